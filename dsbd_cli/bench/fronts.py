"""Arms by kind, and those that no other of their kind beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Run = Mapping[str, Any]
Point = tuple[float, float]


def family(method: str) -> str:
    """The colour group of a method."""
    name = method.partition(":")[0]
    return "hf" if name.startswith("hf-") else "dsbd" if name.startswith("dsbd") else name


def value(arm: Mapping[str, Any], name: str) -> float | None:
    """A number of an arm's summary, or None."""
    entry = arm.get(name)
    return entry["value"] if isinstance(entry, Mapping) else entry


def front(points: Sequence[Point], low_x: bool = False) -> list[Point]:
    """The Pareto front: no other point is better on both axes (y high; x high, or low if `low_x`)."""
    best: list[Point] = []
    for x, y in sorted(points, key=lambda p: (p[0] if low_x else -p[0], -p[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def shown_arms(run: Run) -> dict[str, Run]:
    """The plain arms, and of the swept ones those that no other of their kind beats."""
    best = on_front(run["arms"])
    return {name: arm for name, arm in run["arms"].items() if not arm["swept"] or name in best}


def on_front(arms: Mapping[str, Run]) -> set[str]:
    """Names of the DSBD and beam arms that no other of their kind beats on both log-prob and tokens/s."""
    names = set()
    for group in ("beam", "dsbd"):
        points = {
            name: (arm["tokens_per_s"]["value"], arm["logprob_per_token"]["value"])
            for name, arm in arms.items()
            if family(arm["method"]) == group
        }
        known = {name: point for name, point in points.items() if None not in point}
        best = front(list(known.values()))
        names |= {name for name, point in known.items() if point in best}
    return names
