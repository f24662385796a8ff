"""The one distribution that every method draws from: `p_beam` (docs/design.md section 1). numpy only."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

# How many of the largest joint weights are sorted first when top-p has no top-k to lean on.
_HEAD = 1024
# Up to so many numbers are looked at one by one. Between two forwards, whose weights have thrown everything else out
# of the caches, an array operation costs by the code that it is made of: ten times what it does in a loop of its own.
FEW = 200
# Sums of probabilities round: nine tokens of ten equal ones reach a top-p of 0.9.
_SUMS_ROUND = 1e-14


class Row(NamedTuple):
    """A node's conditional: token ids and raw log-probabilities, best first (ties: lower id first).

    Attributes:
        tokens: int64 [n].
        logps: float32 or float64 [n], the model's raw log-softmax, never processed.
    """

    tokens: np.ndarray
    logps: np.ndarray


@dataclass(frozen=True)
class LogitsProcessor:
    """T: temperature, then top-k, then top-p, once on the joint. 0 = argmax, k 0 = off, p 1 = off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1 or self.top_p == 0

    @property
    def enough(self) -> float:
        """The mass at which top-p counts as reached."""
        return self.top_p if self.top_p >= 1 else self.top_p * (1 - _SUMS_ROUND)

    @property
    def top_n(self) -> int:
        """How many entries of each node's row decide the joint exactly; 0 = the whole row."""
        return 1 if self.greedy else self.top_k


class Support(NamedTuple):
    """The processed joint on its non-zero support, in canonical order (parent, then token id).

    The order does not depend on the weights, so rounding moves a draw only where it moves a
    cumulative sum, and two forwards of different shape give the same draw from the same uniform.

    Attributes:
        parent: int64 [n], index into the list of parents.
        token: int64 [n].
        logp: float64 [n], raw conditional log-probability of the token under its parent.
        prob: float64 [n], sums to 1.
    """

    parent: np.ndarray
    token: np.ndarray
    logp: np.ndarray
    prob: np.ndarray


def joint(scores: Sequence[float] | np.ndarray, rows: Sequence[Row], processor: LogitsProcessor) -> Support:
    """`p_beam` (or `q_beam`) over parents x vocabulary: T once on `scores[i] + rows[i].logps`.

    Args:
        scores: [I] log weights of the parents (`l(x)`), finite.
        rows: [I] conditionals; each holds at least the `processor.top_n` best tokens (0: all).
        processor: T.

    Ties go to the higher weight, then the earlier parent, then the lower token id. Top-p is taken
    of the mass that top-k left, as Hugging Face does.
    """
    size = 1 if processor.greedy else processor.top_k
    sizes = [len(row.tokens) for row in rows]
    if size and sum(sizes) <= FEW:
        return _joint_of_few(scores, rows, size, processor)
    parent = np.repeat(np.arange(len(rows)), sizes)
    token = np.concatenate([row.tokens for row in rows])
    logp = np.concatenate([row.logps for row in rows]).astype(np.float64)
    log_weight = np.asarray(scores, dtype=np.float64)[parent] + logp
    if size == 0 and processor.top_p >= 1:
        keep = np.flatnonzero(log_weight > -np.inf)
        prob = _weights(log_weight[keep], log_weight.max(), processor.temperature)
        prob /= prob.sum()
    else:
        keep, prob = _head(log_weight, parent, token, size, processor)
    # exp(log_weight / tau) can underflow to an exact zero: such an entry is outside the support.
    keep, prob = keep[prob > 0], prob[prob > 0]
    order = np.lexsort((token[keep], parent[keep]))
    keep = keep[order]
    return Support(parent[keep], token[keep], logp[keep], prob[order] / prob.sum())


def _joint_of_few(
    scores: Sequence[float] | np.ndarray, rows: Sequence[Row], size: int, processor: LogitsProcessor
) -> Support:
    """The same support to the bit, entry by entry: sums and exponentials are numpy's here too."""
    entries = sorted(
        (-(float(score) + logp), parent, token, logp)
        for parent, (score, row) in enumerate(zip(scores, rows, strict=True))
        for token, logp in zip(row.tokens.tolist(), row.logps.tolist(), strict=True)
    )[:size]
    if len(entries) == 1 or processor.greedy:
        chances, total = [1.0], 1.0
    else:
        entries = [entry for entry in entries if entry[0] < np.inf]
        peak = entries[0][0]
        weights = np.exp(np.array([(peak - entry[0]) / processor.temperature for entry in entries]))
        mass = float(weights.sum())
        chances = [weight / mass for weight in weights.tolist()]
        if processor.top_p < 1:
            chances = chances[: bisect_left(list(accumulate(chances)), processor.enough) + 1]
        while not chances[-1]:  # best first: what has underflowed stands at the end
            chances.pop()
        total = float(np.array(chances).sum())
    kept = sorted((entry[1:], chance / total) for entry, chance in zip(entries, chances, strict=False))
    found, last = zip(*kept, strict=True)
    parent, token, logp = zip(*found, strict=True)
    return Support(np.array(parent), np.array(token), np.array(logp), np.array(last))


def _head(
    log_weight: np.ndarray, parent: np.ndarray, token: np.ndarray, size: int, processor: LogitsProcessor
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the surviving head, best first, and their probabilities (sum 1 before the last cut)."""
    total = None
    if size == 0:
        weights = _weights(log_weight, log_weight.max(), processor.temperature)
        total = weights.sum()
        count = min(_HEAD, len(log_weight))
        while True:
            # All entries at least as large as the count-th: whole ties, so the sort below decides them.
            floor = np.partition(log_weight, len(log_weight) - count)[len(log_weight) - count]
            pool = np.flatnonzero(log_weight >= floor)
            if weights[pool].sum() / total >= processor.enough or count == len(log_weight):
                break
            count = min(4 * count, len(log_weight))
    else:
        pool = np.arange(len(log_weight))
    pool = pool[np.lexsort((token[pool], parent[pool], -log_weight[pool]))]
    if size:
        pool = pool[:size]
    if len(pool) == 1 or processor.greedy:
        return pool[:1], np.ones(1)
    pool = pool[log_weight[pool] > -np.inf]
    prob = _weights(log_weight[pool], log_weight[pool[0]], processor.temperature)
    prob /= prob.sum() if total is None else total
    if processor.top_p < 1:
        count = int(np.searchsorted(np.cumsum(prob), processor.enough, side="left")) + 1
        pool, prob = pool[:count], prob[:count]
    return pool, prob


def _weights(log_weight: np.ndarray, peak: float, temperature: float) -> np.ndarray:
    """Unnormalised weights, the peak's 1: subtract first, so that no temperature can overflow them all."""
    with np.errstate(over="ignore"):
        return np.exp((log_weight - peak) / temperature)


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """`norm(max(p - q, 0))`; `p` itself where that has no mass (docs/design.md section 3)."""
    rest = np.maximum(p - q, 0.0)
    mass = rest.sum()
    return rest / mass if mass > 0 else p


def most_probable(support: Support, count: int, mass: float = 1.0) -> np.ndarray:
    """Indices of the `count` most probable continuations; ties: earlier parent, then lower token.

    Args:
        mass: stop at the first that completes this much probability.
    """
    if len(support.prob) <= FEW:
        chances = support.prob.tolist()
        few = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)[:count]  # stable
        if mass < 1:
            few = few[: bisect_left(list(accumulate(chances[i] for i in few)), mass) + 1]
        return np.array(few, dtype=np.int64)
    order = np.argsort(-support.prob, kind="stable")[:count]
    if mass < 1:
        order = order[: int(np.searchsorted(np.cumsum(support.prob[order]), mass)) + 1]
    return order


# Randomness: two questions, so that a test can enumerate every answer exactly.


class Sampler(Protocol):
    """What a method may ask of fate."""

    def accept(self, numerator: float, denominator: float) -> bool:
        """True with probability min(1, numerator / denominator); never for a numerator of 0."""

    def sample(self, weights: np.ndarray, count: int) -> list[int]:
        """`count` iid indices, index i with probability weights[i] / sum(weights)."""


def draw_layer(sampler: Sampler, weights: np.ndarray, count: int, distinct: bool) -> list[int]:
    """A layer of `count` draws: iid, or `distinct` ones (docs/design.md section 1)."""
    return draw_distinct(sampler, weights, count) if distinct else sampler.sample(weights, count)


def draw_distinct(sampler: Sampler, weights: np.ndarray, count: int) -> list[int]:
    """`count` indices, each drawn among those not drawn before it; fewer where no more have mass.

    The law is that of the `count` largest of log-weights with independent Gumbel noise, in order (Kool et
    al. 2019); one uniform a draw does it, where noise would be one for every entry. Always asks for `count`
    numbers, so that a layer's are known before its support is.
    """
    left = np.array(weights, dtype=np.float64)
    drawn: list[int] = []
    while len(drawn) < count and left.any():
        (index,) = sampler.sample(left, 1)
        drawn.append(index)
        left[index] = 0.0
    pass_over(sampler, count - len(drawn))
    return drawn


def pass_over(sampler: Sampler, count: int) -> None:
    """Leave so many random numbers unused."""
    if count:
        sampler.sample(np.ones(1), count)


class SeededSampler:
    """Uniforms of one seeded generator; every answer uses exactly one, in order."""

    def __init__(self, seed: int, stream: int) -> None:
        self._rng = np.random.default_rng([seed, stream])

    def accept(self, numerator: float, denominator: float) -> bool:
        # u * q < p' and not u < p' / q: no division, so q = 0 needs no epsilon (docs/design.md section 3).
        return bool(self._rng.random() * denominator < numerator)

    def uniforms(self, count: int) -> np.ndarray:
        """The uniforms that `sample` would draw with: [count], for draws made elsewhere."""
        return self._rng.random(count)

    def peek(self, count: int) -> np.ndarray:
        """The next `count` uniforms, left to be drawn again."""
        state = self._rng.bit_generator.state
        ahead = self._rng.random(count)
        self._rng.bit_generator.state = state
        return ahead

    def sample(self, weights: np.ndarray, count: int) -> list[int]:
        if len(weights) <= FEW:
            sums = list(accumulate(weights.tolist()))
            end = bisect_left(sums, sums[-1])
            return [min(bisect_right(sums, u * sums[-1]), end) for u in self._rng.random(count).tolist()]
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, self._rng.random(count) * cumulative[-1], side="right")
        # The product can round up to the full sum; the last index with mass takes that sliver.
        last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
        return [min(int(index), last) for index in at]
