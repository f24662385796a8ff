"""stderr that may go away: what cannot be written is lost, and the run goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from dsbd_cli.ui.look import is_terminal, unicode_terminal


class Screen:
    """A stream to write to for whoever still reads it.

    Args:
        stream: stderr as it is now, if none is given.
    """

    def __init__(self, stream: Any = None) -> None:
        self._stream = stream if stream is not None else sys.stderr

    def write(self, text: str) -> int:
        with self._kept():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept():
            self._stream.flush()

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        return int(self._stream.fileno())

    @property
    def encoding(self) -> str:
        given = getattr(self._stream, "encoding", None) or "utf-8"
        return given if unicode_terminal(given) else "ascii"

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, ValueError):  # full for now; closed, or no such character in its encoding
            pass
        except OSError:
            self._forget()

    def _forget(self) -> None:
        """What is left in the stream's buffer would fail again at the end, and change the exit code."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)
