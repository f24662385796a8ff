"""Which forest pays: full ones for a few requests, small ones for more, none where nodes are dear."""

from __future__ import annotations

import pytest

from dsbd_cli.prices import Acceptance, Curve, Prices, Shape, best_forest, expected_layers, layers_per_ms
from dsbd_cli.prices.forest import distinct_beams, draft_widths

# One H200, bfloat16, matrix products of an 8B shape; a draft step takes 0.35 ms.
_NODES = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_MS = (4.08, 4.19, 4.30, 4.46, 4.69, 4.81, 5.82, 6.80, 9.28, 12.3, 19.5, 24.1)
CARD = Prices(Curve(_NODES, _MS), Curve(_NODES, tuple(0.35 * one / _MS[0] for one in _MS)))
BEAMS = distinct_beams(4)


def shape(prices: Prices, requests: int, most: Shape = Shape(4, 8), beams: float = BEAMS) -> Shape:
    known = Acceptance.assumed(beams, most.gamma, most.draft_width)
    return best_forest(
        prices, known, requests=requests, max_gamma=most.gamma, max_draft_width=most.draft_width
    ).shape


def nodes(one: Shape) -> int:
    return one.gamma * one.draft_width


def test_full_forests_for_a_few_requests_smaller_ones_for_more_none_for_very_many() -> None:
    assert [shape(CARD, requests) for requests in (1, 2)] == [Shape(4, 8)] * 2
    assert shape(CARD, 4) == Shape(3, 8)  # 135 nodes at depth 4: just beyond where they are nearly free
    for requests in (8, 16):
        assert 0 < nodes(shape(CARD, requests)) < 32
    assert shape(CARD, 256) == Shape(0, 1)
    sizes = [nodes(shape(CARD, requests)) for requests in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert sizes == sorted(sizes, reverse=True)


def test_wider_forests_where_they_are_allowed_and_nodes_are_nearly_free() -> None:
    assert shape(CARD, 1, Shape(4, 16)) == Shape(4, 16)


@pytest.mark.parametrize("requests", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("most", [Shape(4, 8), Shape(8, 32), Shape(1, 1)])
def test_the_best_is_the_best_of_all_and_never_slower_than_plain_beams(requests: int, most: Shape) -> None:
    known = Acceptance.assumed(BEAMS, most.gamma, most.draft_width)
    every = [Shape(gamma, width) for gamma in range(most.gamma + 1) for width in known.widths]
    rates = {one: layers_per_ms(CARD, known, one, requests=requests) for one in every}
    best = shape(CARD, requests, most)
    assert rates[best] == pytest.approx(max(rates.values()))
    assert rates[best] >= rates[Shape(0, 1)]


def test_nothing_is_drafted_where_nodes_or_the_draft_are_dear() -> None:
    dear_nodes = Prices(Curve((1, 2), (1.0, 2.0)), Curve((1,), (0.01,)))
    dear_draft = Prices(Curve((1,), (1.0,)), Curve((1,), (2.0,)))
    no_draft = Prices(Curve((1,), (1.0,)))
    for prices in (dear_nodes, dear_draft, no_draft):
        assert shape(prices, 1).gamma == 0


def test_nothing_is_drafted_for_a_draft_that_is_never_right() -> None:
    never = Acceptance((1, 8), ((0.0, 0.0),) * 4, (1.0, 8.0), BEAMS)
    assert best_forest(CARD, never, max_gamma=4, max_draft_width=8) == (Shape(0, 1), 1.0)


def test_depth_and_width_follow_what_passes() -> None:
    free = Prices(Curve((1,), (1.0,)), Curve((1,), (0.2,)))
    widths, held = (1, 8), (1.0, 8.0)
    narrow = Acceptance(widths, ((0.9, 0.9),) * 4, held, BEAMS)
    wide = Acceptance(widths, ((0.1, 0.9),) * 4, held, BEAMS)
    shallow = Acceptance(widths, ((0.9, 0.9), (0.0, 0.0), (0.9, 0.9), (0.9, 0.9)), held, BEAMS)
    found = [best_forest(free, one, max_gamma=4, max_draft_width=8).shape for one in (narrow, wide, shallow)]
    assert found == [Shape(4, 1), Shape(4, 8), Shape(1, 1)]


def test_limits_are_kept() -> None:
    known = Acceptance.assumed(BEAMS, 8, 32)
    for gamma, width in [(0, 8), (1, 8), (3, 2), (8, 1), (20, 64)]:
        found = best_forest(CARD, known, max_gamma=gamma, max_draft_width=width).shape
        assert found.gamma <= gamma
        assert found.draft_width <= width
    assert best_forest(CARD, known, max_gamma=8, max_draft_width=32, widths=[5]).shape.draft_width in (1, 5)


@pytest.mark.parametrize("requests", [1, 5])
@pytest.mark.parametrize("beams", [None, 3.0])
def test_what_the_best_promises_is_its_rate_beside_that_of_plain_beams(
    requests: int, beams: float | None
) -> None:
    known, prices = Acceptance.assumed(BEAMS, 4, 8), Prices(CARD.target, CARD.draft, 0.2)
    best, gain = best_forest(prices, known, requests=requests, beams=beams, max_gamma=4, max_draft_width=8)
    assert best.gamma
    rates = [layers_per_ms(prices, known, one, requests=requests, beams=beams) for one in (best, Shape(0, 1))]
    assert gain == pytest.approx(rates[0] / rates[1], rel=1e-12)


def test_expected_layers_are_a_sum_of_products() -> None:
    known = Acceptance((1, 4), ((0.2, 0.5), (0.1, 0.4)), (1.0, 4.0), 2.0)
    assert expected_layers(0, 2.0, 4, known) == 1
    assert expected_layers(1, 2.0, 4, known) == pytest.approx(1.5)
    assert expected_layers(2, 2.0, 4, known) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert expected_layers(2, 2.0, 3, known) == pytest.approx(1 + 0.2 + 0.2 * 0.1)
    assert expected_layers(9, 2.0, 9, known) == expected_layers(2, 2.0, 4, known)


def test_more_beams_are_rarely_all_inside() -> None:
    known = Acceptance.assumed(2.0, 4, 8)
    layers = [expected_layers(4, beams, 8, known) for beams in (1.0, 2.0, 3.0, 6.0)]
    assert layers == sorted(layers, reverse=True)
    assert len(set(layers)) == 4
    for beams in (1.0, 3.0):
        assert known.for_beams(beams).passes[0] == pytest.approx(Acceptance.assumed(beams, 4, 8).passes[0])


# Layers a call, measured: default pair, gamma 4, SQuAD, Spider and MT-Bench (W, W_S, deterministic).
@pytest.mark.parametrize(
    ("width", "draft_width", "distinct", "layers"),
    [
        (2, 16, False, 3.36),
        (4, 8, False, 2.77),
        (4, 16, False, 3.12),
        (8, 16, False, 2.73),
        (1, 1, False, 2.5),
        (2, 24, True, 3.10),
        (3, 24, True, 2.57),
        (4, 24, True, 2.17),
        (8, 24, True, 1.61),
    ],
)
def test_what_is_believed_at_first_is_near_what_was_measured(
    width: int, draft_width: int, distinct: bool, layers: float
) -> None:
    beams = distinct_beams(width, without_replacement=distinct)
    found = expected_layers(4, beams, draft_width, Acceptance.assumed(beams, 4, draft_width))
    assert found == pytest.approx(layers, abs=0.25)


def test_widths_that_are_looked_at() -> None:
    assert draft_widths(1) == (1,)
    assert draft_widths(8) == (1, 2, 3, 4, 6, 8)
    assert draft_widths(10) == (1, 2, 3, 4, 6, 8, 10)
    assert draft_widths(24)[-3:] == (12, 16, 24)


def test_a_layer_has_its_own_price() -> None:
    known = Acceptance((1,), ((1.0,),), (1.0,), 1.0)
    prices = Prices(Curve((1,), (10.0,)), Curve((1,), (2.0,)), layer_ms=3.0)
    assert layers_per_ms(prices, known, Shape(0, 1)) == pytest.approx(1 / 13)
    # Two that are committed, and one that is drafted: half as much again.
    assert layers_per_ms(prices, known, Shape(1, 1)) == pytest.approx(2 / (10 + 2 + 6 + 4.5))
    assert layers_per_ms(prices, known, Shape(1, 1), requests=3) == pytest.approx(6 / (10 + 2 + 18 + 13.5))
