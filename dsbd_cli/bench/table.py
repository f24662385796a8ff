"""A table of a report as data, and the kinds of columns that tables have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsbd_cli.bench.cells import fixed, interval, number, word


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: its name in CSV files; an estimate fills KEY, KEY_low, KEY_high and KEY_n there.
        head: its heading for people.
        show: a value as text.
        estimate: whether values are estimates (dicts), or None.
        meaning: a sentence for the legend.
    """

    key: str
    head: str
    show: Callable[[Any], str] = word
    estimate: bool = False
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """Values in rows; `texts` gives them as people read them.

    Attributes:
        name: of the exported files. title: the heading. note: a sentence below it.
        marked: rows that stand out.
    """

    name: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    marked: Sequence[int] = field(default_factory=tuple)

    @property
    def heads(self) -> list[str]:
        return [column.head for column in self.columns]

    def texts(self) -> list[list[str]]:
        return [
            [column.show(cell) for column, cell in zip(self.columns, row, strict=True)] for row in self.rows
        ]


def estimate(key: str, head: str, places: int | None = None, meaning: str = "") -> Column:
    return Column(key, head, lambda entry: interval(entry, places), True, meaning)


def figure(key: str, head: str, meaning: str = "") -> Column:
    return Column(key, head, number, meaning=meaning)


def rounded(key: str, head: str, places: int = 2, meaning: str = "") -> Column:
    return Column(key, head, lambda value: fixed(value, places), meaning=meaning)


ARM = Column("arm", "arm", meaning="method, and what a sweep changed")
COUNT = Column("items", "n", meaning="items that the score rests on, of those asked where some have none")


# Stands for the baseline's own row, which is 1 by definition.
BASE: dict[str, Any] = {"value": 1.0, "low": None, "high": None, "items": None}
