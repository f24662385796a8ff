"""What results keep in fixed words, said to a person.

Results, traces and benches store these words and are compared by them, so they never change; what is shown may.
"""

from __future__ import annotations

from dsbd_cli.tally import NO_FOREST_PAYS

_NOTES = {
    NO_FOREST_PAYS: "nothing was drafted: on this machine drafting is expected to cost more time than it saves "
    "(--forest full drafts anyway)",
}
_ENDINGS = {
    "eos": "ended by itself",
    "stop": "ended at a stop text",
    "length": "cut at max-new-tokens",
    "early_stop": "stopped before its end (early-stopping)",
}


def said(stored: str) -> str:
    """A stored note, or a line that holds one, in words for people; anything else as it is."""
    for words, shown in _NOTES.items():
        stored = stored.replace(words, shown)
    return stored


def ending(finish_reason: str) -> str:
    """How a sequence ended, behind `the answer`; a reason that is none of `Result`'s is named."""
    return _ENDINGS.get(finish_reason, f"ended by {finish_reason}")
