"""Standard streams that were closed before the start (`>&-`): never a traceback, never another file's bytes."""

from __future__ import annotations

import io
import os
import sys

from dsbd_cli.errors import RunError


class Nowhere(io.TextIOBase):
    """Stands in for a stdout that is not there: writing to it fails as writing to a full disk does."""

    encoding = "utf-8"

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise RunError("stdout is closed: there is nowhere to write the answer")


def mend() -> None:
    """Put something where stdin, stdout or stderr is missing."""
    if sys.stderr is None:
        # print(file=None) would write to stdout, into the answer.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = Nowhere()  # type: ignore[assignment]
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115


def hold_descriptors() -> None:
    """Fill descriptors 0 to 2, or the next file opened takes one, and a library's warnings go into it."""
    while True:
        number = os.open(os.devnull, os.O_RDWR)
        if number > 2:
            os.close(number)
            return
