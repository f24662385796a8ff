"""Many requests in one iteration are so many iterations of one."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.device.engines import _laws
from dsbd_cli.decoding.device.iteration import (
    CoverIteration,
    Rules,
    Sent,
    Space,
)
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.forward.capture import OverlapClock
from dsbd_cli.decoding.tree.sequences import Trie
from tests.decoding.device.helpers import EOS, PROMPT, interpreted, reserved, trees

WIDTH, DRAFT_WIDTH, GAMMA = 3, 4, 2


def made(models, law, requests, drafted):
    sides = [model.side() for model in models]
    sizes = (DRAFT_WIDTH, GAMMA) if drafted else (0, 0)
    layout = CoverLayout.of(requests, WIDTH, *sizes, recalled=sides[0].top_n if drafted else 0)
    draft = sides[1] if drafted else None
    return CoverIteration(sides[0], draft, law, layout, False, 8, EOS, torch.device("cpu"), OverlapClock())


def run(iteration, pools, root, starts, rounds, rng_seed):
    """`rounds` iterations in a row of requests that start from (tokens, scores, temperature) below the prompt."""
    layout = iteration.layout
    found, spaces = [], []
    uniforms = [np.random.default_rng([rng_seed, seed]).random((40, WIDTH)) for seed, *_ in starts]
    depth = [0] * len(starts)
    root_rows = [pool.mask_row(root) for pool in pools]
    for number in range(rounds):
        sent = []
        for r, (_, tokens, scores, temperature) in enumerate(starts):
            space = Space.of(layout, pools[0], pools[1] if iteration.draft is not None else None)
            spaces.append(space)
            count = len(tokens)
            draft_rows = [root_rows[1]] * count if iteration.draft is not None else []
            state = None
            if number == 0:
                state = iteration.state_of(tokens, scores, [root_rows[0]] * count, draft_rows, len(PROMPT))
            window = uniforms[r][depth[r] : depth[r] + layout.window]
            rules = Rules(temperature, 0.95, min_width=WIDTH)
            sent.append(Sent(space, window, len(PROMPT) + depth[r], rules, state))
        outcomes = iteration.wait(iteration.launch(sent))
        for r, outcome in enumerate(outcomes):
            depth[r] += len(outcome.sampled)
        found.append(outcomes)
    for space in spaces:
        space.release()
    return found


@pytest.mark.parametrize("drafted", [True, False])
def test_two_requests_in_one_iteration_are_two_iterations_of_one(pair, law, drafted):
    law, device = law
    if device.type != "cpu":
        pytest.skip("the pair lies on the CPU")
    models = trees(pair, True)
    root = Trie(lambda node: None, EOS, 40).root
    for model in models:
        model.prefill(PROMPT, root, top_n=8)
    pools = [model.tree for model in models]
    starts = [(1, [30, 31, 32], [-0.5, -1.0, -2.0], 0.05), (2, [40, 41], [-0.1, -3.0], 0.1)]
    both, one = (made(models, law, requests, drafted) for requests in (2, 1))
    layers, rounds = 0, 2 if interpreted(law, device) else 3
    together = run(both, pools, root, starts, rounds, 5)
    for r, start in enumerate(starts):
        alone = run(one, pools, root, [start], rounds, 5)
        for number in range(rounds):
            got, wanted = together[number][r], alone[number][0]
            assert len(got.sampled) == len(wanted.sampled)
            layers += len(got.sampled)
            for mine, theirs in zip(got.drafted, wanted.drafted, strict=True):
                assert np.array_equal(mine.parent, theirs.parent)
                assert np.array_equal(mine.token, theirs.token)
                assert np.allclose(mine.logp, theirs.logp, atol=1e-5)
            for mine, theirs in zip(got.sampled, wanted.sampled, strict=True):
                assert np.array_equal(mine.parent, theirs.parent)
                assert np.array_equal(mine.token, theirs.token)
                assert np.allclose(mine.logp, theirs.logp, atol=1e-5)
    assert layers > 2 * rounds if drafted else layers == 2 * rounds
    assert not any(reserved(model) for model in models)


def test_triton_is_taken_when_its_interpreter_is_asked_for():
    """Else these tests and those of whole runs would silently be torch's only."""
    names = [type(law).__name__ for law in _laws(torch.device("cpu"))]
    assert names[-1] == "TorchLaw"
    if os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("DSBD_NATIVE") != "0":
        assert names[0] == "TritonLaw"
