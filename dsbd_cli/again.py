"""The command that measures anew, with its preset by name where that is known."""

from __future__ import annotations

import shlex

AGAIN = "dsbd doctor --measure PRESET"


def naming(line: str, preset: str | None) -> str:
    """`line` with what it says about measuring anew said of this preset; None where it is not known."""
    return line if preset is None else line.replace(AGAIN, AGAIN.replace("PRESET", shlex.quote(preset)))
