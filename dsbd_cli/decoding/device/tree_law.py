"""Token trees drawn and verified in tensor operations of fixed shapes, all nodes of a level, or of the tree, at a time.

The rules of `methods.specinfer` from the same random numbers (docs/design.md section 3). What every node would answer
is computed before it is known which nodes the descent meets: a handful of operations for the tree instead of as many
for each node on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.law.verification import BISECTIONS, RHO_ROUNDS

# Numbers that a search for rho may hold at a time.
_GRID = 1 << 20


class Conditionals(NamedTuple):
    """T of single conditionals, in the order that draws go by.

    Attributes:
        tokens: int32 [n, K], ascending.
        prob: float64 [n, K], not normalised; 0: outside the support.
    """

    tokens: Tensor
    prob: Tensor


class Drafted(NamedTuple):
    """Nodes' children as they were drawn; leaves have none that is there.

    Attributes:
        support: [n, K'], what they were drawn from; anything where there are none.
        tokens: int64 [n, k], the children in their order.
        there: bool [n, k], False for what was not drawn.
    """

    support: Conditionals
    tokens: Tensor
    there: Tensor


class Answers(NamedTuple):
    """What nodes answer.

    Attributes:
        passes: bool [n, k], for each child whether it would be accepted if it were looked at.
        rest: float64 [n, K], what the next token is drawn from where none is; not normalised.
    """

    passes: Tensor
    rest: Tensor


def conditionals(best: Tensor, size: int, temperature: Tensor, top_p: Tensor) -> Conditionals:
    """T of each row.

    Args:
        best: float32 [n, 2 k + 1], packed logits (`logits.pack`).
        size: entries that T looks at: 1 where it is greedy, top-k else.
        temperature: float64 [1], above 0. top_p: float64 [1], infinite where nothing is cut.
    """
    count = best.shape[1] // 2
    tokens = best[:, count : count + size].view(torch.int32)
    if size == 1:
        return Conditionals(tokens.contiguous(), torch.ones_like(tokens, dtype=torch.float64))
    prob = torch.softmax(best[:, :size] / temperature, 1)
    # Cut where the mass before an entry has reached top-p.
    prob[:, 1:].masked_fill_(torch.cumsum(prob, 1)[:, :-1] >= top_p, 0.0)
    tokens, order = torch.sort(tokens, 1)
    return Conditionals(tokens, prob.gather(1, order))


def drawn(prob: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """iid draws of each row of prob [n, K], one for each of uniforms [n, k], and the rows' masses [n, 1].

    (A uniform times a sum is less than the sum, and the sum is first reached at an entry with mass.)
    """
    cumulative = torch.cumsum(prob, 1)
    mass = cumulative[:, -1:]
    # (Of what is no number the index must only be one.)
    return torch.searchsorted(cumulative, uniforms * mass, right=True).clamp(max=prob.shape[1] - 1), mass


def drawn_distinct(prob: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draws without replacement, int64 [n, k], and bool [n, k], whether there was anything left to draw."""
    draws, there = [], []
    for i in range(uniforms.shape[1]):
        one, mass = drawn(prob, uniforms[:, i : i + 1])
        draws.append(one)
        there.append(mass > 0)
        prob = prob.scatter(1, one, 0.0)
    return torch.cat(draws, 1), torch.cat(there, 1)


class _Aligned(NamedTuple):
    """q on the entries of p; where p has no mass nothing is accepted and nothing is left over.

    Attributes:
        at: int64 [n, K], places in q's support. hit: bool [n, K], whether q's support has that token.
        mine: bool [n, k, K], which entry of p each child is.
    """

    at: Tensor
    hit: Tensor
    mine: Tensor


def _aligned(p: Conditionals, drafted: Drafted) -> _Aligned:
    support = drafted.support.tokens
    at = torch.searchsorted(support, p.tokens).clamp(max=support.shape[1] - 1)
    return _Aligned(at, support.gather(1, at) == p.tokens, p.tokens[:, None, :] == drafted.tokens[:, :, None])


def by_recursion(p: Conditionals, drafted: Drafted, uniforms: Tensor) -> Answers:
    """`law.verification.accept_draws` of one draw of p, from iid draws of q. uniforms: float64 [n, k]."""
    same = _aligned(p, drafted)
    q = drafted.support.prob
    q = (q / q.sum(1, keepdim=True)).gather(1, same.at) * same.hit
    return _chain(p.prob, q[:, None, :] * drafted.there[:, :, None], same.mine, drafted.there, uniforms)


def by_recursion_distinct(p: Conditionals, drafted: Drafted, uniforms: Tensor) -> Answers:
    """`law.verification.accept_distinct_draws` of one draw of p: a refused one leaves q."""
    same, there = _aligned(p, drafted), drafted.there[:, :, None]
    child = drafted.support.tokens[:, None, :] == drafted.tokens[:, :, None]
    gone = (child & there).int()
    left = drafted.support.prob[:, None, :].masked_fill(torch.cumsum(gone, 1) > gone, 0.0)
    at = same.at[:, None, :].expand(-1, child.shape[1], -1)
    q = (left / left.sum(2, keepdim=True)).gather(2, at)
    q = torch.where(same.hit[:, None, :] & there, q, 0.0)
    return _chain(p.prob, q, same.mine, drafted.there, uniforms)


def _chain(p: Tensor, q: Tensor, mine: Tensor, there: Tensor, uniforms: Tensor) -> Answers:
    """Test child i against what p lacks behind i refused ones.

    p' is kept unnormalised, r = p' times its mass: `u * q < p'` is `u * (mass * q) < r`.

    Args:
        q: float64 [n, k, K], what child i was drawn from, sum at most 1; 0 where there is none.
    """
    rest, mass = p, p.sum(1, keepdim=True)
    shares, chances = [], []
    for i in range(q.shape[1]):
        shares.append(q[:, i] * mass)
        chances.append(rest)
        rest = torch.relu(rest - shares[i])
        mass = rest.sum(1, keepdim=True)
    both = (torch.stack([*shares, *chances]).unflatten(0, (2, -1)) * mine.transpose(0, 1)).sum(3)
    passes = (uniforms * both[0].T < both[1].T) & there
    return Answers(passes, torch.where(mass > 0, rest, p))


def by_sequence(p: Conditionals, drafted: Drafted, uniforms: Tensor) -> Answers:
    """`law.verification.accept_sequentially`, K-SEQ."""
    same, there = _aligned(p, drafted), drafted.there
    q = drafted.support.prob
    q = (q / q.sum(1, keepdim=True)).gather(1, same.at) * same.hit
    probs = p.prob / p.prob.sum(1, keepdim=True)
    count = there.sum(1, keepdim=True).clamp(min=1).double()
    thinned = probs / division_factor(probs, q, count)
    both = (torch.stack([q, thinned])[:, :, None, :] * same.mine).sum(3)
    passes = (uniforms * both[0] < both[1]) & there
    held = torch.minimum(thinned, q)
    rest = torch.relu(probs - held * looked_at(held.sum(1, keepdim=True), count))
    rest = torch.where((rest.sum(1, keepdim=True) > 0) & there[:, :1], rest, probs)
    return Answers(passes, rest)


def division_factor(p: Tensor, q: Tensor, draws: Tensor) -> Tensor:
    """`law.verification.division_factor` of each row: float64 [n, 1]. draws: float64 [n, 1].

    The same search by as many points at a time as there is room for, instead of one.
    """
    bits = 6
    while bits < 13 and p.numel() << (bits + 1) <= _GRID:
        bits += 1
    points = 1 << bits
    steps = torch.arange(points, dtype=torch.float64, device=p.device)
    low, span = torch.ones_like(draws), draws - 1
    for _ in range(-(-BISECTIONS // bits)):
        span = span / points
        grid = torch.addcmul(low, span, steps)
        beta = torch.minimum(p[:, :, None] / grid[:, None, :], q[:, :, None]).sum(1).clamp(max=1.0)
        # Valid: 1 - (1 - beta)^k <= rho beta. Beyond the last point all are; before the first, none.
        valid = torch.addcmul(torch.expm1(draws * torch.log1p(-beta)), grid, beta, value=1 + RHO_ROUNDS) >= 0
        low = low + span * (points - 1 - valid.sum(1, keepdim=True))
    return (low + span).clamp(min=1.0)


def looked_at(beta: Tensor, draws: Tensor) -> Tensor:
    """`law.verification.looked_at` of each row: float64 [n, 1] both."""
    some = -torch.expm1(draws * torch.log1p(-beta.clamp(max=1.0))) / beta
    return torch.where(beta > 0, some, draws)


# The rules of token trees (`settings.TREE_RULES`).
RULES: Mapping[str, Callable[[Conditionals, Drafted, Tensor], Answers]] = {
    "specinfer": by_recursion,
    "spectr": by_sequence,
    "rsd": by_recursion_distinct,
}
