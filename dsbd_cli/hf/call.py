"""What `model.generate` knows and does not hand on to a custom decoding function.

transformers passes a callable its prepared inputs and those keywords that its signature names, and drops the
rest without a word: `streamer`, `assistant_model`, and whether `num_beams` came from the caller or from the
checkpoint. A streamer that nobody ends leaves its reader waiting for ever, so the frame is looked at.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple


class Call(NamedTuple):
    """The running `generate` call.

    Attributes:
        streamer, assistant_model: as given to `generate`, or None.
        given: the keywords that the caller gave, those of `generation_config` included.
    """

    streamer: Any = None
    assistant_model: Any = None
    given: frozenset[str] = frozenset()


def running_call() -> Call:
    """The innermost `generate` of transformers on the stack; an empty `Call` where there is none."""
    frame = inspect.currentframe()
    while frame is not None:
        home = frame.f_globals.get("__name__")
        if frame.f_code.co_name == "generate" and home == "transformers.generation.utils":
            seen = frame.f_locals
            given = frozenset(name for name, value in seen.get("kwargs", {}).items() if value is not None)
            return Call(seen.get("streamer"), seen.get("assistant_model"), given)
        frame = frame.f_back
    return Call()
