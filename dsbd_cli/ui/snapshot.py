"""What the panels show at one moment: plain values, small enough to send to the drawing process at once."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

POINTS = 200  # longest series sent: no terminal shows more columns of a chart


@dataclass(frozen=True)
class LiveBeam:
    """A live beam: `share` = softmax over the live beams' l(x); `text` = what it says after the rest agree."""

    share: float
    text: str


@dataclass(frozen=True)
class Series:
    """A number over time: `now` and `mean` are None while unknown; `values` is thinned to `POINTS`."""

    now: float | None = None
    mean: float | None = None
    values: list[float | None] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """One picture.

    Attributes:
        models, method: the title's two halves.
        prompt, prompt_tokens: the prompt, cut to its beginning.
        confirmed: the tail of the text that is never taken back.
        contested: what the best beam says after it.
        acceptance: accepted / examined drafts per iteration. by_depth: rate per layer of the forest.
        undrafted: what stands there while there is no such layer.
        drawn, distinct: width per committed layer, and distinct sequences in it.
        histogram: [width, layers of that width] over drawn widths.
        layers_per_call: committed layers per target call.
        tokens, budget, seconds: of the best beam; since prefill ended.
        joules_per_token: None where unknown.
        kv_slots, kv_bytes: live slots and bytes, target plus draft; None where unknown.
        notes: what the user should know, oldest first.
    """

    models: str = ""
    method: str = ""
    prompt: str = ""
    prompt_tokens: int = 0
    confirmed: str = ""
    contested: str = ""
    beams: list[LiveBeam] = field(default_factory=list)
    acceptance: Series = field(default_factory=Series)
    by_depth: list[float | None] = field(default_factory=list)
    undrafted: str = "nothing drafted yet"
    drawn: Series = field(default_factory=Series)
    distinct: Series = field(default_factory=Series)
    histogram: list[list[int]] = field(default_factory=list)
    width: int = 1
    layers_per_call: Series = field(default_factory=Series)
    tokens: int = 0
    budget: int = 0
    seconds: float = 0.0
    tokens_per_s: float | None = None
    joules_per_token: float | None = None
    kv_slots: int | None = None
    kv_bytes: int | None = None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Snapshot:
        """The inverse of `to_json`."""
        raw: dict[str, Any] = json.loads(line)
        raw["beams"] = [LiveBeam(**beam) for beam in raw["beams"]]
        for name in ("acceptance", "drawn", "distinct", "layers_per_call"):
            raw[name] = Series(**raw[name])
        return cls(**raw)
