"""How fast the draft-length rule forgets: what it believes of two layers after a given past, to ten digits."""

from __future__ import annotations

import math

import pytest

from dsbd_cli.decoding.methods.proposers import DraftLength

Past = list[list[bool]]


def dearest(past: Past) -> float:
    """The highest cost of a layer at which the second one is still drafted after `past`, by bisection."""
    low, high = 1e-9, 10.0
    for _ in range(60):
        cost = (low + high) / 2
        rule = DraftLength(cost)
        rule.depth(2)
        for passed in past:
            rule.learn(passed)
        low, high = (cost, high) if rule.depth(2) == 2 else (low, cost)
    return low


def fair(first: float, second: float) -> float:
    """The cost c at which two layers promise what one does: (1 + a + ab) / (1 + 2c) = (1 + a) / (1 + c)."""
    both = first * second
    return both / (1 + first - both)


# Before anything was tried, a layer is believed to pass with 0.65.
HOPE = 0.65


def after(rate: float, count: int, start: float, end: float) -> float:
    """`count` steps from `start`, each of which goes `rate` of what is left of the way to `end`."""
    return end + (start - end) * (1 - rate) ** count


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_a_fifth_of_a_belief_is_what_was_seen_last(count: int) -> None:
    up, down = after(0.2, count, HOPE, 1), after(0.2, count, HOPE, 0)
    assert math.isclose(dearest([[True, True]] * count), fair(up, up), rel_tol=1e-9)
    assert math.isclose(dearest([[True, False]] * count), fair(up, down), rel_tol=1e-9)
    # What was seen five iterations ago counts a third of what it did.
    earlier = [[True, False]] * count + [[True, True]] * 5
    assert math.isclose(dearest(earlier), fair(after(0.2, 5, up, 1), after(0.2, 5, down, 1)), rel_tol=1e-9)


@pytest.mark.parametrize("count", [1, 3, 10, 40])
def test_a_layer_that_is_not_tried_drifts_to_the_one_above_it_by_a_twentieth(count: int) -> None:
    first = second = HOPE
    for _ in range(count):
        first = after(0.2, 1, first, 1)
        second = after(0.05, 1, second, first)
    assert math.isclose(dearest([[True]] * count), fair(first, second), rel_tol=1e-9)


def test_a_layer_below_a_failed_one_drifts_as_well() -> None:
    first = after(0.2, 1, HOPE, 0)
    second = after(0.05, 1, HOPE, first)
    # Seen through the second layer once the first passes again.
    first, second = after(0.2, 1, first, 1), after(0.2, 1, second, 1)
    assert math.isclose(dearest([[False], [True, True]]), fair(first, second), rel_tol=1e-9)
