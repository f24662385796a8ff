"""What other processes took of this process's cores over a window of time. Marks clocks; decides nothing.

The load average cannot tell it: it holds this process's own threads, and those of the last minute.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

# Part of the cores' time, from where on clocks tell of others' work too.
BUSY = 0.2
# Windows with less time of the cores than this say nothing: the system counts in hundredths of a second.
_LEAST_S = 0.5
_FIELDS = 8  # user nice system idle iowait irq softirq steal; guests are in user and nice already
_IDLE = (3, 4)


class Ticks(NamedTuple):
    """Seconds that some cores have worked and been there, since they started."""

    busy: float
    there: float


def usable() -> set[int] | None:
    """Numbers of the cores that this process may run on; None where the system does not tell."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on every system
        return None


def parse(text: str, cores: Collection[int] | None, hertz: float) -> Ticks | None:
    """`/proc/stat` of these cores (None: of all); None where it does not hold them.

    Args:
        hertz: the system's ticks a second.
    """
    names = {"cpu"} if cores is None else {f"cpu{core}" for core in cores}
    lines = [line.split() for line in text.splitlines()]
    try:
        rows = [[int(one) for one in line[1 : 1 + _FIELDS]] for line in lines if line and line[0] in names]
    except ValueError:
        return None
    if len(rows) < len(names) or any(len(row) <= max(_IDLE) for row in rows):
        return None
    idle = sum(row[place] for row in rows for place in _IDLE)
    there = sum(map(sum, rows))
    return Ticks((there - idle) / hertz, there / hertz)


def system_ticks() -> Ticks | None:
    """Those of this process's cores now; None where the system has no such file."""
    try:
        text = Path("/proc/stat").read_text(encoding="ascii", errors="replace")
        return parse(text, usable(), os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError):
        return None


def own_seconds() -> float:
    """Seconds of a core that this process has used, and its children that have ended."""
    ended = os.times()
    return time.process_time() + ended.children_user + ended.children_system


class Window:
    """A window of time that begins when it is made.

    Args:
        ticks, own: read the system's count and this process's own.
    """

    def __init__(
        self, ticks: Callable[[], Ticks | None] = system_ticks, own: Callable[[], float] = own_seconds
    ) -> None:
        self._ticks, self._own = ticks, own
        self._begin, self._used = ticks(), own()

    def share(self) -> float | None:
        """Part of the cores' time in 0..1 that others have taken until now; None where it cannot be told."""
        now, used = self._ticks(), self._own() - self._used
        if now is None or self._begin is None:
            return None
        busy, there = (b - a for a, b in zip(self._begin, now, strict=True))
        # A count that stands still, or misses what this process did, is of other cores than its own.
        if there < _LEAST_S or busy < 0.5 * used:
            return None
        return min(1.0, max(0.0, busy - used) / there)


def took(share: float | None) -> str | None:
    """What to say of others' share; None where it is small, or not known."""
    return None if share is None or share < BUSY else f"other processes took {share:.0%} of the cores' time"
