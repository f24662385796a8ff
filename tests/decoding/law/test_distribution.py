"""`joint` against the dense law of reference.py, and the seeded sampler against the laws it draws from.

Every order of T, ties, edges and empty rows; never an impossible answer, one uniform an answer.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy import stats

from dsbd_cli.decoding.law import beam_search, distribution
from dsbd_cli.decoding.law.beam_search import best_candidates
from dsbd_cli.decoding.law.distribution import (
    LogitsProcessor,
    Row,
    SeededSampler,
    Support,
    joint,
    most_probable,
    residual,
)
from tests.decoding.reference import T, warped

# A coarse grid, so that equal weights are common; -inf is a token without mass.
GRID = st.sampled_from([-math.inf, -3.0, -2.0, -1.5, -1.0, -0.5, -0.25])
FINE = st.floats(-6, -0.01)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[float], np.ndarray]:
    """Scores [I] and log-probabilities [I, V] (as numbers: the law does not ask for normalised rows)."""
    parents, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    entry = draw(st.sampled_from([GRID, FINE]))
    scores = draw(st.lists(st.sampled_from([-2.0, -1.0, -0.5, 0.0]), min_size=parents, max_size=parents))
    logps = np.array([draw(st.lists(entry, min_size=vocab, max_size=vocab)) for _ in range(parents)])
    assume(np.any(logps > -math.inf))
    return scores, logps


WARPS = st.builds(
    T,
    st.sampled_from([1.0, 0.3, 0.7, 2.5, 1e-6, 0.0]),
    st.sampled_from([0, 1, 2, 3, 5, 1000]),
    st.sampled_from([0.0, 1e-9, 0.2, 0.37, 0.61, 0.83, 0.999, 1.0]),
)


def rows_of(logps: np.ndarray, size: int) -> list[Row]:
    """Rows best first, ties to the lower id, cut to `size` (0: whole)."""
    rows = []
    for row in logps:
        order = np.lexsort((np.arange(len(row)), -row))[: size or None]
        rows.append(Row(order, row[order]))
    return rows


def as_dict(support: Support) -> dict[tuple[int, int], float]:
    keys = zip(support.parent.tolist(), support.token.tolist(), strict=True)
    return dict(zip(keys, support.prob.tolist(), strict=True))


def dense(scores: list[float], logps: np.ndarray, t: T) -> dict[tuple[int, int], float]:
    return warped(
        [(i, v, scores[i] + logps[i, v]) for i in range(logps.shape[0]) for v in range(logps.shape[1])], t
    )


def on_a_border(scores: list[float], logps: np.ndarray, t: T) -> bool:
    """Whether the mass of some head equals p up to rounding, where either cut is right."""
    if not 0 < t.p < 1 or t.tau == 0:
        return False
    heads = np.cumsum(sorted(dense(scores, logps, t._replace(p=1.0)).values(), reverse=True))
    return bool(np.any(np.abs(heads - t.p) < 1e-9))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(tables(), WARPS)
def test_equals_the_dense_law(table: tuple[list[float], np.ndarray], t: T) -> None:
    scores, logps = table
    assume(not on_a_border(scores, logps, t))
    support = joint(scores, rows_of(logps, 0), LogitsProcessor(*t))
    assert as_dict(support) == pytest.approx(dense(scores, logps, t), abs=1e-12)
    assert support.prob.sum() == pytest.approx(1, abs=1e-12)
    assert np.all(support.prob > 0)
    np.testing.assert_array_equal(support.logp, logps[support.parent, support.token])
    keys = list(zip(support.parent.tolist(), support.token.tolist(), strict=True))
    assert keys == sorted(keys), "the order of a support must not depend on its weights"


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tables(), WARPS)
@example(([0.0, 0.0], np.full((2, 4), -1.0)), T(1.0, 3, 1.0))
def test_the_best_k_of_each_row_decide_the_joint(table: tuple[list[float], np.ndarray], t: T) -> None:
    scores, logps = table
    processor = LogitsProcessor(*t)
    whole = joint(scores, rows_of(logps, 0), processor)
    cut = joint(scores, rows_of(logps, processor.top_n), processor)
    for column, same in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(column, same)


def test_t_acts_in_order_temperature_then_k_then_p() -> None:
    logps = np.log(np.array([[0.5, 0.3, 0.15, 0.05]]))
    # Squared and cut to three: 25 : 9 : 2.25; of that mass the first has 0.69, so p 0.7 keeps two.
    support = joint([0.0], rows_of(logps, 0), LogitsProcessor(0.5, 3, 0.7))
    assert as_dict(support) == pytest.approx({(0, 0): 25 / 34, (0, 1): 9 / 34})
    # Of the mass BEFORE top-k the first two have 0.9328 (< 0.934); of what top-k left, 0.9379.
    assert len(joint([0.0], rows_of(logps, 0), LogitsProcessor(0.5, 3, 0.934)).prob) == 2


def test_ties_go_to_the_earlier_parent_then_to_the_lower_token() -> None:
    flat = np.full((3, 4), -1.0)
    assert list(as_dict(joint([0.0] * 3, rows_of(flat, 0), LogitsProcessor(1.0, 6, 1.0)))) == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1),
    ]  # fmt: skip
    # The later parent's higher score comes first, whatever its place.
    assert list(as_dict(joint([0.0, 0.5, 0.0], rows_of(flat, 0), LogitsProcessor(1.0, 5, 1.0)))) == [
        (0, 0), (1, 0), (1, 1), (1, 2), (1, 3),
    ]  # fmt: skip
    for processor in (
        LogitsProcessor(0.0),
        LogitsProcessor(1.0, 1),
        LogitsProcessor(1.0, 0, 0.0),
        LogitsProcessor(1e-6, 1),
        LogitsProcessor(1.0, 0, 1e-12),
    ):
        assert as_dict(joint([0.0] * 3, rows_of(flat, processor.top_n), processor)) == {(0, 0): 1.0}


@pytest.mark.parametrize("tau", [1e-6, 1e-300, 5e-324])
@pytest.mark.parametrize(("k", "p"), [(0, 1.0), (0, 0.9), (3, 1.0), (3, 0.9)])
def test_a_tiny_temperature_is_greedy_and_quiet(tau: float, k: int, p: float) -> None:
    logps = np.array([[-50.0, -1.0, -3.0, -math.inf], [-1.5, -700.0, -2.0, -1.2]])
    with np.errstate(all="raise", under="ignore"):
        support = joint([-500.0, -500.3], rows_of(logps, k), LogitsProcessor(tau, k, p))
    assert as_dict(support) == {(0, 1): 1.0}


def test_equal_best_share_a_tiny_temperature() -> None:
    logps = np.array([[-1.0, -1.0, -1.1]])
    assert as_dict(joint([0.0], rows_of(logps, 0), LogitsProcessor(1e-6))) == {(0, 0): 0.5, (0, 1): 0.5}


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1 - 1e-12])
@pytest.mark.parametrize("tau", [0.2, 1.0, 3.0])
def test_head_search_past_its_first_guess(top_p: float, tau: float) -> None:
    """More entries than are sorted first (1024), flat enough that the head needs more of them."""
    rng = np.random.default_rng(7)
    logps = rng.normal(0, 0.5, (3, 3000))
    logps[:, ::5] = -0.75  # whole blocks of ties, wider than a guess
    logps[1, 100:2000] = -math.inf
    logps -= np.log(np.exp(logps).sum(1, keepdims=True))
    scores = [-1.0, -0.3, -1.4]
    t = T(tau, 0, top_p)
    expected = dense(scores, logps, t)
    found = as_dict(joint(scores, rows_of(logps, 0), LogitsProcessor(*t)))
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-12)
    if top_p > 0.5 and tau >= 1:
        assert len(found) > 1024, "the case must need more than the first guess"


def test_a_k_above_the_vocabulary_is_no_filter() -> None:
    logps = np.log(np.array([[0.5, 0.3, 0.2]]))
    for k in (3, 4, 1_000_000):
        assert as_dict(joint([0.0], rows_of(logps, k), LogitsProcessor(1.0, k, 1.0))) == pytest.approx(
            {(0, 0): 0.5, (0, 1): 0.3, (0, 2): 0.2}
        )


def test_residual() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.2])
    np.testing.assert_allclose(residual(p, q), [1, 0, 0])
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_allclose(residual(p, np.zeros(3)), p)


def test_most_probable_breaks_ties_by_parent_then_token() -> None:
    logps = np.log(np.array([[0.2, 0.4, 0.4], [0.4, 0.2, 0.4]]))
    support = joint([0.0, 0.0], rows_of(logps, 0), LogitsProcessor())
    sample = most_probable(support, 4)
    assert [(int(support.parent[i]), int(support.token[i])) for i in sample] == [
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 2),
    ]
    assert len(most_probable(support, 100)) == 6


def test_mass_ends_a_layer():
    prob = np.array([0.1, 0.5, 0.3, 0.1])
    support = Support(np.zeros(4, dtype=int), np.arange(4), np.log(prob), prob)
    assert most_probable(support, 4).tolist() == [1, 2, 0, 3]
    assert most_probable(support, 4, 0.75).tolist() == [1, 2]
    assert most_probable(support, 4, 0.85).tolist() == [1, 2, 0]
    assert most_probable(support, 1, 0.85).tolist() == [1]
    assert most_probable(support, 4, 0.9999999).tolist() == [1, 2, 0, 3]


class Fixed:
    """A generator that always says `value`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self, size: int | None = None) -> float | np.ndarray:
        return self.value if size is None else np.full(size, self.value)


def saying(value: float) -> SeededSampler:
    sampler = SeededSampler(0, 0)
    sampler._rng = Fixed(value)  # type: ignore[assignment]
    return sampler


LAST = float(np.nextafter(1.0, 0.0))


@pytest.mark.parametrize("value", [0.0, 0.3, 0.5, LAST])
@pytest.mark.parametrize(
    "weights",
    [
        [0.0, 1.0, 0.0],
        [0.0, 0.0, 0.1, 0.7, 0.2, 0.0, 0.0],
        [1e-300, 0.0],
        [0.1] * 10 + [0.0],
        [3.0, 0.0, 4.0],
    ],
)
def test_what_has_no_mass_is_never_picked(weights: list[float], value: float) -> None:
    for index in saying(value).sample(np.array(weights), 3):
        assert weights[index] > 0


def test_extreme_uniforms_pick_the_ends() -> None:
    weights = np.array([0.0, 0.2, 0.3, 0.5, 0.0])
    assert saying(0.0).sample(weights, 1) == [1]
    assert saying(LAST).sample(weights, 1) == [3]
    assert saying(0.2).sample(weights, 1) == [2], "u = 0.2 is the first number of the second cell"


@pytest.mark.parametrize("value", [0.0, 0.5, LAST])
def test_accept_at_the_edges(value: float) -> None:
    assert not saying(value).accept(0.0, 0.3)
    assert not saying(value).accept(0.0, 0.0)
    assert saying(value).accept(0.3, 0.3)
    assert saying(value).accept(0.4, 0.3)
    assert saying(value).accept(0.1, 0.0), "a draw that q calls impossible cannot be rejected"


def test_the_law_of_picks_and_accepts() -> None:
    weights, runs = np.array([1.0, 0.0, 5.0, 2.0, 2.0]), 20_000
    counts = np.bincount(SeededSampler(5, 0).sample(weights, runs), minlength=5)
    assert counts[1] == 0
    keep = weights > 0
    assert stats.chisquare(counts[keep], runs * weights[keep] / weights.sum()).pvalue > 0.001
    sampler = SeededSampler(6, 0)
    accepted = sum(sampler.accept(0.15, 0.5) for _ in range(runs))
    assert stats.binomtest(accepted, runs, 0.3).pvalue > 0.001


def test_one_seed_one_stream_and_streams_are_independent() -> None:
    weights = np.ones(1000)
    assert SeededSampler(3, 0).sample(weights, 50) == SeededSampler(3, 0).sample(weights, 50)
    assert SeededSampler(3, 0).sample(weights, 50) != SeededSampler(3, 1).sample(weights, 50)
    assert SeededSampler(4, 0).sample(weights, 50) != SeededSampler(3, 0).sample(weights, 50)
    one, other = SeededSampler(3, 0), SeededSampler(3, 0)
    # n draws at once use the same uniforms as n draws one by one.
    assert one.sample(weights, 3) == [other.sample(weights, 1)[0] for _ in range(3)]


@settings(max_examples=300)
@given(table=tables(), t=WARPS, narrow=st.booleans())
def test_few_entries_one_by_one_give_the_same_bits(table, t, narrow):
    scores, logps = table
    processor = LogitsProcessor(t.tau, t.k or 3, t.p)
    rows = rows_of(logps.astype(np.float32 if narrow else np.float64), processor.top_n)
    with pytest.MonkeyPatch.context() as patch:
        few = joint(scores, rows, processor)
        patch.setattr(distribution, "FEW", -1)
        many = joint(scores, rows, processor)
    assert [part.dtype for part in few] == [part.dtype for part in many]
    assert [part.tobytes() for part in few] == [part.tobytes() for part in many]


def test_draws_from_few_weights_are_those_from_many(monkeypatch):
    rng = np.random.default_rng(0)
    for seed in range(200):
        weights = rng.random(int(rng.integers(1, 60))) * (rng.random() < 0.9)
        weights[rng.integers(len(weights))] = rng.choice([1.0, 1e-300, 1e300])
        weights[-int(rng.integers(0, 3)) or len(weights) :] = 0
        if not weights.any():
            continue
        few = SeededSampler(seed, 0).sample(weights, 20)
        with monkeypatch.context() as patch:
            patch.setattr(distribution, "FEW", -1)
            assert few == SeededSampler(seed, 0).sample(weights, 20)


@settings(max_examples=200)
@given(table=tables(), count=st.integers(1, 9), mass=st.sampled_from([1.0, 0.3, 0.75, 0.9999]))
def test_the_best_of_few_are_those_of_many(table, count, mass):
    scores, logps = table
    support = joint(scores, rows_of(logps, 0), LogitsProcessor())
    rows = rows_of(logps.astype(np.float32), 5)
    weights = [float(np.float32(score / 3)) for score in scores]
    with pytest.MonkeyPatch.context() as patch:
        few = most_probable(support, count, mass), *best_candidates(weights, rows, count)
        patch.setattr(distribution, "FEW", -1)
        patch.setattr(beam_search, "FEW", -1)
        many = most_probable(support, count, mass), *best_candidates(weights, rows, count)
    assert [part.dtype for part in few] == [part.dtype for part in many]
    assert [part.tobytes() for part in few] == [part.tobytes() for part in many]
