"""Best entries of logits by each writing of the law, and logits that are no distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.cache.logits import log_probabilities, unpack
from dsbd_cli.decoding.model.protocol import Side


@pytest.mark.parametrize(
    ("rows", "width", "vocab", "count"), [(1, 500, 500, 1), (5, 3100, 3000, 10), (3, 70, 64, 64)]
)
def test_best_entries(law, rows, width, vocab, count):
    law, device = law
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).half().to(device)  # ties
    logits[0, 7], logits[0, 3] = 0.0, -0.0
    side = Side(None, None, vocab, count)  # type: ignore[arg-type]
    got = unpack(law.pack(side, logits).cpu().numpy())
    logps = log_probabilities(logits.cpu(), vocab)
    order = np.argsort(-logps.numpy(), axis=1, kind="stable")[:, :count]
    assert np.array_equal(got.tokens, order)
    assert np.abs(got.logps - np.take_along_axis(logps.numpy(), order, 1)).max() < 1e-5
    assert got.finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_distribution_are_noticed(law, bad):
    law, device = law
    logits = torch.randn(4, 2500, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1, 1700] = bad
    logits[2] = -float("inf")
    side = Side(None, None, 2500, 4)  # type: ignore[arg-type]
    assert unpack(law.pack(side, logits).cpu().numpy()).finite.tolist() == [True, False, False, True]


def test_a_masked_token_has_probability_0_and_spoils_nothing(law):
    law, device = law
    logits = torch.randn(2, 2500, generator=torch.Generator().manual_seed(0)).to(device)
    masked = int(logits[1].argmax())
    logits[1, masked] = -float("inf")
    best = unpack(law.pack(Side(None, None, 2500, 4), logits).cpu().numpy())  # type: ignore[arg-type]
    assert best.finite.all()
    assert masked not in best.tokens[1]
    exact = torch.log_softmax(logits[1].double(), -1).cpu()
    assert np.allclose(best.logps[1], exact[best.tokens[1]], atol=1e-5)
