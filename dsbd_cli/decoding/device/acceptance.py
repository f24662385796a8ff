"""Draws of q tested as draws of p (`law.verification`), in tensor operations of fixed shapes.

One layer of one request. p is given on its support [n] in canonical order, and q on the same entries: where p has no
mass nothing is accepted and nothing is left over, so what q has beyond it is not needed. docs/design.md section 3.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tests(NamedTuple):
    """What a layer is tested with.

    Attributes:
        p, q: float64 [n]; q restricted to live parents, not renormalised.
        places: int64 [W_S], which entry of p each of the forest's draws is; -1 where it is none.
        shares: float64 [W_S], q of each draw.
        rests: float64 [W_S + 1, n], what p' is behind so many rejections in a row.
    """

    p: Tensor
    q: Tensor
    places: Tensor
    shares: Tensor
    rests: Tensor


class Accepted(NamedTuple):
    """A layer's draws.

    Attributes:
        draws: int64 [W], entries of p: accepted ones first, then those filled up.
        verdicts: int64 [W_S], 1 accepted, 0 rejected, -1 not looked at.
        whole: bool [1], all of them were accepted.
    """

    draws: Tensor
    verdicts: Tensor
    whole: Tensor


def draws_of(weights: Tensor, uniforms: Tensor) -> Tensor:
    """iid draws of weights [M], int64 like the uniforms (`law.distribution.SeededSampler.sample`)."""
    cumulative = torch.cumsum(weights, 0)
    draws = torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True)
    # The product can round up to the full sum; the last entry with mass takes that sliver.
    last = torch.searchsorted(cumulative, cumulative[-1:])
    # (Without any parent all is NaN: the host cuts the forest here, the indices must only be some.)
    return torch.minimum(draws, last).clamp(max=len(weights) - 1)


def tests_of(p: Tensor, same: Tensor, q: Tensor, drafted: Tensor) -> Tests:
    """The tests of one drafted layer.

    Args:
        p: float64 [n].
        same: bool [n, M], which entries of the draft's support are which of p's.
        q: float64 [M], what the draft drew from. drafted: int64 [W_S], its draws, indices into that.
    """
    on_p = torch.where(same, q, 0.0).sum(1)
    mine = same[:, drafted]
    places = torch.where(mine.any(0), mine.int().argmax(0), -1)
    rests = [p]
    for _ in range(len(drafted)):
        rest = (rests[-1] - on_p).clamp(min=0)
        mass = rest.sum()
        rests.append(torch.where(mass > 0, rest / mass, rests[-1]))
    return Tests(p, on_p, places, q[drafted], torch.stack(rests))


def draws_accepted(tests: Tests, slack: Tensor, min_width: Tensor, width: int) -> Tensor:
    """`law.width.ThresholdWidth.for_draws`: int64 [1], the most draws that are probably all accepted.

    Args:
        slack: float64 [1], the probability that may be missed.
        min_width: int64 [1].
    """
    count = len(tests.places)
    alphas = torch.minimum(tests.rests[:count], tests.q).sum(1).clamp(0, 1)
    misses = torch.cat([torch.ones_like(alphas[:1]), torch.cumprod(1 - alphas, 0)])
    first = alphas * misses[:-1]
    # P(m, k) = sum over the place i of the first accept of first(i) P(m - i, k - 1): a column a k.
    at = torch.arange(count + 1, device=first.device)
    behind = at[:, None] - at - 1
    steps = torch.where(behind >= 0, first[behind.clamp(0, count - 1)], 0.0)
    column, below, reach = misses, torch.zeros_like(slack), torch.zeros_like(min_width)
    for _ in range(min(width, count)):
        below = below + column[-1:]
        reach = reach + (below <= slack)
        column = (steps * column).sum(1)
    return torch.maximum(reach, min_width)


def accept_draws(tests: Tests, wide: Tensor, tested: Tensor, uniforms: Tensor, width: int) -> Accepted:
    """`law.verification.accept_draws`: at most `width` draws of p.

    Args:
        wide: int64 [1], W_L; draws behind it are some of p.
        tested: bool [1]; where it is False all are draws of p.
        uniforms: float64 [W_S + W], to accept and to draw with.
    """
    places, count = tests.places, len(tests.places)
    device = places.device
    at, slot = torch.arange(count, device=device), torch.arange(width, device=device)
    chance = torch.where(places >= 0, tests.rests[:, places.clamp(min=0)], 0.0)
    passes = (chance > 0) & (uniforms[:count] * tests.shares < chance)  # [rejections before, draw]
    # Of a chain that begins at draw s: the first draw behind which the next one begins, W_S + 1 where there is none.
    before = at - at[:, None]
    chains = (before >= 0) & passes.gather(0, before.clamp(min=0))
    following = torch.where(chains.any(1), chains.int().argmax(1) + 1, count + 1)
    following = torch.cat([following, torch.full((2,), count + 1, device=device)])
    begins = [torch.zeros(1, dtype=torch.long, device=device)]
    for _ in range(width):
        begins.append(following[begins[-1]])
    ends = torch.cat(begins[1:])
    taken = tested & (ends <= count) & (slot < wide)
    accepted = taken.sum(0, keepdim=True)
    whole = tested & (accepted == wide)
    begin = torch.cat(begins)[accepted]  # of the chain that is open
    yes = (taken[:, None] & (ends[:, None] - 1 == at)).any(0)
    looked_at = tested & (~whole | (at < begin))
    verdicts = torch.where(looked_at, yes.long(), -1)
    rest = tests.rests[torch.where(tested & ~whole, count - begin, 0)][0]
    filling = uniforms[count:]
    filled = torch.where(slot == accepted, draws_of(rest, filling), draws_of(tests.p, filling))
    draws = torch.where(slot < accepted, places[(ends - 1).clamp(max=count - 1)], filled)
    return Accepted(draws, verdicts, whole)


def accept_distinct_draws(
    p: Tensor, same: Tensor, q: Tensor, drafted: Tensor, wide: Tensor, tested: Tensor, uniforms: Tensor, width: int
) -> tuple[Accepted, Tensor]:  # fmt: skip
    """`law.verification.accept_distinct_draws`: at most `width` distinct draws of p; how many there are, int64 [1].

    Args:
        p, same, q: as for `tests_of`, q below dead parents too.
        drafted: int64 [W_S], distinct indices into q; -1 behind the last where there are fewer.
        wide, tested, uniforms, width: as for `accept_draws`.
    """
    count = len(drafted)
    entry, slot = torch.arange(len(p), device=p.device), torch.arange(width, device=p.device)
    wide = torch.minimum(wide, (p > 0).sum(0, keepdim=True))
    target, current, draft = p, p, q
    accepted = torch.zeros_like(wide)
    draws, verdicts = torch.zeros_like(slot), []
    for i in range(count):
        one = drafted[i : i + 1]
        at = one.clamp(min=0)
        mine = same[:, at].any(1)
        looked_at = tested & (one >= 0) & (accepted < wide)
        chance = torch.where(mine, current, 0.0).sum(0, keepdim=True)
        yes = looked_at & (chance > 0) & (uniforms[i] * draft[at] < chance)
        verdicts.append(torch.where(looked_at, yes.long(), -1))
        draws = torch.where(yes & (slot == accepted), mine.int().argmax(0), draws)
        rest = (current - torch.where(same, draft, 0.0).sum(1)).clamp(min=0)
        mass = rest.sum()
        rest = torch.where(mass > 0, rest / mass, current)
        target = torch.where(yes, _without(target, mine), target)
        current = torch.where(yes, target, torch.where(looked_at, rest, current))
        draft = torch.where(looked_at, _without(draft, torch.arange(len(q), device=q.device) == at), draft)
        accepted = accepted + yes
    # Numbers to draw with stand behind those of the tests, of which there is one a drafted draw.
    before = torch.where(tested, (drafted >= 0).sum(), count)
    filling = uniforms[before + slot]
    for j in range(width):
        mine = draws_of(torch.where(accepted == j, current, target), filling[j : j + 1])
        mine = torch.where(accepted > j, draws[j], mine)
        draws = torch.where(slot == j, mine, draws)
        target = torch.where(entry == mine, 0.0, target)
    return Accepted(draws, torch.cat(verdicts), tested & (accepted == wide)), wide


def _without(weights: Tensor, mine: Tensor) -> Tensor:
    """`law.verification._without`: the distribution given that it is none of these entries."""
    left = torch.where(mine, 0.0, weights)
    mass = left.sum()
    return torch.where(mass > 0, left / mass, left)
