"""Telling a person about slow stages: downloads, conversions, waiting for another process."""

from __future__ import annotations

import logging
import sys
from typing import Any, Protocol

from dsbd_cli.ui import waiting
from dsbd_cli.ui.safe import one_line

LOG = logging.getLogger("dsbd")


class Progress(Protocol):
    """Called with a stage in words and, where they are known, done and total bytes (total 0: unknown)."""

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None: ...


def silent(stage: str, done: int = 0, total: int = 0) -> None:
    """A `Progress` that says nothing."""


def logged() -> Progress:
    """A `Progress` that writes each stage once into the log, for programs that use the package."""
    seen = set()

    def tell(stage: str, done: int = 0, total: int = 0) -> None:
        if stage not in seen:
            seen.add(stage)
            LOG.info("%s", stage)

    return tell


class TerminalProgress:
    """A `Progress` on stderr: a bar at a terminal, one plain line a stage in a pipe.

    Use as a context manager; nothing is drawn (nor rich imported) before the first stage is
    reported, so a start from a warm cache is quiet and quick.
    """

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> TerminalProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int = 0, total: int = 0) -> None:
        if not sys.stderr.isatty():
            if stage not in self._tasks:
                self._tasks[stage] = None
                print(f"dsbd: {stage}", file=sys.stderr, flush=True)
            return
        stage = one_line(stage)  # names are of files that anyone may have written
        if self._bar is None:
            waiting.ready()
            self._bar = _bar()
            self._bar.start()
        if stage not in self._tasks:
            for task in self._tasks.values():
                self._bar.update(task, visible=False)
            self._tasks[stage] = self._bar.add_task(stage, total=total or None)
        self._bar.update(self._tasks[stage], completed=done, total=total or None)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn
    from rich.text import Text

    class Bytes(DownloadColumn):
        """Nothing for a stage that tells none."""

        def render(self, task: Task) -> Text:
            return super().render(task) if task.total or task.completed else Text()

    # Stages hold file names, which are not markup.
    words = TextColumn("{task.description}", markup=False)
    return Progress(words, BarColumn(20), Bytes(), console=Console(stderr=True), transient=True)
