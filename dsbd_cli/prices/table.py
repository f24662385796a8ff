"""Prices: milliseconds of the forwards of a pair, by their number of nodes. Plain values, no clock, no torch."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

FORMAT = 1
# A table beyond these is a damaged file, not a machine.
_MOST_POINTS, _MOST_NODES, _MOST_MS = 64, 1 << 30, 1e7


@dataclass(frozen=True)
class Curve:
    """Milliseconds of one forward by its number of nodes: never falling, linear between the points.

    Attributes:
        nodes: at least one count, ascending, each at least 1.
        ms: positive, one for each, never falling.

    Raises:
        ValueError: anything else.
    """

    nodes: tuple[int, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 < len(self.nodes) == len(self.ms) <= _MOST_POINTS:
            raise ValueError("a curve needs as many times as counts of nodes")
        if not all(type(count) is int and 1 <= count <= _MOST_NODES for count in self.nodes):
            raise ValueError("counts of nodes are whole numbers from 1 on")
        if not all(type(one) in (int, float) and 0 < one <= _MOST_MS for one in self.ms):
            raise ValueError("times are positive numbers of milliseconds")
        if any(a >= b for a, b in zip(self.nodes, self.nodes[1:], strict=False)):
            raise ValueError("counts of nodes must ascend")
        if any(a > b for a, b in zip(self.ms, self.ms[1:], strict=False)):
            raise ValueError("a forward over more nodes cannot cost less")

    @classmethod
    def fitted(cls, points: Mapping[int, float]) -> Curve:
        """The never falling curve nearest (least squares) to measured milliseconds by node count."""
        counts = sorted(points)
        return cls(tuple(counts), tuple(_isotonic([points[count] for count in counts])))

    def __call__(self, nodes: float) -> float:
        """Milliseconds at `nodes` >= 0; no nodes cost nothing, and beyond the last point the last slope goes on."""
        if nodes <= 0:
            return 0.0
        counts, ms = self.nodes, self.ms
        if nodes <= counts[0] or len(counts) == 1:
            return ms[0]
        at = min(bisect_right(counts, nodes), len(counts) - 1)
        return ms[at - 1] + (nodes - counts[at - 1]) * self._slopes[at - 1]

    @cached_property
    def _slopes(self) -> list[float]:
        steps = zip(self.nodes, self.nodes[1:], self.ms, self.ms[1:], strict=False)
        return [(after - before) / (more - fewer) for fewer, more, before, after in steps]


@dataclass(frozen=True)
class Prices:
    """What decoding pays on one machine with one pair, in milliseconds (or any one unit: only ratios decide).

    Attributes:
        target: one forward of the target over so many nodes, their best entries on the host included.
        draft: one drafted layer, by the nodes that the draft reads for it; None without a draft.
        layer_ms: what a committed layer costs the host beside (its distribution, its draws).
        origin: where the numbers come from, in words.
        busy: why the machine is taken to have been busy when they were measured; empty where it was not.
    """

    target: Curve
    draft: Curve | None = None
    layer_ms: float = 0.0
    origin: str = "assumed"
    busy: str = ""

    def __post_init__(self) -> None:
        if not (type(self.layer_ms) in (int, float) and 0 <= self.layer_ms <= _MOST_MS):
            raise ValueError("layer_ms is a number of milliseconds")

    @classmethod
    def assumed(cls, draft_share: float, node_share: float) -> Prices:
        """A straight line where nothing was measured; its unit is a target forward over one node.

        Args:
            draft_share: a draft forward in target forwards.
            node_share: what a node more costs, in forwards of one node.
        """
        line = Curve((1, 101), (1.0, 1 + 100 * node_share))
        draft = Curve(line.nodes, tuple(draft_share * ms for ms in line.ms))
        return cls(line, draft)

    def describe(self) -> str:
        """One line for people."""
        if self.draft is None:
            return self.origin
        parts = [
            f"{name} " + ", ".join(f"{curve(count):.3g} at {count}" for count in curve.nodes)
            for name, curve in (("target", self.target), ("draft", self.draft))
        ]
        return f"{self.origin}; ms by nodes: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        curves = {"target": self.target, "draft": self.draft}
        plain = {
            name: None if curve is None else {"nodes": list(curve.nodes), "ms": list(curve.ms)}
            for name, curve in curves.items()
        }
        said = {"layer_ms": self.layer_ms, "origin": self.origin, "busy": self.busy}
        return {"format": FORMAT, **plain, **said}

    @classmethod
    def from_dict(cls, values: Any) -> Prices:
        """What `to_dict` wrote.

        Raises:
            ValueError: anything else.
        """
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"prices of format {values['format']!r}, and this version reads {FORMAT}")
            target, draft = values["target"], values["draft"]
            return cls(
                Curve(tuple(target["nodes"]), tuple(target["ms"])),
                None if draft is None else Curve(tuple(draft["nodes"]), tuple(draft["ms"])),
                values["layer_ms"],
                str(values["origin"]),
                str(values.get("busy", "")),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(f"no table of prices ({type(error).__name__}: {error})") from None


def _isotonic(values: Sequence[float]) -> list[float]:
    """The never falling sequence with the least squared distance (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []  # mean and size
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = math.fsum((before * count, mean * size)) / (count + size), count + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]
