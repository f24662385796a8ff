from __future__ import annotations

import pytest

from dsbd_cli.ui.charts import bar, chart, counts, resample
from dsbd_cli.ui.safe import one_line, visible


def test_resample_keeps_short_series_and_means_of_long_ones() -> None:
    assert resample([1.0, None, 3.0], 5) == [1.0, None, 3.0]
    assert resample([1.0, 3.0, None, 5.0, None, None], 3) == [2.0, 5.0, None]
    assert resample([], 4) == []
    assert sum(v for v in resample([1.0] * 997, 60) if v is not None) == pytest.approx(60)


@pytest.mark.parametrize(
    ("values", "rows", "expected"),
    [
        ([0.0, 0.5, 1.0, None], 1, ["▁▄█ "]),
        ([0.0, 0.5, 1.0], 2, ["  █", "▁██"]),
        ([2.0, -1.0], 1, ["█▁"]),
        ([], 1, [""]),
    ],
)
def test_chart(values: list[float | None], rows: int, expected: list[str]) -> None:
    assert chart(values, 10, rows, 1.0) == expected


def test_chart_in_ascii_and_with_nothing_to_scale_by() -> None:
    assert chart([0.0, 1.0], 10, 1, 1.0, unicode=False) == [".@"]
    assert chart([3.0], 10, 1, 0.0) == ["▁"]
    assert len(chart([0.5] * 1000, 37, 1, 1.0)[0]) == 37


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, ""), (0.5, "██"), (0.53, "██▏"), (1.0, "████"), (9.0, "████"), (-1.0, "")]
)
def test_bar(share: float, expected: str) -> None:
    assert bar(share, 4) == expected
    assert bar(share, 4, unicode=False) == "#" * round(4 * min(1, max(0, share)))


def test_counts_name_the_missing_numbers_between() -> None:
    assert counts([4, 2, 4]) == [(2, 1), (3, 0), (4, 2)]
    assert counts([]) == []


def test_control_characters_are_shown_not_obeyed() -> None:
    hostile = "a\x1b[2J\x07\rb\u202ec\u2028\x9b31m\x7f"
    shown = visible(hostile)
    assert shown == "a\\x1b[2J\\x07\\x0db\\u202ec\\u2028\\x9b31m\\x7f"
    assert visible("tab\tx\r\nnext") == "tab    x\nnext"
    assert one_line("a\nb") == "a⏎b"
    assert one_line("ok 🙂\n", unicode=False) == "ok ?\\n"
