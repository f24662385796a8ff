"""The bar of a batch at terminals of several widths."""

from __future__ import annotations

import io
import re
import time
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
    assert re.search(r" \d:\d\d:\d\d( |$)", line)
    assert ("64 under way" in line) is (columns >= 60)
    assert ("62% accepted" in line) is (columns >= 80)
    assert ("width 4.0" in line) is (columns >= 140)
    assert "\u2026" not in line


def test_the_time_left_counts_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = BatchProgress(40, 0, lambda line: None, bar=True)
    now[0] += 6.0
    # Two answers that end together after 6 s, six more under way: 5 of 40 are done, and the rest takes 42 s.
    for running in (7, 6):
        progress.step(result(), Load(running=running, waiting=32, free_slots=750, slots=1000))
    assert progress._bar.tasks[0].fields["left"] == "0:00:42"
    # What an earlier run did says nothing about this one's speed.
    again = BatchProgress(40, 38, lambda line: None, bar=True)
    now[0] += 3.0
    again.step(result())
    assert again._bar.tasks[0].fields["left"] == "0:00:03"
    again.step(result())
    assert again._bar.tasks[0].fields["left"] == "0:00:00"


def test_what_is_most_telling_stays_longest() -> None:
    parts = ["12 under way", "62% accepted", "width 4.0"]
    assert fitting(parts, 99) == "12 under way, 62% accepted, width 4.0"
    assert fitting(parts, 30) == "12 under way, 62% accepted"
    assert fitting(parts, 12) == "12 under way"
    assert fitting(parts, 11) == fitting(parts, -3) == ""
