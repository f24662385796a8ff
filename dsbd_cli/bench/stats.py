"""Estimates over items with intervals that hold from three items on; checked by simulation in the tests.

Items are the unit: repeats of an item are added up first, so that they do not count as independent
evidence. Costs (speed, joules, layers) are medians over items, which one disturbed item cannot move far;
scores are means. Below `FEWEST` items no interval is given.
One module, since values, intervals and tests of one figure have to agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats as theory

LEVEL = 0.95
POWER = 0.8
FEWEST = 3
# Differences of scores that are mostly 0 or 1 and sometimes between (F1): among fewer no interval holds what it says.
FEWEST_GRADED = 12
DRAWS = 2000
SEED = 20250101
MOST_NEEDED = 1_000_000
# From here on order statistics can carry 95 %: the range of 5 items holds the median in 93.75 % of all cases.
_ORDERED = 6
# Jeffreys' weight of an outcome that was not seen.
_PRIOR = 0.5
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval.

    Attributes:
        value: None where nothing is known.
        low, high: the interval; None below `FEWEST` items, and where no spread was seen to judge by.
        items: how many items it rests on.
        of_sums: for a rate, the ratio of the sums over all items, without an interval.
        differing: for a paired difference, how many items differ at all.
    """

    value: float | None
    low: float | None
    high: float | None
    items: int
    of_sums: float | None = None
    differing: int | None = None

    def to_dict(self) -> dict[str, float | int | None]:
        entry = {"value": self.value, "low": self.low, "high": self.high, "items": self.items}
        optional = {"of_sums": self.of_sums, "differing": self.differing}
        return entry | {name: number for name, number in optional.items() if number is not None}


NONE = Estimate(None, None, None, 0)


def median(values: Sequence[float], of_sums: float | None = None) -> Estimate:
    """The median over items.

    From 6 items on the interval lies between order statistics (Hettmansperger and Sheather 1986), which
    supposes nothing about the distribution. Order statistics of 3 to 5 items cannot carry 95 %: there it is
    Student's t, on the logarithms where all values have one sign, which supposes that these are symmetric.
    """
    x = np.sort(np.asarray(values, float))
    if x.size == 0:
        return Estimate(None, None, None, 0, of_sums)
    low, high = None, None
    if x.size >= _ORDERED:
        low, high = _between_order_statistics(x)
    elif x.size >= FEWEST:
        low, high = _t_on_logs(x) if x[0] > 0 or x[-1] < 0 else _t(x)
    return Estimate(float(np.median(x)), low, high, int(x.size), of_sums)


def rate(
    parts: Sequence[float], wholes: Sequence[float], least: float = -math.inf, most: float = math.inf
) -> Estimate:
    """The median over items of part / whole (tokens over seconds), and sum(parts) / sum(wholes) beside it.

    Items whose whole is 0 have no rate of their own; the sums hold them.

    Args:
        least, most: what no item's rate can be beyond, 1 for a share: the interval ends there.
    """
    a, b = np.asarray(parts, float), np.asarray(wholes, float)
    of_sums = float(a.sum() / b.sum()) if a.size and b.sum() else None
    found = median([one / other for one, other in zip(a, b, strict=True) if other], of_sums)
    if found.low is None or found.high is None:
        return found
    return replace(found, low=max(found.low, least), high=min(found.high, most))


def paired_rate(
    parts: Sequence[float],
    wholes: Sequence[float],
    base_parts: Sequence[float],
    base_wholes: Sequence[float],
) -> tuple[Estimate, list[float | None]]:
    """How many times the base's rate: the median of the items' ratios, the ratio of sums beside it.

    Returns:
        (estimate, ratio of each item or None where it has none).
    """
    a, b, c, d = (np.asarray(values, float) for values in (parts, wholes, base_parts, base_wholes))
    ratios = [
        float(one * four / (two * three)) if one > 0 and two > 0 and three > 0 and four > 0 else None
        for one, two, three, four in zip(a, b, c, d, strict=True)
    ]
    bottom = b.sum() * c.sum()
    of_sums = float(a.sum() * d.sum() / bottom) if a.size and bottom else None
    return median([ratio for ratio in ratios if ratio is not None], of_sums), ratios


def mean(values: Sequence[float]) -> Estimate:
    """The mean over items with Student's interval; none where all items agree, since no spread was seen."""
    x = np.asarray(values, float)
    if x.size == 0:
        return NONE
    low, high = _t(x) if x.size >= FEWEST and np.ptp(x) > 0 else (None, None)
    return Estimate(float(x.mean()), low, high, int(x.size))


def share(values: Sequence[float]) -> Estimate:
    """The mean of values in 0..1: yes/no outcomes, F1, or an item's mean over repeats.

    The interval is that of the Bayesian bootstrap (Rubin 1981) with half an observation at 0 and at 1, which
    for yes/no outcomes is Jeffreys' interval: where all items agree it keeps an honest width.
    """
    x = np.asarray(values, float)
    if x.size == 0:
        return NONE
    low, high = None, None
    if x.size >= FEWEST:
        ones = float(x.sum())
        if np.all((x == 0) | (x == 1)):
            ends = theory.beta.ppf(_TAILS, ones + _PRIOR, x.size - ones + _PRIOR)
        else:
            items, one = _weights(x.size)
            ends = np.percentile(items @ x + one, [100 * tail for tail in _TAILS])
        low, high = _outward(float(ends[0]), float(ends[1]), float(x.mean()))
    return Estimate(float(x.mean()), low, high, int(x.size))


def paired_difference(
    values: Sequence[float], base: Sequence[float], yes_no: bool = False, graded: bool = False
) -> Estimate:
    """The mean over items of value - base.

    Many items may tie, when two methods give one text. So the interval is that of a product: the share of
    items that differ (Jeffreys) times their mean difference (Student's t). It needs two that differ. For
    yes/no outcomes, of which a single one tells both, the three shares won, lost and tied are Jeffreys'.

    Args:
        yes_no: 0 or 1 for each item. graded: from 0 to 1, mostly one of the two; no interval below `FEWEST_GRADED`.
    """
    x = np.asarray(values, float) - np.asarray(base, float)
    if x.size == 0:
        return NONE
    other = x[x != 0]
    low, high = None, None
    if x.size >= (FEWEST_GRADED if graded else FEWEST):
        if yes_no and set(np.unique(x)) <= {-1.0, 0.0, 1.0}:
            won, lost = int((x > 0).sum()), int((x < 0).sum())
            low, high = _won_less_lost(won, lost, int(x.size))
        elif other.size == x.size:
            low, high = _t(x)
        elif other.size >= 2:
            low, high = _with_ties(other, int(x.size))
    return Estimate(float(x.mean()), low, high, int(x.size), differing=int(other.size))


def needed(estimate: Estimate, *, ratio: bool = False) -> int | None:
    """How many items would show the difference that was found, if it is the true one.

    The size at which a paired t-test at the level of 5 % sees it in 80 % of all cases, given the spread
    that the interval tells; for a ratio both are taken on the logarithm.

    Returns:
        The number of items; `MOST_NEEDED` where it is more. None where there is no interval or no difference.
    """
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return None
    ends = (estimate.value, estimate.low, estimate.high)
    if ratio:
        if min(ends) <= 0:
            return None
        ends = (math.log(ends[0]), math.log(ends[1]), math.log(ends[2]))
    effect, low, high = ends
    if not effect or high <= low:
        return None
    spread = (high - low) / 2 * math.sqrt(estimate.items) / _quantile(estimate.items)
    size = abs(effect) / spread
    few, many = 1, 2
    while power(size, many) < POWER:
        few, many = many, 2 * many
        if few >= MOST_NEEDED:
            return MOST_NEEDED
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if power(size, middle) >= POWER else (middle, many)
    return max(FEWEST, many)


def power(size: float, items: int) -> float:
    """The chance that a two-sided paired t-test sees a difference of `size` standard deviations."""
    edge = _quantile(items)
    shift = size * math.sqrt(items)
    if items > 200:  # there the noncentral t is a shifted normal, and its own function loses digits
        return float(theory.norm.sf(edge - shift) + theory.norm.cdf(-edge - shift))
    return float(theory.nct.sf(edge, items - 1, shift) + theory.nct.cdf(-edge, items - 1, shift))


def signed_rank(differences: Sequence[float]) -> float | None:
    """Two-sided p of Wilcoxon's signed-rank test of paired differences; None where no pair differs."""
    x = np.asarray([value for value in differences if value], float)
    if x.size == 0:
        return None
    return float(theory.wilcoxon(x).pvalue)


def mcnemar(values: Sequence[float], base: Sequence[float]) -> float | None:
    """Two-sided p of McNemar's exact test of paired yes/no outcomes; None where no pair differs."""
    won = sum(one > other for one, other in zip(values, base, strict=True))
    lost = sum(one < other for one, other in zip(values, base, strict=True))
    return float(theory.binomtest(won, won + lost, 0.5).pvalue) if won + lost else None


def outliers(ratios: Sequence[float | None]) -> list[int]:
    """Places of ratios that lie far from the rest: over 3.5 robust deviations and a factor of 2 off the median.

    The modified z-score of Iglewicz and Hoaglin, on logarithms; below 5 items nothing is far.
    """
    places = [place for place, ratio in enumerate(ratios) if ratio]
    x = np.log([ratio for ratio in ratios if ratio])
    if x.size < 5:
        return []
    off = np.abs(x - np.median(x))
    spread = max(float(np.median(off)), 1e-9)
    return [
        place
        for place, far in zip(places, off, strict=True)
        if 0.6745 * far / spread > 3.5 and far > math.log(2)
    ]


_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@lru_cache(maxsize=256)
def _quantile(items: int) -> float:
    return float(theory.t.ppf(_TAILS[1], items - 1))


def _t(x: Values) -> tuple[float, float]:
    half = _quantile(x.size) * float(x.std(ddof=1)) / math.sqrt(x.size)
    return float(x.mean()) - half, float(x.mean()) + half


def _t_on_logs(x: Values) -> tuple[float, float]:
    """Ends on the scale of `x`, whose values have one sign."""
    with np.errstate(over="ignore"):
        low, high = (float(np.exp(end)) for end in _t(np.log(np.abs(x))))
    # Two clocks of wildly different readings may put the end beyond all numbers.
    low, high = (min(end, float(np.finfo(float).max)) for end in (low, high))
    return (low, high) if x[0] > 0 else (-high, -low)


def _between_order_statistics(x: Values) -> tuple[float, float]:
    """Interpolated between the two pairs of order statistics whose coverages enclose 95 %; `x` is sorted."""
    n = x.size
    # levels[k]: coverage of the interval from the k-th smallest to the k-th largest.
    levels = 1 - 2 * theory.binom.cdf(np.arange(-1, n // 2), n, 0.5)
    k = int(np.flatnonzero(levels >= LEVEL)[-1])
    part = (levels[k] - LEVEL) / (levels[k] - levels[k + 1])
    weight = (n - k) * part / (k + (n - 2 * k) * part)
    low = (1 - weight) * x[k - 1] + weight * x[k]
    high = (1 - weight) * x[n - k] + weight * x[n - k - 1]
    return float(low), float(high)


def _with_ties(other: Values, items: int) -> tuple[float, float]:
    """Ends for the share of items that differ times their mean difference."""
    rng = np.random.default_rng(SEED)
    differ = rng.beta(other.size + _PRIOR, items - other.size + _PRIOR, DRAWS)
    shift = rng.standard_t(other.size - 1, DRAWS) * other.std(ddof=1) / math.sqrt(other.size)
    low, high = np.percentile(differ * (other.mean() + shift), [100 * tail for tail in _TAILS])
    return _outward(float(low), float(high), float(other.sum()) / items)


@lru_cache(maxsize=4096)
def _won_less_lost(won: int, lost: int, items: int) -> tuple[float, float]:
    shares = [won + _PRIOR, lost + _PRIOR, items - won - lost + _PRIOR]
    drawn = np.random.default_rng(SEED).dirichlet(shares, 10 * DRAWS)
    low, high = np.percentile(drawn[:, 0] - drawn[:, 1], [100 * tail for tail in _TAILS])
    return _outward(float(low), float(high), (won - lost) / items)


def _outward(low: float, high: float, value: float) -> tuple[float, float]:
    """Ends that hold the value itself: at the edge of its range a prior's interval may begin beyond it."""
    return min(low, value), max(high, value)


@lru_cache(maxsize=32)
def _weights(size: int) -> tuple[Values, Values]:
    """([DRAWS, size] weights of the items, [DRAWS] weight of the outcome 1), of a Dirichlet distribution."""
    rng = np.random.default_rng(SEED)
    items = rng.standard_gamma(1.0, (DRAWS, size))
    ends = rng.standard_gamma(_PRIOR, (DRAWS, 2))
    total = items.sum(axis=1) + ends.sum(axis=1)
    return items / total[:, None], ends[:, 1] / total
