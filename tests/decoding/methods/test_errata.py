"""What the paper and its script print, put in the engine's place: each must fail the laws clearly.

So nobody "fixes" the code back (docs/design.md section 7), and the laws of the other tests have teeth.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law import width as width_module
from dsbd_cli.decoding.law.distribution import Sampler, residual
from dsbd_cli.decoding.law.verification import Verified, accept_draws
from dsbd_cli.decoding.methods.proposers import DraftModelProposer
from dsbd_cli.decoding.tree.sequences import Hypotheses
from tests.decoding.enumerating import law_of, total_variation
from tests.decoding.harness import State, Toy, settings_for
from tests.decoding.law.test_verification import PAIRS, drawn
from tests.decoding.reference import set_process
from tests.decoding.toys import DRAFTS, EOS, TARGET, TWO

# The package exports the function of the same name.
engine = importlib.import_module("dsbd_cli.decoding.methods.dsbd")


def distance(case: Toy, budget: int) -> float:
    law = case.law_by(case.composed_iteration_law)
    return total_variation(law, set_process(TARGET, 2, TWO, EOS, budget, case.settings.early_stopping))


def toy(budget: int = 4, **given: Any) -> Toy:
    base: dict[str, Any] = {"method": "dsbd", "verify": "paper", "gamma": 2, "draft_width": 3}
    settings = settings_for(TWO, max_new_tokens=budget, **(base | given))
    return Toy(*DRAFTS["good"], settings, EOS)


def variant(
    accept: Callable[[float, float, Sampler], bool] | None = None,
    rest: Callable[[np.ndarray, np.ndarray], np.ndarray] = residual,
    dead_count: bool = True,
    restart: bool = True,
    first_fill: bool = True,
) -> Callable[..., Verified]:
    """`accept_draws`, one line changed."""
    accept = accept or (lambda p, q, sampler: sampler.accept(p, q))

    def verify(p: np.ndarray, q: np.ndarray, draws: list[int], width: int, sampler: Sampler) -> Verified:
        taken: list[int] = []
        verdicts: list[bool] = []
        current = p
        for draw in draws:
            if len(taken) == width:
                break
            if draw < 0 and not dead_count:
                continue
            verdicts.append(draw >= 0 and current[draw] > 0 and accept(current[draw], q[draw], sampler))
            if verdicts[-1]:
                taken.append(draw)
                current = p if restart else current
            else:
                current = rest(current, q)
        passed = len(taken) == width
        if not passed:
            taken += sampler.sample(current if first_fill else p, 1)
            taken += sampler.sample(p, width - len(taken)) if len(taken) < width else []
        return Verified(tuple(taken), tuple(verdicts), passed)

    return verify


def twice(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return residual(residual(p, q), q)


ERRATA = {
    "ratio q / p'": variant(accept=lambda p, q, sampler: sampler.accept(q, p)),
    "q subtracted twice": variant(rest=twice),
    "draws under dead parents left out, q not conditioned": variant(dead_count=False),
    "no new chain after an accept": variant(restart=False),
    "the fill after a rejection from p": variant(first_fill=False),
    "no residual at all": variant(rest=lambda p, q: p, first_fill=False),
}


def test_the_unchanged_variant_is_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "accept_draws", variant())
    assert distance(toy(), 4) < 1e-9


@pytest.mark.parametrize("name", ERRATA)
def test_printed_rules_break_the_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "accept_draws", ERRATA[name])
    assert distance(toy(), 4) > 0.01


def test_q_over_all_parents_renormalised_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """q over the accepted parents must NOT be renormalised while draws under dead ones count."""

    def renormalised(p: np.ndarray, q: np.ndarray, *rest: Any) -> Verified:
        return accept_draws(p, q / q.sum() if q.sum() > 0 else q, *rest)

    monkeypatch.setattr(engine, "accept_draws", renormalised)
    assert distance(toy(), 4) > 0.01


def test_an_unwarped_record_of_a_warped_draft_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded must be what was drawn from, T included."""
    propose = DraftModelProposer.propose

    def dishonest(self: DraftModelProposer, *given: Any) -> Any:
        forest = yield from propose(self, *given)
        layers = []
        for layer in forest.layers:
            flat = layer.support.prob**0.5
            support = layer.support._replace(prob=flat / flat.sum())
            layers.append(type(layer)(layer.parents, support, layer.draws))
        return type(forest)(layers)

    monkeypatch.setattr(DraftModelProposer, "propose", dishonest)
    assert distance(toy(), 4) > 0.01


def test_merged_duplicates_break_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates merged before verification are draws without replacement, verified as iid."""

    def merged(p: np.ndarray, q: np.ndarray, draws: list[int], *rest: Any) -> Verified:
        return accept_draws(p, q, list(dict.fromkeys(draws)), *rest)

    monkeypatch.setattr(engine, "accept_draws", merged)
    assert distance(toy(), 4) > 0.01


@pytest.mark.parametrize("verify", ["paper", "continue", "cover"])
def test_stop_rules_tested_once_an_iteration_break_the_law(
    verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"verify": verify, "gamma": 3, "draft_width": 2, "early_stopping": "first"}
    assert distance(toy(4, **given), 4) < 1e-9
    case = toy(4, **given)
    stopped = Hypotheses.stopped
    monkeypatch.setattr(Hypotheses, "stopped", lambda self: not self.active)

    def once(state: State) -> dict[Any, float]:
        """An iteration whose layers see only an empty active set; the loop around it sees the rule."""
        law: dict[Any, float] = defaultdict(float)
        for (layers, following, _), mass in case.composed_iteration_law(state).items():
            law[layers, following, stopped(case.at(following).hypotheses)] += mass
        return law

    assert total_variation(case.law_by(once), set_process(TARGET, 2, TWO, EOS, 4, "first")) > 0.01


def test_a_width_that_looks_at_the_draws_breaks_the_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Width = number of accepts: every draw then is an accepted one, biased towards q."""
    p, q = PAIRS["other order"]

    def law(width: Callable[[list[int]], int]) -> dict[int, float]:
        def play(sampler: Any) -> int:
            draws = drawn(q, 2, sampler)
            return accept_draws(p, q, draws, width(draws), sampler).draws[-1]

        return law_of(play)

    exact = dict(enumerate(p.tolist()))
    assert total_variation(law(lambda draws: 2), exact) < 1e-12
    assert total_variation(law(lambda draws: 1 if draws[0] == 2 else 2), exact) > 0.01


@pytest.mark.parametrize("name", ["other order", "random 0", "random 1"])
def test_printed_width_formulas_are_wrong(name: str) -> None:
    p, q = PAIRS[name]
    counts = law_of(lambda sampler: accept_draws(p, q, drawn(q, 3, sampler), 3, sampler).accepted)
    exact = np.array([counts.get(k, 0.0) for k in range(4)])
    mine = width_module.accept_counts(width_module.acceptances(p, q, 3))
    np.testing.assert_allclose(mine, exact, atol=1e-12)
    # q subtracted twice a step, as the authors' script has it
    alphas, current = [], p
    for _ in range(3):
        alphas.append(np.minimum(current, q).sum())
        current = twice(current, q)
    assert np.abs(width_module.accept_counts(np.array(alphas)) - exact).max() > 0.01
    # the sum from k = 1 leaves out P(m, 0)
    assert abs((1 - mine[1]) - exact[2:].sum()) > 0.01
