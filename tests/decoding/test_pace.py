"""Sparing forests: exact whatever is drafted, deep where the draft is right, shallow where it is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler, Support, most_probable
from dsbd_cli.decoding.methods.proposers import DraftLength
from dsbd_cli.decoding.methods.setup import forest_mass
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, settings_for
from tests.decoding.reference import T
from tests.decoding.table_model import TableModel
from tests.decoding.toys import DRAFTS, EOS, OFF, ON


@pytest.fixture
def spare(monkeypatch):
    """Forests as on a CPU: `start` finds a price of a layer."""
    monkeypatch.setattr(TableModel, "relative_cost", lambda self, draft: 0.3)


def toy(verify: str, draft: str, t: T, **given: Any) -> Toy:
    options = {"method": "dsbd", "verify": verify, "draft_width": 2, "gamma": 3, "early_stopping": "first"}
    return Toy(*DRAFTS[draft], settings_for(t, **(options | given)), EOS)


@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("verify", ["cover", "paper", "continue"])
def test_the_law_of_whole_runs_is_that_of_beam_sampling(spare, verify, draft):
    t = T(0.9, 2, 0.9)
    plain = Toy(DRAFTS[draft][0], None, settings_for(t, method="beam", early_stopping="first"), EOS)
    case = toy(verify, draft, t, gamma=2)
    assert case.run(SeededSampler(0, 0), SeededSampler(0, 1)).draft_length is not None
    assert total_variation(case.law(), plain.law()) < 1e-9


@pytest.mark.parametrize("t", [OFF, ON, T(0.7, 3, 0.8)])
@pytest.mark.parametrize("draft", DRAFTS)
def test_cover_says_what_beam_says_token_for_token(spare, draft, t):
    case = toy("cover", draft, t, draft_width=4, max_new_tokens=12)
    plain = Toy(DRAFTS[draft][0], None, settings_for(t, method="beam", max_new_tokens=12), EOS)
    plain.settings = plain.settings.merged({"early_stopping": "first"})
    for seed in range(25):
        said = [one.outcome(SeededSampler(seed, 0), SeededSampler(seed, 1)) for one in (case, plain)]
        assert said[0] == said[1]


def test_depth_follows_what_passes():
    draft_length = DraftLength(0.2)
    assert draft_length.depth(6) > 1
    for _ in range(20):
        draft_length.learn([True] * draft_length.depth(6))
    assert draft_length.depth(6) == 6
    for _ in range(20):
        draft_length.depth(6)
        draft_length.learn([False])
    assert draft_length.depth(6) == 1
    for _ in range(40):  # it finds its way back from depth 1
        draft_length.learn([True] * draft_length.depth(6))
    assert draft_length.depth(6) == 6


@pytest.mark.parametrize(("sampler", "cost", "depth"), [(0.9, 0.01, 8), (0.5, 0.2, 2), (0.3, 0.5, 1)])
def test_depth_is_the_best_bargain(sampler, cost, depth):
    draft_length = DraftLength(cost)
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(400):
        tried = rng.random(draft_length.depth(8)) < sampler
        chosen.append(len(tried))
        good = int(np.argmin(tried)) if not tried.all() else len(tried)
        draft_length.learn([bool(one) for one in tried[: good + 1]])
    worth = [sum(sampler**i for i in range(d + 1)) / (1 + cost * d) for d in range(1, 9)]
    assert worth[depth - 1] == max(worth)
    assert abs(np.median(chosen) - depth) <= 1


def test_a_layer_never_asked_about_teaches_nothing():
    draft_length = DraftLength(0.2)
    before = draft_length.depth(4)
    draft_length.learn([])
    assert draft_length.depth(4) == before


def test_mass_ends_a_layer():
    prob = np.array([0.1, 0.5, 0.3, 0.1])
    support = Support(np.zeros(4, dtype=int), np.arange(4), np.log(prob), prob)
    assert most_probable(support, 4).tolist() == [1, 2, 0, 3]
    assert most_probable(support, 4, 0.75).tolist() == [1, 2]
    assert most_probable(support, 4, 0.85).tolist() == [1, 2, 0]
    assert most_probable(support, 1, 0.85).tolist() == [1]
    assert most_probable(support, 4, 0.9999999).tolist() == [1, 2, 0, 3]


def test_only_fixed_width_covers_are_pruned():
    given = {"method": "dsbd", "verify": "cover", "width": 4}
    assert forest_mass(settings_for(T(1.0, 10, 0.8), **given)) == pytest.approx(0.9)
    assert forest_mass(settings_for(T(1.0, 10, 1.0), **given)) == 1
    assert forest_mass(settings_for(T(0.0, 10, 0.8), **given)) == 1
    assert forest_mass(settings_for(T(1.0, 10, 0.8), **(given | {"threshold": 0.9}))) == 1
    assert forest_mass(settings_for(T(1.0, 10, 0.8), **(given | {"verify": "paper"}))) == 1
