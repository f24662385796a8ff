"""From what a user hands in (text, chat messages, token ids) to the one list of token ids both models see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.settings import Settings, broken

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def encode(
    prompt: Prompt, tokenizer: Any, settings: Settings, vocab_size: int
) -> tuple[list[int], list[str]]:
    """Token ids of a prompt, and notes for the user.

    Text goes through the chat template where the model has one (unless `raw`); the template is then
    the only source of special tokens, so that BOS appears exactly once. An empty text starts from BOS.

    Raises:
        UserError: no BOS for an empty prompt, a template that refuses, ids out of the vocabulary,
            a system turn for a model without a template.
    """
    if isinstance(prompt, str):
        _check_text(prompt)
        if not prompt and not settings.system:
            return [_bos(tokenizer)], ["the prompt is empty: the target starts from its BOS token"]
        if settings.raw or not tokenizer.chat_template:
            if settings.system and settings.raw:
                raise UserError("--system has no place in a raw prompt: leave out one of --system and --raw")
            if settings.system:
                raise UserError("the target has no chat template, so a system turn has no place: "
                                "put that text into the prompt")  # fmt: skip
            return _once_bos(list(tokenizer(prompt)["input_ids"]), tokenizer), []
        return _chat([{"role": "user", "content": prompt}], tokenizer, settings)
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        if not tokenizer.chat_template:
            raise UserError("the target has no chat template: give the prompt as text, not as messages")
        for item in items:
            _check_text(item.get("content"))
        return _chat([dict(item) for item in items], tokenizer, settings)
    if not items:
        return [_bos(tokenizer)], []
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise UserError("a prompt is a text, a list of messages {role, content}, or a list of token ids")
    if min(items) < 0 or max(items) >= vocab_size:
        raise UserError(f"prompt token ids must lie in 0..{vocab_size - 1}, the target's vocabulary")
    return items, []


def _check_text(text: Any) -> None:
    """Refuse what no tokenizer takes; it would be a TypeError from deep inside."""
    if isinstance(text, str) and broken(text):
        raise UserError("the prompt is not UTF-8 text (it holds half a surrogate pair): mend its encoding")


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
    system, notes = settings.system, []
    if system:
        try:
            return _template([{"role": "system", "content": system}, *messages], tokenizer), []
        except UserError:
            # Some templates know no system role; the words still belong before the user's own.
            first = messages[0] | {"content": f"{system}\n\n{messages[0]['content']}"}
            messages = [first, *messages[1:]]
            notes = ["the chat template takes no system turn: its text leads the first user turn"]
    return _template(messages, tokenizer), notes


def _template(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # jinja raises many kinds; all of them are the template's own words
        raise UserError(f"the chat template refuses this prompt: {error} (--raw leaves it out)") from None
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return _once_bos(ids, tokenizer)
