"""What a run says: progress for a person, JSON lines for later."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dsbd_cli.counted import counted

# The first line where there is no bar comes soon: a long silence looks like a run that hangs.
FIRST_S = 2.0


def ahead(
    only: str | None, sample: tuple[float | None, int | None], train: tuple[float | None, int | None]
) -> str:
    """What a run is about to take, in words.

    Args:
        only: the one step that is made, `sample` or `train`; None for both.
        sample: minutes and answer tokens, whichever is spent first; None: no bound.
        train: minutes and steps, likewise.
    """
    steps = []
    if only != "train":
        steps.append(f"sampling takes {_bounds(*sample, 'answer token')} (--sample-minutes, --tokens)")
    if only != "sample":
        steps.append(f"training takes {_bounds(*train, 'step')} (--minutes, --steps)")
    return f"{', then '.join(steps)}; stopped, the same command goes on"


def _bounds(minutes: float | None, count: int | None, thing: str) -> str:
    found = [] if minutes is None else [f"{minutes:g} {'minute' if minutes == 1 else 'minutes'}"]
    found += [] if count is None else [counted(count, thing, form=",")]
    return " or ".join(found)


class RunLog:
    """Appends one JSON object a line to `path`; None writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **fields: Any) -> None:
        if self.path is None:
            return
        line = json.dumps({"time": round(time.time(), 2), "event": event, **fields})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class Step:
    """One step's progress: a bar on a terminal, else a plain line now and then.

    Use as a context manager; `update(done, total, note)` in any unit.
    """

    def __init__(self, console: Console | None, name: str, every: float = 15.0) -> None:
        self.console, self.name, self.every = console, name, every
        self.began = time.monotonic()
        self.due = self.began + FIRST_S
        self.bar: Progress | None = None

    def __enter__(self) -> Step:
        if self.console is not None and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
                console=self.console,
            )  # fmt: skip
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=1.0, note="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def update(self, done: float, total: float, note: Callable[[], str] | str = "") -> None:
        text = note if isinstance(note, str) else note()
        if self.bar is not None:
            self.bar.update(self.task, completed=min(1.0, done / max(total, 1e-9)), note=text)
        elif self.console is not None and (now := time.monotonic()) >= self.due:
            self.due = now + self.every
            spent = now - self.began
            left = f", left {spent * (total - done) / done:.0f} s" if done else ""
            self.console.print(f"{self.name} {100 * done / total:.0f}% {spent:.0f} s{left} {text}".rstrip())

    def say(self, text: str) -> None:
        if self.console is not None:
            (self.bar.console if self.bar is not None else self.console).print(f"{self.name}: {text}")
