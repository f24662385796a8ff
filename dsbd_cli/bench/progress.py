"""How far a bench is, on stderr: a bar with running figures at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from dsbd_cli.counted import counted
from dsbd_cli.ui import waiting
from dsbd_cli.ui.look import folded, moves_cursor
from dsbd_cli.ui.screen import Screen

# A line where there is no bar: soon, or a run that loads and warms up looks like one that hangs; then now and then.
FIRST_S, EVERY_S = 2.0, 30.0
_ROWS = 14


def tell(line: str) -> None:
    """One notice on stderr, if anyone still reads it."""
    screen = Screen()
    with waiting.above():
        screen.write(folded(f"dsbd: {line}", sys.stderr) + "\n")
        screen.flush()


def draws() -> bool:
    """Whether progress is drawn; a terminal that cannot move its cursor gets the lines of a pipe."""
    return Screen().isatty() and moves_cursor()


class Figures(Protocol):
    """Running figures (`bench.figures.Figures`)."""

    def add(self, records: Iterable[Mapping[str, Any]]) -> None: ...

    def arms(self) -> list[str]: ...

    def line(self, arm: str) -> tuple[str, str, str, str]: ...


class BenchProgress:
    """A context manager around the run.

    Args:
        total, done: answers of this process, and how many of them an earlier run gave.
        figures: running figures to show.
        label: what is run.
        visible: False shows nothing (ranks above 0).
    """

    def __init__(self, total: int, done: int, figures: Figures, label: str, visible: bool = True) -> None:
        self._total, self._done, self._before = total, done, done
        self._figures, self._label = figures, label
        self._began = time.monotonic()
        self._due = self._began + FIRST_S
        self._visible = visible
        self._live: Any = None
        self._stage = ""
        self._said = done

    def __enter__(self) -> BenchProgress:
        waiting.ready()
        if self._visible and draws():
            from rich.console import Console
            from rich.live import Live

            console = Console(file=Screen())  # type: ignore[arg-type]
            self._live = Live(
                console=console, get_renderable=self._picture, refresh_per_second=4, transient=True
            )
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._visible and not any(error) and self._said < self._done:
            self._tell()

    def stage(self, text: str) -> None:
        """What is being done now."""
        self._stage = text
        self._note()

    def step(self, record: Mapping[str, Any]) -> None:
        """One more answer is there."""
        self._done += 1
        self._figures.add([record])
        self._stage = ""
        self._note()

    def _note(self) -> None:
        now = time.monotonic()
        if self._visible and self._live is None and now >= self._due:
            self._due = now + EVERY_S
            self._tell()

    def _tell(self) -> None:
        self._said = self._done
        now = f"; now {self._stage}" if self._stage else ""
        tell(f"{self._done}/{counted(self._total, 'answer')}, {self._clock()}{self._speeds()}{now}")

    def _clock(self) -> str:
        spent = time.monotonic() - self._began
        new = self._done - self._before
        going = new and self._done < self._total
        left = f", about {_span(spent / new * (self._total - self._done))} left" if going else ""
        return f"{_span(spent)}{left}"

    def _speeds(self) -> str:
        arms = self._figures.arms()[:6]
        return "".join(f"; {arm} {self._figures.line(arm)[2]} tok/s" for arm in arms)

    def _picture(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        head = [
            Text(self._label),
            # One row each, whatever the width: rows that come and go would make the table jump.
            Text(
                f"{self._done} of {counted(self._total, 'answer')}, {self._clock()}",
                no_wrap=True,
                overflow="ellipsis",
            ),
            Text(self._stage, no_wrap=True, overflow="ellipsis"),
        ]
        bar = Table.grid()  # a bare bar does not end its row
        bar.add_row(ProgressBar(total=max(1, self._total), completed=self._done, width=48))
        table = Table(box=None, pad_edge=False)
        # Of a row that is too long, the arm's name gives way and not the figures.
        table.add_column("arm", no_wrap=True, overflow="ellipsis")
        for name in ("items", "score", "tok/s", "J/token"):
            table.add_column(name, justify="right", no_wrap=True, min_width=5)
        arms = self._figures.arms()
        for arm in arms[:_ROWS]:
            table.add_row(Text(arm), *self._figures.line(arm))
        more = [Text(f"and {counted(len(arms) - _ROWS, 'more arm')}")] if len(arms) > _ROWS else []
        return Group(*head, bar, table, *more)


def _span(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
