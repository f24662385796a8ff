"""One line at the terminal that says what a start is waiting for; wiped before anything else is written.

torch and transformers take seconds to import, and nothing here needs them: the line is there at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from dsbd_cli.ui.look import columns_of, is_terminal, moves_cursor, unicode_terminal
from dsbd_cli.ui.safe import one_line

_WIPE = "\r\x1b[K"
_text = ""
_echoes = False  # whether what somebody types ahead may stand at the cursor


def waiting(what: str, *, typing: bool = False) -> None:
    """Show `what` on stderr, if that is a terminal and this is the first process of a torchrun.

    Args:
        typing: somebody may type ahead, and the terminal echoes it at the cursor: then the line is one for itself and
            stays, and what is wiped is the echo, which the prompt will show again.
    """
    global _text, _echoes
    if not is_terminal(sys.stderr) or os.environ.get("RANK", "0") != "0":
        return
    unicode = unicode_terminal(getattr(sys.stderr, "encoding", None))
    line = f"dsbd: {one_line(what, unicode)}{'…' if unicode else '...'}"
    if not moves_cursor():
        _write(line + "\n")
        return
    _clear()
    if typing:
        _write(f"{_WIPE}{line}\n")  # keys are faster than an interpreter that starts
        _echoes = True
        return
    _text = line
    _draw()


def ready() -> None:
    """Wipe the line for good."""
    global _text, _echoes
    _clear()
    _text, _echoes = "", False


@contextlib.contextmanager
def above() -> Iterator[None]:
    """Write in here: the line is wiped before, and stands below what was written after."""
    _clear()
    try:
        yield
    finally:
        _draw()


def _draw() -> None:
    if _text:
        columns = columns_of(sys.stderr)
        # Two short of the edge: the mark at the end may be two cells wide, and a full line would wrap.
        _write(_text if columns is None or len(_text) < columns - 1 else _text[: max(0, columns - 2)])


def _clear() -> None:
    if _text or _echoes:
        _write(_WIPE)


def _write(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a screen that is gone stops nothing
        sys.stderr.write(text)
        sys.stderr.flush()
