"""The host's side of `device_chain`: what the device decided becomes nodes, and the pools learn of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dsbd_cli.decoding.device.chain_iteration import Landing, Outcome, Space
from dsbd_cli.decoding.device.layout import Layer as DraftedLayer
from dsbd_cli.decoding.device.proposer import layer_of, living
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler, SeededSampler
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie
from dsbd_cli.errors import first_line

if TYPE_CHECKING:
    from dsbd_cli.decoding.model.hf_model import HfTreeModel


@dataclass
class _Flight:
    """One iteration under way.

    Attributes:
        beams: node by place, None where there is none; known once the iteration before has landed.
        above: the parents by place, where the draft computes them in this iteration.
    """

    space: Space
    landing: Landing
    beams: list[Node | None] = field(default_factory=list)
    above: list[Node] = field(default_factory=list)


@dataclass(frozen=True)
class Landed:
    """One iteration that came back.

    Attributes:
        forest: as the events show it.
        layers: per committed layer its draws in order, and for each whether it lies in the forest.
    """

    forest: Forest
    layers: Iterator[tuple[list[Node], list[bool]]]


class Chain:
    """Runs `cover` iterations on the device, one ahead of the host.

    Args:
        target: recorded. draft: likewise, or None to sample without one.
        trie, sampler, processor: of the run; every layer takes `width` uniforms.
        width: W, fixed.
        draft_width, gamma: of the forests.
    """

    def __init__(
        self, target: HfTreeModel, draft: HfTreeModel | None, trie: Trie, sampler: SeededSampler,
        processor: LogitsProcessor, width: int, draft_width: int, gamma: int,
    ) -> None:  # fmt: skip
        self._target, self._draft, self._trie, self._sampler = target, draft, trie, sampler
        self._width, self._draft_width, self._gamma = width, draft_width, gamma
        self._flights: deque[_Flight] = deque()
        self._since = 0.0
        self._loop = target.chain_with(draft, width, processor, draft_width, gamma, sorted(trie.eos_ids))
        self._usable = True  # else what is under way still lands, and the host goes on
        try:
            self._loop.prepare()
        except RuntimeError as error:
            self._stop(error)

    # Launching.

    def begin(self, beams: list[Node]) -> bool:
        """Set off the first iteration from `beams`, which no model has computed; whether that was possible."""
        loop, models = self._loop, self._models()
        if not self._usable or not self._fits(beams[0].depth):
            return False
        parents = [node.parent for node in beams]
        if any(node in model.pool for model in models for node in beams):
            return False
        if not all(parent is not None and parent in self._target.pool for parent in parents):
            return False
        above = [parent for parent in parents if parent is not None]
        draft_rows: list[int] = []
        if self._draft is not None:
            pool = self._draft.pool
            if lacking := [node for node in dict.fromkeys(above) if node not in pool]:
                self._draft.forward(lacking)
            draft_rows = [pool.mask_row(node) for node in above]
        fresh = loop.state_of(
            [node.token for node in beams],
            [node.score for node in beams],
            [self._target.pool.mask_row(node) for node in above],
            draft_rows,
            self._target.pool.position(beams[0]),
        )
        if not self._launch(beams[0], fresh):
            return False
        self._flights[-1].beams = [*beams, *[None] * (self._width - len(beams))]
        return True

    def ahead(self, beams: list[Node], landed: bool) -> None:
        """Set off the iteration that follows, if it may be needed and has room.

        Args:
            beams: those of the last iteration that has landed.
            landed: whether nothing is under way; else the beams grow by one to gamma + 1 tokens first.
        """
        depth = beams[0].depth
        if not self._usable or (not landed and depth + 1 >= self._trie.budget):
            return
        if self._fits(depth if landed else depth + self._gamma + 1):
            self._launch(beams[0], None)

    def _launch(self, committed: Node, fresh: np.ndarray | None) -> bool:
        loop = self._loop
        uniforms = self._sampler.peek(loop.window * self._width).reshape(-1, self._width)
        position = self._target.pool.position(committed)
        space = loop.space()
        try:
            landing = loop.launch(space, uniforms, position, fresh)
        except RuntimeError as error:
            loop.release(space)
            self._stop(error)
            return False
        if not self._flights:
            self._since = time.perf_counter()
        self._flights.append(_Flight(space, landing))
        self._target.set_off(True)
        return True

    def _fits(self, depth: int) -> bool:
        """Whether both contexts hold an iteration from beams of that depth."""
        limits = [model.max_depth for model in self._models()]
        return all(limit is None or depth + self._gamma <= limit for limit in limits)

    def _models(self) -> list[HfTreeModel]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def _stop(self, error: RuntimeError) -> None:
        self._usable = False
        self._target.stop_chains(first_line(error))

    def drop(self) -> None:
        """Give up what is under way: nobody will ask for it."""
        while self._flights:
            self._loop.release(self._flights.popleft().space)
        self._target.set_off(False)

    @property
    def flying(self) -> bool:
        """Whether an iteration is under way."""
        return bool(self._flights)

    # Landing.

    @torch.inference_mode()
    def land(self) -> Landed:
        """Wait for the iteration under way that was launched first.

        The layers are for the caller to commit, one by one; then `settle`.
        """
        flight = self._flights.popleft()
        outcome = self._loop.land(flight.landing, self._since)
        self._since = time.perf_counter()
        self._target.landed(flight.landing.seconds)
        self._target.set_off(bool(self._flights))
        self._target.calls += 1
        if self._draft is not None:
            self._draft.calls += self._gamma
        self._flight, self._layers = flight, len(outcome.verified)
        forest, self._places = self._drafted(flight.beams, outcome.drafted)
        return Landed(forest, self._verified(flight.beams, outcome))

    def _drafted(
        self, beams: list[Node | None], layers: list[DraftedLayer]
    ) -> tuple[Forest, list[list[Node | None]]]:
        """The forest, and the nodes of each layer by their places in it."""
        shown: list[DraftLayer] = []
        placed: list[list[Node | None]] = []
        parents, stopped = beams, False
        room = self._trie.budget - next(node.depth for node in beams if node is not None) - 1
        for drafted in layers[: max(0, room)]:  # the last layer of a budget is drawn from known rows
            places = [i for i, parent in enumerate(parents) if parent is not None]
            if not places:
                break
            if not all(drafted.finite[i] for i in places):
                assert self._draft is not None
                raise self._draft.rows.fail(next(node for node in parents if node is not None))
            if stopped:
                # Below a stop string the device went on: what it found elsewhere still counts.
                tokens = zip(
                    drafted.parent[drafted.draws].tolist(), drafted.token[drafted.draws].tolist(), strict=True
                )
                nodes = [
                    None if (parent := parents[p]) is None else self._trie.child(parent, t) for p, t in tokens
                ]
                parents = [None if node is None or node.finish is not None else node for node in nodes]
            else:
                nodes_above = [node for node in parents if node is not None]
                layer, parents = layer_of(self._trie, places, nodes_above, drafted)
                shown.append(layer)
                stopped = any(node.finish == "stop" for node in layer.draws)
            placed.append(parents)
        return Forest(shown, computed=True), placed

    def _verified(
        self, beams: list[Node | None], outcome: Outcome
    ) -> Iterator[tuple[list[Node], list[bool]]]:
        above = beams
        for layer in outcome.verified:
            for i, parent in enumerate(above):
                if parent is not None and not layer.finite[i]:
                    raise self._target.rows.fail(parent)
            self._sampler.uniforms(self._width)
            slots = []
            for p, token, logp in zip(
                layer.parent.tolist(), layer.token.tolist(), layer.logp.tolist(), strict=True
            ):
                parent = above[p]
                assert parent is not None
                node = self._trie.child(parent, token)
                node.score = parent.score + logp
                slots.append(node)
            above = living(slots)
            self._slots = slots
            yield slots, layer.known.tolist()

    def settle(self, whole: bool) -> None:
        """Tell the pools what of the landed iteration may live on; the next `retain` enters it.

        Args:
            whole: all its layers were committed; else what follows on the device is of no use.
        """
        flight, deepest = self._flight, self._slots[0].depth
        computed: dict[Node, int] = {}
        for i, node in enumerate(flight.beams):
            if node is not None:
                computed[node] = i
        below = {
            node: self._width + depth * self._draft_width + i
            for depth, nodes in enumerate(self._places)
            for i, node in enumerate(nodes)
            # The next iteration computes its beams itself.
            if node is not None and node.depth < deepest
        }
        self._target.pool.adopt(flight.space.target, computed | below)
        if self._draft is not None and flight.space.draft is not None:
            places: dict[Node, int] = {}
            for i, node in enumerate(flight.above):
                places.setdefault(node, i)
            end = self._width + (self._gamma - 1) * self._draft_width  # the draft's own last layer
            for node, place in (computed | below).items():
                if place < end:
                    places[node] = self._width + place
            self._draft.pool.adopt(flight.space.draft, places)
        if not whole:
            self.drop()
        elif self._flights:
            follows = self._flights[0]
            follows.beams = living(self._slots)
            if self._layers > self._gamma > 0:
                follows.above = [node.parent for node in self._slots if node.parent is not None]


def chain_for(
    target: HfTreeModel, draft: Any, trie: Trie, sampler: Sampler, processor: LogitsProcessor, width: int,
    draft_width: int, gamma: int,
) -> Chain | None:  # fmt: skip
    """A `Chain` where the models are recorded and their rows are short; else None."""
    if not isinstance(sampler, SeededSampler) or (draft is not None and gamma < 1):
        return None
    if target.why_no_chain(draft, draft_width) is not None:
        return None
    limits = [model.max_positions for model in (target, draft) if model is not None and model.max_positions]
    if min(limits, default=gamma + 2) < gamma + 2:  # what a recording runs through must be there
        return None
    return Chain(target, draft, trie, sampler, processor, width, draft_width, gamma)
