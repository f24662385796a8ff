"""The evaluator's figures against plain definitions, ties included."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.distill.metrics import Warp, dense, ordered_top, token_figures, warp_rows

WARPS = [Warp(), Warp(0.7, 5, 0.9), Warp(1.3, 0, 0.5), Warp(1.0, 3, 1.0), Warp(1.0, 0, 1.0)]


def plain(logits: torch.Tensor, warp: Warp) -> torch.Tensor:
    """One row warped by the definition: sort by (value, id), cut, renormalise, cut, renormalise."""
    values = (logits.double() / warp.temperature).tolist()
    ranked = sorted(range(len(values)), key=lambda i: (-values[i], i))[: warp.top_k or len(values)]
    weights = torch.tensor([values[i] for i in ranked]).double().softmax(0).tolist()
    kept, mass = [], 0.0
    for place, weight in zip(ranked, weights, strict=True):
        kept.append((place, weight))
        mass += weight
        if mass >= warp.top_p - 1e-12:
            break
    out = torch.zeros(len(values)).double()
    for place, weight in kept:
        out[place] = weight / mass
    return out


@pytest.mark.parametrize("warp", WARPS)
def test_warp_is_the_definition(warp: Warp) -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)) * 2
    got = dense(*warp_rows(logits, warp), 30)
    want = torch.stack([plain(row, warp) for row in logits])
    assert (got - want).abs().max() < 1e-6


@pytest.mark.parametrize("count", [1, 2, 4, 5, 7])
def test_a_head_of_exactly_top_p_is_all_that_stays(count: int) -> None:
    """Eight equal tokens, so sums are exact: what stands behind a head that reaches p is cut, as in decoding."""
    probs, ids = warp_rows(torch.zeros(1, 8), Warp(1.0, 0, count / 8))
    assert ids[0, probs[0] > 0].tolist() == list(range(count))


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(2, 50)
    logits[1, 7] = 1.0
    values, ids = ordered_top(logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [7, 0, 1, 2]]
    assert values[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert warp_rows(logits, Warp(1.0, 2, 0.4))[1][0].tolist() == [0, 1]


def test_figures_against_dense_sums() -> None:
    generator = torch.Generator().manual_seed(2)
    target, draft = torch.randn(25, 40, generator=generator) * 2, torch.randn(25, 40, generator=generator) * 2
    warp = Warp(0.9, 10, 0.8)
    found = token_figures(target, draft, warp)
    p, q = target.softmax(-1), draft.softmax(-1)
    pw, qw = (torch.stack([plain(row, warp) for row in rows]).float() for rows in (target, draft))
    assert torch.allclose(found["raw"], torch.minimum(p, q).sum(-1), atol=1e-6)
    assert torch.allclose(found["warped"], torch.minimum(pw, qw).sum(-1), atol=1e-6)
    assert torch.allclose(found["kl"], (p * (p / q).log()).sum(-1), atol=1e-4)
    assert found["agree"].tolist() == (target.argmax(-1) == draft.argmax(-1)).float().tolist()
    for count in (2, 4, 6):
        best = draft.topk(count).indices
        assert torch.allclose(found[f"cover_{count}"], pw.gather(1, best).sum(-1), atol=1e-6)


def test_a_model_against_itself_is_perfect() -> None:
    logits = torch.randn(9, 33, generator=torch.Generator().manual_seed(3))
    found = token_figures(logits, logits, Warp())
    for name in ("raw", "warped", "agree"):
        assert torch.allclose(found[name], torch.ones(9), atol=1e-5)
    assert found["kl"].abs().max() < 1e-5
