"""The draft-length rule: exact whatever it drafts, deep where the draft is right, and how fast it forgets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.proposers import DraftLength
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


# How fast the rule forgets: what it believes of two layers after a given past, to ten digits.
Past = list[list[bool]]


def dearest(past: Past) -> float:
    """The highest cost of a layer at which the second one is still drafted after `past`, by bisection."""
    low, high = 1e-9, 10.0
    for _ in range(60):
        cost = (low + high) / 2
        rule = DraftLength(cost)
        rule.depth(2)
        for passed in past:
            rule.learn(passed)
        low, high = (cost, high) if rule.depth(2) == 2 else (low, cost)
    return low


def fair(first: float, second: float) -> float:
    """The cost c at which two layers promise what one does: (1 + a + ab) / (1 + 2c) = (1 + a) / (1 + c)."""
    both = first * second
    return both / (1 + first - both)


# Before anything was tried, a layer is believed to pass with 0.65.
HOPE = 0.65


def after(rate: float, count: int, start: float, end: float) -> float:
    """`count` steps from `start`, each of which goes `rate` of what is left of the way to `end`."""
    return end + (start - end) * (1 - rate) ** count


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_a_fifth_of_a_belief_is_what_was_seen_last(count: int) -> None:
    up, down = after(0.2, count, HOPE, 1), after(0.2, count, HOPE, 0)
    assert math.isclose(dearest([[True, True]] * count), fair(up, up), rel_tol=1e-9)
    assert math.isclose(dearest([[True, False]] * count), fair(up, down), rel_tol=1e-9)
    # What was seen five iterations ago counts a third of what it did.
    earlier = [[True, False]] * count + [[True, True]] * 5
    assert math.isclose(dearest(earlier), fair(after(0.2, 5, up, 1), after(0.2, 5, down, 1)), rel_tol=1e-9)


@pytest.mark.parametrize("count", [1, 3, 10, 40])
def test_a_layer_that_is_not_tried_drifts_to_the_one_above_it_by_a_twentieth(count: int) -> None:
    first = second = HOPE
    for _ in range(count):
        first = after(0.2, 1, first, 1)
        second = after(0.05, 1, second, first)
    assert math.isclose(dearest([[True]] * count), fair(first, second), rel_tol=1e-9)


def test_a_layer_below_a_failed_one_drifts_as_well() -> None:
    first = after(0.2, 1, HOPE, 0)
    second = after(0.05, 1, HOPE, first)
    # Seen through the second layer once the first passes again.
    first, second = after(0.2, 1, first, 1), after(0.2, 1, second, 1)
    assert math.isclose(dearest([[False], [True, True]]), fair(first, second), rel_tol=1e-9)
