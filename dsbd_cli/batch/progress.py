"""How far a batch is, on stderr: a bar at a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dsbd_cli.counted import counted
from dsbd_cli.tally import ratio
from dsbd_cli.ui.screen import Screen

if TYPE_CHECKING:
    from dsbd_cli.many import Load
    from dsbd_cli.result import Result

# A line where there is no bar: soon, or a long first answer looks like a run that hangs; then now and then.
_FIRST_S, _EVERY_S = 2.0, 30.0
_PULSE_S = 0.2
_UNKNOWN = "-:--:--"
_LABEL = "prompts"


class BatchProgress:
    """Counts finished prompts, and tokens of those under way; a context manager.

    Args:
        total, done: prompts of this process (None: nobody knows), and how many of them an earlier run did.
        tell: receives the lines where there is no bar.
        bar: draw a bar on stderr.
    """

    def __init__(self, total: int | None, done: int, tell: Callable[[str], None], *, bar: bool) -> None:
        self._total, self._done, self._before, self._tell = total, done, done, tell
        self._began = time.monotonic()
        self._due = self._began + (0.0 if bar else _FIRST_S)
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
            self._tell(self._line(None))

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
            self._draw(self._bar, load)
        else:
            self.pulse(lambda: load)

    def pulse(self, load: Callable[[], Load | None]) -> None:
        """Called as often as one likes: shows how things stand, if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        if self._bar is not None:
            self._due = now + _PULSE_S
            self._draw(self._bar, load())
        else:
            self._due = now + _EVERY_S
            self._tell(self._line(load()))

    def _draw(self, bar: Any, load: Load | None) -> None:
        speed, left = self._speed(load), self._left(load)
        about = fitting(self._about(load), _room(bar.console.width, self._total, speed))
        bar.update(bar.task_ids[0], completed=self._done, speed=speed, left=left, load=about)

    def _speed(self, load: Load | None) -> str:
        """Tokens of all prompts by the clock on the wall."""
        tokens = self._tokens + (load.tokens if load is not None else 0)
        rate = ratio(tokens, time.monotonic() - self._began)
        return f"{rate:.1f} tok/s" if rate else ""

    def _left(self, load: Load | None) -> str:
        """The time left, as h:mm:ss.

        Prompts that are under way count as done by half: the first of many that are decoded at a time end late and
        together, and by their number alone the next ones would seem to take no time, or all of it.
        """
        if self._total is None:
            return ""
        if self._done == self._before:
            return _UNKNOWN
        new = self._done - self._before + (load.running / 2 if load is not None else 0)
        spent = time.monotonic() - self._began
        seconds = round(spent / new * max(0.0, self._total - self._before - new))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def _about(self, load: Load | None) -> list[str]:
        """How it goes, the most telling first."""
        parts = [] if load is None else _under_way(load)
        if (rate := ratio(self._accepted, self._examined)) is not None:
            parts.append(f"{rate:.0%} accepted")
        if self._widths:
            parts.append(f"width {sum(self._widths) / len(self._widths):.1f}")
        return parts

    def _line(self, load: Load | None) -> str:
        of = self._done if self._total is None else self._total
        parts = [
            f"{self._done}/{counted(of, 'prompt')}",
            f"{time.monotonic() - self._began:.0f} s",
            self._speed(load),
            *(_under_way(load) if load is not None and load.running else []),
        ]
        return ", ".join(part for part in parts if part)


def _under_way(load: Load) -> list[str]:
    if load.running and load.reading == load.running:
        parts = [f"reading {counted(load.reading, 'prompt')}"]
    else:
        parts = [f"{load.running} under way"]
    # They come in as others leave.
    return [*parts, f"{load.waiting} wait for memory"] if load.waiting else parts


def fitting(parts: Sequence[str], room: int) -> str:
    """As many of the parts, the first first, as fit into `room` columns."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if len(longer) > room:
            break
        text = longer
    return text


def _bar_width(columns: int) -> int:
    """Columns of the bar itself; a narrow terminal needs them for count, speed and time."""
    return max(4, min(40, columns - 70))


def _room(columns: int, total: int | None, speed: str) -> int:
    """Columns that the count, the speed and the time left do not need."""
    others = (_LABEL, f"{total or 99999}/{total or '?'}", speed, _UNKNOWN)
    return columns - _bar_width(columns) - sum(map(len, others)) - len(others) - 1


def _bar(total: int | None, done: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(file=Screen())  # type: ignore[arg-type]
    columns = (TextColumn(_LABEL), BarColumn(_bar_width(console.width)), MofNCompleteColumn(),
               TextColumn("{task.fields[speed]}"), TextColumn("{task.fields[left]}", style="cyan"),
               TextColumn("{task.fields[load]}", style="dim"))  # fmt: skip
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4)
    bar.add_task(_LABEL, total=total, completed=done, speed="", left=_UNKNOWN, load="")
    return bar
