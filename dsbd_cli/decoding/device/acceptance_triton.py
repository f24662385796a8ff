"""Draws of weights, and draws of q tested as draws of p, inside the Triton kernels of `law_triton`.

What `acceptance` does in tensor operations, for one layer of one request in one program: one test after the other,
as `law.verification` goes through them. Entries of p are known by their keys (`law.verification.keys`), in any order;
where p has no mass a key may be any. docs/design.md section 3.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def picked(key, weights, u):
    """Keys of iid draws of unnormalised weights, one a uniform; -1 where there is nothing."""
    far: tl.constexpr = 9223372036854775807
    some = weights > 0
    reached = tl.sum(tl.where(key[None, :] <= key[:, None], weights[None, :], 0.0), 1)
    total = tl.max(tl.where(some, reached, 0.0), 0)
    beyond = some[None, :] & (reached[None, :] > (u * total)[:, None])
    pick = tl.min(tl.where(beyond, key[None, :], far), 1)
    return tl.where(pick == far, tl.max(tl.where(some, key, -1), 0), pick)


@triton.jit
def picked_apart(key, owed, weights, pick, begin, u, WIDTH: tl.constexpr, BEAMS: tl.constexpr):
    """`pick` [BEAMS] from place `begin` on filled with distinct draws, one a uniform; -1 where nothing is left.

    The first of them is a draw of `owed`, the others of what they leave of `weights`.
    """
    far: tl.constexpr = 9223372036854775807
    d = tl.arange(0, BEAMS)
    below = key[None, :] <= key[:, None]
    left, others = owed, weights
    for i in range(begin, WIDTH):
        some = left > 0
        reached = tl.sum(tl.where(below, left[None, :], 0.0), 1)
        total = tl.max(tl.where(some, reached, 0.0), 0)
        beyond = some & (reached > tl.sum(tl.where(d == i, u, 0.0), 0) * total)
        one = tl.min(tl.where(beyond, key, far), 0)
        one = tl.where(one == far, tl.max(tl.where(some, key, -1), 0), one)
        pick = tl.where(d == i, one, pick)
        others = tl.where(key == one, 0.0, others)
        left = others
    return pick


@triton.jit
def _left_over(p, q):
    """`law.distribution.residual`."""
    rest = tl.maximum(p - q, 0.0)
    mass = tl.sum(rest, 0)
    return tl.where(mass > 0, rest / tl.where(mass > 0, mass, 1.0), p)


@triton.jit
def draws_accepted(p, q, slack, DRAFT_WIDTH: tl.constexpr, WIDTH: tl.constexpr, FOREST: tl.constexpr):
    """`acceptance.draws_accepted` without its least: int64.

    Args:
        p, q: float64 [n]; q restricted to live parents.
    """
    f = tl.arange(0, FOREST)
    behind = f[:, None] - f[None, :] - 1
    rest, missed = p, slack * 0 + 1.0
    # P(m, k) = sum over the place i of the first accept of first(i) P(m - i, k - 1): a column a k, of m below W_S;
    # and P(W_S, k) beside it, which is asked for.
    column = tl.zeros([FOREST], tl.float64)
    ahead = tl.zeros([FOREST], tl.float64)
    steps = tl.zeros([FOREST, FOREST], tl.float64)
    for j in range(DRAFT_WIDTH):
        alpha = tl.minimum(tl.maximum(tl.sum(tl.minimum(rest, q), 0), 0.0), 1.0)
        first = alpha * missed
        column = tl.where(f == j, missed, column)
        ahead = tl.where(f == DRAFT_WIDTH - 1 - j, first, ahead)
        steps = tl.where(behind == j, first, steps)
        missed = missed * (1 - alpha)
        rest = _left_over(rest, q)
    most: tl.constexpr = WIDTH if WIDTH < DRAFT_WIDTH else DRAFT_WIDTH
    below, reach = slack * 0, (slack * 0).to(tl.int64)
    for _ in range(most):
        below += missed
        reach += (below <= slack).to(tl.int64)
        missed = tl.sum(ahead * column, 0)
        column = tl.sum(steps * column[None, :], 1)
    return reach


@triton.jit
def accept_draws(
    key, p, q, places, shares, wide, tested, looks, asked, filling,
    BEAMS: tl.constexpr, FOREST: tl.constexpr,
):  # fmt: skip
    """`acceptance.accept_draws`: keys [BEAMS], verdicts [FOREST], and whether all were accepted.

    Args:
        key, p, q: [n]; q restricted to live parents.
        places: int64 [FOREST], keys of the draft's draws; -1 for those that p has no mass for.
        shares: float64 [FOREST], q of each draw.
        wide: int64, W_L; draws behind it are some of p.
        tested: where it is False all are draws of p.
        looks: int32, draws to go through; W_S, or 0 where nothing is tested or asked for.
        asked, filling: float64 [FOREST] and [BEAMS], uniforms to accept and to draw with.
    """
    f, d = tl.arange(0, FOREST), tl.arange(0, BEAMS)
    current, accepted = p, wide * 0
    pick = tl.full([BEAMS], -1, tl.int64)
    verdicts = tl.full([FOREST], -1, tl.int64)
    limits = asked * shares
    for i in range(looks):
        this = f == i
        one = tl.sum(tl.where(this, places, 0), 0)
        chance = tl.sum(tl.where(key == one, current, 0.0), 0)
        looked_at = tested & (accepted < wide)
        yes = looked_at & (chance > 0) & (tl.sum(tl.where(this, limits, 0.0), 0) < chance)
        pick = tl.where(yes & (d == accepted), one, pick)
        verdicts = tl.where(this & looked_at, yes.to(tl.int64), verdicts)
        accepted += yes.to(tl.int64)
        current = tl.where(yes, p, tl.where(looked_at, _left_over(current, q), current))
    # The open chain of rejections owes one draw of its residual; the rest are free draws of p.
    filled = tl.where(d == accepted, picked(key, current, filling), picked(key, p, filling))
    return tl.where(d < accepted, pick, filled), verdicts, tested & (accepted == wide)


@triton.jit
def accept_distinct_draws(
    key, p, q, places, draft, draws, wide, tested, looks, asked, filling,
    WIDTH: tl.constexpr, BEAMS: tl.constexpr, FOREST: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """`acceptance.accept_distinct_draws`: keys [BEAMS], verdicts [FOREST], and whether all were accepted.

    Args:
        key, p, q, places, tested, looks, asked, filling: as for `accept_draws`.
        draft: float64 [ENTRIES], all that the draft drew from, below dead parents too.
        draws: int64 [FOREST], distinct indices into that; -1 behind the last where there are fewer.
        wide: int64, of how many p has continuations for.
    """
    f, d, m = tl.arange(0, FOREST), tl.arange(0, BEAMS), tl.arange(0, ENTRIES)
    target, current, accepted = p, p, wide * 0
    pick = tl.full([BEAMS], -1, tl.int64)
    verdicts = tl.full([FOREST], -1, tl.int64)
    for i in range(looks):
        this = f == i
        index = tl.sum(tl.where(this, draws, 0), 0)
        one = tl.sum(tl.where(this, places, 0), 0)
        looked_at = tested & (index >= 0) & (accepted < wide)
        chance = tl.sum(tl.where(key == one, current, 0.0), 0)
        limit = tl.sum(tl.where(this, asked, 0.0), 0) * tl.sum(tl.where(m == index, draft, 0.0), 0)
        yes = looked_at & (chance > 0) & (limit < chance)
        pick = tl.where(yes & (d == accepted), one, pick)
        verdicts = tl.where(this & looked_at, yes.to(tl.int64), verdicts)
        accepted += yes.to(tl.int64)
        rest = _left_over(current, q)
        # An accepted draw leaves p, and every one that was looked at leaves q.
        left = tl.where(key == one, 0.0, target)
        mass = tl.sum(left, 0)
        target = tl.where(yes, left / tl.where(mass > 0, mass, 1.0), target)
        current = tl.where(yes, target, tl.where(looked_at, rest, current))
        left = tl.where(m == index, 0.0, draft)
        mass = tl.sum(left, 0)
        mass = tl.where(mass > 0, mass, 1.0)
        draft = tl.where(looked_at, left / mass, draft)
        q = tl.where(looked_at, tl.where(key == one, 0.0, q) / mass, q)
    pick = picked_apart(key, current, target, pick, accepted.to(tl.int32), filling, WIDTH, BEAMS)
    return pick, verdicts, tested & (accepted == wide)
