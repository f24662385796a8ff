"""The line that bridges the first seconds: there before torch is imported, wiped before anything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dsbd_cli.ui import waiting
from tests import builders
from tests.cli.conftest import environment
from tests.terminal import Terminal

# An import of torch fails, so that whatever is on the screen was there before.
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from dsbd_cli.cli.main import run
try:
    run(sys.argv[1:])
except ImportError:
    print("torch was asked for", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "mein-[b]-Modell"
    builders.says(folder, "A")
    return str(folder)


@pytest.mark.parametrize("command", [["generate", "hi", "--method"], ["chat", "--method"],
                                     ["bench", "--dataset", "squad", "--out", "out", "--methods"]])  # fmt: skip
@pytest.mark.parametrize("columns", [100, 20])
def test_it_is_there_before_torch_and_gone_after(
    model: str, command: list[str], columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = [sys.executable, "-c", WITHOUT_TORCH, *command, "beam", "--target", model]
    terminal = Terminal(call, columns=columns, env=environment(TERM="xterm", LANG="C.UTF-8"))
    terminal.finish()
    chat = command[0] == "chat"  # somebody may type ahead: a line for itself
    line, wipe, rest = terminal.output.removeprefix(b"\r\x1b[K" if chat else b"").partition(b"\r\x1b[K")
    said = "dsbd: loading mein-[b]-Modell…"
    if chat:
        assert line.decode() == said + "\r\n"
    else:
        assert line.decode() == (said if columns == 100 else said[:18])
    assert wipe
    assert b"torch was asked for" in rest
    assert b"loading" not in rest.replace(line, b"")  # redrawn under a notice, at most


# Loading takes until somebody has typed a line.
TYPED_AHEAD = """
import sys
from dsbd_cli.cli import main, options
from dsbd_cli.errors import UserError
def opened(*_):
    sys.stdin.readline()
    raise UserError("that was it")
options._open = opened
main.run(sys.argv[1:])
"""


def test_what_is_typed_ahead_in_a_chat_stands_on_lines_of_its_own(model: str) -> None:
    call = [sys.executable, "-c", TYPED_AHEAD, "chat", "--method", "beam", "--target", model]
    terminal = Terminal(call, env=environment(TERM="xterm", LANG="C.UTF-8"))
    assert terminal.until(lambda output: "…".encode() in output)
    terminal.send(b"hello\r")
    terminal.finish()
    assert terminal.text == "\rdsbd: loading mein-[b]-Modell…\nhello\n\rdsbd: that was it\n"
    assert b"\r\n\r\x1b[Kdsbd: that" in terminal.output  # the prompt shows half a line again


def test_a_dumb_terminal_gets_a_plain_line(model: str) -> None:
    call = [sys.executable, "-c", WITHOUT_TORCH, "generate", "hi", "--method", "beam", "--target", model]
    terminal = Terminal(call, env=environment(TERM="dumb", LC_ALL="C"))
    terminal.finish()
    assert terminal.output.startswith(b"dsbd: loading mein-[b]-Modell...\r\n")
    assert b"\x1b" not in terminal.output


def test_quiet_says_nothing(model: str) -> None:
    call = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        "generate",
        "hi",
        "-q",
        "--method",
        "beam",
        "--target",
        model,
    ]
    terminal = Terminal(call, env=environment(TERM="xterm"))
    terminal.finish()
    assert b"loading" not in terminal.output


def test_a_pipe_sees_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    waiting.waiting("loading")
    with waiting.above():
        pass
    waiting.ready()
    assert capsys.readouterr() == ("", "")


def test_notes_break_between_words(model: str) -> None:
    code = (
        "from dsbd_cli.cli.output import note; from dsbd_cli.bench.progress import tell\n"
        "for say in (note, tell): say('one two three four /a/path/that/is/longer/than/the/screen is whole')"
    )
    terminal = Terminal([sys.executable, "-c", code], columns=24, env=environment(TERM="xterm"))
    assert terminal.finish() == 0
    lines = ["dsbd: one two three four", "/a/path/that/is/longer/than/the/screen", "is whole"]
    assert terminal.text.splitlines() == lines * 2


def test_the_next_line_stands_in_place_of_the_last() -> None:
    code = "from dsbd_cli.ui.waiting import ready, waiting; waiting('reading'); waiting('drawing'); ready()"
    terminal = Terminal([sys.executable, "-c", code], env=environment(TERM="xterm", LANG="C.UTF-8"))
    assert terminal.finish() == 0
    assert terminal.output.decode() == "dsbd: reading…\r\x1b[Kdsbd: drawing…\r\x1b[K"
