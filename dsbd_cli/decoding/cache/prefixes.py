"""Prompts whose keys and values lie in a shared buffer, for others that begin alike (docs/design.md section 10).

Keys and values depend on the tokens up to theirs and on its position alone, so a prompt takes over what is computed
of its beginning: copying costs a small part of computing. Prompts are those of requests under way, and of some that
ended: these lie behind the regions of requests and make room for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsbd_cli.decoding.cache.buffers import SPARE, KVBuffer
from dsbd_cli.decoding.cache.regions import Regions

# Tokens: fewer are no reason to read a prompt in two parts.
LEAST = 16


@dataclass(eq=False)
class _Prompt:
    """Of `ids`, int64, the first `count` are computed."""

    ids: np.ndarray
    count: int = 0


class Prefixes:
    """Which prompts lie where, each in the first slots of a region, in order.

    Args:
        cache, regions: the buffer, and who has which part of it.

    Attributes:
        slots: of those that ended: whoever needs them gets them (`give_way`).
    """

    def __init__(self, cache: KVBuffer, regions: Regions) -> None:
        self._cache, self._regions = cache, regions
        self._running: dict[int, _Prompt] = {}  # by begin of their region
        self._kept: dict[int, _Prompt] = {}  # likewise, that which was of no use for longest first

    @property
    def slots(self) -> int:
        return sum(self._size(prompt.count) for prompt in self._kept.values())

    def computed(self, begin: int, ids: Sequence[int], count: int) -> None:
        """The request whose region begins there has computed the first `count` tokens of its prompt `ids`."""
        prompt = self._running.get(begin)
        if prompt is None:
            prompt = self._running[begin] = _Prompt(np.array(ids, dtype=np.int64))
        prompt.count = count

    def take_over(self, ids: Sequence[int], begin: int) -> int:
        """Copy the longest beginning of `ids` that is computed to the region that begins there.

        Returns:
            of how many tokens: not of the last, whose logits are wanted; 0 where only a few are there.
        """
        wanted = np.array(ids[:-1], dtype=np.int64)
        source, most = 0, LEAST - 1
        for prompts in (self._running, self._kept):
            for at, prompt in prompts.items():
                if (count := _common(wanted, prompt)) > most:
                    source, most = at, count
        if most < LEAST:
            return 0
        self._touch(source)
        self._cache.copy(source + SPARE + 1, begin + SPARE + 1, most)
        return most

    def end(self, begin: int, keep: bool = False) -> None:
        """Give the region that begins there back; keep: what is computed of its prompt stays where there is room."""
        prompt = self._running.pop(begin, None)
        if keep and prompt is not None:
            self._keep(begin, prompt)
        self._regions.give(begin)

    def give_way(self) -> bool:
        """Let go of one prompt of a request that ended; False where there is none."""
        if not self._kept:
            return False
        at = next(iter(self._kept))
        del self._kept[at]
        self._regions.give(at)
        return True

    def _keep(self, begin: int, prompt: _Prompt) -> None:
        own = prompt.ids[: prompt.count]
        if prompt.count < LEAST or self._size(prompt.count) > self._regions.free + self.slots:
            return
        for at, kept in self._kept.items():
            if _common(own, kept) == prompt.count:
                self._touch(at)
                return
        to = self._regions.take_last(SPARE + 1 + prompt.count)
        while to is None and self.give_way():
            to = self._regions.take_last(SPARE + 1 + prompt.count)
        if to is not None:
            self._cache.copy(begin + SPARE + 1, to + SPARE + 1, prompt.count)
            self._kept[to] = _Prompt(own, prompt.count)

    def _touch(self, at: int) -> None:
        """One that was of use goes last."""
        if (prompt := self._kept.pop(at, None)) is not None:
            self._kept[at] = prompt

    def _size(self, count: int) -> int:
        return self._regions.rounded(SPARE + 1 + count)


def _common(ids: np.ndarray, prompt: _Prompt) -> int:
    """How many tokens of `ids` from the first on are the computed ones of `prompt`."""
    most = min(len(ids), prompt.count)
    differ = np.flatnonzero(ids[:most] != prompt.ids[:most])
    return int(differ[0]) if len(differ) else most
