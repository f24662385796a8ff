"""A stderr that goes away takes what is said with it, and nothing else."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_cli.ui.screen import Screen


def test_what_nobody_reads_is_lost_and_fails_no_later_write() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:  # closing it writes what is left in its buffer
        os.close(reading)
        screen = Screen(stream)
        for _ in range(3):
            assert screen.write("gone\n") == 5
            screen.flush()
        stream.write("and what others write there")
    assert stream.closed
    screen.write("closed by now")
    screen.flush()


def test_a_pipe_that_is_full_for_now_is_written_to_again_later() -> None:
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    with os.fdopen(reading, "rb", buffering=0) as reader, os.fdopen(writing, "w") as stream:
        screen = Screen(stream)
        for _ in range(40):
            screen.write("x" * 4096)
            screen.flush()
        while reader.read(1 << 20):
            pass
        screen.flush()
        screen.write("later\n")
        screen.flush()
        assert (reader.read(1 << 20) or b"").endswith(b"later\n")


def test_a_character_that_has_no_place_costs_its_text_alone() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    screen = Screen(stream)
    screen.write("ä\n")
    screen.write("a\n")
    screen.flush()
    assert raw.getvalue() == b"a\n"


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_that_of_the_run(code: int) -> None:
    program = (
        f"from dsbd_cli.cli.output import note; input(); note('one'); note('two'); raise SystemExit({code})"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])})  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None
    process.stderr.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    assert process.wait(60) == code
