"""What curves say: medians over rounds, and how steeply each series grows."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kit.report import aligned

# (curve, value, unit shown, factor): what is tabulated and drawn.
VALUES = (
    ("width", "iteration_ms", "ms an iteration", 1.0),
    ("width", "tokens_per_s", "tokens/s", 1.0),
    ("gamma", "iteration_ms", "ms an iteration", 1.0),
    ("gamma", "layers_per_call", "layers a target call", 1.0),
    ("prompt", "iteration_ms", "ms an iteration", 1.0),
    ("prompt", "prefill_s", "seconds of prefill", 1.0),
    ("prompt", "kv_bytes", "peak key/value MB", 1e-6),
    ("nodes", "forward_ms", "ms a forward", 1.0),
)
LABELS = {"width": "width W", "gamma": "gamma", "prompt": "prompt tokens", "nodes": "nodes of a forward"}
Line = list[tuple[int, float]]


def lines(
    records: Sequence[Mapping[str, Any]], curve: str, value: str, factor: float = 1.0
) -> dict[str, Line]:
    """Series -> points (x, median over rounds), ascending in x."""
    cells: dict[str, dict[int, list[float]]] = {}
    for record in records:
        if record["curve"] == curve and record.get(value) is not None:
            cells.setdefault(record["series"], {}).setdefault(record["x"], []).append(record[value] * factor)
    return {
        series: [(x, statistics.median(values)) for x, values in sorted(points.items())]
        for series, points in cells.items()
    }


def steepest(line: Line) -> float | None:
    """The largest exponent e with y ~ x**e between neighbouring points: 1 is linear. None for one point."""
    slopes = [
        math.log(b[1] / a[1]) / math.log(b[0] / a[0])
        for a, b in itertools.pairwise(line)
        if a[1] > 0 and b[1] > 0
    ]
    return max(slopes, default=None)


def overall(line: Line) -> float | None:
    """The same exponent between the first and the last point."""
    return steepest([line[0], line[-1]]) if len(line) > 1 else None


def report(found: Mapping[str, Any]) -> str:
    """A results file of curves.py as text."""
    facts = found["facts"]
    models = ", ".join(
        f"{role} {one['name']} ({one['dtype']})" for role, one in facts["models"].items() if one
    )
    rows = [["curve", "value", "series", "from", "to", "exponent", "steepest"]]
    for curve, value, label, factor in VALUES:
        for series, line in lines(found["records"], curve, value, factor).items():
            ends = [f"{y:.3g} at {x}" for x, y in (line[0], line[-1])]
            rows.append([curve, label, series, *ends, _shown(overall(line)), _shown(steepest(line))])
    failed = dict.fromkeys(
        f"{record['curve']} {record['series']} {record['x']}: {record['error']}"
        for record in found["records"]
        if "error" in record
    )
    head = f"{facts['hardware']}, torch {facts['torch']}, transformers {facts['transformers']}; {models}"
    return "\n\n".join([head, aligned(rows), *failed, *found.get("left_out", [])])


def _shown(exponent: float | None) -> str:
    return "-" if exponent is None else f"{exponent:.2f}"
