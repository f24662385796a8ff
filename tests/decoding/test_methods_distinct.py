"""Distinct draws under every rule, against the enumerated process of draws without replacement."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dsbd_cli.decoding.law.distribution import SeededSampler, draw_distinct
from dsbd_cli.decoding.tree.events import Layer
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, settings_for
from tests.decoding.reference import Outcome, T, layer_law, set_process
from tests.decoding.toys import DRAFTS, EOS, HEAD, OFF, ON, TWO

VERIFY = ("paper", "continue", "cover")
WIDE, SOFT = T(0.9, 4, 1.0), T(1.3, 5, 0.9)


@cache
def expected(
    draft: str, t: T, budget: int, width: int = 2, stop: str = "heuristic", alpha: float = 1.0
) -> dict[Outcome, float]:
    return set_process(DRAFTS[draft][0], width, t, EOS, budget, stop, alpha, distinct=True)


def toy(draft: str, t: T, budget: int, **given: Any) -> Toy:
    target, proposal = DRAFTS[draft]
    settings = settings_for(t, max_new_tokens=budget, draws="distinct", **given)
    return Toy(target, None if given["method"] == "beam" else proposal, settings, EOS)


@pytest.mark.parametrize("stop", ["first", "heuristic", "never"])
@pytest.mark.parametrize(
    ("t", "width"), [(ON, 2), (TWO, 2), (TWO, 3), (HEAD, 3), (OFF, 2), (SOFT, 5)], ids=str
)
def test_beam(t: T, width: int, stop: str) -> None:
    case = toy("holes", t, 3, method="beam", width=width, early_stopping=stop)
    law = case.law_by(case.iteration_law)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(law, expected("holes", t, 3, width, stop)) < 1e-9


def test_the_law_is_not_that_of_iid_draws() -> None:
    iid = set_process(DRAFTS["good"][0], 2, ON, EOS, 3)
    assert total_variation(expected("good", ON, 3), iid) > 0.3


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("verify", VERIFY)
def test_dsbd(verify: str, gamma: int, draws: int, draft: str) -> None:
    """W 2 with W_S below, at and above it; T = ON leaves three continuations, of which two are drawn."""
    case = toy(draft, ON, 4, method="dsbd", verify=verify, gamma=gamma, draft_width=draws)
    law = case.law_by(case.composed_iteration_law)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(law, expected(draft, ON, 4)) < 1e-9


@pytest.mark.parametrize(
    ("t", "width", "draws"), [(WIDE, 2, 2), (HEAD, 2, 2), (TWO, 4, 3), (ON, 3, 2)], ids=str
)
@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("draft", ["good", "bad"])
def test_other_supports(draft: str, verify: str, t: T, width: int, draws: int) -> None:
    """Supports wider than W, and narrower: a layer then shrinks to what there is."""
    case = toy(draft, t, 3, method="dsbd", verify=verify, gamma=2, draft_width=draws, width=width)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected(draft, t, 3, width)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("stop", ["first", "heuristic", "never"])
def test_stop_rules_are_tested_in_every_layer(verify: str, stop: str) -> None:
    given = {"method": "dsbd", "gamma": 3, "draft_width": 2, "early_stopping": stop, "length_penalty": 0.5}
    case = toy("good", TWO, 5, verify=verify, **given)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("good", TWO, 5, 2, stop, 0.5)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
def test_two_whole_iterations(verify: str) -> None:
    case = toy("good", TWO, 6, method="dsbd", verify=verify, gamma=2, draft_width=2)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("good", TWO, 6)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize(("gamma", "draws"), [(1, 2), (2, 2)])
def test_replayed_from_first_to_last_token(verify: str, gamma: int, draws: int) -> None:
    """Nothing composed: one run per branch, the proposer's draws included."""
    case = toy("bad", TWO, 3, method="dsbd", verify=verify, gamma=gamma, draft_width=draws)
    assert total_variation(case.law(), expected("bad", TWO, 3)) < 1e-9


@pytest.mark.parametrize("draft", ["good", "bad", "holes", "disjoint"])
@pytest.mark.parametrize("t", [OFF, ON, HEAD, SOFT], ids=str)
def test_cover_is_beam_at_the_same_seed(draft: str, t: T) -> None:
    plain = toy(draft, t, 6, method="beam", width=3)
    cover = toy(draft, t, 6, method="dsbd", verify="cover", width=3, gamma=3, draft_width=4)
    for seed in range(100):
        one = plain.seeded(seed)
        assert one == cover.outcome(SeededSampler(seed, 0), SeededSampler(seed + 7, 1))


# Widths that p alone decides.


@pytest.mark.parametrize("draws", ["distinct", "iid"])
@pytest.mark.parametrize("method", ["beam", *VERIFY])
@pytest.mark.parametrize(("t", "threshold", "least"), [(ON, 0.8, 1), (TWO, 0.6, 1), (WIDE, 0.85, 2)], ids=str)
def test_a_width_of_p_alone_is_a_process_of_the_target(
    t: T, threshold: float, least: int, method: str, draws: str
) -> None:
    given: dict[str, Any] = {"method": "beam"}
    if method != "beam":
        given = {"method": "dsbd", "verify": method, "gamma": 2, "draft_width": 2}
    case = toy("good", t, 3, width=3, **given)
    settings = {"draws": draws, "width_rule": "distinct", "threshold": threshold, "min_width": least}
    case = Toy(case.target, case.draft, case.settings.merged(settings), EOS)
    law = case.law_by(case.composed_iteration_law)
    wanted = set_process(case.target, 3, t, EOS, 3, distinct=draws == "distinct", by_mass=(least, threshold))
    assert total_variation(law, wanted) < 1e-9
    fixed = set_process(case.target, 3, t, EOS, 3, distinct=draws == "distinct")
    assert total_variation(law, fixed) > 0.05, "the width never moved"


@pytest.mark.parametrize("draws", ["distinct", "iid"])
def test_cover_is_beam_at_the_same_seed_whatever_width_p_asks_for(draws: str) -> None:
    rule = {"draws": draws, "width_rule": "distinct", "threshold": 0.75, "min_width": 1}
    plain = toy("good", SOFT, 6, method="beam", width=4)
    cover = toy("good", SOFT, 6, method="dsbd", verify="cover", width=4, gamma=3, draft_width=4)
    plain, cover = (Toy(case.target, case.draft, case.settings.merged(rule), EOS) for case in (plain, cover))
    widths = set()
    for seed in range(100):
        one = plain.seeded(seed)
        assert one == cover.outcome(SeededSampler(seed, 0), SeededSampler(seed + 7, 1))
        widths |= {len(layer) for layer in one.layers}
    assert len(widths) > 2


@pytest.mark.parametrize("verify", VERIFY)
def test_every_layer_holds_distinct_beams(verify: str) -> None:
    short = 0
    for seed in range(50):
        case = toy("good", ON, 6, method="dsbd", verify=verify, width=4, gamma=2, draft_width=4)
        _, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
        for layer in (event for event in events if isinstance(event, Layer)):
            assert layer.distinct == len(layer.draws) <= 4
            short += len(layer.draws) < 4
    assert short


def test_seeded_draws_have_the_law_of_draws_without_replacement() -> None:
    """And each asks for as many uniforms as it may have draws, whatever there is to draw."""
    weights = np.array([0.0, 4.0, 1.0, 0.0, 3.0, 2.0])
    sampler, runs = SeededSampler(5, 0), 6_000
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(runs):
        drawn = tuple(draw_distinct(sampler, weights, 2))
        counts[drawn] = counts.get(drawn, 0) + 1
    law = layer_law({(i,): w / 10 for i, w in enumerate(weights) if w}, 2, True)
    means = {tuple(path[0] for path in slots): share * runs for slots, share in law.items()}
    assert counts.keys() == means.keys()
    assert stats.chisquare([counts[key] for key in means], list(means.values())).pvalue > 0.001
    used, other = SeededSampler(1, 0), SeededSampler(1, 0)
    assert draw_distinct(used, np.array([0.0, 1.0]), 5) == [1]
    other.uniforms(5)
    assert np.array_equal(used.uniforms(3), other.uniforms(3))
