"""The panels at a real terminal: a pty, a child that draws, and what stays when it is gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsbd_cli.decoding.tree.events import Event
from dsbd_cli.ui.look import panel_stream, unicode_terminal
from dsbd_cli.ui.painter import DRAWS_PER_SECOND, Painter
from dsbd_cli.ui.safe import escaped
from dsbd_cli.ui.snapshot import Snapshot
from dsbd_cli.ui.wrapping import Wrapping
from tests.terminal import Terminal
from tests.ui.fake import FakeDecoder, stream

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from tests.ui.fake import FakeDecoder, stream
from dsbd_cli.errors import DsbdError, RunError
from dsbd_cli.ui.panels import show
decoder = FakeDecoder()
fail = {"none": None, "fail": RunError("logits are [not] finite")}[sys.argv[2]]
try:
    show(stream(decoder, int(sys.argv[1]), delay=float(sys.argv[3]), fail=fail), decoder, "why [b]?")
except DsbdError as error:
    print("dsbd:", error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def start(
    tokens: int = 40, fail: str = "none", delay: float = 0.05, size: tuple[int, int] = (100, 30), **env: str
):  # type: ignore[no-untyped-def]
    environment = {
        "TERM": "xterm-256color",
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "LANG": "C.UTF-8",
    }
    command = [sys.executable, "-c", PROGRAM, str(tokens), fail, str(delay)]
    return Terminal(command, columns=size[0], rows=size[1], env=environment | env)


def drawn(output: bytes) -> bool:
    return b"live beams" in output


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def answer(tokens: int) -> str:
    decoder = FakeDecoder()
    *_, last = stream(decoder, tokens)
    return last.result.text  # type: ignore[union-attr]


def test_the_panels_vanish_and_the_plain_answer_stays() -> None:
    terminal = start()
    assert terminal.finish() == 0
    assert drawn(terminal.output)
    assert terminal.output.count(b"\x1b[?1049h") == terminal.output.count(b"\x1b[?1049l") == 1
    assert terminal.output.rindex(b"\x1b[?25h") > terminal.output.rindex(b"\x1b[?25l")
    # Not through `text`: the model's own escape codes are shown, not sent.
    rest = terminal.output.rpartition(b"\x1b[?1049l")[2].replace(b"\r\n", b"\n").decode()
    assert Wrapping(100).push(escaped(answer(40)) + "\n") in rest
    assert "\x1b[31m" in answer(40)
    assert "\x1b" not in rest
    assert "40 tokens in 2.0 s, 20.0 tok/s" in rest
    assert rest.count("dsbd: ") == 2  # the notice and the summary


@pytest.mark.parametrize("columns", [60, 200])
def test_narrow_and_wide(columns: int) -> None:
    terminal = start(size=(columns, 24))
    assert terminal.finish() == 0
    assert drawn(terminal.output)


def test_models_and_method_are_there_while_the_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsbd_cli.ui import panels

    offered: list[str] = []
    painter = SimpleNamespace(ready=False, offer=offered.append, close=lambda: None)
    monkeypatch.setattr(panels, "Painter", lambda stream, unicode: painter)
    monkeypatch.setattr(panels, "panel_stream", lambda: sys.stderr)
    decoder = FakeDecoder()

    def events() -> Iterator[Event]:
        (line,) = offered
        shot = Snapshot.from_json(line)
        assert shot.models == "Big-135M + small-12M"
        assert (shot.tokens, shot.budget, shot.prompt_tokens) == (0, 256, 0)
        assert (shot.kv_slots, shot.kv_bytes) == (None, 0)
        yield from stream(decoder)

    panels.show(events(), decoder, "why?")  # type: ignore[arg-type]


def test_ctrl_c_keeps_what_there_is() -> None:
    terminal = start(tokens=4000)
    assert terminal.until(drawn)
    time.sleep(0.5)
    terminal.send(b"\x03")
    began = time.monotonic()
    assert terminal.finish() == 130
    assert time.monotonic() - began < 5  # far below what the run would have taken
    assert b"\x1b[?1049l" in terminal.output
    assert "Traceback" not in terminal.text
    stopped = re.search(r"stopped after (\d+) tokens", terminal.after_panels)
    assert stopped is not None
    assert int(stopped[1]) > 0
    assert terminal.after_panels.count("stopped") == 1
    assert answer(40)[:20] in terminal.after_panels


def test_a_failure_in_decoding_gives_the_terminal_back() -> None:
    terminal = start(fail="fail")
    assert terminal.finish() == 1
    assert "dsbd: logits are [not] finite" in terminal.after_panels
    assert "Traceback" not in terminal.text


def test_a_killed_run_leaves_the_terminal_as_it_was() -> None:
    terminal = start(tokens=4000)
    assert terminal.until(drawn)
    terminal.process.send_signal(signal.SIGKILL)
    assert terminal.until(lambda output: output.endswith(b"\x1b[?1049l"), 10)
    terminal.finish()
    assert terminal.output.rindex(b"\x1b[?25h") > terminal.output.rindex(b"\x1b[?25l")


def test_a_new_size_is_drawn_at() -> None:
    terminal = start(tokens=4000, size=(100, 30))
    assert terminal.until(drawn)
    terminal.resize(61, 20)
    mark = len(terminal.output)

    def resized(output: bytes) -> bool:
        text = output[mark:].decode("utf-8", "ignore")
        return any(len(rule) == 61 for rule in re.findall("── answer ─+", plain(text)))

    assert terminal.until(resized, 20)
    terminal.send(b"\x03")
    terminal.finish()


def test_no_colour_and_no_unicode() -> None:
    terminal = start(NO_COLOR="1", LC_ALL="C")
    assert terminal.finish() == 0
    panels = terminal.output.partition(b"\x1b[?1049l")[0]
    assert panels.isascii()
    codes = set(re.findall(rb"\x1b\[([0-9;]*)m", panels))
    assert codes <= {b"", b"0", b"1", b"2"}


def test_a_dumb_terminal_gets_no_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tty:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return slave

    master, slave = os.openpty()
    monkeypatch.setattr("sys.stderr", Tty())
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    monkeypatch.setenv("TERM", "xterm")
    assert panel_stream() is sys.stderr
    for term in ("dumb", ""):
        monkeypatch.setenv("TERM", term)
        assert panel_stream() is None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((0, 0)))
    assert panel_stream() is None
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize(
    ("encoding", "locale", "expected"),
    [
        ("utf-8", "en_US.UTF-8", True),
        ("utf-8", "C", False),
        ("utf-8", "", True),
        ("ascii", "C.UTF-8", False),
        (None, "", False),
    ],
)
def test_unicode_only_where_it_shows(
    monkeypatch: pytest.MonkeyPatch, encoding: str | None, locale: str, expected: bool
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", locale)
    assert unicode_terminal(encoding) is expected


def test_a_painter_that_hangs_or_dies_never_holds_up_decoding() -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as screen:
        painter = Painter(screen, True)
        try:
            assert painter._ready.wait(30)
            painter._child.send_signal(signal.SIGSTOP)
            painter.offer(Snapshot(confirmed="x" * 6000).to_json())
            # It asked once and was answered once; it does not ask again, so nothing piles up.
            assert not painter.ready
            painter._child.kill()
            painter._child.wait()
            painter.offer(Snapshot().to_json())
        finally:
            painter.close()
    os.close(master)


def test_it_draws_no_more_often_than_it_says() -> None:
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as screen:
        painter = Painter(screen, True)
        asked = 0
        assert painter._ready.wait(30)
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            os.set_blocking(master, False)
            with contextlib.suppress(BlockingIOError):
                os.read(master, 1 << 20)
            if painter.ready:
                painter.offer(Snapshot().to_json())
                asked += 1
            time.sleep(0.002)
        painter.close()
    os.close(master)
    assert 1 <= asked <= 1.5 * DRAWS_PER_SECOND + 2
