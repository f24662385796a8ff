"""Drafting one layer where the rows lie: `q_beam` over best entries, and its continuations.

The same law as `law.joint` and `Sampler.sample`, in tensors of fixed shape, so that a recording can hold
it. What comes out is what was drawn from: that alone keeps the output law exact (docs/design.md section 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.law.distribution import LogitsProcessor


class Drafted(NamedTuple):
    """One layer, on the device. M entries of support in canonical order, W draws.

    Attributes:
        parent, token: int64 [M]; logp, prob: float64 [M]; prob 0: outside the support.
        draws: int64 [W], indices into the support.
        scores: float64 [W], log weight of each draw as a parent; -inf where it has been drawn before.
    """

    parent: Tensor
    token: Tensor
    logp: Tensor
    prob: Tensor
    draws: Tensor
    scores: Tensor


def draft_layer(
    scores: Tensor, tokens: Tensor, logps: Tensor, processor: LogitsProcessor, uniforms: Tensor
) -> Drafted:
    """W iid draws of the warped joint, one per uniform.

    Args:
        scores: float64 [I], log weights of the parents; -inf for what is none.
        tokens, logps: int64 and float32 [I, k], the best entries of each parent's row.
        uniforms: float64 [W].
    """
    size = min(processor.top_n, tokens.numel())
    parent, token, logp, weight = _head(scores, tokens, logps, size)
    if processor.greedy:
        prob = torch.ones_like(weight)
    else:
        prob = torch.softmax((weight - weight[0]) / processor.temperature, 0)
        if processor.top_p < 1:
            # Cut where the mass before an entry has reached top-p; the first always stays.
            reached = torch.cumsum(prob, 0)[:-1] >= processor.top_p
            prob = torch.cat([prob[:1], prob[1:].masked_fill(reached, 0.0)])
            prob = prob / prob.sum()
    order = torch.argsort((parent << 32) | token)
    parent, token, logp, prob, weight = (x[order] for x in (parent, token, logp, prob, weight))
    cumulative = torch.cumsum(prob, 0)
    draws = torch.searchsorted(cumulative, uniforms * cumulative[-1], right=True)
    # The product can round up to the full sum; the last entry with mass takes that sliver.
    last = torch.searchsorted(cumulative, cumulative[-1:])
    # (Without any parent all is NaN: the host cuts the forest here, the indices must only be some.)
    draws = torch.minimum(draws, last).clamp(max=size - 1)
    again = (draws[:, None] == draws[None, :]).tril(-1).any(1)
    return Drafted(parent, token, logp, prob, draws, weight[draws].masked_fill(again, -torch.inf))


def best_layer(scores: Tensor, tokens: Tensor, logps: Tensor, width: int) -> Drafted:
    """The `width` most probable distinct continuations of the joint; arguments as in `draft_layer`."""
    width = min(width, tokens.numel())
    parent, token, logp, weight = _head(scores, tokens, logps, width)
    prob = torch.softmax(weight, 0)
    everyone = torch.arange(width, device=scores.device)
    return Drafted(parent, token, logp, prob, everyone, weight)


def _head(scores: Tensor, tokens: Tensor, logps: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parent, token, log-probability and log weight of the `size` heaviest entries, heaviest first."""
    wide = logps.double()
    # Not topk, which keeps no order among ties: they go to the earlier parent, then to the lower token.
    weight, flat = torch.sort((scores[:, None] + wide).flatten(), descending=True, stable=True)
    weight, flat = weight[:size], flat[:size]
    return flat // tokens.shape[1], tokens.flatten()[flat], wide.flatten()[flat], weight
