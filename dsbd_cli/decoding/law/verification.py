"""Verifying one layer of a forest: the rules side by side (docs/design.md section 3). numpy only.

`cover` (the default) samples the layer from the target distribution p and asks whether the forest holds
the draws; `paper` and `continue` accept or reject the draft's own draws so that what is kept is
distributed as p (Leviathan et al. 2023, Chen et al. 2023; several draws: Miao et al. 2024). Whatever the
draft proposed, every draw that comes out is an iid draw of p: that is the whole theorem. Where a layer's
draws are distinct, every one comes out as a draw of p among what was not drawn before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dsbd_cli.decoding.law.distribution import Sampler, draw_distinct, draw_layer, pass_over, residual

# Halvings of the range of rho, from 1 to k: down to the last places of a float.
BISECTIONS = 52
# Sums of probabilities round: where p is q, every rho would be as good as 1 by a hair.
RHO_ROUNDS = 1e-13


@dataclass(frozen=True)
class Verified:
    """What verification made of a layer.

    Attributes:
        draws: indices into p, W_L of them (`paper`, `continue`: accepted ones first, then those filled up).
        verdicts: one bool per draw that was looked at: the draft's, accepted or not; for `cover` those of
            p, in the forest or not, but for `ended`.
        passed: every draw came from the forest, or needed no place there.
        ended: for `cover`, draws that finish a sequence and were not drafted.
    """

    draws: tuple[int, ...]
    verdicts: tuple[bool, ...]
    passed: bool
    ended: int = 0

    @property
    def accepted(self) -> int:
        return sum(self.verdicts)


def cover(
    p: np.ndarray, width: int, held: Callable[[int], bool | None], sampler: Sampler, distinct: bool = False
) -> Verified:
    """`cover`: the layer is sampled from p; the forest only decides how many layers one target call yields.

    With the same random numbers this is beam sampling, draw by draw.

    Args:
        p: [n] target distribution over (beam, token), sums to 1.
        width: W_L >= 1.
        held: whether the forest holds continuation i; None: it does not, and need not (it is finished).
        distinct: draws without replacement.
    """
    draws = draw_layer(sampler, p, width, distinct)
    return covered(draws, [held(index) for index in draws])


def covered(draws: Sequence[int], held: Sequence[bool | None]) -> Verified:
    """`cover` for draws at hand; `held` as there, one a draw."""
    verdicts = tuple(one for one in held if one is not None)
    return Verified(tuple(draws), verdicts, all(verdicts), len(held) - len(verdicts))


def accept_draws(p: np.ndarray, q: np.ndarray, drafted: list[int], width: int, sampler: Sampler) -> Verified:
    """`paper` and `continue`: Algorithm 1 with the errata applied; accept draws of q as draws of p, then fill up.

    Asks for len(drafted) + width random numbers, whatever is accepted: one at the place of each test, then one at
    the place of each draw, so that a device can be given them before p and q are known. With one draw and a width
    of 1 this is speculative sampling.

    Args:
        p: [n] target distribution over the accepted beams, sums to 1.
        q: [n] draft distribution restricted to those beams, NOT renormalised.
        drafted: indices into p of the draft's draws, in the order they were drawn; -1 for a draw
            below a dead beam, which p gives no mass.
        width: W_L >= 1.
    """
    draws: list[int] = []
    verdicts: list[bool] = []
    current = p
    for draw in drafted:
        if len(draws) == width:
            break
        # p'/q, not the printed q/p' (docs/design.md section 7). A dead beam's draw has p' = 0: rejected.
        possible = draw >= 0 and current[draw] > 0
        accepted = possible and sampler.accept(current[draw], q[draw])
        if not possible:
            pass_over(sampler, 1)
        verdicts.append(bool(accepted))
        if accepted:
            draws.append(draw)
            current = p
        else:
            current = residual(current, q)
    passed = len(draws) == width
    pass_over(sampler, len(drafted) - len(verdicts) + len(draws))
    if not passed:
        # The open chain of rejections owes one draw from its residual; the rest are free draws of p.
        draws += sampler.sample(current, 1)
        draws += sampler.sample(p, width - len(draws)) if len(draws) < width else []
    return Verified(tuple(draws), tuple(verdicts), passed)


def accept_distinct_draws(
    p: np.ndarray, q: np.ndarray, drafted: list[int], width: int, sampler: Sampler
) -> Verified:
    """`paper` and `continue` for distinct draws: draws of q without replacement become such draws of p.

    Recursive rejection (Jeon et al. 2024), one chain for each draw of p: a rejected draw leaves q, an
    accepted one leaves both (docs/design.md section 3). Its random numbers are those of `accept_draws`.

    Args:
        p: [n] target distribution over the accepted beams, sums to 1; 0 below dead ones.
        q: [n] draft distribution over ALL beams that it was drawn from, sums to 1.
        drafted: distinct indices, in the order they were drawn.
        width: W_L >= 1; a layer has fewer draws where p has fewer continuations.
    """
    asked, width = width, min(width, int(np.count_nonzero(p)))
    target, draft = p, q
    current = target
    draws: list[int] = []
    verdicts: list[bool] = []
    for index in drafted:
        if len(draws) == width:
            break
        possible = current[index] > 0
        accepted = possible and sampler.accept(current[index], draft[index])
        if not possible:
            pass_over(sampler, 1)
        verdicts.append(bool(accepted))
        if accepted:
            draws.append(index)
            current = target = _without(target, index)
        else:
            current = residual(current, draft)
        draft = _without(draft, index)
    passed = len(draws) == width
    pass_over(sampler, len(drafted) - len(verdicts) + len(draws))
    if not passed:
        # The open chain owes one draw of its residual; the rest are draws of what is left of p.
        draws += sampler.sample(current, 1)
        draws += draw_distinct(sampler, _without(target, draws[-1]), width - len(draws))
    pass_over(sampler, asked - width)
    return Verified(tuple(draws), tuple(verdicts), passed)


def accept_sequentially(p: np.ndarray, q: np.ndarray, drafted: list[int], sampler: Sampler) -> Verified:
    """k-sequential selection, K-SEQ (SpecTr, Sun et al. 2023): one draw of p from k iid draws of q.

    Every draw is accepted with probability `min(1, p / (rho q))`, the same for each, and behind the last comes one
    draw of what p then lacks (docs/design.md section 3). Its random numbers are those of `accept_draws`.

    Args:
        p, q: [n] target and draft distribution, each sums to 1.
        drafted: indices into p and q of the k >= 1 draws, equal ones at their places.
    """
    rho = division_factor(p, q, len(drafted))
    verdicts: list[bool] = []
    for draw in drafted:
        possible = p[draw] > 0
        accepted = possible and sampler.accept(p[draw] / rho, q[draw])
        if not possible:
            pass_over(sampler, 1)
        verdicts.append(bool(accepted))
        if accepted:
            pass_over(sampler, len(drafted) - len(verdicts) + 1)
            return Verified((draw,), tuple(verdicts), True)
    held = np.minimum(p / rho, q)
    (other,) = sampler.sample(residual(p, held * looked_at(held.sum(), len(drafted))), 1)
    return Verified((other,), tuple(verdicts), False)


def division_factor(p: np.ndarray, q: np.ndarray, draws: int) -> float:
    """rho of K-SEQ: the least for which no token is accepted more often than p draws it.

    With beta the chance that one draw is accepted, a token has `min(p / rho, q) * looked_at` of the accepts, and
    looked_at <= rho keeps that below p: 1 - (1 - beta)**k <= rho * beta. The left side falls with rho and the right
    one grows, from a crossing at or behind 1 to one at or before k: found by bisection, from above, so that what is
    found keeps the law, however coarse it were.

    Args:
        p, q: as in `accept_sequentially`.
        draws: k >= 1.
    """
    both = (p > 0) & (q > 0)
    p, q = p[both], q[both]

    def valid(rho: float) -> bool:
        return looked_at(np.minimum(p / rho, q).sum(), draws) <= rho * (1 + RHO_ROUNDS)

    low, high = 1.0, float(draws)
    if valid(low):  # one draw, or q below p wherever it has mass
        return low
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if valid(middle) else (middle, high)
    return high


def looked_at(beta: float, draws: int) -> float:
    """How many of k draws are looked at on average, each accepted with chance beta: (1 - (1 - beta)**k) / beta."""
    if beta <= 0:
        return float(draws)
    return -math.expm1(draws * math.log1p(-beta)) / beta if beta < 1 else 1.0


def _without(weights: np.ndarray, index: int) -> np.ndarray:
    """The distribution given that it is not `index`; all 0 where nothing is left."""
    left = weights.copy()
    left[index] = 0.0
    mass = left.sum()
    return left / mass if mass > 0 else left


# One number for a continuation, so that two supports can be compared.


def keys(parent: np.ndarray, token: np.ndarray) -> np.ndarray:
    """int64 [n], ascending in (parent, token); token ids fit in 32 bits."""
    return (parent.astype(np.int64) << 32) | token.astype(np.int64)


def align(
    p_keys: np.ndarray, p: np.ndarray, q_keys: np.ndarray, q: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p and q on the union of their supports: (keys, p, q), keys ascending; absent entries are 0."""
    union = np.union1d(p_keys, q_keys)
    wide_p, wide_q = np.zeros(len(union)), np.zeros(len(union))
    wide_p[np.searchsorted(union, p_keys)] = p
    wide_q[np.searchsorted(union, q_keys)] = q
    return union, wide_p, wide_q
