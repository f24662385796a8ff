"""Beam sampling, and dsbd of fixed width under every rule, against the enumerated set process.

What is compared is the law of everything a run leaves: its layers as sets, the pool, what is still
active, and the answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.tree.events import Layer
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, settings_for
from tests.decoding.reference import Outcome, T, p_beam, set_process
from tests.decoding.table_model import Path
from tests.decoding.toys import DRAFTS, EOS, HEAD, OFF, ON, TWO

STOP_RULES = ("first", "heuristic", "never")
VERIFY = ("paper", "continue", "cover")


@cache
def expected(
    draft: str, t: T, budget: int, stop: str = "heuristic", alpha: float = 1.0, width: int = 2
) -> dict[Outcome, float]:
    return set_process(DRAFTS[draft][0], width, t, EOS, budget, stop, alpha)


def toy(draft: str, t: T, budget: int, **given: Any) -> Toy:
    target, proposal = DRAFTS[draft]
    settings = settings_for(t, max_new_tokens=budget, **given)
    return Toy(target, None if given["method"] == "beam" else proposal, settings, EOS)


@pytest.mark.parametrize("stop", STOP_RULES)
@pytest.mark.parametrize("alpha", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("t", "budget"), [(ON, 3), (TWO, 4)], ids=["three layers", "four layers"])
def test_beam(t: T, budget: int, stop: str, alpha: float) -> None:
    """Replayed whole."""
    law = toy("bad", t, budget, method="beam", early_stopping=stop, length_penalty=alpha).law()
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(law, expected("bad", t, budget, stop, alpha)) < 1e-9
    if budget == 4:
        others = [expected("bad", t, budget, rule, alpha) for rule in STOP_RULES if rule != stop]
        assert all(total_variation(law, other) > 0.01 for other in others), "not one law of three names"


@pytest.mark.parametrize(
    ("t", "width"), [(OFF, 1), (OFF, 2), (TWO, 1), (TWO, 3), (HEAD, 2), (HEAD, 3)], ids=str
)
def test_beam_of_other_widths(t: T, width: int) -> None:
    case = toy("holes", t, 3, method="beam", width=width)
    law = case.law_by(case.iteration_law)
    assert total_variation(law, expected("holes", t, 3, width=width)) < 1e-9


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("draws", [1, 2, 3, 4])
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("verify", VERIFY)
def test_dsbd(verify: str, gamma: int, draws: int, draft: str) -> None:
    """W 2 with W_S below, at and above it; four layers, so the depths 1 to 3 are all drafted whole."""
    case = toy(draft, TWO, 4, method="dsbd", verify=verify, gamma=gamma, draft_width=draws)
    law = case.law_by(case.composed_iteration_law)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert total_variation(law, expected(draft, TWO, 4)) < 1e-9


@pytest.mark.parametrize(("gamma", "draws", "budget"), [(1, 3, 4), (2, 2, 4), (3, 2, 4)])
@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("t", [ON, HEAD], ids=["top-k 3", "top-p"])
@pytest.mark.parametrize("draft", ["good", "bad"])
def test_dsbd_on_wider_supports(draft: str, t: T, verify: str, gamma: int, draws: int, budget: int) -> None:
    case = toy(draft, t, budget, method="dsbd", verify=verify, gamma=gamma, draft_width=draws)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected(draft, t, budget)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
def test_dsbd_over_two_whole_iterations(verify: str) -> None:
    """Six layers: a second iteration starts from several beams and drafts as deep as the first."""
    case = toy("good", TWO, 6, method="dsbd", verify=verify, gamma=2, draft_width=2)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("good", TWO, 6)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("stop", STOP_RULES)
def test_dsbd_tests_the_stop_rules_in_every_layer(verify: str, stop: str) -> None:
    given = {"method": "dsbd", "gamma": 3, "draft_width": 2, "early_stopping": stop, "length_penalty": 0.5}
    case = toy("good", TWO, 5, verify=verify, **given)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("good", TWO, 5, stop, 0.5)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
def test_dsbd_of_width_3(verify: str) -> None:
    case = toy("good", TWO, 3, method="dsbd", verify=verify, gamma=2, draft_width=3, width=3)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("good", TWO, 3, width=3)) < 1e-9


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("given", [{"threshold": 0.6, "min_width": 2}, {"threshold": None}])
def test_min_width_equal_to_the_width_is_the_fixed_width(verify: str, given: dict[str, Any]) -> None:
    case = toy("good", TWO, 3, method="dsbd", verify=verify, gamma=2, draft_width=2, **given)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("good", TWO, 3)) < 1e-9


@pytest.mark.parametrize("t", [OFF, TWO], ids=["T off", "T on"])
@pytest.mark.parametrize("verify", ["paper", "continue"])
def test_width_1_with_one_draw_is_speculative_sampling(verify: str, t: T) -> None:
    case = toy("bad", t, 3, method="dsbd", verify=verify, gamma=2, width=1, draft_width=1)
    other = toy("bad", t, 3, method="speculative", gamma=2)
    law = case.law_by(case.composed_iteration_law)
    assert total_variation(law, expected("bad", t, 3, width=1)) < 1e-9
    # And not only in law: the same answers to the same questions.
    for seed in range(100):
        runs = [toy_.seeded(seed) for toy_ in (case, other)]
        assert runs[0] == runs[1]


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize(("gamma", "draws"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_dsbd_replayed_from_first_to_last_token(verify: str, gamma: int, draws: int) -> None:
    """Nothing composed: one run per branch, the proposer's draws included."""
    case = toy("bad", TWO, 3, method="dsbd", verify=verify, gamma=gamma, draft_width=draws)
    law = case.law()
    assert total_variation(law, expected("bad", TWO, 3)) < 1e-9
    for step in (case.iteration_law, case.composed_iteration_law):
        assert total_variation(law, case.law_by(step)) < 1e-12


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("depth", [-1, 0, 1])
def test_a_draft_out_of_context_keeps_the_law(verify: str, depth: int) -> None:
    case = toy("bad", TWO, 4, method="dsbd", verify=verify, gamma=3, draft_width=2)
    case = Toy(case.target, case.draft, case.settings, EOS, draft_depth=depth)
    assert total_variation(case.law_by(case.iteration_law), expected("bad", TWO, 4)) < 1e-9


@pytest.mark.parametrize("t", [T(1.0, 3, 1.0), T(1.0, 0, 0.6)], ids=["top-k", "top-p"])
@pytest.mark.parametrize("method", ["beam", *VERIFY])
def test_ties_at_the_cut(method: str, t: T) -> None:
    """Halves and quarters make equal weights in every joint; which of them T keeps must be one rule's."""

    def target(path: Path) -> np.ndarray:
        return np.roll([0.5, 0.25, 0.125, 0.125], sum(path) + len(path))

    def draft(path: Path) -> np.ndarray:
        return np.roll([0.25, 0.25, 0.25, 0.25] if len(path) == 1 else [0.125, 0.5, 0.25, 0.125], sum(path))

    given: dict[str, Any] = {"method": "beam"}
    if method != "beam":
        given = {"method": "dsbd", "verify": method, "gamma": 2, "draft_width": 2}
    case = Toy(target, draft, settings_for(t, max_new_tokens=4, **given), EOS)
    weights = sorted(p_beam(target, [(1,), (0,)], OFF).values())
    assert len(set(np.round(weights, 12))) < len(weights)
    law = case.law_by(case.composed_iteration_law)
    # Of equally good answers the engine takes the one that ended first, which a set does not know.
    assert total_variation(unanswered(law), unanswered(set_process(target, 2, t, EOS, 4))) < 1e-9


def unanswered(law: dict[Outcome, float]) -> dict[Outcome, float]:
    merged: dict[Outcome, float] = defaultdict(float)
    for outcome, mass in law.items():
        merged[outcome._replace(answer=())] += mass
    return dict(merged)


@pytest.mark.parametrize("verify", ["paper", "continue"])
def test_an_equal_draft_is_accepted_whole_and_a_disjoint_one_never(verify: str) -> None:
    """W_S = W, so no draw is left under a dead parent."""
    for draft, verdict in (("equal", True), ("disjoint", False)):
        case = toy(draft, ON, 6, method="dsbd", verify=verify, gamma=3, draft_width=2)
        for seed in range(200):
            _, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
            verdicts = [v for event in events if isinstance(event, Layer) for v in event.verdicts]
            assert verdicts
            assert set(verdicts) == {verdict}


@pytest.mark.parametrize(
    ("method", "draft"), [("beam", "good")] + [(rule, draft) for rule in VERIFY for draft in ("good", "bad")]
)
def test_chi_square_of_2000_seeds(method: str, draft: str) -> None:
    """The same with the real generator: one run per seed."""
    given: dict[str, Any] = {"method": "beam"}
    if method != "beam":
        given = {"method": "dsbd", "verify": method, "gamma": 2, "draft_width": 3}
    case, runs = toy(draft, ON, 3, **given), 2000
    counts = Counter(case.seeded(seed) for seed in range(runs))
    law = expected(draft, ON, 3)
    assert counts.keys() <= law.keys()
    common = [outcome for outcome in law if law[outcome] * runs >= 5]
    seen = [counts[outcome] for outcome in common]
    means = [law[outcome] * runs for outcome in common]
    seen.append(runs - sum(seen))
    means.append(runs - sum(means))
    assert stats.chisquare(seen, means).pvalue > 0.001


@pytest.mark.parametrize("t", [OFF, ON, HEAD], ids=["off", "top-k", "top-p"])
@pytest.mark.parametrize("draft", ["good", "bad", "holes"])
def test_cover_is_beam_at_the_same_seed(draft: str, t: T) -> None:
    """Not in law alone: run for run, whatever the draft and its own randomness."""
    plain = toy(draft, t, 6, method="beam", width=3)
    cover = toy(draft, t, 6, method="dsbd", verify="cover", width=3, gamma=3, draft_width=4)
    for seed in range(100):
        one = plain.seeded(seed)
        assert one == cover.outcome(SeededSampler(seed, 0), SeededSampler(seed + 7, 1))
