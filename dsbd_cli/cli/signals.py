"""SIGTERM ends a run as Ctrl-C does: with a word, with what there is of an answer, and with what was written kept."""

from __future__ import annotations

import signal
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
BROKEN_PIPE = 141  # as shells name it: 128 + SIGPIPE, a signal that Windows lacks

_ended = False


def heed() -> None:
    """From now on SIGTERM raises KeyboardInterrupt in the main thread, unless the parent had it ignored."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def terminated() -> bool:
    """Whether it was SIGTERM: whoever goes on after Ctrl-C must not go on then."""
    return _ended


def _end(number: int, frame: FrameType | None) -> None:
    global _ended
    _ended = True
    raise KeyboardInterrupt
