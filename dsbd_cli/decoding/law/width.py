"""The dynamic width: how many draws a layer is worth, from p and q alone (docs/design.md section 4). numpy only.

A width that is a function of (p, q) and never of the draws keeps every draw an exact draw of p.
"""

from __future__ import annotations

import numpy as np

from dsbd_cli.decoding.law.distribution import residual

# Sums of probabilities miss an exact 1 by rounding; a threshold of 1 must still be reachable.
_ROUNDING = 1e-12


class ThresholdWidth:
    """The paper's dynamic width: the largest width reached with probability at least `threshold`.

    Args:
        width, min_width: W and the least W_L, 1 <= min_width <= width.
        threshold: t in (0, 1].
    """

    def __init__(self, width: int, min_width: int, threshold: float) -> None:
        self.width, self.min_width = width, min_width
        self.slack = 1 - threshold + _ROUNDING  # the probability that may be missed

    def for_draws(self, p: np.ndarray, q: np.ndarray, draws: int) -> int:
        """W_L for `paper` and `continue`: p, q aligned [n], `draws` = W_S."""
        # P(W_S, k) for k = 0..W_S: 1 - sum_{k<K} P is the probability of at least K accepts.
        below = np.cumsum(accept_counts(acceptances(p, q, draws)))
        reach = [k for k in range(1, min(self.width, draws) + 1) if below[k - 1] <= self.slack]
        return max([self.min_width, *reach])

    def for_cover(self, mass: float) -> int:
        """W_L for `cover`: `mass` is p's mass on the forest's layer or on finished sequences."""
        reach = [k for k in range(1, self.width + 1) if 1 - mass**k <= self.slack]
        return max([self.min_width, *reach])


class DistinctWidth:
    """As many beams as hold `threshold` of p: few where one continuation has the mass, more where it is spread.

    A function of p alone: what comes out is a process of the target's own, the same whatever is drafted.

    Args:
        width, min_width, threshold: as for `ThresholdWidth`.
    """

    def __init__(self, width: int, min_width: int, threshold: float) -> None:
        self.width, self.min_width, self.threshold = width, min_width, threshold

    def of(self, p: np.ndarray) -> int:
        """W_L of a layer: p [n], sums to 1."""
        held = np.cumsum(-np.sort(-p))
        enough = int(np.searchsorted(held, self.enough)) + 1
        return min(self.width, max(self.min_width, enough))

    @property
    def enough(self) -> float:
        """The mass at which t counts as reached."""
        return self.threshold - _ROUNDING


def width_rule(
    width: int, min_width: int, threshold: float | None, distinct: bool = False
) -> ThresholdWidth | DistinctWidth | None:
    """The rule that these settings name; None: W in every layer, so the output process is beam sampling."""
    if threshold is None or min_width == width:
        return None
    return (DistinctWidth if distinct else ThresholdWidth)(width, min_width, threshold)


def acceptances(p: np.ndarray, q: np.ndarray, draws: int) -> np.ndarray:
    """alpha_j, j = 1..draws: the probability that a draw is accepted after j - 1 rejections in a row.

    `alpha_j = sum min(p_j, q)`, `p_1 = p`, `p_{j+1} = norm(max(p_j - q, 0))`; q, restricted to live
    parents and not renormalised, is subtracted once a step.
    """
    alphas = np.empty(draws)
    current = p
    for j in range(draws):
        alphas[j] = np.minimum(current, q).sum()
        current = residual(current, q)
    return np.clip(alphas, 0.0, 1.0)


def accept_counts(alphas: np.ndarray) -> np.ndarray:
    """P(m, k), k = 0..m, for m = len(alphas) draws: the law of the number of accepted draws.

    `first(i) = alpha_i prod_{j<i}(1 - alpha_j)` is the probability that the first accept is draw i; after
    an accept the chain starts again: `P(m, k) = sum_i first(i) P(m - i, k - 1)`.
    """
    m = len(alphas)
    misses = np.concatenate([[1.0], np.cumprod(1 - alphas)])
    first = alphas * misses[:-1]
    table = np.zeros((m + 1, m + 1))
    table[:, 0] = misses
    for n in range(1, m + 1):
        for k in range(1, n + 1):
            table[n, k] = sum(first[i - 1] * table[n - i, k - 1] for i in range(1, n + 1))
    return table[m]
