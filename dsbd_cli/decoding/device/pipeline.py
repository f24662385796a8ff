"""Pipelined iterations of `cover`: the device is one iteration ahead of the host, which commits what it decided.

The host's side of `CoverIteration`: what the device decided becomes nodes, and the caches learn of it.
Launching ahead, waiting, committing and dropping are one call, `step`, so their order cannot be got
wrong. docs/design.md section 3 (why `cover` can run ahead) and section 5 (the cache).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dsbd_cli.decoding.device.iteration import (
    CoverIteration,
    DraftedLayer,
    Outcome,
    Sent,
    Space,
    layer_of,
    living,
)
from dsbd_cli.decoding.forward.capture import InFlight
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler, SeededSampler
from dsbd_cli.decoding.law.width import DistinctWidth
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.protocol import Commit
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node

# Layers for which uniforms are taken from a sampler at a time.
_BLOCK = 64


class _Uniforms:
    """What a request draws with: uniforms, looked at by launches and used by committed layers, and T.

    The sampler itself moves on in blocks, and to where it belongs by `settle`.

    Attributes:
        temperature, top_p: what they are drawn under.
        mass, min_width: how many draws a layer has (`layout.CoverRequestFields`).
    """

    def __init__(
        self,
        sampler: SeededSampler,
        width: int,
        processor: LogitsProcessor,
        rule: DistinctWidth | None = None,
    ) -> None:
        self.temperature, self.top_p = processor.temperature, processor.enough
        self.mass, self.min_width = (1.0, width) if rule is None else (rule.enough, rule.min_width)
        self._sampler, self._width = sampler, width
        self._block = np.zeros((0, width))
        self._used = 0

    def ahead(self, layers: int) -> np.ndarray:
        """Those of the next `layers` layers: float64 [layers, W]."""
        if self._used + layers > len(self._block):
            self.settle()
            self._block = self._sampler.peek(max(layers, _BLOCK) * self._width).reshape(-1, self._width)
        return self._block[self._used : self._used + layers]

    def use(self) -> None:
        """A layer was committed."""
        self._used += 1

    def settle(self) -> None:
        """Let the sampler go on from where committed layers end."""
        self._sampler.uniforms(self._used * self._width)
        self._block, self._used = self._block[self._used :], 0


@dataclass
class _Part:
    """One request's part of an iteration in flight.

    Attributes:
        beams: node by place, None where there is none; known once the iteration before is committed.
        above: the parents by place, where the draft computes them in this iteration.
    """

    space: Space
    beams: list[Node | None] = field(default_factory=list)
    above: list[Node] = field(default_factory=list)


@dataclass
class _Iteration:
    flight: InFlight
    parts: list[_Part]


@dataclass
class _Committed:
    """What became of one request's part.

    Attributes:
        whole: the request goes on from the last of its layers.
        draws: of that layer. layers: how many there were.
        places: the forest's nodes by their places in it.
    """

    forest: Forest
    whole: bool
    draws: list[Node]
    layers: int
    places: list[list[Node | None]]


class Pipeline:
    """Runs `cover` iterations of R requests on the device, one ahead of the host (`model.protocol.Engine`).

    Args:
        target: captured and prefilled. draft: likewise, or None to sample without one.
        iteration: made for both, and for as many requests.
        stopped: told why nothing can be launched any more.
    """

    def __init__(
        self, target: HfTreeModel, draft: HfTreeModel | None, iteration: CoverIteration,
        stopped: Callable[[CannotCapture | OutOfMemory], None],
    ) -> None:  # fmt: skip
        self._target, self._draft, self._iteration, self._stopped = target, draft, iteration, stopped
        self._models = [target] if draft is None else [target, draft]
        limits = [model.max_depth for model in self._models if model.max_depth is not None]
        self._deepest = min(limits) - iteration.layout.gamma if limits else None
        self._in_flight: deque[_Iteration] = deque()
        self._usable = True  # else what is in flight still comes back, and the host goes on
        self._uniforms: list[_Uniforms] = []

    @property
    def in_flight(self) -> bool:
        """Whether an iteration is in flight: `step` may be called."""
        return bool(self._in_flight)

    def begin(self, requests: Sequence[Request]) -> bool:
        """Launch a first iteration from the requests' active sets, which no model has computed.

        Args:
            requests: R of them.

        Returns:
            Whether one is in flight: False where a model, a context or a sampler does not allow it.
        """
        if self._in_flight:
            return True
        if not self._usable or not all(self._ready(request) for request in requests):
            return False
        self._uniforms = [
            _Uniforms(_seeded(request.sampler), request.width, request.processor, _rule(request))
            for request in requests
        ]
        states = [self._state_of(request) for request in requests]
        if not self._launch(requests, states):
            return False
        for part, request in zip(self._in_flight[-1].parts, requests, strict=True):
            beams = request.hypotheses.active
            part.beams = [*beams, *[None] * (request.width - len(beams))]
        return True

    @torch.inference_mode()
    def step(self, requests: Sequence[Request], commit: Commit) -> list[Forest]:
        """Launch the next iteration, wait for the one in flight, and commit what it decided.

        Args:
            requests: those of `begin`.
            commit: called for every layer of every request, in order, with its draws and, where there
                is a drafted layer beside it, whether the forest holds each; returns whether the
                request goes on. Past a layer where it does not, what the device did is dropped.

        Returns:
            The forest of each request, as events show it.

        Raises:
            RunError: a model gave logits that are not finite.
        """
        if not self._in_flight:
            raise RuntimeError("step without begin: no iteration is in flight")
        if len(self._in_flight) == 1:
            self._launch_ahead(requests, committed=False)
        iteration = self._in_flight.popleft()
        outcomes = self._iteration.wait(iteration.flight)
        self._target.calls += 1
        if self._draft is not None:
            self._draft.calls += self._iteration.layout.gamma
        done = [
            self._commit(request, part, outcome, uniforms, commit)
            for request, part, outcome, uniforms in zip(
                requests, iteration.parts, outcomes, self._uniforms, strict=True
            )
        ]
        whole = all(one.whole for one in done)
        if whole and not self._in_flight:
            self._launch_ahead(requests, committed=True)
        for part, one in zip(iteration.parts, done, strict=True):
            self._adopt(part, one)
        if not whole:
            self.drop()
        elif self._in_flight:
            for part, one in zip(self._in_flight[0].parts, done, strict=True):
                part.beams = living(one.draws)
                if one.layers > self._iteration.layout.gamma > 0:
                    part.above = [node.parent for node in one.draws if node.parent is not None]
        else:
            self._settle()
        return [one.forest for one in done]

    def retain(self, leaves: Iterable[Node]) -> None:
        """Free every node that is neither one of `leaves` nor above one, in both caches."""
        leaves = list(leaves)
        for model in self._models:
            model.pool.retain(leaves)

    def drop(self) -> None:
        """Give up what is in flight: nobody will ask for it."""
        while self._in_flight:
            for part in self._in_flight.popleft().parts:
                self._iteration.release(part.space)
        self._target.clock.idle()
        self._settle()

    def _settle(self) -> None:
        for uniforms in self._uniforms:
            uniforms.settle()

    # Launching.

    def _ready(self, request: Request) -> bool:
        beams = request.hypotheses.active
        if not isinstance(request.sampler, SeededSampler) or not self._fits(beams[0].depth):
            return False
        if any(node in model.pool for model in self._models for node in beams):
            return False
        return all(node.parent is not None and node.parent in self._target.pool for node in beams)

    def _state_of(self, request: Request) -> np.ndarray:
        beams = request.hypotheses.active
        above = [node.parent for node in beams if node.parent is not None]
        draft_rows: list[int] = []
        if self._draft is not None:
            pool = self._draft.pool
            if lacking := [node for node in dict.fromkeys(above) if node not in pool]:
                self._draft.forward(lacking)
            draft_rows = [pool.mask_row(node) for node in above]
        return self._iteration.state_of(
            [node.token for node in beams],
            [node.score for node in beams],
            [self._target.pool.mask_row(node) for node in above],
            draft_rows,
            self._target.pool.position(beams[0]),
        )

    def _launch_ahead(self, requests: Sequence[Request], committed: bool) -> None:
        """Launch the iteration that follows, if it may be needed and has room.

        Args:
            committed: nothing is in flight; else the beams grow by one to gamma + 1 tokens first.
        """
        gamma = self._iteration.layout.gamma
        for request in requests:
            depth = request.hypotheses.active[0].depth
            if not self._usable or (not committed and depth + 1 >= request.trie.budget):
                return
            if not self._fits(depth if committed else depth + gamma + 1):
                return
        self._launch(requests, [None] * len(requests))

    def _launch(self, requests: Sequence[Request], states: Sequence[np.ndarray | None]) -> bool:
        spaces: list[Space] = []
        sent: list[Sent] = []
        try:
            for request, uniforms, state in zip(requests, self._uniforms, states, strict=True):
                spaces.append(self._iteration.reserve())
                origin = self._target.pool.position(request.hypotheses.active[0])
                ahead = uniforms.ahead(self._iteration.layout.window)
                sent.append(
                    Sent(
                        spaces[-1], ahead, origin, uniforms.temperature, uniforms.top_p, uniforms.mass,
                        uniforms.min_width, state,
                    )
                )  # fmt: skip
            flight = self._iteration.launch(sent)
        except (CannotCapture, OutOfMemory) as error:
            for space in spaces:
                self._iteration.release(space)
            self._usable = False
            self._stopped(error)
            return False
        self._in_flight.append(_Iteration(flight, [_Part(space) for space in spaces]))
        return True

    def _fits(self, depth: int) -> bool:
        """Whether both contexts hold an iteration from beams of that depth."""
        return self._deepest is None or depth <= self._deepest

    # Committing.

    def _commit(
        self, request: Request, part: _Part, outcome: Outcome, uniforms: _Uniforms, commit: Commit
    ) -> _Committed:
        forest, places = self._drafted(request, part.beams, outcome.drafted)
        above, whole = part.beams, True
        draws: list[Node] = []
        for depth, layer in enumerate(outcome.sampled):
            for i, parent in enumerate(above):
                if parent is not None and not layer.finite[i]:
                    raise self._target.rows.fail(parent)
            uniforms.use()
            draws = []
            for p, token, logp in zip(
                layer.parent.tolist(), layer.token.tolist(), layer.logp.tolist(), strict=True
            ):
                parent = above[p]
                assert parent is not None
                node = request.trie.child(parent, token)
                node.score = parent.score + logp
                draws.append(node)
            above = living(draws)
            held: list[bool] | None = None
            if depth < len(forest.layers):
                # The device looks for nodes that may have children; a drafted end is drafted as well.
                inside = frozenset(forest.layers[depth].draws)
                held = [one or node in inside for node, one in zip(draws, layer.held.tolist(), strict=True)]
            goes_on = commit(request, draws, held)
            # The device knows nothing of stop strings and budgets.
            whole = goes_on and all(node.finish in (None, "eos") for node in draws)
            if not whole:
                break
        return _Committed(forest, whole, draws, len(outcome.sampled), places)

    def _drafted(
        self, request: Request, beams: list[Node | None], layers: list[DraftedLayer]
    ) -> tuple[Forest, list[list[Node | None]]]:
        """The forest, and the nodes of each layer by their places in it."""
        trie = request.trie
        shown: list[DraftLayer] = []
        placed: list[list[Node | None]] = []
        parents, stopped = beams, False
        room = trie.budget - next(node.depth for node in beams if node is not None) - 1
        for drafted in layers[: max(0, room)]:  # the last layer of a budget needs no forest
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
                nodes = [None if (parent := parents[p]) is None else trie.child(parent, t) for p, t in tokens]
                parents = [None if node is None or node.finish is not None else node for node in nodes]
            else:
                nodes_above = [node for node in parents if node is not None]
                layer, parents = layer_of(trie, places, nodes_above, drafted)
                shown.append(layer)
                stopped = any(node.finish == "stop" for node in layer.draws)
            placed.append(parents)
        return Forest(shown, computed=True), placed

    def _adopt(self, part: _Part, done: _Committed) -> None:
        """Tell the caches which nodes of a reservation may live on; the next `retain` enters them."""
        layout, deepest = self._iteration.layout, done.draws[0].depth
        computed: dict[Node, int] = {node: i for i, node in enumerate(part.beams) if node is not None}
        for depth, nodes in enumerate(done.places):
            for i, node in enumerate(nodes):
                # The next iteration computes its beams itself.
                if node is not None and node.depth < deepest:
                    computed[node] = layout.width + depth * layout.draft_width + i
        self._target.pool.commit(part.space.target, computed)
        if self._draft is None or part.space.draft is None:
            return
        places: dict[Node, int] = {}
        for i, node in enumerate(part.above):
            places.setdefault(node, i)
        end = layout.draft_nodes - layout.width  # the forest's last layer is not computed by the draft
        for node, place in computed.items():
            if place < end:
                places[node] = layout.width + place
        self._draft.pool.commit(part.space.draft, places)


def _rule(request: Request) -> DistinctWidth | None:
    """What p alone says of a layer's width; None: W."""
    rule = request.dynamic_width
    return rule if isinstance(rule, DistinctWidth) else None


def _seeded(sampler: Sampler) -> SeededSampler:
    assert isinstance(sampler, SeededSampler)
    return sampler
