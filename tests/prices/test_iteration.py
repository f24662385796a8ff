"""Which forest an iteration of many requests on a device gets: measured milliseconds of an H100 on a 7B-sized pair."""

from __future__ import annotations

import pytest

from dsbd_cli.prices import Acceptance, Curve, Prices, Shape, best_iteration, distinct_beams

NODES = (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
TARGET = Curve(NODES, (5.72, 6.04, 6.16, 6.35, 6.92, 7.6, 8.15, 10.98, 12.43, 18.56, 23.8))
DRAFT = Curve(NODES, (0.2, 0.235, 0.237, 0.252, 0.289, 0.32, 0.355, 0.42, 0.493, 0.66, 0.78))


def best(
    requests: int, prices: Prices, host: tuple[float, float, float, float] = (0.15, 0.0, 0.15, 0.06)
) -> Shape:
    known = Acceptance.assumed(distinct_beams(4), 4, 8)
    return best_iteration(
        prices,
        known,
        requests=requests,
        width=4,
        max_gamma=4,
        max_draft_width=8,
        host_ms=host,
    )


def test_forests_shrink_with_the_load_and_end() -> None:
    prices = Prices(TARGET, DRAFT)
    nodes = [
        shape.gamma * shape.draft_width
        for shape in (best(count, prices) for count in (1, 2, 4, 8, 16, 32, 64))
    ]
    assert nodes[0] == 32
    assert nodes == sorted(nodes, reverse=True)
    assert nodes[-1] == 0


def test_a_quick_host_drafts_where_a_slow_one_does_not() -> None:
    prices = Prices(TARGET, DRAFT)
    assert best(32, prices, (0.0, 0.0, 0.0, 0.0)).gamma > 0
    assert best(32, prices, (1.0, 0.0, 1.0, 1.0)).gamma == 0


def test_what_is_dear_for_forests_alone_takes_forests_away() -> None:
    prices = Prices(TARGET, DRAFT)
    assert best(8, prices, (0.3, 0.0, 0.0, 0.0)).gamma > 0
    assert best(8, prices, (0.3, 0.0, 0.0, 1.0)).gamma == 0
    assert best(8, prices, (0.3, 2.0, 0.0, 0.0)).gamma == 0


@pytest.mark.parametrize("requests", [1, 64])
def test_without_a_draft_there_is_no_forest(requests: int) -> None:
    assert best(requests, Prices(TARGET)).gamma == 0
