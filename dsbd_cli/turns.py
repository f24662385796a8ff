"""What chat turns say: texts of turns, and special words in them.

Special words are text there: `</s>` that somebody types must not end their turn. The template is given a private-use
character in place of each, so that in its output they differ from its own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def texts_of(content: Any) -> list[str]:
    """What a turn says: a text, or the texts of a list of parts {type, text}."""
    parts = content if in_parts(content) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return [text for text in texts if isinstance(text, str)]


def _with_texts(content: Any, made: Callable[[str], str]) -> Any:
    """The same with other texts."""
    if isinstance(content, str):
        return made(content)
    if not in_parts(content):
        return content
    return [{**part, "text": made(part["text"])} if texts_of([part]) else part for part in content]


def spoken(turn: dict[str, Any], made: Callable[[str], str]) -> dict[str, Any]:
    """The turn with other texts; one of calls may have none."""
    return turn | {"content": _with_texts(turn["content"], made)} if "content" in turn else turn


def in_parts(content: Any) -> bool:
    return isinstance(content, (list, tuple))


def quote(messages: list[dict[str, Any]], tokenizer: Any) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages with a mark for each special word in them, and the words by mark."""
    whole = "\0".join(text for turn in messages for text in texts_of(turn.get("content")))
    words = [word for word in _special_words(tokenizer) if word in whole]
    if not words:
        return messages, {}
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in whole)
    marks = dict(zip(free, sorted(words, key=len, reverse=True), strict=False))
    # In one pass, the longest word first: one special word may begin another.
    pattern = re.compile("|".join(map(re.escape, marks.values())))
    mark_of = {word: mark for mark, word in marks.items()}

    def quoted(text: str) -> str:
        return pattern.sub(lambda found: mark_of[found[0]], text)

    return [spoken(turn, quoted) for turn in messages], marks


def unquote(text: str, marks: Mapping[str, str]) -> str:
    for mark, word in marks.items():
        text = text.replace(mark, word)
    return text


def encode_quoted(text: str, marks: Mapping[str, str], tokenizer: Any) -> tuple[list[int], list[str]]:
    """Ids of a template's output: marked words as text, the template's own special words as tokens."""
    if not any(mark in text for mark in marks):
        return _ids(tokenizer, text), []
    if not tokenizer.is_fast:  # tells no offsets
        words = ", ".join(marks.values())
        return _ids(tokenizer, unquote(text, marks)), [f"this tokenizer takes {words} in a turn as a token"]
    special = {token for token, facts in tokenizer.added_tokens_decoder.items() if facts.special}
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens = list(zip(found["input_ids"], found["offset_mapping"], strict=True))
    ids: list[int] = []
    begin = 0
    run: list[int] = []

    def marked(piece: str) -> bool:
        return any(mark in piece for mark in marks)

    # Special tokens cut a text into runs that are encoded each for itself; a run with a mark is encoded anew.
    for token, (left, right) in [*tokens, (-1, (len(text), len(text)))]:
        # A vocabulary without the mark's character has the special word for unknown ones there.
        if token >= 0 and (token not in special or marked(text[left:right])):
            run.append(token)
            continue
        piece = text[begin:left]
        if marked(piece):
            with _within(tokenizer, begin):
                run = _ids(tokenizer, unquote(piece, marks), split_special_tokens=True)
        ids += [*run, token] if token >= 0 else run
        run, begin = [], right
    return ids, []


@contextlib.contextmanager
def _within(tokenizer: Any, begin: int) -> Iterator[None]:
    """Encode a piece as it is in a text that it does not begin: many tokenizers put a blank before a text's start."""
    core = tokenizer.backend_tokenizer.pre_tokenizer
    steps = list(core) if hasattr(core, "__getitem__") else [core]
    first = [one for one in steps if begin and getattr(one, "prepend_scheme", "") == "first"]
    for one in first:
        one.prepend_scheme = "never"
    try:
        yield
    finally:
        for one in first:
            one.prepend_scheme = "first"


def _special_words(tokenizer: Any) -> list[str]:
    added = [str(facts) for facts in tokenizer.added_tokens_decoder.values() if facts.special]
    return list(dict.fromkeys([*added, *map(str, tokenizer.all_special_tokens)]))


def _ids(tokenizer: Any, text: str, **how: Any) -> list[int]:
    """Not `verbose`: that a prompt is too long is said by us, in one line, where it matters."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False, **how)["input_ids"])
