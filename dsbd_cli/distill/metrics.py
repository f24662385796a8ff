"""How close a draft is to its target, per token: overlap, agreement, coverage (pure functions).

A distribution is warped as decoding warps one node: temperature, top-k, renormalise, top-p (smallest
head whose mass reaches p), renormalise; ties go to the lowest token id (docs/design.md section 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Kept beyond the top-k so that ties at its edge are seen and go to the lowest id.
TIE_MARGIN = 16
COVERAGE_COUNTS = (2, 4, 6)


@dataclass(frozen=True)
class Warp:
    """The per-node warp: `temperature` > 0, `top_k` (0 = off), `top_p` in (0, 1] (1 = off)."""

    temperature: float = 1.0
    top_k: int = 10
    top_p: float = 0.8


def ordered_top(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row and their ids, ties in order of id (`[N, V] -> 2 x [N, count]`).

    `torch.topk` does not promise an order among equals, so a margin is fetched and sorted; where a tie
    runs past the margin, whole rows are sorted.
    """
    vocab = logits.shape[-1]
    values, ids = logits.topk(min(count + TIE_MARGIN, vocab))
    if values.shape[-1] < vocab and bool((values[:, -1] == values[:, count - 1]).any()):
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    ids, by_id = ids.sort(dim=-1)
    values, by_value = values.gather(-1, by_id).sort(dim=-1, descending=True, stable=True)
    return values[:, :count], ids.gather(-1, by_value)[:, :count]


def warp_rows(logits: torch.Tensor, warp: Warp) -> tuple[torch.Tensor, torch.Tensor]:
    """Warped probabilities of each row, sparse: `(probabilities, ids)`, both `[N, k]`, best first.

    Args:
        logits: `[N, V]`, any float type; the arithmetic is float32.
    """
    count = min(warp.top_k or logits.shape[-1], logits.shape[-1])
    values, ids = ordered_top(logits.float() / warp.temperature, count)
    probs = values.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = torch.where(before < warp.top_p, probs, 0.0)
    return probs / probs.sum(-1, keepdim=True), ids


def dense(probs: torch.Tensor, ids: torch.Tensor, vocab: int) -> torch.Tensor:
    """Sparse rows `[N, k]` as a dense `[N, vocab]`."""
    return torch.zeros(probs.shape[0], vocab, device=probs.device).scatter_(1, ids, probs)


def token_figures(target: torch.Tensor, draft: torch.Tensor, warp: Warp) -> dict[str, torch.Tensor]:
    """Per-token figures of the draft's logits against the target's, both `[N, V]`; each value is `[N]`.

    `raw` and `warped`: sum(min(p, q)). `agree`: same most probable token. `cover_m`: the target's
    warped mass on the draft's m most probable tokens. `kl`: KL(target || draft) in nats.
    """
    target, draft = target.float(), draft.float()
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    p = log_p.exp()
    p_warped = dense(*warp_rows(target, warp), target.shape[-1])
    q_warped, q_ids = warp_rows(draft, warp)
    best = ordered_top(draft, max(COVERAGE_COUNTS))[1]
    covered = p_warped.gather(1, best).cumsum(-1)
    figures = {
        "raw": torch.minimum(p, log_q.exp()).sum(-1),
        "warped": torch.minimum(p_warped.gather(1, q_ids), q_warped).sum(-1),
        "agree": (ordered_top(target, 1)[1] == best[:, :1]).float().squeeze(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
    }
    for count in COVERAGE_COUNTS:
        figures[f"cover_{count}"] = covered[:, min(count, covered.shape[1]) - 1]
    return figures
