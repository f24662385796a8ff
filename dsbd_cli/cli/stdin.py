"""Prompts from the command line's argument and from stdin: UTF-8, whatever the locale says."""

from __future__ import annotations

import codecs
import io
import os
import select
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator

from dsbd_cli.errors import UserError
from dsbd_cli.settings import broken
from dsbd_cli.ui.look import is_terminal

BOM = codecs.BOM_UTF8  # what Windows editors put before a text; no part of a prompt


def read_prompt(prompt: str | None) -> str:
    """The argument, else stdin less one trailing newline; at a terminal with neither: usage.

    Raises:
        UserError: nothing given at a terminal, or text that is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        if broken(prompt):  # in a C locale good UTF-8 comes in like this too
            prompt = _utf8(os.fsencode(prompt), "the prompt")
        return prompt
    if prompt is None and is_terminal(sys.stdin):
        raise UserError('no prompt: dsbd generate "your prompt", or pipe it in (dsbd generate --help)')
    data = sys.stdin.buffer.read() if sys.stdin is not None else b""
    return _utf8(data.removeprefix(BOM), "stdin").removesuffix("\n").removesuffix("\r")


def text_waits() -> bool:
    """Whether stdin is a pipe in which text waits. Reads none of it, and never waits for any."""
    try:
        import fcntl
        import termios

        fd = sys.stdin.fileno()
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        count = fcntl.ioctl(fd, termios.FIONREAD, bytes(4))
    except (ImportError, OSError, AttributeError, ValueError):  # no such thing here, or no stdin
        return False
    return int.from_bytes(count, sys.byteorder) > 0


def arriving_lines(wait: Callable[[], bool]) -> Iterator[str | None]:
    """The lines of stdin as they come, without their ends; None for "none just now".

    A byte that is no UTF-8 becomes half a surrogate pair, which refuses that prompt alone.

    Args:
        wait: whether to wait for a line; else there may be none yet.
    """
    lines = _Arriving()
    number = 0
    while True:
        line = lines.next(wait)
        if line is None:
            yield None
            continue
        if not line:
            return
        number += 1
        text = line.removeprefix(BOM) if number == 1 else line
        yield text.decode("utf-8", "surrogateescape").removesuffix("\n").removesuffix("\r")


class _Arriving:
    """Lines of stdin, without waiting for one where that can be told (not on Windows, not for what is no file)."""

    def __init__(self) -> None:
        self._file = sys.stdin.buffer if sys.stdin is not None else io.BytesIO()
        self._lines: deque[bytes] = deque()
        self._rest = b""
        self._ended = False
        try:
            self._fd = -1 if sys.platform == "win32" else self._file.fileno()
        except (OSError, AttributeError):
            self._fd = -1

    def next(self, wait: Callable[[], bool]) -> bytes | None:
        """A line with its end; empty at the end of all; None where there is none yet and nobody waits."""
        if self._fd < 0:
            return self._file.readline()
        while not self._lines and not self._ended:
            if not select.select([self._fd], [], [], 0)[0] and not wait():
                return None
            data = os.read(self._fd, 1 << 16)
            self._ended = not data
            *whole, self._rest = (self._rest + data).split(b"\n")
            self._lines += [line + b"\n" for line in whole]
            if self._ended and self._rest:
                self._lines.append(self._rest)
        return self._lines.popleft() if self._lines else b""


def stdin_lines() -> Iterator[str]:
    """The lines of stdin as they come, without their ends.

    Raises:
        UserError: a line that is not UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer if sys.stdin is not None else (), start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        yield _utf8(text, f"line {number} of stdin").removesuffix("\n").removesuffix("\r")


def _utf8(data: bytes, what: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{what} is not UTF-8 text (byte {error.start}): convert it first, e.g. with iconv"
        ) from None
