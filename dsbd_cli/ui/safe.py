"""A model's words on a terminal: never markup, never control codes."""

from __future__ import annotations

import re

# C0 and C1 controls, and the marks that reorder or split what stands around them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def escaped(text: str) -> str:
    """`text` with control characters written as escapes; line ends and tabs stay."""
    return _UNSAFE.sub(_escape, text.replace("\r\n", "\n"))


def escaped_json(text: str) -> str:
    """JSON with escapes of its own in place of the control characters that it lets through; means the same."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def visible(text: str, unicode: bool = True) -> str:
    """`text` with control characters written as escapes (`\\x1b`); newlines stay, a tab is four spaces.

    Without `unicode`, any character beyond ASCII is a question mark.
    """
    text = escaped(text).replace("\t", "    ")
    return text if unicode else text.encode("ascii", "replace").decode("ascii")


def one_line(text: str, unicode: bool = True) -> str:
    """`visible` with line ends shown as a mark, for places one row high."""
    return visible(text, unicode).replace("\n", "⏎" if unicode else "\\n")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
