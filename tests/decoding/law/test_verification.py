"""`accept_draws` by exact enumeration: whatever q is, the draws are iid of p."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest

from dsbd_cli.decoding.law.verification import Verified, accept_draws, align
from tests.decoding.enumerating import Branching, law_of, total_variation

Case = tuple[np.ndarray, np.ndarray]


def pairs() -> dict[str, Case]:
    """(p, q): q sums to at most 1, what is missing lies under dead parents."""
    p = np.array([0.5, 0.3, 0.2, 0.0])
    cases = {
        "equal": (p, p.copy()),
        "other order": (p, np.array([0.1, 0.2, 0.4, 0.3])),
        "disjoint": (np.array([0.6, 0.4, 0.0, 0.0]), np.array([0.0, 0.0, 0.3, 0.7])),
        "q inside p": (p, np.array([0.0, 1.0, 0.0, 0.0])),
        "p inside q": (np.array([0.0, 0.0, 1.0, 0.0]), np.array([0.25, 0.25, 0.25, 0.25])),
        "half dead": (p, np.array([0.05, 0.3, 0.05, 0.1])),
        "all dead": (p, np.zeros(4)),
        "equal where alive": (np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.25, 0.25, 0.0, 0.0])),
        "more than p wherever alive": (np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.5, 0.5, 0.0, 0.0])),
        "ties": (np.full(4, 0.25), np.array([0.4, 0.4, 0.1, 0.1])),
    }
    rng = np.random.default_rng(0)
    for number in range(6):
        q = rng.dirichlet(np.full(5, 0.5))
        cases[f"random {number}"] = (rng.dirichlet(np.full(4, 0.7)), q[:4])
    return cases


PAIRS = pairs()


def drawn(q: np.ndarray, count: int, sampler: Branching) -> list[int]:
    """`count` iid draws of q and of what q lacks, which lies under dead parents (-1)."""
    dead = max(0.0, 1 - q.sum())
    return [
        i if i < len(q) else -1 for i in sampler.sample(np.append(q, dead if dead > 1e-12 else 0.0), count)
    ]


def law_of_draws(p: np.ndarray, q: np.ndarray, draws: int, width: int) -> dict[tuple[int, ...], float]:
    return law_of(lambda sampler: accept_draws(p, q, drawn(q, draws, sampler), width, sampler).draws)


def iid(p: np.ndarray, width: int) -> dict[tuple[int, ...], float]:
    return {tokens: math.prod(p[list(tokens)]) for tokens in itertools.product(range(len(p)), repeat=width)}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("draws", "width"), [(0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 3), (4, 1)])
def test_draws_are_iid_of_p(name: str, draws: int, width: int) -> None:
    p, q = PAIRS[name]
    assert total_variation(law_of_draws(p, q, draws, width), iid(p, width)) < 1e-12


@pytest.mark.parametrize("name", ["other order", "half dead", "random 0"])
def test_four_drafts_for_three_draws(name: str) -> None:
    p, q = PAIRS[name]
    assert total_variation(law_of_draws(p, q, 4, 3), iid(p, 3)) < 1e-12


def test_one_draft_for_one_draw_is_textbook_speculative_sampling() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    law: dict[tuple[int, bool], float] = defaultdict(float)
    for draw, mass in enumerate(q):
        law[draw, True] += mass * min(1, p[draw] / q[draw])
        rest = np.maximum(p - q, 0)
        for token in range(3):
            law[token, False] += mass * (1 - min(1, p[draw] / q[draw])) * rest[token] / rest.sum()

    def play(sampler: Branching) -> tuple[int, bool]:
        result = accept_draws(p, q, drawn(q, 1, sampler), 1, sampler)
        return result.draws[0], result.passed

    assert total_variation(law_of(play), dict(law)) < 1e-12


@pytest.mark.parametrize("p", [np.array([0.5, 0.3, 0.2]), np.array([1.0]), np.full(7, 1 / 7)])
def test_a_draft_equal_to_the_target_is_accepted_whole(p: np.ndarray) -> None:
    for draws, width in ((1, 1), (2, 2), (3, 2)):
        results = law_of(
            lambda sampler: all(
                accept_draws(p, p.copy(), drawn(p, draws, sampler), width, sampler).verdicts  # noqa: B023
            )
        )
        assert results == {True: pytest.approx(1)}


def test_a_draft_equal_up_to_rounding_never_makes_nan() -> None:
    """One unit in the last place more or less: the residual is dust, and must still be a law."""
    p = np.array([0.5, 0.3, 0.2])
    for q in (np.nextafter(p, 0), np.nextafter(p, 1), np.array([np.nextafter(0.5, 1), 0.3, 0.2])):
        law = law_of_draws(p, q, 3, 2)
        assert all(math.isfinite(mass) for mass in law.values())
        assert total_variation(law, iid(p, 2)) < 1e-12


def test_disjoint_supports_accept_nothing() -> None:
    p, q = PAIRS["disjoint"]
    law = law_of(lambda sampler: accept_draws(p, q, drawn(q, 3, sampler), 2, sampler).accepted)
    assert law == {0: pytest.approx(1)}


def play_script(p: np.ndarray, q: np.ndarray, draws: list[int], width: int, accepts: list[bool]) -> Verified:
    class Script:
        def accept(self, numerator: float, denominator: float) -> bool:
            return accepts.pop(0)

        def sample(self, weights: np.ndarray, count: int) -> list[int]:
            return [int(np.argmax(weights))] * count

    result = accept_draws(p, q, draws, width, Script())
    assert not accepts, "more verdicts were expected"
    return result


def test_what_is_looked_at_and_what_counts() -> None:
    p, q = np.array([0.6, 0.4, 0.0]), np.array([0.4, 0.3, 0.2])
    # Stops at the width: the third draw is not looked at.
    assert play_script(p, q, [0, 1, 0], 2, [True, True]) == Verified((0, 1), (True, True), True)
    # Dead parents and tokens that p lacks are rejected without a question, and looked at.
    assert play_script(p, q, [-1, 2, 1], 2, [False]) == Verified((0, 0), (False, False, False), False)
    # Equal draws keep their places: one may be accepted where the other was not.
    assert play_script(p, q, [1, 1, 1], 2, [True, False, True]).draws == (1, 1)
    # An accept starts a new chain, so the fill after it comes from p, not from the residual.
    assert play_script(p, np.array([0.9, 0.1, 0.0]), [1], 2, [True]) == Verified((1, 0), (True,), False)
    # After a rejection it comes from the residual (p - q has mass on 1 only), and the rest from p.
    filled = play_script(p, np.array([0.9, 0.1, 0.0]), [0], 3, [False])
    assert filled == Verified((1, 0, 0), (False,), False)


def test_align_puts_both_on_the_union_of_supports() -> None:
    keys, p, q = align(np.array([2, 5, 9]), np.array([0.2, 0.5, 0.3]), np.array([1, 5]), np.array([0.7, 0.3]))
    np.testing.assert_array_equal(keys, [1, 2, 5, 9])
    np.testing.assert_array_equal(p, [0, 0.2, 0.5, 0.3])
    np.testing.assert_array_equal(q, [0.7, 0, 0.3, 0])
