"""Something raised at a chosen point of a run: wherever Python could have raised it in this package's code.

Python looks for signals behind a call, where a function begins or a generator goes on, and where a loop goes back: a
Ctrl-C comes at one of these points and at no other.
"""

from __future__ import annotations

import dis
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import dsbd_cli

_ROOT = str(Path(dsbd_cli.__file__).parent)
_LOOKS = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.startswith("CALL") or name in ("RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
)


# Where exceptions of an instruction are handled, on versions that have a table of it.
_table: Callable[[CodeType], Any] = getattr(dis, "_parse_exception_table", lambda code: ())


class Point(NamedTuple):
    """The `visit`-th time (from 1) that a run comes to an instruction."""

    code: CodeType
    at: int
    visit: int

    def __str__(self) -> str:
        lines = [line for begin, line in dis.findlinestarts(self.code) if begin <= self.at]
        where = Path(self.code.co_filename).relative_to(_ROOT)
        return (
            f"{where}:{lines[-1] if lines else 0} ({self.code.co_name}, byte {self.at}, visit {self.visit})"
        )


class _Code:
    """A function of ours: its instructions, and who handles their exceptions."""

    def __init__(self, code: CodeType) -> None:
        self.text = code.co_code
        self._blocks = [(one.start, one.end, one.target) for one in _table(code)]

    def handler(self, at: int) -> int | None:
        return next((target for begin, end, target in self._blocks if begin <= at < end), None)

    def interrupts(self, last: int, at: int) -> bool:
        """Whether Python could have raised behind the instruction at `last`, before that at `at`.

        Here it is raised at the latter: not where that is outside a block that the former ends.
        """
        return self.text[last] in _LOOKS and self.handler(last) == self.handler(at)


def _asked(frame: FrameType, event: str, arg: Any) -> Any:
    frame.f_trace_opcodes = True
    return _asked


def _nothing() -> None:
    pass


@contextmanager
def _traced(seen: Callable[[CodeType, int], None]) -> Iterator[None]:
    """`seen` is told of every point inside the block."""
    known: dict[CodeType, _Code | None] = {}

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code not in known:
            known[code] = _Code(code) if code.co_filename.startswith(_ROOT) else None
        ours = known[code]
        if ours is None:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        last: int | None = None

        def followed(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal last
            if event == "opcode":
                at = frame.f_lasti
                if last is not None and ours.interrupts(last, at):
                    seen(code, at)
                last = at
            return followed

        return followed

    before = sys.gettrace()
    # From Python 3.12 on opcodes are traced from the second time that anybody asks for them.
    sys.settrace(_asked)
    _nothing()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


def points_of(work: Callable[[], object]) -> list[Point]:
    """Every point of a run of `work`."""
    visits: Counter[tuple[CodeType, int]] = Counter()
    found: list[Point] = []

    def seen(code: CodeType, at: int) -> None:
        visits[code, at] += 1
        found.append(Point(code, at, visits[code, at]))

    with _traced(seen):
        work()
    return found


def some(points: list[Point], count: int, seed: int = 0) -> list[Point]:
    """`count` of them, of different instructions as far as there are: a visit of each."""
    visits: dict[tuple[CodeType, int], list[Point]] = {}
    for point in points:
        visits.setdefault((point.code, point.at), []).append(point)
    chosen = random.Random(seed)
    each = [chosen.choice(all_) for all_ in visits.values()]
    return chosen.sample(each, min(count, len(each)))


class Late(Exception):
    """What a caller's time limit raises."""


def late(number: int, frame: FrameType | None) -> None:
    """Handles a signal."""
    raise Late


@contextmanager
def limited(handler: Callable[..., Any] | None = None) -> Iterator[Callable[[], None]]:
    """Inside, what is yielded sends this process a signal, whose handler raises `Late`, the usual one in itself."""
    before = signal.signal(signal.SIGTERM, handler or late)
    try:
        yield lambda: signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def stopped() -> None:
    """As Ctrl-C does it."""
    raise KeyboardInterrupt


def interrupted(work: Callable[[], object], point: Point, stop: Callable[[], None] = stopped) -> bool:
    """Run `work` with a KeyboardInterrupt, or what else `stop` raises, at `point`; whether that comes out of it."""
    left = point.visit

    def seen(code: CodeType, at: int) -> None:
        nonlocal left
        if at == point.at and code is point.code:
            left -= 1
            if left == 0:
                stop()

    try:
        with _traced(seen):
            work()
    except (KeyboardInterrupt, Late):
        return True
    return False
