"""A user's error under torchrun: said once, by rank 0, and every rank leaves with the same code.

The launcher ends all ranks (SIGTERM) as soon as one has failed. So the others hold still for a while:
rank 0, which met the same error, says its line and leaves, and takes them with it. Where it does not,
the error was this rank's own, and it is said here.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 10.0
_said_to: Any = None  # stderr, where this process has been hushed


def follower() -> bool:
    """Whether torchrun started this process, as another than rank 0. A RANK left over from elsewhere does not count."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"


def hush() -> None:
    """From now on this process says nothing: the first of its team does (`group.Team`).

    It ends at a SIGTERM wherever it is: the launcher sends one when another process has failed, and this one may be
    waiting for that on its card.
    """
    global _said_to
    _said_to = _said_to or sys.stderr
    sys.stdout, sys.stderr = (open(os.devnull, "w", encoding="utf-8") for _ in range(2))  # noqa: SIM115
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def leave(code: int, say: Callable[[str], None], line: str) -> None:
    """Wait for rank 0 to say the line; say it only if that does not happen."""
    if not follower():
        say(line)
        return

    def end(*_: Any) -> None:
        os._exit(code)

    before = signal.signal(signal.SIGTERM, end)
    try:
        time.sleep(PATIENCE_S)
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.stderr = _said_to or sys.stderr
    say(f"rank {os.environ['RANK']}: {line}")
