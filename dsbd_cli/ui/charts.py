"""Small charts as plain strings, in block characters or in ASCII; pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#@"
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def resample(values: Sequence[float | None], points: int) -> list[float | None]:
    """`values` as at most `points` means of equal stretches; None (unknown) entries are left out of them."""
    if len(values) <= points:
        return list(values)
    edges = [len(values) * i // points for i in range(points + 1)]
    return [_mean(values[low:high]) for low, high in itertools.pairwise(edges)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def chart(
    values: Sequence[float | None], width: int, rows: int, top: float, unicode: bool = True
) -> list[str]:
    """A column chart over the whole of `values`, `rows` high and at most `width` columns wide, top row first.

    Args:
        values: in order of time; None leaves a gap.
        top: the value drawn full; 0 is drawn as the lowest step, so that it differs from a gap.
    """
    marks = _BLOCKS if unicode else _ASCII
    steps = len(marks) - 1
    heights = [
        0 if value is None else max(1, round(rows * steps * _share(value, top)))
        for value in resample(values, max(1, width))
    ]
    return [
        "".join(marks[min(steps, max(0, height - row * steps))] for height in heights)
        for row in range(rows - 1, -1, -1)
    ]


def bar(share: float, width: int, unicode: bool = True) -> str:
    """A horizontal bar of `share` (clipped to 0..1) of `width` columns; shorter than `width` unless full."""
    share = _share(share, 1.0)
    if not unicode:
        return "#" * round(share * width)
    eighths = round(share * width * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def _share(value: float, top: float) -> float:
    return min(1.0, max(0.0, value / top)) if top > 0 else 0.0


def counts(values: Sequence[int]) -> list[tuple[int, int]]:
    """(value, how often), ascending, for every whole number from the smallest to the largest."""
    if not values:
        return []
    return [(value, values.count(value)) for value in range(min(values), max(values) + 1)]
