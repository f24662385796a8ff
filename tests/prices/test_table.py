"""Tables of prices: never falling, straight between points, read back as written, damage told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsbd_cli.prices import Curve, Prices


def test_a_curve_is_straight_between_its_points_and_goes_on_beyond_them() -> None:
    curve = Curve((1, 4, 16), (10.0, 13.0, 19.0))
    assert [curve(count) for count in (0, 0.5, 1, 2, 4, 10, 16)] == [0, 10, 10, 11, 13, 16, 19]
    assert curve(36) == pytest.approx(29)
    assert Curve((8,), (5.0,))(1000) == 5


def test_measured_times_that_fall_are_pooled() -> None:
    curve = Curve.fitted({1: 10.0, 2: 12.0, 4: 9.0, 8: 9.0, 16: 30.0})
    assert curve.nodes == (1, 2, 4, 8, 16)
    assert curve.ms == (10.0, 10.0, 10.0, 10.0, 30.0)
    assert Curve.fitted({4: 2.0, 1: 1.0, 2: 1.5}).ms == (1.0, 1.5, 2.0)


def test_more_nodes_never_cost_less() -> None:
    curve = Curve.fitted({1: 3.1, 2: 2.9, 4: 3.3, 8: 3.2, 16: 5.0, 32: 4.9, 64: 9.0})
    prices = [curve(count / 2) for count in range(300)]
    assert prices == sorted(prices)


@pytest.mark.parametrize(
    ("nodes", "ms"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((1, 1), (1.0, 2.0)),
        ((0, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1, 2), (0.0, 1.0)),
        ((1, 2), (1.0, float("inf"))),
        ((1, 2), (1.0, float("nan"))),
        ((1, True), (1.0, 1.0)),
        ((1, 2), (1.0, "2")),
        (tuple(range(1, 100)), (1.0,) * 99),
    ],
)
def test_a_curve_that_is_none_is_refused(nodes: Any, ms: Any) -> None:
    with pytest.raises(ValueError):
        Curve(nodes, ms)


def test_prices_are_read_back_as_written() -> None:
    for prices in (
        Prices(Curve((1, 8), (4.0, 4.5)), Curve((1,), (0.5,)), 0.2, "measured"),
        Prices(Curve((1,), (4.0,))),
    ):
        assert Prices.from_dict(json.loads(json.dumps(prices.to_dict()))) == prices


def test_what_are_no_prices_is_refused() -> None:
    good = Prices.assumed(0.2, 0.03).to_dict()
    bad = [None, [], "x", {}, good | {"format": 2}, good | {"target": None}, good | {"layer_ms": "1"},
           good | {"target": {"nodes": [1], "ms": []}}, good | {"draft": {"nodes": 1, "ms": 1}},
           good | {"layer_ms": -1}, good | {"target": {"nodes": [1, 10**400], "ms": [1, 2]}}]  # fmt: skip
    for values in bad:
        with pytest.raises(ValueError):
            Prices.from_dict(values)


def test_assumed_prices_are_straight_lines() -> None:
    prices = Prices.assumed(0.2, 0.03)
    assert prices.draft is not None
    assert prices.target(1) == 1
    assert prices.target(11) == pytest.approx(1.3)
    assert prices.target(201) == pytest.approx(7)
    assert prices.draft(11) == pytest.approx(0.26)
