"""Whether a chat template writes what it is given: every turn, in parts too, and the one that is gone on with."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsbd_cli.errors import UserError, let_by
from dsbd_cli.turns import in_parts, spoken, texts_of

_LEADING = ("system", "developer")  # of turns that stand before a conversation
_SHOWN = 40  # characters of a turn in an error
_LETTERS = range(0x20000, 0x2A6D7)  # ideographs that no template writes


def check_continued(text: str, last: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Refuse a template that rewrites the turn that is gone on with: the answer would continue other words.

    Args:
        text: what the template made of the quoted messages, up to where the `last` of them is gone on with.

    Returns:
        Notes: many templates strip the blanks around a turn.
    """
    said = texts_of(last["content"])[-1]
    if text.endswith(said):
        return []
    if not text.endswith(said.strip()):
        raise rewritten(messages)
    return [
        "the chat template strips the blanks around the assistant's turn, which is gone on with as it writes it"
    ]


def renders(messages: list[dict[str, Any]], tokenizer: Any) -> bool:
    """Whether the template takes the messages where none is gone on with."""
    try:
        tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception as error:
        let_by(error)
        return False
    return True


def opens(tokenizer: Any, role: str) -> bool:
    """Whether the template opens an answer in the role's name, as those do that write any role as it is given."""
    turn = [{"role": "user", "content": "?"}]
    try:
        without, opened = (
            str(tokenizer.apply_chat_template(turn, add_generation_prompt=adds, tokenize=False))
            for adds in (False, True)
        )
    except Exception as error:  # then it says itself what it does not take
        let_by(error)
        return False
    answer = opened.removeprefix(without)
    return bool(role) and re.search(rf"(?<![\w-]){re.escape(role)}(?![\w-])", answer) is not None


def rewritten(messages: Sequence[Mapping[str, Any]]) -> UserError:
    said = texts_of(messages[-1]["content"])[-1].strip()
    shown = said if len(said) <= _SHOWN else f"...{said[-_SHOWN:]}"
    return UserError(
        "the chat template writes the last message, the assistant's turn that is to be gone on with, "
        f"otherwise than {shown!r}: give it as the template writes it, or end with the user's turn"
    )


def check_parts(messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str]) -> None:
    """Refuse parts under a template that reads texts alone: it would fail in words of its own, write the list, or
    leave out what it does not look at, as some do with all behind the first.

    Args:
        rendered: makes the template's text of messages.
    """
    places = [place for place, turn in enumerate(messages) if in_parts(turn.get("content"))]
    if not places:
        return
    place, fault = places[0], "which the target's chat template does not read"
    try:
        written = rendered(messages)
    except Exception as error:
        let_by(error)
        try:
            rendered([_joined(turn) for turn in messages])
        except Exception as error:  # not for the parts
            let_by(error)
            return
    else:
        parts = [part for place in places for part in messages[place]["content"]]
        listed = any(
            form in written for part in parts for form in (str(part), json.dumps(part, ensure_ascii=False))
        )
        if not listed:
            unread = _unread(messages, rendered)
            if unread is None:
                return
            place, fault = unread, "of which the target's chat template leaves some out"
    raise UserError(f"message {place + 1} has its content in parts, {fault}: give it as one text")


def _joined(turn: dict[str, Any]) -> dict[str, Any]:
    """The turn with its parts as one text."""
    return turn | {"content": "".join(texts_of(turn["content"]))} if in_parts(turn.get("content")) else turn


def _unread(messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str]) -> int | None:
    """The first message of whose parts one is left out (by its mark, as in `check_whole`), though its text is not."""
    letters = map(chr, itertools.cycle(_LETTERS))
    marked, marks = [], []
    for turn in messages:
        own: list[str] = []

        def mark(text: str, own: list[str] = own) -> str:
            if not text.strip():
                return text
            own.append(next(letters))
            return own[-1]

        marked.append(spoken(turn, mark))
        marks.append(own)
    try:
        written, whole = rendered(marked), rendered([_joined(turn) for turn in marked])
    except Exception as error:  # it looks for something in the words that these have not
        let_by(error)
        return None
    for place, (turn, own) in enumerate(zip(messages, marks, strict=True)):
        if in_parts(turn.get("content")) and any(mark not in written and mark in whole for mark in own):
            return place
    return None


def check_whole(
    messages: list[dict[str, Any]], rendered: Callable[[list[dict[str, Any]]], str], way_out: str
) -> list[str]:
    """Refuse a conversation of which the template leaves out a turn without a word, as some do with roles.

    Templates trim, shorten, quote and capitalize what is said: a letter without case is said instead, by each turn
    one of its own, of which all that leaves is the same.

    Args:
        rendered: makes the template's text of messages.
        way_out: ends the error.

    Returns:
        Notes: a template that keeps the latest turns of a long conversation only does what it is for.
    """
    marks = [chr(_LETTERS.start + place % len(_LETTERS)) for place in range(len(messages))]
    marked = [spoken(turn, lambda _, mark=mark: mark) for turn, mark in zip(messages, marks, strict=True)]  # type: ignore[misc]
    try:
        written = set(rendered(marked))
    except Exception as error:  # it looks for something in the words that these have not
        let_by(error)
        return []
    # A turn with more keys may be one of calls, written as its calls.
    left_out = [
        place
        for place, (turn, mark) in enumerate(zip(messages, marks, strict=True))
        if mark not in written
        and turn.keys() == {"role", "content"}
        and "".join(texts_of(turn["content"])).strip()
    ]
    if not left_out:
        return []
    if len(messages) == 1:
        raise UserError(f"the target's chat template leaves out the prompt's words{way_out}")
    roles = [turn["role"] for turn in messages]
    before = [role for role, mark in zip(roles[: left_out[-1] + 1], marks, strict=False) if mark in written]
    cut = {roles[place] for place in left_out}
    if (
        "user" in cut
        and not cut & set(_LEADING)
        and set(before) <= set(_LEADING)
        and "user" in roles[left_out[-1] + 1 :]
    ):
        return [f"the chat template leaves out what was said up to message {left_out[-1] + 1}"]
    raise UserError(
        f"the target's chat template leaves out message {left_out[0] + 1}, of role {roles[left_out[0]]!r}: "
        "leave it out too, or give its words to another turn"
    )
