"""Why something was not captured or replayed: three facts that call for three different answers."""

from __future__ import annotations


class TooLarge(Exception):
    """More nodes than any capture has room for: this time. The next forward or iteration may fit."""


class CannotCapture(Exception):
    """The steps cannot be captured, or their captures not replayed: asking again would not help."""


class OutOfMemory(Exception):
    """The device has no memory left for it now; captures were let go. Later there may be room again."""
