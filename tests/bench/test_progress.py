"""What a bench shows while it runs, at a terminal of any width, and where there is none that can draw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.bench import cells
from dsbd_cli.bench.figures import Figures
from dsbd_cli.bench.progress import BenchProgress
from dsbd_cli.bench.summary import summarize_arm
from tests.terminal import Terminal

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
from dsbd_cli.bench import progress
from dsbd_cli.bench.figures import Figures
figures = Figures("score", ["beam", "speculative"])
progress.FIRST_S = progress.EVERY_S = 0.05
with progress.BenchProgress(40, 0, figures, "a data set with a rather long name, 3 arms") as shown:
    for number in range(12):
        arm = ["beam", "dsbd threshold=0.9 [b]", "speculative"][number % 3]
        shown.stage(f"{arm} on item-with-a-long-name-{number}")
        shown.step({"arm": arm, "item": str(number), "new_tokens": 40, "decode_s": 0.5, "energy_j": None,
                    "score": {"score": 0.5}})
        time.sleep(0.1)
"""


def answer(item: int, repeat: int, tokens: int, seconds: float, **more: Any) -> dict[str, Any]:
    score = {"exact_match": float(tokens > 20), "f1": 0.5}
    return {"arm": "beam", "item": f"q{item}", "repeat": repeat, "group": None, "new_tokens": tokens, "wall_s": seconds,
            "decode_s": seconds, "prefill_s": 0.0, "energy_j": 2.0 * seconds, "logprob": -1.0 * tokens,
            "peak_bytes": None, "score": score, "turns": []} | more  # fmt: skip


def window(number: int) -> dict[str, Any]:
    return {"window": {"id": f"w{number}", "answers": 2, "at_a_time": 2, "new_tokens": 60 + number, "wall_s": 2.0,
                       "energy_j": 9.0 + number, "peak_bytes": None}}  # fmt: skip


@pytest.mark.parametrize(
    "records",
    [
        # A short answer beside long ones: its rate weighs as much as theirs in a median, and less in sums.
        [answer(1, 0, 40, 1.0), answer(2, 0, 3, 1.5), answer(3, 0, 90, 3.0), answer(4, 0, 64, 2.0)],
        # An item asked twice is one item.
        [answer(1, 0, 40, 1.0), answer(1, 1, 10, 1.0), answer(2, 0, 30, 3.0), answer(2, 1, 90, 2.0)],
        [answer(1, 0, 40, 1.0, energy_j=0.0), answer(2, 0, 30, 4.0), answer(3, 0, 80, 2.0)],
        [answer(n, 0, 30, 9.0, decode_s=None, energy_j=None, **window(n // 2)) for n in range(6)],
    ],
    ids=["lengths", "repeats", "a coarse counter", "windows"],
)
def test_running_figures_are_those_of_the_table(records: list[dict[str, Any]]) -> None:
    figures = Figures("exact_match", ["beam"])
    for record in records:
        figures.add([record])
    arm = summarize_arm(records, "squad", {})
    texts = [cells.number(arm[name]["value"]) for name in ("tokens_per_s", "joules_per_token")]
    assert figures.line("beam") == (str(arm["items"]), cells.fixed(arm["score"]["value"]), *texts)
    assert "n/a" not in figures.line("beam")


def test_arms_stand_in_the_order_of_the_table() -> None:
    figures = Figures("exact_match", ["multinomial", "beam", "dsbd"])
    figures.add([answer(1, 0, 4, 1.0, arm="dsbd"), answer(1, 0, 4, 1.0)])
    assert figures.arms() == ["beam", "dsbd"]


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
        assert rows[-1] == ["beam", "4", "0.500", "80", "n/a"]


def test_a_dumb_terminal_gets_lines() -> None:
    terminal = run(80, TERM="dumb")
    assert b"\x1b" not in terminal.output
    assert "dsbd: 2/40 answers" in terminal.text


def test_without_unicode_the_bar_is_ascii() -> None:
    terminal = run(80, TERM="xterm", LC_ALL="C")
    assert terminal.text.isascii()


PIPED = """
import sys
import time
from dsbd_cli.bench import progress
from dsbd_cli.bench.figures import Figures
progress.FIRST_S, progress.EVERY_S = float(sys.argv[1]), 3600
with progress.BenchProgress(2, 0, Figures("score", ["beam"]), "a data set, 1 arm") as shown:
    shown.stage("warming up")
    time.sleep(0.25)
    for number in range(2):
        shown.stage(f"beam on {number}")
        shown.step({"arm": "beam", "item": str(number), "new_tokens": 40, "decode_s": 0.5, "energy_j": None,
                    "score": {"score": 0.5}})
"""


@pytest.mark.parametrize(
    ("first", "heard"),
    [
        ("0.2", ["0/2 answers, 0 s; now beam on 0", "2/2 answers, 0 s; beam 80 tok/s"]),
        ("3600", ["2/2 answers, 0 s; beam 80 tok/s"]),
    ],
)
def test_a_pipe_hears_soon_and_at_the_end(first: str, heard: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PIPED, first],
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.stderr.splitlines() == [f"dsbd: {line}" for line in heard]


def test_what_is_told_last_is_not_told_again(capsys: pytest.CaptureFixture[str]) -> None:
    progress = BenchProgress(1, 0, Figures("score", ["beam"]), "a data set, 1 arm")
    with progress:
        progress.stage("beam on 0")
        progress._due = 0.0
        progress.step({"arm": "beam", "item": "0", "new_tokens": 40, "decode_s": 0.5, "energy_j": None,
                       "score": {"score": 0.5}})  # fmt: skip
    assert capsys.readouterr().err == "dsbd: 1/1 answer, 0 s; beam 80 tok/s\n"
