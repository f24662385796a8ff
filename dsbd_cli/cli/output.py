"""Plain output: bytes of the answer unchanged on stdout, notes on stderr; at a terminal without control codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsbd_cli.errors import RunError
from dsbd_cli.paths import write_error
from dsbd_cli.ui import waiting
from dsbd_cli.ui.look import columns_of, folded, is_terminal
from dsbd_cli.ui.safe import escaped, escaped_json
from dsbd_cli.ui.screen import Screen

if TYPE_CHECKING:
    from dsbd_cli.ui.wrapping import Wrapping


class StdoutError(RunError):
    """Stdout does not take the answer, so there is no use in writing more of it."""


class Out:
    """Writes UTF-8 to stdout whatever the locale, flushed at once so that pipes see text as it comes.

    A file and a pipe get every byte; on a terminal, control characters (a model may say anything) are
    shown as escapes. One `Out` for the pieces of one answer.

    Args:
        wrap: break lines between words on a terminal; what is written last is then shown by `finish`.
    """

    def __init__(self, *, wrap: bool = False) -> None:
        self._screen = is_terminal(sys.stdout)
        self._held = ""
        columns = columns_of(sys.stdout) if wrap else None
        self._wrapping: Wrapping | None = None
        if columns is not None:
            from dsbd_cli.ui.wrapping import Wrapping

            self._wrapping = Wrapping(columns)

    def write(self, text: str) -> None:
        """One piece of text.

        Raises:
            StdoutError: a full disk. BrokenPipeError: nobody reads any more.
        """
        if self._screen:
            # A carriage return may be half of a line end.
            text = self._held + text
            self._held = "\r" if text.endswith("\r") else ""
            text = escaped(text.removesuffix("\r"))
        self._write(text if self._wrapping is None else self._wrapping.push(text))

    def finish(self) -> None:
        """Show the word that was held back for `wrap`. Raises like `write`."""
        if self._wrapping is not None:
            self._write(self._wrapping.finish())

    def write_json(self, line: str) -> None:
        """One line of JSON. Raises like `write`."""
        self._write(escaped_json(line) if self._screen else line)

    def _write(self, text: str) -> None:
        try:
            self._raw(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise StdoutError(str(write_error("stdout", error))) from error

    @staticmethod
    def _raw(text: str) -> None:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:
            sys.stdout.write(text)
        else:
            stream.write(text.encode("utf-8"))
        sys.stdout.flush()


def print_answer(text: str) -> None:
    """A whole answer and a line end on stdout, broken between words at a terminal. Raises like `Out.write`."""
    out = Out(wrap=True)
    out.write(text + "\n")
    out.finish()


def note(line: str) -> None:
    """A note for the person at the terminal; never on stdout. Where nobody reads it, nothing ends for it."""
    line = f"dsbd: {line}"
    if is_terminal(sys.stderr):
        line = folded(escaped(line), sys.stderr)
    screen = Screen()
    with waiting.above():
        screen.write(line + "\n")
        screen.flush()


def figures(lines: Iterable[str]) -> None:
    """Lines of numbers on stderr; what models and files are called stands among them."""
    told = map(escaped, lines) if is_terminal(sys.stderr) else lines
    print(*told, sep="\n", file=sys.stderr)
