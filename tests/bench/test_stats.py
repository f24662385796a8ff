"""Intervals: against known sampling theory, on data whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dsbd_cli.bench.stats import mean, paired_difference, paired_ratio, ratio, share, wilson


def test_the_interval_of_a_mean_is_close_to_theory():
    values = np.random.default_rng(1).normal(5, 2, 400)
    estimate = mean(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert estimate.value == pytest.approx(values.mean())
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.03)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.03)


def test_intervals_cover_the_truth_about_95_times_in_100():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        seconds = rng.exponential(2, 60) + 0.5
        tokens = seconds * 10 * rng.normal(1, 0.2, 60)
        estimate = ratio(tokens, seconds)
        hits += estimate.low <= 10 <= estimate.high
    assert 180 <= hits <= 199


def test_a_ratio_weighs_items_by_their_size_not_equally():
    assert ratio([10, 90], [1, 3]).value == 25


def test_pairing_removes_what_the_items_share():
    rng = np.random.default_rng(3)
    seconds = rng.exponential(2, 80) + 0.2  # hard and easy items
    estimate = paired_ratio([100] * 80, seconds / 2, [100] * 80, seconds)
    assert estimate.value == pytest.approx(2)
    assert (estimate.low, estimate.high) == pytest.approx((2, 2))
    noisy = paired_ratio([100] * 80, seconds / 2 * rng.normal(1, 0.05, 80), [100] * 80, seconds)
    assert noisy.high - noisy.low < 0.2


def test_a_share_where_all_agree_keeps_an_honest_interval():
    estimate = share([0] * 10, [1] * 10)
    assert (estimate.value, estimate.low) == (0, 0)
    assert estimate.high == pytest.approx(0.2775, abs=1e-3)  # Wilson, 0 of 10
    assert share([1] * 10, [1] * 10).low == pytest.approx(1 - 0.2775, abs=1e-3)
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-3)


def test_repeats_of_an_item_are_no_new_items():
    once = mean([1, 0, 1, 1])
    many = ratio([5, 0, 5, 5], [5, 5, 5, 5])
    assert (once.low, once.high, once.items) == (many.low, many.high, many.items)


def test_nothing_to_divide_by_is_none_not_zero():
    for estimate in (
        mean([]),
        ratio([0.0], [0.0]),
        paired_ratio([], [], [], []),
        paired_ratio([1], [1], [0], [1]),
    ):
        assert estimate.value is None
        assert estimate.low is None
    assert mean([3.0]).value == 3
    assert mean([3.0]).low is None


def test_difference():
    assert paired_difference([1, 0, 1], [0, 0, 1]).value == pytest.approx(1 / 3)
