"""One draw of p from several draws of q: the rules of token trees by exact enumeration, and what is proved of them."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, draw_distinct, joint
from dsbd_cli.decoding.law.verification import (
    Verified,
    accept_distinct_draws,
    accept_draws,
    accept_sequentially,
    division_factor,
)
from tests.decoding.enumerating import Branching, law_of, total_variation

Case = tuple[np.ndarray, np.ndarray]
RULES = ("specinfer", "spectr", "rsd")


def processed(weights: list[float], processor: LogitsProcessor) -> np.ndarray:
    """What temperature, top-k and top-p leave of a conditional, on the whole vocabulary."""
    row = Row(np.arange(len(weights)), np.log(np.array(weights) / sum(weights)))
    support = joint([0.0], [row], processor)
    whole = np.zeros(len(weights))
    whole[support.token] = support.prob
    return whole


def cases() -> dict[str, Case]:
    p = np.array([0.5, 0.3, 0.2, 0.0])
    one, other = np.array([1.0, 0, 0, 0]), np.array([0, 0, 1.0, 0])
    up, down = [5.0, 4.0, 2.0, 1.0], [1.0, 2.0, 4.0, 3.0]
    found = {
        "equal": (p, p.copy()),
        "equal up to rounding": (p, np.nextafter(p, 0)),
        "other order": (p, np.array([0.1, 0.2, 0.4, 0.3])),
        "disjoint": (np.array([0.6, 0.4, 0, 0]), np.array([0, 0, 0.3, 0.7])),
        "q inside p": (p, np.array([0.0, 1.0, 0.0, 0.0])),
        "p inside q": (other, np.full(4, 0.25)),
        "ties": (np.full(4, 0.25), np.array([0.4, 0.4, 0.1, 0.1])),
        "hardly together": (np.array([1 - 1e-12, 0, 1e-12, 0]), np.array([0, 0.5, 0.5, 0])),
        "greedy, one mind": (one, one.copy()),
        "greedy, two minds": (one, other),
        "greedy draft": (p, one),
        "top-k": tuple(processed(row, LogitsProcessor(0.8, top_k=2)) for row in (up, down)),
        "top-p": tuple(processed(row, LogitsProcessor(1.0, top_p=0.7)) for row in (up, down)),
        "both": tuple(processed(row, LogitsProcessor(1.2, 3, 0.8)) for row in (up, down)),
    }
    rng = np.random.default_rng(3)
    for number in range(4):
        found[f"random {number}"] = (rng.dirichlet(np.full(4, 0.6)), rng.dirichlet(np.full(4, 0.4)))
    return found  # type: ignore[return-value]


CASES = cases()


def verified(rule: str, p: np.ndarray, q: np.ndarray, draws: int, sampler: Branching) -> Verified:
    """The draft's draws and what the rule makes of them, as at a node of a token tree."""
    if rule == "rsd":
        return accept_distinct_draws(p, q, draw_distinct(sampler, q, draws), 1, sampler)
    drafted = sampler.sample(q, draws)
    if rule == "spectr":
        return accept_sequentially(p, q, drafted, sampler)
    return accept_draws(p, q, drafted, 1, sampler)


def law(rule: str, p: np.ndarray, q: np.ndarray, draws: int) -> dict[tuple[int, bool], float]:
    """The law of (token, whether it was an accepted draw)."""

    def play(sampler: Branching) -> tuple[int, bool]:
        result = verified(rule, p, q, draws, sampler)
        (token,) = result.draws
        assert result.passed == result.verdicts[-1]
        return token, result.passed

    return law_of(play)


def of_tokens(found: dict[tuple[int, bool], float]) -> dict[int, float]:
    tokens: dict[int, float] = defaultdict(float)
    for (token, _), mass in found.items():
        tokens[token] += mass
    return dict(tokens)


def accepted(found: dict[tuple[int, bool], float]) -> float:
    return sum(mass for (_, passed), mass in found.items() if passed)


def target(p: np.ndarray) -> dict[int, float]:
    return {token: float(mass) for token, mass in enumerate(p) if mass > 0}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_one_draw_of_p_whatever_the_draft_says(rule: str, name: str) -> None:
    p, q = CASES[name]
    for draws in (1, 2, 3):
        assert total_variation(of_tokens(law(rule, p, q, draws)), target(p)) < 1e-12, draws


@pytest.mark.parametrize("name", ["other order", "q inside p", "disjoint", "greedy draft", "random 1"])
@pytest.mark.parametrize("rule", RULES)
def test_more_draws_than_the_draft_has_continuations(rule: str, name: str) -> None:
    p, q = CASES[name]
    draws = int(np.count_nonzero(q)) + 1
    assert total_variation(of_tokens(law(rule, p, q, draws)), target(p)) < 1e-12


@pytest.mark.parametrize("name", CASES)
def test_one_draw_is_textbook_speculative_sampling(name: str) -> None:
    p, q = CASES[name]
    wanted = law("specinfer", p, q, 1)
    assert division_factor(p, q, 1) == 1
    assert accepted(wanted) == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)
    for rule in ("spectr", "rsd"):
        assert total_variation(law(rule, p, q, 1), wanted) < 1e-12


def test_distinct_draws_are_not_verified_as_if_they_were_iid() -> None:
    p, q = CASES["other order"]

    def chain(sampler: Branching) -> int:
        return accept_draws(p, q, draw_distinct(sampler, q, 2), 1, sampler).draws[0]

    def sequential(sampler: Branching) -> int:
        return accept_sequentially(p, q, draw_distinct(sampler, q, 2), sampler).draws[0]

    for play in (chain, sequential):
        assert total_variation(law_of(play), target(p)) > 0.01


# What is proved of them.


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_no_rule_accepts_a_token_more_often_than_it_is_drawn_or_drafted(rule: str, name: str) -> None:
    """P(token accepted) <= min(p, P(token among the draws)): the bound of optimal transport (Sun et al. 2023)."""
    p, q = CASES[name]
    for draws in (2, 3):

        def among(sampler: Branching, draws: int = draws) -> frozenset[int]:
            found = draw_distinct(sampler, q, draws) if rule == "rsd" else sampler.sample(q, draws)
            return frozenset(found)

        inside = np.zeros(len(p))
        for tokens, mass in law_of(among).items():
            inside[list(tokens)] += mass
        found = law(rule, p, q, draws)
        for token in range(len(p)):
            assert found.get((token, True), 0.0) <= min(p[token], inside[token]) + 1e-12


@pytest.mark.parametrize("name", CASES)
def test_what_k_seq_accepts_lies_between_its_bounds(name: str) -> None:
    """At rho = k, a valid choice, 1 - (1 - S/k)^k are accepted, S = sum(min(p, k q)); the best rho accepts no less.

    S bounds every rule that has k iid draws, so K-SEQ is within 1 - (1 - 1/k)^k > 1 - 1/e of all of them.
    """
    p, q = CASES[name]
    for draws in (1, 2, 3):
        most = np.minimum(p, draws * q).sum()
        found = law("spectr", p, q, draws)
        share, rho = accepted(found), division_factor(p, q, draws)
        assert 1 <= rho <= draws
        assert share >= 1 - (1 - most / draws) ** draws - 1e-12
        assert share >= (1 - (1 - 1 / draws) ** draws) * most - 1e-12
        assert share <= most + 1e-12
        assert share >= np.minimum(p, q).sum() - 1e-12
        assert share == pytest.approx(np.minimum(p, rho * q).sum(), abs=1e-12)  # where both sides cross
        assert accepted(law("specinfer", p, q, draws)) <= most + 1e-12


@pytest.mark.parametrize("name", CASES)
def test_rsd_takes_whatever_the_draft_can_say_once_it_has_said_it_all(name: str) -> None:
    """Each rejected token has no residual mass left, so only what q lacks is drawn in the end (Jeon et al. 2024)."""
    p, q = CASES[name]
    found = law("rsd", p, q, int(np.count_nonzero(q)))
    assert accepted(found) == pytest.approx(p[q > 0].sum(), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_more_draws_accept_no_less(rule: str) -> None:
    """Chains look at the first draws as if no more came; K-SEQ accepts sum(min(p, rho q)), and rho grows with k."""
    for p, q in CASES.values():
        shares = [accepted(law(rule, p, q, draws)) for draws in (1, 2, 3)]
        assert np.all(np.diff(shares) > -1e-12)


def test_the_division_factor_of_many_draws() -> None:
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.full(50, 0.1)), rng.dirichlet(np.full(50, 0.1))
    for draws in (2, 7, 64, 4096):
        rho = division_factor(p, q, draws)
        beta = np.minimum(p / rho, q).sum()
        assert 1 < rho < draws
        assert 1 - (1 - beta) ** draws == pytest.approx(rho * beta, abs=1e-12)
    assert division_factor(p, p, 64) == 1
    assert division_factor(np.array([1.0, 0]), np.array([0, 1.0]), 64) == pytest.approx(
        64
    )  # nothing together: never asked
    assert math.isfinite(division_factor(np.array([1e-300, 1]), np.array([1, 0.0]), 9))
