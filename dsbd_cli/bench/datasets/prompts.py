"""Worked examples before a question, as chat turns or as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Message = dict[str, str]


@dataclass(frozen=True)
class Example:
    """A question with its answer.

    Attributes:
        asked: the question as a prompt puts it, up to the place of the answer.
        answer: one line.
        groups: what it must not share with the item that is asked (its article and paragraph, its database).
    """

    asked: str
    answer: str
    groups: frozenset[str] = frozenset()


def as_turns(instruction: str, examples: Sequence[Example], asked: str) -> list[Message]:
    """For models with a chat template: each example is a turn that was asked and answered.

    Small chat models stop after the answer in this form; given the same text in one user turn they go on
    writing further examples.
    """
    turns: list[Message] = []
    for example in examples:
        turns += [
            {"role": "user", "content": example.asked},
            {"role": "assistant", "content": example.answer},
        ]
    turns.append({"role": "user", "content": asked})
    turns[0]["content"] = f"{instruction}\n\n{turns[0]['content']}"
    return turns


def as_text(instruction: str, examples: Sequence[Example], asked: str) -> str:
    """For models without one, and for continuing a pattern: ends where the answer goes."""
    shown = [f"{example.asked} {example.answer}" for example in examples]
    return "\n\n".join([instruction, *shown, asked])
