"""What a bench shows while it runs, at a terminal of any width, and where there is none that can draw."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
from dsbd_cli.bench import progress
figures = progress.Figures("score")
progress.EVERY_S = 0.05
with progress.BenchProgress(40, 0, figures, "a data set with a rather long name, 3 arms") as shown:
    for number in range(12):
        arm = ["beam", "dsbd threshold=0.9 [b]", "speculative"][number % 3]
        shown.stage(f"{arm} on item-with-a-long-name-{number}")
        shown.step({"arm": arm, "new_tokens": 40, "decode_s": 0.5, "score": {"score": 0.5}})
        time.sleep(0.1)
"""


def run(columns: int, **env: str) -> Terminal:
    more = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    terminal = Terminal([sys.executable, "-c", PROGRAM], columns=columns, rows=24, env=more | env)
    assert terminal.finish() == 0
    return terminal


@pytest.mark.parametrize("columns", [20, 40, 60, 100, 200])
def test_running_figures_keep_to_their_rows(columns: int) -> None:
    lines = run(columns, TERM="xterm").text.splitlines()
    assert max(len(line.rpartition("\r")[2]) for line in lines) <= columns
    heads = [line for line in lines if line.startswith("arm")]
    assert heads, "the heading has a row of its own, below the bar"
    for name in ("items", "score", "tok/s", "J/token") if columns >= 60 else ():
        assert name in heads[-1]
    rows = [line.split() for line in lines if line.startswith("beam")]
    if columns >= 60:
        assert rows[-1] == ["beam", "4", "0.500", "80.0", "n/a"]


def test_a_dumb_terminal_gets_lines() -> None:
    terminal = run(80, TERM="dumb")
    assert b"\x1b" not in terminal.output
    assert "dsbd: 2/40 answers" in terminal.text


def test_without_unicode_the_bar_is_ascii() -> None:
    terminal = run(80, TERM="xterm", LC_ALL="C")
    assert terminal.text.isascii()
