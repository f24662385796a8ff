"""Best entries of a row: exact under ties, trimmed, checked; the same by tensors and by compiled kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.forward import kernels as module
from dsbd_cli.decoding.forward.kernels import c_kernels, top_logits


@pytest.fixture(params=["tensors", "native"])
def way(request, monkeypatch):
    """Both ways of finding the best entries."""
    if request.param == "tensors":
        monkeypatch.setattr(module, "c_kernels", lambda: None)
    elif c_kernels() is None:
        pytest.skip("no C compiler here")
    return request.param


def exact(logits, vocab, count):
    """The definition: raw log-softmax over the trimmed vocabulary, stable descending sort."""
    logps = torch.log_softmax(logits[:, :vocab].double(), -1).numpy()
    tokens = np.argsort(-logits[:, :vocab].float().numpy(), axis=-1, kind="stable")[:, :count]
    return tokens, np.take_along_axis(logps, tokens, -1)


@pytest.mark.parametrize("count", [1, 3, 10, 100])
@pytest.mark.parametrize("levels", [2, 5, 40, 10**5])
@pytest.mark.parametrize("size", [12, 259, 5000])
def test_ties_go_to_the_lower_id(way, size, levels, count):
    rng = np.random.default_rng(levels + size)
    # Few levels make ties wider than any margin; many make next to none.
    logits = torch.tensor(rng.integers(0, levels, (6, size)) / levels * 8, dtype=torch.float32)
    vocab = size - 2
    best = top_logits(logits, vocab, count)
    tokens, logps = exact(logits, vocab, min(count, vocab))
    assert np.array_equal(best.tokens, tokens)
    assert np.abs(best.logps - logps).max() < 5e-6
    assert best.finite.all()


def test_logits_that_round_to_one_probability_are_a_tie(way):
    levels = np.random.default_rng(0).integers(0, 4, 3000)
    # 3e-7 vanishes in a log-probability of about -8, 3e-5 does not.
    rounded = top_logits(torch.tensor(levels * 1e-7, dtype=torch.float32)[None], 3000, 20)
    assert rounded.tokens[0].tolist() == list(range(20))
    apart = top_logits(torch.tensor(levels * 1e-5, dtype=torch.float32)[None], 3000, 20)
    assert apart.tokens[0].tolist() == np.flatnonzero(levels == 3)[:20].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_cast_before_the_softmax(way, dtype):
    logits = (5 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))).to(dtype)
    best = top_logits(logits, 3000, 10)
    tokens, logps = exact(logits, 3000, 10)
    assert np.array_equal(best.tokens, tokens)
    assert np.abs(best.logps - logps).max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_logit_spoils_its_row_only(way, value, dtype):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 77] = value
    logits[2, 299] = value  # beyond the vocabulary: not looked at
    assert top_logits(logits, 299, 5).finite.tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_token_has_probability_zero_and_a_row_of_nothing_else_is_broken(way, dtype):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 200:] = logits[1, ::2] = logits[2] = float("-inf")
    best = top_logits(logits, 300, 160)
    assert best.finite.tolist() == [True, True, False]
    for row in (0, 1):
        expected = torch.log_softmax(logits[row].float(), -1)
        assert np.allclose(best.logps[row], expected[best.tokens[row]].numpy(), atol=1e-5)
    assert (best.logps[1, 150:] == -np.inf).all()
    assert np.isfinite(best.logps[1, :150]).all()


def test_a_head_of_fewer_rows_than_there_are_tokens(way):
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    best = top_logits(logits[:, :50], 64, 60)  # what lies behind a row's end is not looked at
    assert best.tokens.shape == (3, 50)
    assert best.tokens.max() < 50
    assert np.allclose(np.exp(best.logps).sum(1), 1, atol=1e-5)
