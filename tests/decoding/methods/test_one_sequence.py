"""One-beam methods draw exactly the sequence law, whatever the draft: enumerated, and sampled."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.settings import TREE_RULES
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, settings_for
from tests.decoding.reference import T, sequence_law
from tests.decoding.table_model import by_last
from tests.decoding.toys import DRAFTS, EOS, OFF, ON

METHODS: dict[str, dict[str, Any]] = {
    "multinomial": {"method": "multinomial"},
    "speculative 1": {"method": "speculative", "gamma": 1},
    "speculative 3": {"method": "speculative", "gamma": 3},
    "specinfer 1": {"method": "specinfer", "tree": (1,)},
    "specinfer 3": {"method": "specinfer", "tree": (3,)},
    "specinfer 1,2": {"method": "specinfer", "tree": (1, 2)},
    "specinfer 2,2": {"method": "specinfer", "tree": (2, 2)},
    "specinfer 3,1,1": {"method": "specinfer", "tree": (3, 1, 1)},
    "spectr 3": {"method": "specinfer", "tree": (3,), "tree_rule": "spectr"},
    "spectr 1,2": {"method": "specinfer", "tree": (1, 2), "tree_rule": "spectr"},
    "spectr 2,1,1": {"method": "specinfer", "tree": (2, 1, 1), "tree_rule": "spectr"},
    "rsd 3": {"method": "specinfer", "tree": (3,), "tree_rule": "rsd"},
    "rsd 5": {"method": "specinfer", "tree": (5,), "tree_rule": "rsd"},  # more than there are tokens
    "rsd 2,2": {"method": "specinfer", "tree": (2, 2), "tree_rule": "rsd"},
}


@cache
def expected(draft: str, t: T, budget: int) -> dict[tuple[int, ...], float]:
    return sequence_law(DRAFTS[draft][0], t, EOS, budget)


def toy(method: str, draft: str, t: T, budget: int = 3, **more: Any) -> Toy:
    target, proposal = DRAFTS[draft]
    settings = settings_for(t, max_new_tokens=budget, **METHODS[method])
    return Toy(target, None if method == "multinomial" else proposal, settings, EOS, **more)


@pytest.mark.parametrize("t", [OFF, ON], ids=["T off", "T on"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("method", METHODS)
def test_exact_law(method: str, draft: str, t: T) -> None:
    if method.endswith(" 2,2") and t is OFF:
        t = T(1.0, 0, 0.9)  # of two whole levels of pairs there are too many
    law = toy(method, draft, t).sequences()
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert total_variation(law, expected(draft, t, 3)) < 1e-9


@pytest.mark.parametrize("draft", ["good", "bad", "disjoint"])
@pytest.mark.parametrize("tree", [(2, 2, 1), (2, 2)])
@pytest.mark.parametrize("rule", TREE_RULES)
def test_exact_law_of_the_default_tree(draft: str, tree: tuple[int, ...], rule: str) -> None:
    t = T(0.9, 2, 1.0)
    target, proposal = DRAFTS[draft]
    settings = settings_for(t, max_new_tokens=4, method="specinfer", tree=tree, tree_rule=rule)
    law = Toy(target, proposal, settings, EOS).sequences()
    assert total_variation(law, expected(draft, t, 4)) < 1e-9


@pytest.mark.parametrize("method", ["speculative 1", "specinfer 1,2", "spectr 1,2", "rsd 3"])
def test_exact_law_replayed_from_first_to_last_token(method: str) -> None:
    """The iterations of the other tests are enumerated one by one; here nothing is composed."""
    case = toy(method, "bad", ON)
    law: Counter[tuple[int, ...]] = Counter()
    for outcome, mass in case.law().items():
        law[outcome.answer] += mass  # type: ignore[assignment]
    assert total_variation(dict(law), expected("bad", ON, 3)) < 1e-9


@pytest.mark.parametrize("method", ["speculative 3", "specinfer 3,1,1", "spectr 2,1,1", "rsd 2,2"])
@pytest.mark.parametrize("depth", [-1, 0, 1])
def test_a_draft_out_of_context_keeps_the_law(method: str, depth: int) -> None:
    case = toy(method, "bad", ON, draft_depth=depth)
    assert total_variation(case.sequences(), expected("bad", ON, 3)) < 1e-9


@pytest.mark.parametrize(
    ("method", "draft"),
    [
        *itertools.product(
            ["multinomial", "speculative 3", "specinfer 3", "specinfer 2,2"], ["good", "bad", "disjoint"]
        ),
        ("spectr 3", "good"),
        ("rsd 3", "bad"),
    ],
)
def test_chi_square_of_2000_seeds(method: str, draft: str) -> None:
    """One run per seed, as a user would; every continuation of up to three tokens is a cell."""
    runs = 2000
    case = toy(method, draft, ON)
    counts = Counter(case.seeded(seed).answer for seed in range(runs))
    law = expected(draft, ON, 3)
    assert counts.keys() <= law.keys()
    # Cells too rare for the chi-square law are taken together.
    common = [path for path in law if law[path] * runs >= 5]
    seen = [counts[path] for path in common]
    means = [law[path] * runs for path in common]
    if runs - sum(means) > 1e-6:
        seen.append(runs - sum(seen))
        means.append(runs - sum(means))
    assert stats.chisquare(seen, means).pvalue > 0.001


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("t", [T(0.0), T(1.0, 1), T(1.0, 0, 0.0), T(1e-6)])
def test_greedy_is_the_argmax_of_every_step(method: str, t: T) -> None:
    """Ties to the lower id; the seed does not matter."""
    table = np.array([[0.1, 0.4, 0.4, 0.1], [0.3, 0.1, 0.3, 0.3], [0.25, 0.25, 0.25, 0.25], [0, 0, 0, 1.0]])
    settings = settings_for(t, max_new_tokens=5, **METHODS[method])
    if t.tau == 1e-6:  # not greedy: equal ones share, so no ties here
        table = table + np.array([0, 0.004, 0.002, -0.006])
    case = Toy(by_last(table), None if method == "multinomial" else by_last(table[::-1]), settings, EOS)
    answers = {case.seeded(seed).answer for seed in range(20)}
    greedy: list[int] = []
    last = 0
    while len(greedy) < 5 and last != 3:
        last = int(np.argmax(table[last]))
        greedy.append(last)
    assert answers == {tuple(greedy)}


@pytest.mark.parametrize("method", ["speculative 3", "specinfer 3", "specinfer 2,2", "spectr 3", "rsd 2,2"])
def test_a_draft_equal_to_the_target_is_always_accepted(method: str) -> None:
    case = toy(method, "equal", ON)
    for seed in range(200):
        _, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
        layers = [event for event in events if hasattr(event, "verdicts")]
        assert all(all(layer.verdicts) for layer in layers)
        assert any(layer.verdicts for layer in layers)
