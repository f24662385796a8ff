"""The loss that writes its own gradient, against autograd on the plain formulas."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.distill import loss
from dsbd_cli.distill.loss import DistillLoss, LossWeights
from dsbd_cli.distill.metrics import Warp, dense, warp_rows


def plain(hidden: torch.Tensor, other: torch.Tensor, head: torch.Tensor, bias: torch.Tensor | None,
          weights: LossWeights) -> torch.Tensor:  # fmt: skip
    z, t = torch.nn.functional.linear(hidden, head, bias), torch.nn.functional.linear(other, head, bias)
    p, log_q = t.softmax(-1), z.log_softmax(-1)
    kl = (p * (p.log() - log_q)).sum()
    kept = dense(*warp_rows(z.detach(), weights.warp), z.shape[-1]) > 0
    q = (z / weights.warp.temperature).masked_fill(~kept, float("-inf")).softmax(-1)
    overlap = torch.minimum(q, dense(*warp_rows(t, weights.warp), z.shape[-1])).sum()
    return weights.kl * kl + weights.warped * (len(hidden) - overlap)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "weights", [LossWeights(), LossWeights(0.3, 1.0), LossWeights(0.0, 2.0, Warp(0.8, 5, 0.9))]
)
def test_value_and_gradient(weights: LossWeights, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 7)  # several chunks, the last one short
    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(17, 12, generator=generator) for _ in range(2))
    head = torch.randn(50, 12, generator=generator)
    bias = torch.randn(50, generator=generator) if with_bias else None
    one, two = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found = DistillLoss.apply(one, other, head, bias, weights, False)
    (3 * found[0]).backward()
    want = plain(two, other, head, bias, weights)
    (3 * want).backward()
    assert torch.allclose(found[0], want, rtol=1e-5)
    assert torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-5)
    assert found[0].item() == pytest.approx(
        weights.kl * found[1].item() + weights.warped * (17 - found[2].item()), rel=1e-5
    )


def test_it_is_zero_at_the_target() -> None:
    hidden = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
    head = torch.randn(20, 8, generator=torch.Generator().manual_seed(2))
    found = DistillLoss.apply(hidden, hidden.detach(), head, None, LossWeights(1.0, 1.0), False)
    found[0].backward()
    assert abs(found[0].item()) < 1e-4
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-5
