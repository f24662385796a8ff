"""A forward that tells what it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Spy:
    """Stands before a forward: `seen` is given its arguments at every call; all else is the forward's own."""

    def __init__(self, forward: Any, seen: Callable[..., None]) -> None:
        self._inner, self._seen = forward, seen

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._seen(*args)
        return self._inner(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
