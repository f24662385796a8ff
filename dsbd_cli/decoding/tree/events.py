"""What the decoding loops yield; the command line, the bench and the panels only consume these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsbd_cli.decoding.tree.sequences import Forest, Node

if TYPE_CHECKING:
    from dsbd_cli.result import Result


@dataclass(frozen=True)
class Layer:
    """One committed layer: the engine's smallest step.

    Attributes:
        draws: nodes in the order they were drawn, equal ones repeated; len(draws) is the layer's width.
        distinct: distinct sequences among them, finished ones included.
        examined, accepted: draft draws looked at and accepted (`cover`: draws of p, `ended` left out, and those
            in the forest).
        verdicts: accept or reject per examined draw, in order (the forest's draws; for `cover` the draws of p).
        drafted: position in the forest, 0-based; None for a layer that no draft layer was tested for.
        passed: every draw came from the forest, or ended.
        ended: `cover`: draws that finish a sequence and were not drafted; they need no place in the forest.
    """

    draws: tuple[Node, ...]
    distinct: int
    examined: int = 0
    accepted: int = 0
    verdicts: tuple[bool, ...] = ()
    drafted: int | None = None
    passed: bool = False
    ended: int = 0


@dataclass(frozen=True)
class Iteration:
    """One target call is over (the first layers may come from prefill alone).

    Attributes:
        active: the live beams now, in order.
        forest: what had been drafted, empty without a draft.
        layers: what was committed.
    """

    active: tuple[Node, ...]
    forest: Forest
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Notice:
    """Something the user should know; one line."""

    text: str


@dataclass(frozen=True)
class Text:
    """Confirmed text: `new` extends everything confirmed before and is never taken back."""

    new: str


@dataclass(frozen=True)
class Prefilled:
    """The prompt is in both caches. Times in seconds, `prompt_ids` as the target saw them."""

    prompt_ids: list[int]
    seconds: float


@dataclass(frozen=True)
class Finished:
    """The answer. Always the last event."""

    result: Result


Event = Layer | Iteration | Notice | Text | Prefilled | Finished
