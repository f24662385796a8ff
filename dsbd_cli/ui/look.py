"""What a terminal can show: whether panels can be drawn at all, in Unicode or in ASCII."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import Any, TextIO

_TOO_SMALL = (20, 6)


def panel_stream() -> TextIO | None:
    """Where panels can be drawn: stderr, else stdout; None where neither is a terminal that can."""
    if not moves_cursor():
        return None
    for stream in (sys.stderr, sys.stdout):
        if is_terminal(stream) and _large_enough(stream):
            return stream
    return None


def moves_cursor() -> bool:
    """Whether terminals of this environment can wipe a line and draw over it. (Windows sets no TERM.)"""
    return os.name == "nt" or os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; False for one that is closed or missing."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):
        return False


def columns_of(stream: Any) -> int | None:
    """Columns of the terminal that a stream is; None for anything else, and where it does not tell."""
    if not is_terminal(stream):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError):
        return None


def folded(line: str, stream: Any) -> str:
    """A line broken between words for the terminal that `stream` is, if it is one; paths stay whole."""
    columns = columns_of(stream)
    if columns is None or len(line) <= columns:
        return line
    return textwrap.fill(line, columns, break_long_words=False, break_on_hyphens=False)


def hanging(head: str, text: str, stream: Any) -> str:
    """`head` and `text`, whose further lines begin below its first word where `stream` is a terminal too narrow."""
    columns = columns_of(stream)
    if columns is None or len(head) + len(text) <= columns:
        return head + text
    return textwrap.fill(text, columns, initial_indent=head, subsequent_indent=" " * len(head),
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _large_enough(stream: TextIO) -> bool:
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return False
    # A terminal that does not tell its size says 0 x 0.
    return columns >= _TOO_SMALL[0] and rows >= _TOO_SMALL[1]


def unicode_terminal(encoding: str | None) -> bool:
    """Whether block characters can be expected to show.

    Args:
        encoding: of the stream. Python says utf-8 in the C locale too, so the locale's own name is
            looked at as well; where none is set at all, the stream is believed.
    """
    if encoding is None or not encoding.lower().replace("-", "").startswith("utf8"):
        return False
    named = next((os.environ[key] for key in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(key)), "")
    return not named or "utf" in named.lower()
