"""Timing one model: forwards over small forests behind a short prompt."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dsbd_cli.again import AGAIN
from dsbd_cli.decoding import HfTreeModel, LogitsProcessor, Node, SeededSampler, Trie
from dsbd_cli.others import took

_PROMPT = 64
_LAYER = 8  # nodes of a layer of the measured forests
_DRAWS = 4


def quick(times: Sequence[float]) -> float:
    """The median of the quicker half of ascending times."""
    return statistics.median(times[: (len(times) + 1) // 2])


class Moment(NamedTuple):
    """When something was measured, in words for people, and why the machine is taken to have been busy ("" if not)."""

    origin: str
    busy: str


def measured_now(others: float | None, *, uneven: bool = False) -> Moment:
    """Where numbers come from that were measured just now.

    Args:
        others: part of the cores' time that other processes took meanwhile, None where unknown. Steady work slows
            all times alike, so that none stands out.
        uneven: times differ as work that comes and goes makes them.
    """
    when = f"measured {time.strftime('%Y-%m-%d %H:%M')}"
    busy = took(others) or ("times of one forward differ by half" if uneven else "")
    if not busy:
        return Moment(when, busy)
    return Moment(f"{when} on a busy machine ({busy}; {AGAIN} does it anew)", busy)


def torn(others: float | None) -> bool:
    """Whether forwards by several threads say little, by the part of the cores' time that others took."""
    return bool(took(others)) and torch.get_num_threads() > 1


@contextmanager
def one_thread() -> Iterator[None]:
    """Where others have a core, threads that wait for each other take any time: one alone finds a core that is free."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


class Probe:
    """Forwards of one model over small forests behind a short prompt, timed in milliseconds."""

    def __init__(self, model: HfTreeModel, clock: Callable[[], float]) -> None:
        self._model, self._clock = model, clock
        self._trie = Trie(lambda node: None, (), 1 << 30)
        self._processor = LogitsProcessor(1.0, 10, 0.8)
        self._sampler = SeededSampler(0, 0)
        room = model.max_positions or 1 << 30
        self._ids = [token % model.vocab_size for token in range(max(1, min(_PROMPT, room // 2)))]
        self._room = room - len(self._ids)
        self._width = min(_LAYER, model.vocab_size)
        # A draft is asked for the distribution of each layer at once; a target's layers have a price of their own.
        self._joints = model.role == "draft"
        self.layers: list[float] = []
        model.prefill(self._ids, self._trie.root, top_n=self._processor.top_n, reuse=False)

    def holds(self, count: int) -> bool:
        """Whether the context has room for a forest of `count` nodes."""
        return -(-count // self._width) <= self._room

    def run(self, count: int) -> float:
        """One forward over `count` new nodes, and for a draft the joint of each layer of it."""
        nodes = self._forest(count)
        begin = self._clock()
        self._model.forward(nodes)
        if self._joints:
            for place in range(0, count, self._width):
                self._joint(nodes[place : place + self._width])
        took = self._clock() - begin
        if not self._joints:
            self._draw(nodes[:2])
        self._model.retain([self._trie.root])
        self._trie.root.children = {}
        return max(took * 1e3, 1e-6)

    def _draw(self, beams: list[Node]) -> None:
        """What a layer of these beams costs the host: their joint, and the draws."""
        begin = self._clock()
        self._sampler.sample(self._joint(beams).prob, _DRAWS)
        self.layers.append(max((self._clock() - begin) * 1e3, 0.0))

    def _joint(self, nodes: list[Node]) -> Any:
        return self._model.joint(nodes, [0.0] * len(nodes), self._processor)

    def _forest(self, count: int) -> list[Node]:
        """Layers of `_LAYER` nodes, each below the one above it."""
        nodes: list[Node] = []
        for place in range(count):
            parent = nodes[place - self._width] if place >= self._width else self._trie.root
            nodes.append(self._trie.child(parent, place % self._width))
        return nodes
