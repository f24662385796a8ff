"""From what a user hands in (text, chat messages, token ids) to the one list of token ids both models see."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsbd_cli.errors import UserError, let_by
from dsbd_cli.messages import ANSWERING, NOT_RAW, ask_nothing, check, is_blank, says
from dsbd_cli.names import near
from dsbd_cli.settings import Settings, broken
from dsbd_cli.templates import check_continued, check_parts, check_whole, opens, renders, rewritten
from dsbd_cli.turns import encode_quoted, in_parts, quote, texts_of, unquote

_KINDS = "a prompt is a text, a list of messages {role, content}, or a list of token ids"
# Roles that every template knows or refuses by itself, and those that some know.
_ROLES = ("system", "user", "assistant")
_FURTHER_ROLES = ("tool", "developer", "function", "ipython", "model")
# A template that asks for a role in small letters, however it is written.
_LOWERED = re.compile(r"role['\"]?\]?\s*(\|\s*lower|\.lower\(\))")
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def encode(
    prompt: Prompt, tokenizer: Any, settings: Settings, vocab_size: int
) -> tuple[list[int], list[str]]:
    """Token ids of a prompt, and notes for the user.

    Text goes through the chat template where the model has one (unless `raw`); the template is then
    the only source of special tokens, so that BOS appears exactly once, and special words inside a
    turn are text. Without a template, and in `raw`, they are tokens. Messages that end with the
    assistant's turn are gone on with.

    An empty text starts from BOS, where a text is what the target goes on with. Under a template it would be a turn
    in which nothing is asked, and whatever a model says to that is nonsense: refused, blanks too, but where `system`
    may hold the question.

    Raises:
        UserError: nothing asked, messages in a raw prompt or that no template can write, no BOS for an empty
            prompt, a template that refuses, ids out of the vocabulary, a system turn for a model without a
            template, or beside one that the messages hold; a role or parts that the template does not know, or a turn
            that it leaves out.
    """
    if isinstance(prompt, str):
        _check_text(prompt)
        if is_blank(prompt) and not settings.system:
            _refuse_blank(tokenizer, settings)
        if not prompt and not settings.system:
            return _from_bos(tokenizer)
        if settings.raw or not tokenizer.chat_template:
            if settings.system and settings.raw:
                raise UserError("--system has no place in a raw prompt: leave out one of --system and --raw")
            if settings.system:
                raise UserError("the target has no chat template, so a system turn has no place: "
                                "put that text into the prompt")  # fmt: skip
            return _once_bos(list(tokenizer(prompt, verbose=False)["input_ids"]), tokenizer), []
        return _chat([{"role": "user", "content": prompt}], tokenizer, settings, " (--raw leaves it out)")
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise UserError(f"{_KINDS}, not {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if any(isinstance(item, Mapping) for item in items):
        check(items)
        if not tokenizer.chat_template:
            raise UserError("the target has no chat template: give the prompt as text, not as messages")
        if settings.raw:
            raise UserError(NOT_RAW)
        for number, item in enumerate(items, start=1):
            _check_role(item.get("role"), number, tokenizer)
            _check_text(item.get("content"))
        if ask_nothing(items) and not settings.system:
            raise UserError("the last turn of the messages is empty: nothing is asked")
        return _chat([dict(item) for item in items], tokenizer, settings)
    if not items:
        _refuse_blank(tokenizer, settings)
        return _from_bos(tokenizer)
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise UserError(_KINDS)
    if min(items) < 0 or max(items) >= vocab_size:
        raise UserError(f"prompt token ids must lie in 0..{vocab_size - 1}, the target's vocabulary")
    return items, []


def _refuse_blank(tokenizer: Any, settings: Settings) -> None:
    """Refuse an empty prompt of any kind where it would be a turn."""
    if tokenizer.chat_template and not settings.raw:
        raise UserError(
            "the prompt is empty: nothing is asked (with --raw the target starts from nothing; in Python: raw=True)"
        )


def _from_bos(tokenizer: Any) -> tuple[list[int], list[str]]:
    return [_bos(tokenizer)], ["the prompt is empty: the target starts from its BOS token"]


def _check_text(content: Any) -> None:
    """Refuse what no tokenizer takes; it would be a TypeError from deep inside."""
    if any(broken(text) for text in texts_of(content)):
        raise UserError(
            "the prompt is not UTF-8 text (it holds a broken byte or half a surrogate pair): mend its encoding"
        )


def _check_role(role: Any, number: int, tokenizer: Any) -> None:
    """Refuse a role that neither every template knows nor this one names.

    Most templates write whatever stands there, and what the target says to a role that it has never seen looks like
    an answer.

    Args:
        number: which of the messages it is, from 1.
    """
    template = tokenizer.chat_template
    named = "\n".join(map(str, template.values())) if isinstance(template, Mapping) else str(template)
    if role in _ROLES or (isinstance(role, str) and _names(named, role)):
        return
    if isinstance(role, str) and role.lower() in _ROLES and _LOWERED.search(named):
        return
    if isinstance(role, str) and opens(tokenizer, role):
        return
    # Those that it asks for; its prose may hold such words too.
    known = [*_ROLES, *(word for word in _FURTHER_ROLES if _names(named, word))]
    raise UserError(
        f"message {number} has the role {role!r}, which the target's chat template does not know"
        f"{near(str(role), known)}: {', '.join(known)}"
    )


def _names(template: str, role: str) -> bool:
    """Whether the template compares with the role: a quoted word, not one of its prose nor a key (`x['function']`)."""
    return bool(role) and re.search(rf"""(?<![\w\])]\[)(['"]){re.escape(role)}\1""", template) is not None


def _bos(tokenizer: Any) -> int:
    if tokenizer.bos_token_id is None:
        raise UserError("the prompt is empty and the target has no BOS token to start from: give a prompt")
    return int(tokenizer.bos_token_id)


def _once_bos(ids: list[int], tokenizer: Any) -> list[int]:
    """A prompt that already spells BOS keeps one."""
    bos = tokenizer.bos_token_id
    while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
        ids = ids[1:]
    return ids if ids else [_bos(tokenizer)]


def _chat(
    messages: list[dict[str, Any]], tokenizer: Any, settings: Settings, way_out: str = ""
) -> tuple[list[int], list[str]]:
    """Ids of a conversation behind the settings' system turn, and notes; `way_out` ends a template's refusal."""
    system = settings.system
    if not system:
        return _template(messages, tokenizer, way_out)
    if any(turn.get("role") == "system" for turn in messages):
        raise UserError("the messages hold a system turn of their own: leave out --system (or a preset's, with "
                        '--system ""), or that turn')  # fmt: skip
    try:
        return _template([{"role": "system", "content": system}, *messages], tokenizer, way_out)
    except UserError:
        # Some templates know no system role; the words still belong before the user's own.
        at = next((at for at, turn in enumerate(messages) if turn.get("role") == "user"), None)
        if at is None:
            raise
        content = messages[at].get("content") or ""
        first = (
            [{"type": "text", "text": f"{system}\n\n"}, *content]
            if in_parts(content)
            else f"{system}\n\n{content}"
        )
        ids, notes = _template(
            [*messages[:at], messages[at] | {"content": first}, *messages[at + 1 :]], tokenizer, way_out
        )
        return ids, ["the chat template takes no system turn: its text leads the first user turn", *notes]


def _template(messages: list[dict[str, Any]], tokenizer: Any, way_out: str) -> tuple[list[int], list[str]]:
    """Token ids of a conversation, up to where the assistant is to go on, and notes."""
    last = messages[-1]
    # (Calls stand behind what is said: such a turn is whole.)
    answers = last.get("role") in ANSWERING and not last.get("tool_calls")
    goes_on, blanks = answers and says(last), []
    if answers and not goes_on and len(messages) > 1:
        messages = messages[:-1]  # nothing to go on from: the template opens that turn itself
        if any(texts_of(last.get("content"))):
            blanks = ["the last turn, the assistant's, holds blanks alone: the chat template opens it itself"]
    quoted, marks = quote(messages, tokenizer)

    def rendered(turns: list[dict[str, Any]]) -> str:
        how = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on, "tokenize": False}
        return str(tokenizer.apply_chat_template(turns, **how))

    try:
        text = rendered(quoted)
    except Exception as error:  # jinja raises many kinds; all of them are the template's own words
        let_by(error)
        check_parts(messages, rendered)
        if goes_on and renders(quoted, tokenizer):
            raise rewritten(messages) from None
        said = unquote(str(error), marks)
        raise UserError(f"the chat template refuses this prompt: {said}{way_out}") from None
    check_parts(messages, rendered)
    left_out = check_whole(messages, rendered, way_out)
    if goes_on:
        left_out += check_continued(text, quoted[-1], messages)
    ids, notes = encode_quoted(text, marks, tokenizer)
    return _once_bos(ids, tokenizer), [*left_out, *blanks, *notes]
