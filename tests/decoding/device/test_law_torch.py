"""The law in tensors: its draws, and that it never waits for the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dsbd_cli.decoding.device.law_torch import TorchLaw, best_layer, draft_layer
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.distribution import (
    LogitsProcessor,
    Row,
    SeededSampler,
    draw_layer,
    joint,
    most_probable,
)
from tests.decoding.device.law_cases import EOS, PROCESSORS


@pytest.mark.parametrize(("drawn", "distinct"), [(0, False), (0, True), (6, False), (6, True)])
def test_tensors_of_the_law_never_wait_for_the_host(drawn, distinct):
    """A CUDA graph cannot hold an operation whose shape or place depends on values: here there are none to look at."""
    layout = CoverLayout.of(2, 3, 4, 2, drawn=drawn)
    with FakeTensorMode():
        state, request, outcome = (
            torch.zeros((2, size), dtype=torch.long)
            for size in (layout.state_size, layout.request_size, layout.outcome_size)
        )
        eos, best = torch.tensor(EOS), torch.zeros((2 * layout.nodes, 13))
        parents, scores = best[: 2 * layout.width], torch.zeros((2, layout.width), dtype=torch.float64)
        if drawn:
            TorchLaw().draw(parents, scores, 0, layout, request, outcome, eos, False, 6, distinct)
        else:
            TorchLaw().draft(parents, scores, 0, layout, outcome, eos)
        TorchLaw().verify(
            best, state, torch.zeros_like(state), request, outcome, layout, eos, False, 6, distinct
        )
        with pytest.raises(DataDependentOutputException):
            state[0, 0].item()


@pytest.mark.parametrize("processor", PROCESSORS)
def test_draws_in_tensors_are_those_of_the_law(processor):
    rng = np.random.default_rng(0)
    size = max(1, processor.top_n)
    numbers = [
        torch.tensor([number], dtype=torch.float64) for number in (processor.temperature, processor.top_p)
    ]
    for trial in range(200):
        parents = int(rng.integers(1, 6))
        logps = torch.log_softmax(torch.tensor(3 * rng.normal(size=(parents, 50)), dtype=torch.float32), -1)
        values, ids = torch.topk(logps, size)
        scores = rng.normal(size=parents)
        rows = [Row(i.numpy(), v.double().numpy()) for i, v in zip(ids, values, strict=True)]
        law = joint(scores, rows, processor)
        distinct = trial % 2 == 1
        sample = draw_layer(SeededSampler(trial, 0), law.prob, 6, distinct)
        # One place more, as where there are fewer beams than there may be.
        wide = torch.tensor([*scores, -np.inf])
        more = [torch.cat([part, part[:1]]) for part in (ids, values)]
        uniforms = torch.tensor(SeededSampler(trial, 0).peek(6))
        got = draft_layer(wide, *more, processor.greedy, processor.top_n, *numbers, uniforms, distinct)
        inside = got.prob > 0
        assert np.allclose(got.prob[inside], law.prob, rtol=1e-12, atol=0)
        assert np.array_equal(got.parent[inside], law.parent)
        assert np.array_equal(got.token[inside], law.token)
        assert np.array_equal(got.token[got.draws[: len(sample)]], law.token[sample])
        assert got.there.tolist() == [i < len(sample) for i in range(6)]
        first = [sample.index(pick) == i for i, pick in enumerate(sample)]
        assert torch.isfinite(got.scores).tolist() == first + [False] * (6 - len(sample))
        best = best_layer(wide, *more, size)
        exact = joint(scores, rows, LogitsProcessor(top_k=size))
        assert np.array_equal(best.token, exact.token[most_probable(exact, size)])
