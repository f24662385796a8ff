"""Plain output: bytes of the answer unchanged on stdout, notes on stderr."""

from __future__ import annotations

import sys

from dsbd_cli.ui import waiting
from dsbd_cli.ui.look import folded


class Out:
    """Writes UTF-8 to stdout whatever the locale, flushed at once so that pipes see text as it comes."""

    def write(self, text: str) -> None:
        stream = getattr(sys.stdout, "buffer", None)
        if stream is None:
            sys.stdout.write(text)
        else:
            stream.write(text.encode("utf-8"))
        sys.stdout.flush()


def note(line: str) -> None:
    """A note for the person at the terminal; never on stdout."""
    with waiting.above():
        print(folded(f"dsbd: {line}", sys.stderr), file=sys.stderr, flush=True)
