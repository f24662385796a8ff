"""Means and ratios with 95 % intervals, by bootstrap over items (percentile method, fixed seed).

Items are the unit: repeats of an item are added up before anything is drawn, so that they do not count
as independent evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
SEED = 20250101
_Z = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A value, its 95 % interval (None where one item or none is too few), and how many items it rests on."""

    value: float | None
    low: float | None
    high: float | None
    items: int

    def to_dict(self) -> dict[str, float | int | None]:
        return {"value": self.value, "low": self.low, "high": self.high, "items": self.items}


NONE = Estimate(None, None, None, 0)


def ratio(parts: Sequence[float], wholes: Sequence[float]) -> Estimate:
    """sum(parts) / sum(wholes) over items: tokens over seconds, a mean (wholes of 1), joules over tokens."""
    a, b = np.asarray(parts, float), np.asarray(wholes, float)
    if a.size == 0 or b.sum() == 0:
        return Estimate(None, None, None, int(a.size))
    picks = _picks(a.size)
    low, high = _interval(_sums(a, picks), _sums(b, picks)) if a.size > 1 else (None, None)
    return Estimate(float(a.sum() / b.sum()), low, high, int(a.size))


def mean(values: Sequence[float], weights: Sequence[float] | None = None) -> Estimate:
    """The mean over items; `weights` = how many repeats each item's sum holds."""
    return ratio(values, [1.0] * len(values) if weights is None else weights)


def share(successes: Sequence[float], trials: Sequence[float]) -> Estimate:
    """A share of yes/no outcomes. Where all items agree the bootstrap sees no spread: Wilson's interval then."""
    estimate = ratio(successes, trials)
    if estimate.value in (0.0, 1.0):
        low, high = wilson(estimate.value, estimate.items)
        return Estimate(estimate.value, low, high, estimate.items)
    return estimate


def wilson(p: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a share `p` of `n`."""
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n)) / (1 + _Z**2 / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_ratio(
    parts: Sequence[float],
    wholes: Sequence[float],
    base_parts: Sequence[float],
    base_wholes: Sequence[float],
) -> Estimate:
    """(sum parts / sum wholes) / (sum base_parts / sum base_wholes), items drawn together in all four."""
    a, b, c, d = (np.asarray(values, float) for values in (parts, wholes, base_parts, base_wholes))
    if a.size == 0 or min(b.sum(), c.sum(), d.sum()) == 0:
        return Estimate(None, None, None, int(a.size))
    picks = _picks(a.size)
    low, high = (None, None)
    if a.size > 1:
        low, high = _interval(_sums(a, picks) * _sums(d, picks), _sums(b, picks) * _sums(c, picks))
    return Estimate(float(a.sum() * d.sum() / (b.sum() * c.sum())), low, high, int(a.size))


def paired_difference(values: Sequence[float], base: Sequence[float]) -> Estimate:
    """Mean over items of value - base."""
    return mean([value - other for value, other in zip(values, base, strict=True)])


@lru_cache(maxsize=8)
def _picks(size: int) -> NDArray[np.intp]:
    """[DRAWS, size] item numbers; the same for every estimate over as many items."""
    return np.random.default_rng(SEED).integers(0, size, (DRAWS, size))


def _sums(values: NDArray[np.float64], picks: NDArray[np.intp]) -> NDArray[np.float64]:
    return values[picks].sum(axis=1)


def _interval(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> tuple[float | None, float | None]:
    usable = bottom != 0
    if not usable.any():
        return None, None
    low, high = np.percentile(top[usable] / bottom[usable], [2.5, 97.5])
    return float(low), float(high)
