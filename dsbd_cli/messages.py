"""What a list of chat messages must be, whatever way it comes in: Python, and the files of every command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.turns import in_parts, texts_of

# Turns mean something to a template alone; a raw prompt is what one would have written.
NOT_RAW = (
    "messages have no place in a raw prompt, since only the chat template can write their turns: "
    "leave out --raw (in Python: raw=True), or give the whole prompt as a text"
)
# Whose turn an answer is; only some templates know the second, and others refuse it.
ANSWERING = ("assistant", "model")
_NAMES = {dict: "an object", list: "a list", tuple: "a list", bool: "true or false", type(None): "null"}


def check(messages: Sequence[Any]) -> None:
    """Refuse what no template can write, before one is asked: its own words name neither message nor key.

    A content is a text, or a list of parts {type: text, text}; a turn of calls (`tool_calls`) may have none.

    Raises:
        UserError: no messages, or which of them (from 1) has what wrong with its role or content.
    """
    if not messages:
        raise UserError("the list of messages is empty: nothing is asked")
    for number, turn in enumerate(messages, start=1):
        if not isinstance(turn, Mapping):
            raise UserError(f"message {number} must be an object {{role, content}}, not {_kind(turn)}")
        if turn.get("content") is None and turn.get("tool_calls"):
            needed = ["role"]
        else:
            needed = ["role", "content"]
        for key in needed:
            if key not in turn:
                raise UserError(f"message {number} has no {key}")
            value = turn[key]
            if key == "content" and in_parts(value):
                _check_parts(value, number)
            elif not isinstance(value, str):
                raise UserError(f"message {number}: {key} must be a text, not {_kind(value)}")


def _check_parts(parts: Sequence[Any], number: int) -> None:
    for place, part in enumerate(parts, start=1):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            other = f"of the type {kind!r}" if isinstance(kind, str) and kind != "text" else "something else"
            raise UserError(
                f'message {number}: part {place} of its content must be {{"type": "text", "text": ...}}, not {other}'
            )


def ask_nothing(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether checked messages end in a user's turn that says nothing, and no system turn may hold the question.

    An empty turn of the assistant's behind it is only where the answer goes.
    """
    if any(turn["role"] == "system" and says(turn) for turn in messages):
        return False
    asked = [*messages]
    while asked and asked[-1]["role"] in ANSWERING and not says(asked[-1]):
        asked.pop()
    return not asked or (asked[-1]["role"] == "user" and not says(asked[-1]))


def says(turn: Mapping[str, Any]) -> bool:
    """Whether there is more than blanks in it."""
    return bool("".join(texts_of(turn.get("content"))).strip())


def prompt_of(record: Mapping[str, Any]) -> str | list[Any]:
    """The prompt of a line of JSON Lines: a text or messages under `prompt`, or messages under `messages`.

    Raises:
        UserError: neither key or both, or what is wrong with the prompt.
    """
    if ("prompt" in record) == ("messages" in record):
        raise UserError("must have either prompt or messages")
    key = "prompt" if "prompt" in record else "messages"
    value = record[key]
    if isinstance(value, str) and key == "prompt":
        return value
    if not isinstance(value, list):
        kinds = "a text or a list of messages" if key == "prompt" else "a list of objects {role, content}"
        raise UserError(f"{key} must be {kinds}, not {_kind(value)}")
    check(value)
    return value


def is_blank(prompt: Any) -> bool:
    """Whether it is a text that says nothing, or checked messages that ask nothing."""
    return not prompt.strip() if isinstance(prompt, str) else ask_nothing(prompt)


def question_of(record: Mapping[str, Any], where: str) -> str | tuple[Any, ...]:
    """The prompt of a line of JSON Lines (`prompt_of`), which asks something.

    Args:
        where: file and line, for errors.

    Raises:
        UserError: no prompt, or an empty one.
    """
    try:
        prompt = prompt_of(record)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if is_blank(prompt):
        raise UserError(f"{where}: the prompt is empty: nothing is asked")
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _kind(value: Any) -> str:
    """In the words of JSON."""
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return "a text" if isinstance(value, str) else "a number"
    return _NAMES.get(type(value), type(value).__name__)
