"""Draws the panels in a process of its own, so that decoding never waits for a terminal.

The child asks (one byte on its stdout) when it is ready for the next picture, and it asks at most
`DRAWS_PER_SECOND` times a second; the parent answers with one snapshot, a line of JSON, when the
next event comes along. So the decoding thread pays for a snapshot per picture and nothing else:
it shares neither the interpreter lock nor a full pipe with the drawing, and whatever ends the
parent, the child sees its stdin close and gives the terminal back as it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any, TextIO

DRAWS_PER_SECOND = 12.0
_CLOSE_S = 2.0  # how long the parent waits for the terminal to be given back
_LOOK_S = 0.25  # how often the child looks for a new size of the terminal


class Painter:
    """The parent's end. `offer` never waits; `close` waits until the terminal is given back.

    Args:
        stream: the terminal to draw on.
        unicode: whether block characters can be shown.
    """

    def __init__(self, stream: TextIO, unicode: bool) -> None:
        self._ready = threading.Event()
        # The child searches modules where this process does, and nowhere else (not in the folder it runs in).
        code = (
            "import json,sys;sys.path[:]=json.loads(sys.argv[1]);from dsbd_cli.ui.painter import main;main()"
        )
        command = [sys.executable, "-I", "-c", code, json.dumps(sys.path), "unicode" if unicode else "ascii"]
        # Ctrl-C reaches every process of the terminal; held back from birth, it can't tear the child down.
        hold = getattr(signal, "pthread_sigmask", None)
        before = hold(signal.SIG_BLOCK, {signal.SIGINT}) if hold else None
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream.fileno(), bufsize=0
            )
        finally:
            if hold:
                hold(signal.SIG_SETMASK, before)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._child.stdout is not None
        while self._child.stdout.read(1):
            self._ready.set()

    @property
    def ready(self) -> bool:
        """Whether a picture would be drawn now."""
        return self._ready.is_set()

    def offer(self, line: str) -> None:
        """Send one snapshot (a line of JSON); the child has asked for it."""
        self._ready.clear()
        assert self._child.stdin is not None
        # A child that has died draws nothing any more; the answer does not depend on it.
        with contextlib.suppress(OSError):
            self._child.stdin.write(line.encode("utf-8") + b"\n")

    def close(self) -> None:
        """Have the panels taken away and wait for it."""
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._listener.join(_CLOSE_S)
        if self._child.stdout is not None:
            self._child.stdout.close()


class _Canvas:
    """The child's screen: the last snapshot, drawn on the alternate screen of the terminal."""

    def __init__(self, unicode: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        from dsbd_cli.ui.snapshot import Snapshot

        self.unicode, self.shot, self.size = unicode, Snapshot(), (0, 0)
        self.console = Console(stderr=True, force_terminal=True, highlight=False, markup=False, emoji=False)
        options: dict[str, Any] = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self.live = Live(console=self.console, screen=True, get_renderable=self._picture, **options)

    def _picture(self) -> Any:
        from dsbd_cli.ui.frame import frame

        width, height = self.size
        return frame(self.shot, self.console, width, height, self.unicode) if width else ""

    def draw(self) -> None:
        self.size = self.now()
        self.live.refresh()

    def now(self) -> tuple[int, int]:
        """The terminal's size at this moment."""
        try:
            return tuple(os.get_terminal_size(sys.stderr.fileno()))  # type: ignore[return-value]
        except OSError:
            return self.size

    def pause(self, *_: Any) -> None:
        """Ctrl-Z: hand the terminal back, stop, and take it again when continued."""
        self.live.stop()
        os.kill(os.getpid(), signal.SIGSTOP)
        self.live.start()
        self.draw()


def main() -> None:
    """The child: draw what comes in until stdin closes."""
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda *_: sys.exit(0))
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    with contextlib.suppress(OSError, ValueError):
        _draw_all(inbox, _Canvas(sys.argv[2] == "unicode"))
    # The reading thread may sit in a read for ever, should an exit from elsewhere have brought us here.
    os._exit(0)


def _read(inbox: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        inbox.put(line)
    inbox.put(b"")


def _draw_all(inbox: queue.SimpleQueue[bytes], canvas: _Canvas) -> None:
    from dsbd_cli.ui.snapshot import Snapshot

    if hasattr(signal, "SIGTSTP"):
        signal.signal(signal.SIGTSTP, canvas.pause)
    with canvas.live:
        _ask()
        while True:
            try:
                line = inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                if canvas.size != canvas.now():
                    canvas.draw()
                continue
            if not line:
                return
            began = time.monotonic()
            canvas.shot = Snapshot.from_json(line.decode("utf-8"))
            canvas.draw()
            # Resting before asking again keeps the rate, and leaves the processor to decoding.
            if not _rest(inbox, began + 1 / DRAWS_PER_SECOND - time.monotonic()):
                return
            _ask()


def _rest(inbox: queue.SimpleQueue[bytes], seconds: float) -> bool:
    """Wait; False if the parent closed meanwhile (nothing else comes unasked)."""
    try:
        return bool(inbox.get(timeout=max(0.001, seconds)))
    except queue.Empty:
        return True


def _ask() -> None:
    sys.stdout.buffer.write(b".")
    sys.stdout.buffer.flush()
