"""The bar of a batch at terminals of several widths."""

from __future__ import annotations

import io
import os
import re
import sys
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
    progress.step(result(), Load(running=64, waiting=3))
    screen = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    screen.print(progress._bar.get_renderable())
    (line,) = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "8/1200" in line
    assert "tok/s" in line
    assert re.search(r" \d:\d\d:\d\d( |$)", line)
    assert ("64 under way" in line) is (columns >= 60)
    assert ("3 wait for memory" in line) is (columns >= 80)
    assert ("62% accepted" in line) is (columns >= 140)
    assert ("width 4.0" in line) is (columns >= 140)
    assert "\u2026" not in line


def test_the_time_left_counts_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = BatchProgress(40, 0, lambda line: None, bar=True)
    now[0] += 6.0
    # Two answers that end together after 6 s, six more under way: 5 of 40 are done, and the rest takes 42 s.
    for running in (7, 6):
        progress.step(result(), Load(running=running, waiting=32))
    assert progress._bar.tasks[0].fields["left"] == "0:00:42"
    # What an earlier run did says nothing about this one's speed.
    again = BatchProgress(40, 38, lambda line: None, bar=True)
    now[0] += 3.0
    again.step(result())
    assert again._bar.tasks[0].fields["left"] == "0:00:03"
    again.step(result())
    assert again._bar.tasks[0].fields["left"] == "0:00:00"


def load(running: int = 8, reading: int = 0, tokens: int = 0) -> Load:
    return Load(running, 0, reading, tokens)


def test_a_bar_shows_what_is_under_way_before_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = BatchProgress(40, 0, lambda line: None, bar=True)
    fields = progress._bar.tasks[0].fields
    progress.pulse(lambda: load(reading=8))
    assert (fields["speed"], fields["left"]) == ("", "-:--:--")
    assert fields["load"].startswith("reading 8 prompts")
    now[0] += 2.0
    progress.pulse(lambda: load(reading=1, tokens=100))
    assert (fields["speed"], fields["left"]) == ("50.0 tok/s", "-:--:--")
    assert fields["load"].startswith("8 under way")
    # Rounds come by the hundred a second; nobody reads that fast.
    now[0] += 0.05
    progress.pulse(lambda: pytest.fail("too soon"))
    # An answer is there: its tokens are counted once, beside those of the others.
    now[0] += 0.95
    progress.step(result(), load(running=7, tokens=110))
    assert fields["speed"] == "250.0 tok/s"


def test_without_a_bar_a_line_comes_soon_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with BatchProgress(40, 3, told.append, bar=False) as progress:
        now[0] += 1.9
        progress.pulse(lambda: pytest.fail("too soon"))
        progress.step(result(), load(tokens=5))
        now[0] += 0.2
        progress.pulse(lambda: Load(running=8, waiting=2, tokens=410))
        now[0] += 29.0
        progress.step(result(), load())
        assert told == ["4/40 prompts, 2 s, 500.0 tok/s, 8 under way, 2 wait for memory"]
        now[0] += 2.0
        progress.step(result(), load(running=1, reading=1))
        now[0] += 10.0
    assert told[1:] == [
        "6/40 prompts, 33 s, 58.0 tok/s, reading 1 prompt",
        "6/40 prompts, 43 s, 44.5 tok/s",
    ]


def test_a_stream_has_no_end_to_count_to() -> None:
    progress = BatchProgress(None, 0, lambda line: None, bar=True)
    progress.step(result(), load())
    screen = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    screen.print(progress._bar.get_renderable())
    (line,) = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "1/?" in line
    assert "8 under way" in line
    assert ":" not in line


def test_a_screen_that_goes_away_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as gone:
        os.close(reading)
        monkeypatch.setattr(sys, "stderr", gone)
        with BatchProgress(40, 0, lambda line: None, bar=True) as progress:
            progress._bar.console._force_terminal = True
            progress.step(result(), load())
            progress._bar.refresh()


def test_what_is_most_telling_stays_longest() -> None:
    parts = ["12 under way", "62% accepted", "width 4.0"]
    assert fitting(parts, 99) == "12 under way, 62% accepted, width 4.0"
    assert fitting(parts, 30) == "12 under way, 62% accepted"
    assert fitting(parts, 12) == "12 under way"
    assert fitting(parts, 11) == fitting(parts, -3) == ""
