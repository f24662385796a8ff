"""What the user should know about prompts of a batch: each thing once, with the prompt where it came up first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any


class Notes:
    """Tells notes of prompts as they come, and at the end how many prompts they are true of.

    Args:
        tell: receives lines.
        what: what a prompt's number counts: `line` or `prompt`.
    """

    def __init__(self, tell: Callable[[str], None], what: str) -> None:
        self._tell, self._what = tell, what
        self._seen: Counter[str] = Counter()

    def add(self, number: int, record: Mapping[str, Any]) -> None:
        """Those of one prompt's record."""
        for note in dict.fromkeys(record.get("notes", ())):
            if not self._seen[note]:
                self._tell(f"{self._what} {number}: {note}")
            self._seen[note] += 1

    def finish(self) -> None:
        """Say of how many prompts each was true, where that was not one alone."""
        for note, count in self._seen.items():
            if count > 1:
                self._tell(f"{count} prompts: {note}")
