"""The ways a run can end early, and nothing else.

A `UserError` is something the user can mend (a wrong option, file, pair): the command line
prints it as one line and exits 2. A `RunError` is a run that broke (non-finite logits, a
full disk): one line, exit 1. `Stopped` is Ctrl-C with something to say about it: exit 130. None
ever shows a traceback.
"""

from __future__ import annotations

import functools
import signal
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
    """Raise it again where a handler of signals raised it, as time limits do: it is the caller's, and says nothing of
    what it came into.

    A handler that has had another put in its place since is not known any more.
    """
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in handlers:
            raise error
        at = at.tb_next


def _code(handler: Any) -> Any:
    """The code that runs when a handler is called; None where that is not Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):  # SIG_DFL and its like
        return None
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
