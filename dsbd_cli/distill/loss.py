"""The distillation loss over a wide vocabulary, in chunks, with its gradient written out.

Both logits of a chunk of tokens exist only inside it: the gradient with respect to the draft's hidden
states is formed there, so memory does not grow with the batch and nothing is recomputed. With p the
target's and q the draft's distribution:

- KL(p || q): the gradient with respect to q's logits is q - p.
- the warped overlap sum(min(p', q')), p' and q' warped as decoding warps them: with g = -[q' < p'] on
  q's kept tokens, the gradient of 1 - overlap is q' * (g - sum(q' * g)); which tokens are kept is
  taken as fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dsbd_cli.distill.engine import top_window
from dsbd_cli.distill.metrics import Warp

CHUNK_TOKENS = 4096


@dataclass(frozen=True)
class LossWeights:
    """How much of each term: KL(target || draft), and 1 - warped overlap under `warp`."""

    kl: float = 1.0
    warped: float = 0.0
    warp: Warp = field(default_factory=Warp)


def _warp(logits: torch.Tensor, warp: Warp) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = top_window(logits, min(warp.top_k or 64, logits.shape[-1]))
    probs = (values.float() / warp.temperature).softmax(-1)
    probs = torch.where(probs.cumsum(-1) - probs < warp.top_p, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True), ids


def chunk_gradient(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(target || draft) summed over a chunk, and `weight` times its gradient.

    Args:
        draft_logits, target_logits: `[n, V]`.
        weight: scalar tensor (a tensor, so that a compiled version serves every value).

    Returns:
        `(kl, gradient)`: a scalar, and `[n, V]` in the logits' type.
    """
    log_q = draft_logits.float().log_softmax(-1)
    log_p = target_logits.float().log_softmax(-1)
    p = log_p.exp()
    kl = (p * (log_p - log_q)).sum()
    gradient = ((log_q.exp() - p) * weight).to(draft_logits.dtype)
    return kl, gradient


def warped_gradient(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, weights: LossWeights
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The warped term, sparse: `(sum of overlaps, gradient [n, k], ids [n, k])`."""
    p, p_ids = _warp(target_logits, weights.warp)
    q, q_ids = _warp(draft_logits, weights.warp)
    p_at_q = ((p_ids[:, None, :] == q_ids[:, :, None]) * p[:, None, :]).sum(-1)
    pull = -(q < p_at_q).float()
    gradient = q * (pull - (q * pull).sum(-1, keepdim=True)) * (weights.warped / weights.warp.temperature)
    return torch.minimum(p_at_q, q).sum(), gradient, q_ids


_compiled: dict[str, Any] = {}


def _chunk_function(compile_it: bool) -> Any:
    if not compile_it:
        return chunk_gradient
    if "chunk" not in _compiled:
        _compiled["chunk"] = torch.compile(chunk_gradient, dynamic=False)
    return _compiled["chunk"]


class DistillLoss(torch.autograd.Function):
    """Loss of hidden states through a frozen linear head; see the module's text.

    `apply(draft_hidden [N, H], target_hidden [N, H], head [V, H], bias [V] | None, weights, compiled)`
    returns `[3]`: the weighted loss summed over tokens (the only differentiable entry), KL, overlap.
    """

    @staticmethod
    def forward(ctx, hidden, target_hidden, head, bias, weights, compiled):  # type: ignore[no-untyped-def]
        function = _chunk_function(compiled)
        gradients = torch.empty_like(hidden)
        totals = torch.zeros(2, device=hidden.device)
        weight = torch.tensor(weights.kl, device=hidden.device)
        head = head.to(hidden.dtype)
        for begin in range(0, hidden.shape[0], CHUNK_TOKENS):
            part = slice(begin, begin + CHUNK_TOKENS)
            own, other = hidden[part], target_hidden[part].to(hidden.dtype)
            short = CHUNK_TOKENS - own.shape[0] if compiled else 0
            if short:
                # One shape only: padding rows are equal on both sides, so they add nothing.
                own = torch.cat([own, own.new_zeros(short, own.shape[1])])
                other = torch.cat([other, other.new_zeros(short, other.shape[1])])
            draft_logits, target_logits = own @ head.T, other @ head.T
            if bias is not None:
                draft_logits, target_logits = draft_logits + bias, target_logits + bias
            kl, gradient = function(draft_logits, target_logits, weight)
            totals[0] += kl
            if weights.warped:
                real = hidden[part].shape[0]
                overlap, extra, ids = warped_gradient(draft_logits[:real], target_logits[:real], weights)
                totals[1] += overlap
                gradient[:real].scatter_add_(1, ids, extra.to(gradient.dtype))
            gradients[part] = (gradient @ head)[: hidden[part].shape[0]]
        ctx.save_for_backward(gradients)
        loss = weights.kl * totals[0] + weights.warped * (hidden.shape[0] - totals[1])
        return torch.stack([loss, totals[0], totals[1]])

    @staticmethod
    def backward(ctx, upstream):  # type: ignore[no-untyped-def]
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0].to(gradients.dtype), None, None, None, None, None
