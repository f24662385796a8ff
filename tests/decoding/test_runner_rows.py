"""Best entries of a row: exact under ties, trimmed, checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.rows import best_rows


def exact(logits, vocab, count):
    """The definition: raw log-softmax over the trimmed vocabulary, stable descending sort."""
    logps = torch.log_softmax(logits[:, :vocab].float(), -1).numpy()
    tokens = np.argsort(-logps, axis=-1, kind="stable")[:, :count]
    return tokens, np.take_along_axis(logps, tokens, -1)


@pytest.mark.parametrize("count", [1, 3, 10, 100])
@pytest.mark.parametrize("levels", [2, 5, 40, 10**6])
@pytest.mark.parametrize("size", [12, 259, 5000])
def test_ties_go_to_the_lower_id(size, levels, count):
    rng = np.random.default_rng(levels + size)
    # Few levels make ties wider than any margin; a million make none.
    logits = torch.tensor(rng.integers(0, levels, (6, size)) / levels * 8, dtype=torch.float32)
    vocab = size - 2
    best = best_rows(logits, vocab, count)
    tokens, logps = exact(logits, vocab, min(count, vocab))
    assert np.array_equal(best.tokens, tokens)
    assert np.array_equal(best.logps, logps)
    assert best.finite.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_cast_before_the_softmax(dtype):
    logits = (5 * torch.randn(4, 3000, generator=torch.Generator().manual_seed(0))).to(dtype)
    best = best_rows(logits, 3000, 10)
    tokens, logps = exact(logits, 3000, 10)
    assert np.array_equal(best.tokens, tokens)
    assert np.array_equal(best.logps, logps)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_logit_spoils_its_row_only(value):
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    logits[1, 77] = value
    logits[2, 299] = value  # beyond the vocabulary: not looked at
    assert best_rows(logits, 299, 5).finite.tolist() == [True, False, True]
