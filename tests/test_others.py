"""Others' share of the cores' time, from counts that are given: no clock decides here."""

from __future__ import annotations

import pytest

from dsbd_cli.others import BUSY, Ticks, Window, parse, took

STAT = """cpu  700 200 100 3000 50 10 20 5 80 0
cpu0 300 100 60 1500 30 5 10 2 40 0
cpu1 400 100 40 1500 20 5 10 3 40 0
intr 1 2 3
"""


def test_the_systems_count_is_read_for_the_cores_of_this_process() -> None:
    whole = parse(STAT, None, 100)
    assert whole == pytest.approx(Ticks(10.35, 40.85))  # guests are in user time already
    one = parse(STAT, {1}, 100)
    assert one == pytest.approx(Ticks(5.58, 20.78))
    for text, cores in (("", {0}), (STAT, {0, 7}), ("cpu0 1 2\n", {0}), ("cpu0 a b c d e\n", {0})):
        assert parse(text, cores, 100) is None


def window(own: float, *counts: Ticks | None) -> float | None:
    """Others' share where this process used `own` seconds between the two counts."""
    readings, used = iter(counts), iter((1.0, 1.0 + own))
    return Window(lambda: next(readings), lambda: next(used)).share()


def test_others_share_is_what_the_cores_did_less_what_this_process_did() -> None:
    begin = Ticks(100.0, 1000.0)
    # Two cores for ten seconds: 17 of 20 seconds were worked, 4 of them by this process.
    assert window(4.0, begin, Ticks(117.0, 1020.0)) == pytest.approx(0.65)
    # What a process loads and computes itself is nobody else's, however much it is.
    assert window(18.0, begin, Ticks(118.0, 1020.0)) == 0
    assert window(18.1, begin, Ticks(118.0, 1020.0)) == 0  # counts are rounded


@pytest.mark.parametrize(
    "counts",
    [
        (None, Ticks(1.0, 2.0)),
        (Ticks(1.0, 2.0), None),
        (Ticks(0.0, 0.0), Ticks(0.0, 0.0)),  # a sandbox whose file holds zeros
        (Ticks(1.0, 2.0), Ticks(1.2, 2.2)),  # too short a window
        (Ticks(1.0, 2.0), Ticks(1.1, 22.0)),  # the count misses what this process did
    ],
)
def test_what_cannot_be_told_is_not_told(counts: tuple[Ticks | None, Ticks | None]) -> None:
    assert window(1.0, *counts) is None


def test_words_begin_where_it_matters() -> None:
    assert took(None) is took(0.0) is took(BUSY - 0.01) is None
    assert took(0.61) == "other processes took 61% of the cores' time"


def test_this_system_is_read_or_said_to_be_unknown() -> None:
    share = Window().share()
    assert share is None or 0 <= share <= 1
