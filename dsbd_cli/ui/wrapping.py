"""Text that comes piece by piece, broken between words for a terminal of so many columns."""

from __future__ import annotations

from rich.cells import cell_len

_FENCES = ("```", "~~~")


class Wrapping:
    """Breaks lines at spaces. A word is held back until it has ended, for only then is it known whether it fits.

    What fits on no line, and wide characters, between which there are no spaces, are the terminal's to break. So are
    lines of fenced code: who copies one that the terminal broke gets one line, and code may not stand another.

    Args:
        columns: of the terminal, at least 1.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._at = 0  # columns used of this line
        self._gap = self._word = ""
        self._begins = True  # no word of this line is placed yet
        self._fence = ""  # what fenced code that is open began with

    def push(self, text: str) -> str:
        """What can be shown now that `text` has come."""
        shown = ""
        for char in text:
            if char == "\n":
                shown += self._place() + self._gap + char
                self._gap, self._at, self._begins = "", 0, True
            elif char in " \t":
                shown += self._place()
                self._gap += char
            elif cell_len(char) > 1:
                self._word += char
                shown += self._place()
            else:
                self._word += char
                if len(self._word) > self._columns:
                    shown += self._place()
        return shown

    def finish(self) -> str:
        """What was held back."""
        shown = self._place() + self._gap
        self._gap = ""
        return shown

    def _place(self) -> str:
        if not self._word:
            return ""
        if self._begins:
            self._look_for_fence()
        wide = cell_len(self._gap) + cell_len(self._word)
        if self._at and self._gap and not self._fence and self._at + wide > self._columns:
            shown, self._at = "\n" + self._word, cell_len(self._word)
        else:
            shown, self._at = self._gap + self._word, self._at + wide
        while self._at > self._columns:
            self._at -= self._columns
        self._gap = self._word = ""
        return shown

    def _look_for_fence(self) -> None:
        self._begins = False
        fence = self._word[:3]
        if fence in _FENCES and self._fence in ("", fence):
            self._fence = "" if self._fence else fence
