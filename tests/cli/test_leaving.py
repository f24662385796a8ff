"""The end of a process that has torch: at once, with everything written, what is registered run, the code kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading, time
sys.modules["torch"] = sys  # its name is what counts; importing it takes seconds
from dsbd_cli.cli import main
class Slow:
    def __del__(self): print("taken apart", file=sys.stderr)
kept = Slow()
atexit.register(lambda: print("registered"))
def run():
    sys.stdout.write("answer, unfinished")
    if {thread}:
        threading.Thread(target=lambda: (time.sleep(0.2), print("\\nworked", flush=True))).start()
    return {code}
main.run = run
main.main()
"""


def ended(code: int, thread: bool = False, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=code, thread=thread)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=stdout, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.parametrize("code", [0, 1, 2])
def test_nothing_is_taken_apart_and_nothing_is_lost(code: int) -> None:
    found = ended(code)
    assert (found.returncode, found.stdout, found.stderr) == (code, "answer, unfinishedregistered\n", "")


def test_a_thread_that_works_is_waited_for() -> None:
    found = ended(0, thread=True)
    assert found.returncode == 0
    assert "worked" in found.stdout
    assert "registered" in found.stdout
    assert "taken apart" in found.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_what_cannot_be_written_is_not_kept_quiet() -> None:
    with open("/dev/full", "w") as full:
        found = ended(0, stdout=full.fileno())
    assert found.returncode != 0
    assert "No space left" in found.stderr
