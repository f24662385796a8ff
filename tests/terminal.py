"""Runs a program at a terminal of its own (a pty) and looks at what it wrote there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence

_ESCAPES = re.compile(rb"\x1b(\[[0-9;?]*[ -/]*[@-~]|[@-Z\\-_])")


class Terminal:
    """A program whose stdin, stdout and stderr are one terminal, and which it controls."""

    def __init__(
        self, command: Sequence[str], *, columns: int = 100, rows: int = 30, env: dict[str, str] | None = None
    ) -> None:
        self.master, slave = pty.openpty()
        self.output = b""
        self.resize(columns, rows, slave)

        def take_terminal() -> None:
            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=env, preexec_fn=take_terminal
        )
        os.close(slave)

    def resize(self, columns: int, rows: int, fd: int | None = None) -> None:
        fcntl.ioctl(
            self.master if fd is None else fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0)
        )

    def send(self, data: bytes) -> None:
        """Keys; b"\\x03" is Ctrl-C."""
        os.write(self.master, data)

    def until(self, seen: Callable[[bytes], bool], seconds: float = 60.0) -> bool:
        """Read on until `seen(output)`; False if the program ended or time ran out first."""
        end = time.monotonic() + seconds
        while not seen(self.output):
            left = end - time.monotonic()
            if left <= 0 or not self._read(left):
                return seen(self.output)
        return True

    def finish(self, seconds: float = 60.0) -> int:
        """Read until the program ends; its exit code."""
        self.until(lambda _: False, seconds)
        code = self.process.wait(seconds)
        os.close(self.master)
        return code

    def _read(self, seconds: float) -> bool:
        if select.select([self.master], [], [], seconds)[0]:
            try:
                data = os.read(self.master, 65536)
            except OSError:  # Linux says so when the last writer is gone
                data = b""
            self.output += data
            return bool(data)
        return False

    @property
    def text(self) -> str:
        """What was written, without escape codes and with plain line ends."""
        return _ESCAPES.sub(b"", self.output).replace(b"\r\n", b"\n").decode("utf-8", "replace")

    @property
    def after_panels(self) -> str:
        """What stays on the screen: everything written after the alternate screen was left."""
        rest = self.output.rpartition(b"\x1b[?1049l")[2]
        return _ESCAPES.sub(b"", rest).replace(b"\r\n", b"\n").decode("utf-8", "replace")
