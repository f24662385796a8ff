"""Intervals: against known sampling theory and, by simulation, against truths that are known."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats as theory

from dsbd_cli.bench import stats
from dsbd_cli.bench.stats import Estimate, mean, median, needed, paired_difference, paired_rate, rate, share

SIZES = (3, 4, 6, 8, 25, 100)
# An item's score in F1's manner: 0 and 1 are common, and anything between.
GRADES = (0.0, 1.0)


def coverage(draw, n, runs, seed):
    """Per cent of `runs` samples of n items whose interval holds the truth, of those that have one.

    draw: (rng, n) -> (estimate, truth).
    """
    rng = np.random.default_rng([seed, n])
    hits = []
    for _ in range(runs):
        estimate, truth = draw(rng, n)
        if estimate.low is not None:
            hits.append(estimate.low <= truth <= estimate.high)
    assert len(hits) > runs / 20
    return 100 * np.mean(hits)


def tokens_per_second(rng, n):
    tokens = np.maximum(1, np.round(20 * np.exp(0.8 * rng.normal(size=n))))
    return rate(tokens, tokens / 10 * np.exp(0.5 * rng.normal(size=n))), 10


def speed_up(rng, n):
    """Hard and easy items, log-normal clocks."""
    hard = np.exp(rng.normal(size=n))
    mine, base = (hard * np.exp(0.4 * rng.normal(size=n)) for _ in range(2))
    tokens = rng.integers(5, 60, (2, n))
    return paired_rate(tokens[0], tokens[0] * mine / 1.4, tokens[1], tokens[1] * base)[0], 1.4


def heavy_tails(rng, n):
    """One clock in ten was disturbed by a factor of up to thousands; too few items cannot know of it."""
    noise = np.where(rng.random(n) < 0.1, 3.0, 0.2) * rng.normal(size=n)
    return median(np.exp(noise)), 1


def log_prob_per_token(rng, n):
    tokens = rng.integers(5, 60, n)
    return rate(-0.6 * np.exp(0.5 * rng.normal(size=n)) * tokens, tokens), -0.6


def share_of_drafts(rng, n):
    return median(rng.beta(8, 4, n)), float(theory.beta.median(8, 4))


def yes_no(rng, n):
    """Over all rates: no interval of a discrete outcome has one coverage at every single one."""
    p = rng.random()
    return share_of_counts(rng.binomial(n, p), n), p


@cache
def share_of_counts(hits, n):
    return share([1.0] * hits + [0.0] * (n - hits))


def graded(rng, n):
    zero, one, between = rng.dirichlet([1, 1, 1])
    kind = rng.choice(3, n, p=[zero, one, between])
    return share(np.choose(kind, [0.0, 1.0, rng.uniform(0, 1, n)])), one + between / 2


def rating(rng, n):
    return mean(rng.normal(6, 2, n)), 6


def difference(rng, n):
    return paired_difference(rng.normal(0.3, 1, n), np.zeros(n)), 0.3


def difference_with_ties(rng, n):
    tied = rng.random(n) < 0.4
    return paired_difference(np.where(tied, 0, rng.normal(0.2, 0.5, n)), np.zeros(n)), 0.12


def difference_of_yes_no(rng, n):
    won, lost, tied = rng.dirichlet([0.5, 0.5, 0.5])
    return difference_of_counts(*rng.multinomial(n, [won, lost, tied])), won - lost


@cache
def difference_of_counts(won, lost, tied):
    x = [1.0] * won + [-1.0] * lost + [0.0] * tied
    return paired_difference(x, [0.0] * len(x), yes_no=True)


def difference_of_graded(rng, n):
    """F1 against F1: half the items alike, the others mostly 0 or 1 and now and then between."""
    tied = rng.random(n) < 0.5
    one, two = (
        np.where(rng.random(n) < 0.3, rng.uniform(0, 1, n), (rng.random(n) < p).astype(float))
        for p in (0.5, 0.35)
    )
    return paired_difference(np.where(tied, 0, one - two), np.zeros(n), graded=True), 0.5 * 0.7 * 0.15


INTERVALS = (tokens_per_second, speed_up, log_prob_per_token, share_of_drafts, yes_no, graded, rating,
             difference, difference_with_ties, difference_of_yes_no)  # fmt: skip


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.slow
@pytest.mark.parametrize("draw", INTERVALS, ids=lambda draw: draw.__name__)
def test_every_interval_covers_the_truth_in_93_to_97_of_100_samples(draw, n):
    assert 93 <= coverage(draw, n, 4000, 11) <= 97


@pytest.mark.parametrize("n", [6, 12, 100])
def test_disturbed_clocks_leave_the_coverage_as_it_is(n):
    assert 93 <= coverage(heavy_tails, n, 4000, 12) <= 97


@pytest.mark.parametrize("n", [12, 25, 100])
def test_differences_of_f1_cover_the_truth_where_they_have_an_interval(n):
    assert 93 <= coverage(difference_of_graded, n, 3000, 11) <= 97


@pytest.mark.parametrize("n", [3, 11])
def test_differences_of_f1_among_few_items_have_no_interval(n):
    estimate, _ = difference_of_graded(np.random.default_rng(1), n)
    assert estimate.low is None
    assert estimate.high is None


def test_one_disturbed_item_makes_no_headline():
    ratios = [161.6, 2.47, 0.81, 0.69, 1.42, 1.38]
    estimate, found = paired_rate(ratios, [1] * 6, [1] * 6, [1] * 6)
    assert estimate.value == pytest.approx(1.40)
    assert estimate.of_sums == pytest.approx(sum(ratios) / 6)
    assert estimate.low < 1 < estimate.high  # six items cannot say more
    assert stats.outliers(found) == [0]
    more = [*ratios, 1.3, 1.5, 1.45, 1.35, 1.4, 1.41]
    assert median(more).high < 2.5


def test_outliers_need_company_to_be_far_from():
    assert stats.outliers([1, 1, 1, 90]) == []
    assert stats.outliers([1.0, 1.0, 1.0, 1.0, 90.0]) == [4]
    assert stats.outliers([1.0, 1.0, 1.0, 1.0, 1.5]) == []  # far in deviations, but nobody would care
    assert stats.outliers([None, 1.0, 1.1, 0.9, None, 1.05, 0.01]) == [6]
    assert stats.outliers(np.exp(0.3 * np.random.default_rng(2).normal(size=40))) == []


@pytest.mark.parametrize("n", [0, 1, 2])
def test_below_three_items_there_is_no_interval(n):
    values = [8.0, 9.0][:n]
    for estimate in (
        median(values),
        mean(values),
        share([0.2, 1.0][:n]),
        share([1.0, 1.0][:n]),
        rate(values, [1.0] * n),
        paired_difference(values, [0.0] * n),
        paired_difference([1.0, 1.0][:n], [0.0] * n, yes_no=True),
        paired_rate(values, [1.0] * n, values, [1.0] * n)[0],
    ):
        assert (estimate.low, estimate.high) == (None, None)
        assert (estimate.value is None) == (n == 0)
        assert needed(estimate) is None


def test_a_median_takes_no_shape_for_granted():
    skewed = np.random.default_rng(4).exponential(size=(2000, 25))
    held = [e.low <= math.log(2) <= e.high for e in map(median, skewed)]
    assert 0.935 <= np.mean(held) <= 0.965


def test_a_rate_stands_beside_the_ratio_of_sums():
    estimate = rate([10, 90, 30], [1, 3, 2])
    assert (estimate.value, estimate.of_sums) == (15, pytest.approx(130 / 6))
    assert rate([1, 2], [0, 0]).of_sums is None
    assert rate([1, 2, 3], [0, 1, 1]).items == 2  # an item without seconds has no rate, and its tokens count
    assert rate([1, 2, 3], [0, 1, 1]).of_sums == 3


def test_the_interval_of_a_share_stays_among_shares():
    few = ([0, 1, 8], [10, 10, 10])
    assert rate(*few).high > 1  # Student's t knows nothing of where shares end
    found = rate(*few, least=0, most=1)
    assert (found.value, found.low, found.high) == (0.1, 0, 1)
    assert rate([1, 2], [4, 4], least=0, most=1).low is None


def test_pairing_removes_what_the_items_share():
    rng = np.random.default_rng(3)
    seconds = rng.exponential(2, 80) + 0.2
    estimate, _ = paired_rate([100] * 80, seconds / 2, [100] * 80, seconds)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((2, 2, 2))


def test_a_share_where_all_agree_keeps_an_honest_interval():
    estimate = share([0] * 10)
    assert (estimate.value, estimate.low) == (0, 0)
    assert estimate.high == pytest.approx(theory.beta.ppf(0.975, 0.5, 10.5))
    assert share([1] * 10).low == pytest.approx(1 - estimate.high)


def test_where_no_spread_was_seen_no_interval_is_made_up():
    assert mean([8.0] * 8) == Estimate(8.0, None, None, 8)
    same = paired_difference([0.5] * 8, [0.5] * 8)
    assert (same.value, same.low, same.differing) == (0, None, 0)
    assert paired_difference([1, 0, 1], [1, 0, 1], yes_no=True).high > 0.3


def test_nothing_to_divide_by_is_none_not_zero():
    for estimate in (mean([]), rate([], []), rate([0.0], [0.0]), paired_rate([], [], [], [])[0],
                     paired_rate([1], [1], [0], [1])[0], share([]), median([]), paired_difference([], [])):  # fmt: skip
        assert estimate.value is None
        assert estimate.low is None


def test_the_same_values_give_the_same_interval():
    values = np.random.default_rng(5).uniform(size=30)
    for make in (share, lambda v: paired_difference(np.where(v < 0.5, 0, v), 0 * v)):
        assert make(values) == make(values)


def test_as_many_items_as_are_said_to_be_needed_show_the_difference():
    rng = np.random.default_rng(6)
    found = paired_difference(*(rng.normal(center, 1, 30) for center in (0.4, 0.0)))
    spread = (found.high - found.low) / 2 * math.sqrt(30) / theory.t.ppf(0.975, 29)
    n = needed(found)
    seen = 0
    for _ in range(2000):
        low, high = theory.ttest_1samp(rng.normal(found.value, spread, n), 0).confidence_interval()
        seen += not low <= 0 <= high
    assert 0.77 <= seen / 2000 <= 0.83


def test_what_was_clearly_seen_needs_fewer_and_what_was_not_needs_more():
    clear, faint = Estimate(0.5, 0.3, 0.7, 20), Estimate(0.1, -0.3, 0.5, 20)
    assert needed(clear) < 20 < needed(faint)
    assert needed(Estimate(1.5, 1.2, 1.9, 20), ratio=True) == needed(
        Estimate(1 / 1.5, 1 / 1.9, 1 / 1.2, 20), ratio=True
    )
    assert needed(Estimate(1e-9, -1, 1, 20)) == stats.MOST_NEEDED
    assert needed(Estimate(0.0, -1, 1, 20)) is None
    assert needed(Estimate(1.0, 0.9, 1.1, 20), ratio=True) is None


def test_tests_of_pairs_are_the_textbooks():
    assert stats.mcnemar([1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1, 1]) == pytest.approx(2 * 7 / 64)
    assert stats.mcnemar([1, 0], [1, 0]) is None
    assert stats.signed_rank([1, 2, 3, 4, 5, 6]) == pytest.approx(2 / 64)
    assert stats.signed_rank([0.0, 0.0]) is None
