"""Which modules of `dsbd_cli/decoding` each iteration of a run crosses on the host."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from dsbd_cli.decoding.tree.events import Iteration

_ROOM = f"dsbd_cli{os.sep}decoding{os.sep}"


class Crossing:
    """Counts by `sys.setprofile`; `unseen` wraps what is not the host's part."""

    def __init__(self) -> None:
        self._crossed: set[str] = set()
        self._counting = False

    def modules(self, events: Iterable[Any]) -> list[list[str]]:
        """The modules of each iteration, in order; what a consumer does is not counted."""
        counts = []
        steps = iter(events)
        while True:
            with self._seen():
                event = next(steps, None)
            if event is None:
                return counts
            if isinstance(event, Iteration):
                counts.append(sorted(self._crossed))
                self._crossed.clear()

    def unseen(self, call: Callable[[], None]) -> Callable[[], None]:
        def quietly() -> None:
            sys.setprofile(None)
            call()
            sys.setprofile(self._profile if self._counting else None)

        return quietly

    @contextmanager
    def _seen(self) -> Iterator[None]:
        self._counting = True
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._counting = False

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and _ROOM in (name := frame.f_code.co_filename):
            self._crossed.add(name.split(_ROOM, 1)[1])
