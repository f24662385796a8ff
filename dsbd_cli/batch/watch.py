"""Waiting for other ranks: with a word within seconds, and not for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from dsbd_cli.batch.shard import Shard
from dsbd_cli.errors import RunError

POLL_S = 0.2
SAY_S = 3.0
AGAIN_S = 60.0
LIMIT_S = 600.0  # a large model may take minutes to load, before which a rank gives no sign of life
_PATIENCE_S = 1.0  # for a lock that `is_alive` of another rank holds for a moment


class Watch:
    """One wait for ranks, seen from another of them.

    Args:
        path: OUT.
        shard: who waits.
        tell: receives a line after some seconds, and again every minute.
    """

    def __init__(self, path: Path, shard: Shard, tell: Callable[[str], None]) -> None:
        self._path, self._shard, self._tell = path, shard, tell
        self._sign = time.monotonic()
        self._say = self._sign + SAY_S
        self._state = ""

    def wait(self, ranks: Collection[int], state: str) -> None:
        """Sleep for a moment; to be called until what is waited for is there.

        Args:
            ranks: whose work is missing.
            state: how far things are, in words; a change of it is a sign of life.

        Raises:
            RunError: too long without a sign of life from any of them.
        """
        time.sleep(POLL_S)
        now = time.monotonic()
        world = self._shard.world
        if state != self._state or any(is_alive(part_of(self._path, rank, world)) for rank in ranks):
            self._state, self._sign = state, now
        names = ", ".join(map(str, sorted(ranks)[:8])) + (", ..." if len(ranks) > 8 else "")
        who = f"rank{'' if len(ranks) == 1 else 's'} {names} of {world}"
        if now - self._sign > LIMIT_S:
            raise RunError(f"no sign of life from {who} for {LIMIT_S:.0f} s ({state}): start all ranks, as torchrun "
                           "does, or unset RANK and WORLD_SIZE; the same command goes on")  # fmt: skip
        if now > self._say:
            self._say = now + AGAIN_S
            self._tell(
                f"waiting for {who}: {state} (this is rank {self._shard.rank}, by RANK and WORLD_SIZE)"
            )


def part_of(path: Path, rank: int, world: int) -> Path:
    """Where rank `rank` of `world` keeps its records until they are joined."""
    return path.with_name(f"{path.name}.rank-{rank}-of-{world}")


def is_alive(part: Path) -> bool:
    """Whether a process holds this part file."""
    try:
        fd = os.open(part, os.O_RDWR)
    except OSError:
        return False
    try:
        return not lock(fd)
    finally:
        os.close(fd)


def lock(fd: int, *, patient: bool = False) -> bool:
    """Hold the file for this process until it ends or closes it; False if another holds it.

    Args:
        patient: try again for a second.
    """
    try:
        import fcntl
    except ImportError:  # Windows: no such lock; two writers are then the user's own care
        return True
    end = time.monotonic() + (_PATIENCE_S if patient else 0.0)
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
            continue
        return True
