"""From what a user hands in (text, chat messages, token ids) to the one list of token ids both models see."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.names import near
from dsbd_cli.settings import Settings, broken

_KINDS = "a prompt is a text, a list of messages {role, content}, or a list of token ids"
# Roles that every template knows or refuses by itself, and those that some know.
_ROLES = ("system", "user", "assistant")
_FURTHER_ROLES = ("tool", "developer", "function", "ipython", "model")
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
        UserError: nothing asked, no BOS for an empty prompt, a template that refuses, ids out of the vocabulary,
            a system turn for a model without a template, or beside one that the messages hold; a role that the
            template does not know, or a turn that it leaves out.
    """
    if isinstance(prompt, str):
        _check_text(prompt)
        if is_blank(prompt) and tokenizer.chat_template and not settings.raw and not settings.system:
            raise UserError(
                "the prompt is empty: nothing is asked (with --raw the target starts from nothing; in Python: raw=True)"
            )
        if not prompt and not settings.system:
            return [_bos(tokenizer)], ["the prompt is empty: the target starts from its BOS token"]
        if settings.raw or not tokenizer.chat_template:
            if settings.system and settings.raw:
                raise UserError("--system has no place in a raw prompt: leave out one of --system and --raw")
            if settings.system:
                raise UserError("the target has no chat template, so a system turn has no place: "
                                "put that text into the prompt")  # fmt: skip
            return _once_bos(list(tokenizer(prompt, verbose=False)["input_ids"]), tokenizer), []
        return _chat([{"role": "user", "content": prompt}], tokenizer, settings)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Iterable):
        raise UserError(f"{_KINDS}, not {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        if not tokenizer.chat_template:
            raise UserError("the target has no chat template: give the prompt as text, not as messages")
        for number, item in enumerate(items, start=1):
            _check_role(item.get("role"), number, tokenizer)
            _check_text(item.get("content"))
        return _chat([dict(item) for item in items], tokenizer, settings)
    if not items:
        return [_bos(tokenizer)], []
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise UserError(_KINDS)
    if min(items) < 0 or max(items) >= vocab_size:
        raise UserError(f"prompt token ids must lie in 0..{vocab_size - 1}, the target's vocabulary")
    return items, []


def is_blank(prompt: Any) -> bool:
    """Whether it is a text that says nothing."""
    return isinstance(prompt, str) and not prompt.strip()


def _check_text(text: Any) -> None:
    """Refuse what no tokenizer takes; it would be a TypeError from deep inside."""
    if isinstance(text, str) and broken(text):
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
    # Those that it asks for; its prose may hold such words too.
    known = [*_ROLES, *(word for word in _FURTHER_ROLES if f"'{word}'" in named or f'"{word}"' in named)]
    raise UserError(
        f"message {number} has the role {role!r}, which the target's chat template does not know"
        f"{near(str(role), known)}: {', '.join(known)}"
    )


def _names(template: str, role: str) -> bool:
    """Whether the role is a word of the template."""
    return bool(role) and re.search(rf"(?<![\w-]){re.escape(role)}(?![\w-])", template) is not None


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


def _chat(messages: list[dict[str, str]], tokenizer: Any, settings: Settings) -> tuple[list[int], list[str]]:
    system = settings.system
    if not system:
        return _template(messages, tokenizer)
    if any(turn.get("role") == "system" for turn in messages):
        raise UserError("the messages hold a system turn of their own: leave out --system (or a preset's, with "
                        '--system ""), or that turn')  # fmt: skip
    try:
        return _template([{"role": "system", "content": system}, *messages], tokenizer)
    except UserError:
        # Some templates know no system role; the words still belong before the user's own.
        first = messages[0] | {"content": f"{system}\n\n{messages[0]['content']}"}
        ids, notes = _template([first, *messages[1:]], tokenizer)
        return ids, ["the chat template takes no system turn: its text leads the first user turn", *notes]


def _template(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[int], list[str]]:
    """Token ids of a conversation, up to where the assistant is to go on, and notes."""
    last = messages[-1]
    goes_on = last.get("role") == "assistant" and bool(last.get("content"))
    if last.get("role") == "assistant" and not goes_on and len(messages) > 1:
        messages = messages[:-1]  # nothing to go on from: the template opens that turn itself
    quoted, marks = _quote(messages, tokenizer)

    def rendered(turns: list[dict[str, str]]) -> str:
        how = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on, "tokenize": False}
        return str(tokenizer.apply_chat_template(turns, **how))

    try:
        text = rendered(quoted)
    except Exception as error:  # jinja raises many kinds; all of them are the template's own words
        said = _unquote(str(error), marks)
        raise UserError(f"the chat template refuses this prompt: {said} (--raw leaves it out)") from None
    _check_whole(messages, rendered)
    ids, notes = _encode_quoted(text, marks, tokenizer)
    return _once_bos(ids, tokenizer), notes


def _check_whole(messages: list[dict[str, str]], rendered: Callable[[list[dict[str, str]]], str]) -> None:
    """Refuse a conversation of which the template leaves out a turn without a word, as some do with roles.

    Templates trim, shorten and quote what is said, so that other words are looked for, which leave nothing to change.

    Args:
        rendered: makes the template's text of messages.
    """
    if len(messages) == 1:
        return
    marked = [turn | {"content": f"turn{place}words"} for place, turn in enumerate(messages)]
    try:
        text = rendered(marked)
    except Exception:  # it looks for something in the words that these have not
        return
    for place, (turn, mark) in enumerate(zip(messages, marked, strict=True), start=1):
        said = turn.get("content")
        silent = isinstance(said, str) and not said.strip()
        # A turn with more keys may be one of calls, written as its calls.
        if mark["content"] not in text and not silent and turn.keys() == {"role", "content"}:
            raise UserError(
                f"the target's chat template leaves out message {place}, of role {turn['role']!r}: "
                "leave it out too, or give its words to another turn"
            )


# Special words in a turn. They are text there: `</s>` that somebody types must not end their turn. The template
# is given a private-use character in place of each, so that in its output they differ from its own.


def _quote(messages: list[dict[str, str]], tokenizer: Any) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The messages with a mark for each special word in them, and the words by mark."""
    contents = [turn["content"] for turn in messages if isinstance(turn.get("content"), str)]
    whole = "\0".join(contents)
    words = [word for word in _special_words(tokenizer) if word in whole]
    if not words:
        return messages, {}
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in whole)
    marks = dict(zip(free, sorted(words, key=len, reverse=True), strict=False))
    # In one pass, the longest word first: one special word may begin another.
    pattern = re.compile("|".join(map(re.escape, marks.values())))
    mark_of = {word: mark for mark, word in marks.items()}

    def quoted(text: Any) -> Any:
        return pattern.sub(lambda found: mark_of[found[0]], text) if isinstance(text, str) else text

    return [turn | {"content": quoted(turn.get("content"))} for turn in messages], marks


def _unquote(text: str, marks: Mapping[str, str]) -> str:
    for mark, word in marks.items():
        text = text.replace(mark, word)
    return text


def _encode_quoted(text: str, marks: Mapping[str, str], tokenizer: Any) -> tuple[list[int], list[str]]:
    """Ids of a template's output: marked words as text, the template's own special words as tokens."""
    if not any(mark in text for mark in marks):
        return _ids(tokenizer, text), []
    if not tokenizer.is_fast:  # tells no offsets
        words = ", ".join(marks.values())
        return _ids(tokenizer, _unquote(text, marks)), [f"this tokenizer takes {words} in a turn as a token"]
    special = {token for token, facts in tokenizer.added_tokens_decoder.items() if facts.special}
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = list(zip(found["input_ids"], found["offset_mapping"], strict=True))
    ids: list[int] = []
    begin = 0
    run: list[int] = []
    # Special tokens cut a text into runs that are encoded each for itself; a run with a mark is encoded anew.
    for token, (left, right) in [*tokens, (-1, (len(text), len(text)))]:
        if token >= 0 and token not in special:
            run.append(token)
            continue
        piece = text[begin:left]
        if any(mark in piece for mark in marks):
            run = _ids(tokenizer, _unquote(piece, marks), split_special_tokens=True)
        ids += [*run, token] if token >= 0 else run
        run, begin = [], right
    return ids, []


def _special_words(tokenizer: Any) -> list[str]:
    added = [str(facts) for facts in tokenizer.added_tokens_decoder.values() if facts.special]
    return list(dict.fromkeys([*added, *map(str, tokenizer.all_special_tokens)]))


def _ids(tokenizer: Any, text: str, **how: Any) -> list[int]:
    """Not `verbose`: that a prompt is too long is said by us, in one line, where it matters."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False, **how)["input_ids"])
