"""The ways a run can end early, and nothing else.

A `UserError` is something the user can mend (a wrong option, file, pair): the command line
prints it as one line and exits 2. A `RunError` is a run that broke (non-finite logits, a
full disk): one line, exit 1. `Stopped` is Ctrl-C with something to say about it: exit 130. None
ever shows a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any


class DsbdError(Exception):
    """Base of all errors meant for a person; `str(error)` is one line: what, where, what to do."""

    exit_code = 1

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


class UserError(DsbdError):
    """The input is wrong: option, preset, path, pair of models, prompt. Exit code 2."""

    exit_code = 2


class RunError(DsbdError):
    """The run itself failed: non-finite logits, out of memory, full disk. Exit code 1."""

    exit_code = 1


class Stopped(DsbdError):
    """Ctrl-C, with how far the run was. Exit code 130."""

    exit_code = 130


def first_line(error: BaseException) -> str:
    """What a library's error says, in one line; its kind where it says nothing."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def let_by(error: BaseException) -> None:
    """Raise what a handler of signals raised, as time limits do: it is the caller's, and says nothing of what it came
    into. That is `error` itself, or what a library made it of.

    A handler that has had another put in its place since is not known any more.
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    for one in _made_of(error):
        at = one.__traceback__
        while at is not None:
            if at.tb_frame.f_code in handlers:
                raise one
            at = at.tb_next


def _made_of(error: BaseException) -> Iterator[BaseException]:
    """It and what it was raised in answer to, less what is seen to where the asking is done, or further out."""
    outer: set[FrameType] = set()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        outer.add(frame)
        frame = frame.f_back
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        at = one.__traceback__
        if one is not error and at is not None and at.tb_frame in outer:
            return
        yield one
        one = one.__cause__ or one.__context__


@contextlib.contextmanager
def suppressed(*kinds: type[Exception]) -> Iterator[None]:
    """As `contextlib.suppress`, and `let_by`."""
    try:
        yield
    except kinds as error:
        let_by(error)


def _code(handler: Any) -> Any:
    """The code that runs when a handler is called; None where that is not Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):  # SIG_DFL and its like
        return None
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
