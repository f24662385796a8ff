"""The bar of a batch at terminals of several widths."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from dsbd_cli.batch.progress import BatchProgress, fitting
from dsbd_cli.many import Load


def result() -> Any:
    stats = SimpleNamespace(new_tokens=640, drafts_examined=50, drafts_accepted=31, mean_width=4.0)
    return SimpleNamespace(stats=stats)


@pytest.mark.parametrize("columns", [50, 60, 80, 100, 140])
def test_the_count_and_the_time_left_are_never_cut(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = BatchProgress(1200, 7, lambda line: None, bar=True)
    progress._began -= 2.0
    progress.step(result(), Load(running=64, waiting=3, free_slots=750, slots=1000))
    screen = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    screen.print(progress._bar.get_renderable())
    (line,) = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "8/1200" in line
    assert "tok/s" in line
    assert "-:--:--" in line
    assert ("64 under way" in line) is (columns >= 60)
    assert ("62% accepted" in line) is (columns >= 80)
    assert ("width 4.0" in line) is (columns >= 140)
    assert "\u2026" not in line


def test_what_is_most_telling_stays_longest() -> None:
    parts = ["12 under way", "62% accepted", "width 4.0"]
    assert fitting(parts, 99) == "12 under way, 62% accepted, width 4.0"
    assert fitting(parts, 30) == "12 under way, 62% accepted"
    assert fitting(parts, 12) == "12 under way"
    assert fitting(parts, 11) == fitting(parts, -3) == ""
