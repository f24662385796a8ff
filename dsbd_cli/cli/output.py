"""Plain output: bytes of the answer unchanged on stdout, notes on stderr."""

from __future__ import annotations

import sys

from dsbd_cli.errors import RunError
from dsbd_cli.ui import waiting


class Out:
    """Writes UTF-8 to stdout whatever the locale, flushed at once so that pipes see text as it comes."""

    def write(self, text: str) -> None:
        if sys.stdout is None:  # a shell's `>&-`
            raise RunError("stdout is closed: there is nowhere to write the answer")
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:
            sys.stdout.write(text)
        else:
            stream.write(text.encode("utf-8"))
        sys.stdout.flush()


def note(line: str) -> None:
    """A note for the person at the terminal; never on stdout."""
    if sys.stderr is not None:  # print() would take None for stdout
        with waiting.above():
            print(f"dsbd: {line}", file=sys.stderr, flush=True)
