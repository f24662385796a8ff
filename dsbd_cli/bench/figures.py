"""Running figures of a bench: the same quantities as the table at its end, of the answers so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dsbd_cli.bench import summary
from dsbd_cli.bench.cells import fixed, number
from dsbd_cli.bench.files import Record
from dsbd_cli.bench.windows import clocks


class Figures:
    """Figures per arm, in the order of the run's arms.

    They are computed when an answer is added, between two clocks, and never while a screen is drawn.

    Args:
        field: of a score, the one that the table shows.
        arms: names, in the table's order.
    """

    def __init__(self, field: str, arms: Iterable[str]) -> None:
        self._field = field
        self._records: dict[str, list[Record]] = {arm: [] for arm in arms}
        self._lines: dict[str, tuple[str, str, str, str]] = {}

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Count results."""
        for record in records:
            self._records.setdefault(record["arm"], []).append(dict(record))
            self._lines.pop(record["arm"], None)
        for arm in self.arms():
            if arm not in self._lines:
                self._lines[arm] = self._line(arm)

    def arms(self) -> list[str]:
        """The arms that have answers."""
        return [arm for arm, records in self._records.items() if records]

    def line(self, arm: str) -> tuple[str, str, str, str]:
        """(items, score, tok/s, J/token) as text; n/a where unknown."""
        return self._lines[arm]

    def _line(self, arm: str) -> tuple[str, str, str, str]:
        records = self._records[arm]
        timed = clocks(records)
        scores = summary.item_scores(records, self._field)
        score = sum(scores) / len(scores) if scores else None
        speed = summary.tokens_per_s(timed).value
        joules = summary.joules_per_token(timed).value
        return (
            str(len({record["item"] for record in records})),
            fixed(score),
            number(speed),
            number(joules),
        )
