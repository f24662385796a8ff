"""How far a batch is, on stderr: a bar at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsbd_cli.tally import ratio

if TYPE_CHECKING:
    from dsbd_cli.many import Load
    from dsbd_cli.result import Result

_EVERY_S = 30.0


class BatchProgress:
    """Counts finished prompts; a context manager.

    Args:
        total, done: prompts of this process, and how many of them an earlier run did.
        tell: receives the lines where there is no bar.
        bar: draw a bar on stderr.
    """

    def __init__(self, total: int, done: int, tell: Callable[[str], None], *, bar: bool) -> None:
        self._total, self._done, self._tell = total, done, tell
        self._began = self._told = time.monotonic()
        self._tokens = self._examined = self._accepted = 0
        self._widths: list[float] = []
        self._bar = _bar(total, done) if bar else None

    def __enter__(self) -> BatchProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if not any(error):
            self._tell(self._line())

    def step(self, result: Result | None, load: Load | None = None) -> None:
        """One more prompt is done; None for one that was refused.

        Args:
            load: how things stand where many are decoded at a time.
        """
        self._done += 1
        if result is not None:
            self._tokens += result.stats.new_tokens
            self._examined += result.stats.drafts_examined
            self._accepted += result.stats.drafts_accepted
            self._widths += [] if result.stats.mean_width is None else [result.stats.mean_width]
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=self._done, speed=self._speed(), load=self._about(load)
            )
        elif time.monotonic() - self._told > _EVERY_S:
            self._told = time.monotonic()
            self._tell(self._line())

    def _speed(self) -> str:
        """Tokens of all prompts by the clock on the wall."""
        rate = ratio(self._tokens, time.monotonic() - self._began)
        return "" if rate is None else f"{rate:.1f} tok/s"

    def _about(self, load: Load | None) -> str:
        parts = []
        if load is not None:
            parts.append(f"{load.running} under way")
            if load.slots:
                parts.append(f"{load.free_slots / load.slots:.0%} of the cache free")
        if (rate := ratio(self._accepted, self._examined)) is not None:
            parts.append(f"{rate:.0%} accepted")
        if self._widths:
            parts.append(f"width {sum(self._widths) / len(self._widths):.1f}")
        return ", ".join(parts)

    def _line(self) -> str:
        parts = [
            f"{self._done}/{self._total} prompts",
            f"{time.monotonic() - self._began:.0f} s",
            self._speed(),
        ]
        return ", ".join(part for part in parts if part)


def _bar(total: int, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"),
               TextColumn("{task.fields[load]}", style="dim"), TimeRemainingColumn())  # fmt: skip
    bar = Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)
    bar.add_task("prompts", total=total, completed=done, speed="", load="")
    return bar
