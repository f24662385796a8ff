"""P(m, k) and W_L: against Monte Carlo, against the enumerated verification, and at the edges."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.law.verification import accept_draws
from dsbd_cli.decoding.law.width import (
    ThresholdWidth,
    accept_counts,
    acceptances,
    width_rule,
)
from tests.decoding.enumerating import law_of
from tests.decoding.law.test_verification import PAIRS, drawn

FEW = [name for name in PAIRS if name not in ("random 2", "random 3", "random 4", "random 5")]


@cache
def enumerated_counts(name: str, m: int) -> dict[int, float]:
    """The law of the number of accepts among m draws, by enumeration."""
    p, q = PAIRS[name]
    return law_of(lambda sampler: accept_draws(p, q, drawn(q, m, sampler), m, sampler).accepted)


@pytest.mark.parametrize(("name", "m"), [(n, m) for n in PAIRS for m in (1, 2, 3)] + [(n, 4) for n in FEW])
def test_counts_equal_the_enumerated_verification(name: str, m: int) -> None:
    p, q = PAIRS[name]
    law = enumerated_counts(name, m)
    expected = [law.get(k, 0.0) for k in range(m + 1)]
    np.testing.assert_allclose(accept_counts(acceptances(p, q, m)), expected, atol=1e-12)


def test_counts_against_monte_carlo() -> None:
    p, q, m = np.array([0.5, 0.3, 0.2, 0.0]), np.array([0.1, 0.2, 0.3, 0.25]), 6
    sampler, rounds = SeededSampler(11, 0), 20_000
    with_dead = np.append(q, 1 - q.sum())
    seen = np.zeros(m + 1)
    for _ in range(rounds):
        draws = [i if i < 4 else -1 for i in sampler.sample(with_dead, m)]
        seen[accept_draws(p, q, draws, m, sampler).accepted] += 1
    law = accept_counts(acceptances(p, q, m))
    assert law.sum() == pytest.approx(1, abs=1e-12)
    error = np.sqrt(law * (1 - law) / rounds)
    np.testing.assert_array_less(np.abs(seen / rounds - law), 4 * error + 1e-9)


def test_counts_at_the_edges() -> None:
    np.testing.assert_array_equal(accept_counts(np.array([])), [1.0])
    p = np.array([0.5, 0.3, 0.2])
    np.testing.assert_allclose(accept_counts(acceptances(p, p.copy(), 4)), [0, 0, 0, 0, 1])
    far = np.array([0.0, 0.0, 0.0, 1.0])
    np.testing.assert_allclose(accept_counts(acceptances(np.append(p, 0), far, 4)), [1, 0, 0, 0, 0])
    # Independent coins when every alpha is the same.
    np.testing.assert_allclose(accept_counts(np.full(3, 0.5)), [1 / 8, 3 / 8, 3 / 8, 1 / 8])


def test_q_is_subtracted_once_a_step() -> None:
    p, q = np.array([0.6, 0.4]), np.array([0.3, 0.7])
    # p2 = (1, 0), p3 = norm(0.7, 0) = (1, 0)
    np.testing.assert_allclose(acceptances(p, q, 3), [0.7, 0.3, 0.3])


def brute_width(name: str, draws: int, width: int, least: int, threshold: float) -> int:
    law = enumerated_counts(name, draws)
    reached = [
        k
        for k in range(1, min(width, draws) + 1)
        if sum(mass for accepted, mass in law.items() if accepted >= k) >= threshold
    ]
    return max([least, *reached])


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("width", "least", "draws"), [(4, 1, 4), (3, 2, 4), (4, 2, 2), (2, 1, 4), (4, 3, 1)])
@pytest.mark.parametrize("threshold", [0.15, 0.43, 0.71, 0.93])
def test_width_is_the_largest_reached(
    name: str, width: int, least: int, draws: int, threshold: float
) -> None:
    p, q = PAIRS[name]
    found = ThresholdWidth(width, least, threshold).for_draws(p, q, draws)
    assert found == brute_width(name, draws, width, least, threshold)
    assert least <= found <= width


def test_a_perfect_draft_reaches_the_width_at_any_threshold() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        p = rng.dirichlet(np.ones(9))
        q = p * (1 + 1e-15 * rng.standard_normal(9))  # what another summation order leaves
        assert ThresholdWidth(4, 1, 1.0).for_draws(p, q, 4) == 4
        assert ThresholdWidth(4, 1, 1.0).for_cover(float(p.sum())) == 4
        assert ThresholdWidth(4, 1, 1.0).for_cover(1 - 2e-16) == 4


def test_a_useless_draft_leaves_the_minimum() -> None:
    p, q = PAIRS["disjoint"]
    assert ThresholdWidth(4, 2, 0.01).for_draws(p, q, 4) == 2
    assert ThresholdWidth(4, 2, 0.01).for_cover(0.0) == 2


def test_cover_width_in_closed_form() -> None:
    rule = ThresholdWidth(4, 1, 0.5)
    # 0.8, 0.64, 0.512, 0.41
    assert [rule.for_cover(c) for c in (0.3, 0.6, 0.72, 0.8, 0.9, 1.0)] == [1, 1, 2, 3, 4, 4]


def test_which_rule_the_settings_name() -> None:
    assert width_rule(4, 2, None) is None  # W in every layer
    assert width_rule(4, 4, 0.9) is None
    assert isinstance(width_rule(4, 3, 0.9), ThresholdWidth)
