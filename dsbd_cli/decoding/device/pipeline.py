"""Pipelined iterations: the device is one iteration ahead of the host, which commits what it decided.

The host's side of `CoverIteration`: what the device decided becomes nodes, and the caches learn of it.
Launching ahead, waiting, committing and dropping are one call, `step`, so their order cannot be got
wrong. docs/design.md section 3 (why a device can run ahead) and section 5 (the cache). One module, since
what is launched ahead, what is committed and what is dropped are the same few records.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dsbd_cli.decoding.device.iteration import (
    AheadIteration,
    DraftedLayer,
    Rules,
    SampledLayer,
    Sent,
    Space,
    layer_of,
    living,
)
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.forward.capture import InFlight, OverlapClock
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth
from dsbd_cli.decoding.model.protocol import Commit
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node

# Layers for which uniforms are taken from a sampler at a time.
_BLOCK = 64


class Uniforms:
    """What a request draws with: uniforms, looked at by launches and used by committed layers.

    The sampler itself moves on in blocks, and to where it belongs by `settle`.

    Attributes:
        taken: layers committed so far.
    """

    def __init__(self, sampler: SeededSampler, width: int) -> None:
        self._sampler, self._width = sampler, width
        self._block = np.zeros((0, width))
        self._used = 0
        self.taken = 0

    def ahead(self, layers: int) -> np.ndarray:
        """Those of the next `layers` layers: float64 [layers, W]."""
        if self._used + layers > len(self._block):
            self.settle()
            self._block = self._sampler.peek(max(4 * layers, _BLOCK) * self._width).reshape(-1, self._width)
        return self._block[self._used : self._used + layers]

    def use(self, layers: int = 1) -> None:
        """So many layers were committed."""
        self._used += layers
        self.taken += layers

    def settle(self) -> None:
        """Let the sampler go on from where committed layers end."""
        self._sampler.uniforms(self._used * self._width)
        self._block, self._used = self._block[self._used :], 0


@dataclass(eq=False)
class Lane:
    """A request that has a place in the iterations.

    Attributes:
        seat: whose it is. target, draft: the models as it sees them.
        commit: what to do with its layers.
        uniforms: of its sampler. drafting: of the draft's, where forests are drawn: a row an iteration.
        rules: what its layers are drawn under.
        state: where it starts in the next launch; None: where its last iteration ended.
        deepest: beams deeper than that have no room for an iteration in a context; None: no limit.
        anew: what is not launched ahead starts anew, without what the target said: so it has to beside others, and
            its text depends on the forest.
        beams, above: of its next iteration (`Part`).
    """

    seat: Seat
    request: Request
    target: Any
    draft: Any
    commit: Commit
    uniforms: Uniforms
    drafting: Uniforms | None
    rules: Rules
    state: np.ndarray | None
    deepest: int | None
    anew: bool
    beams: list[Node | None]
    above: list[Node] = field(default_factory=list)

    def settle(self) -> None:
        """Let the samplers go on from what was used."""
        self.uniforms.settle()
        if self.drafting is not None:
            self.drafting.settle()

    def fits(self, depth: int) -> bool:
        """Whether the contexts hold an iteration from beams of that depth."""
        return self.deepest is None or depth <= self.deepest


@dataclass(eq=False)
class Part:
    """One request's part of an iteration in flight.

    Attributes:
        beams: node by place, None where there is none; known once the iteration before is committed.
        above: the parents by place, where the draft computes them in this iteration.
        void: nobody asks for it any more, and its space is given back.
    """

    lane: Lane
    space: Space
    beams: list[Node | None] = field(default_factory=list)
    above: list[Node] = field(default_factory=list)
    void: bool = False


@dataclass
class _Iteration:
    flight: InFlight
    parts: list[Part | None]


# By layer of a forest: the place of each continuation, by its parent's place and its token.
_Places = list[dict[tuple[int | None, int], int]]


@dataclass
class Committed:
    """What became of one request's part.

    Attributes:
        whole: the request goes on from the last of its layers.
        beams, parents: those of the next iteration and what is above each, by place, if `whole`.
        depth: of the last layer. layers: how many there were.
        computed: places in the iteration of beams and of the forest's nodes: at least of those that may live on.
    """

    forest: Forest
    whole: bool
    beams: list[Node | None]
    parents: list[Node]
    depth: int
    layers: int
    computed: dict[Node, int]


class _AsNodes:
    """A request's forest as nodes of its trie, for who looks at it.

    Attributes:
        forest: for the method. layers: how many of it count.
        computed: places in the iteration of beams and of the forest's nodes.
    """

    def __init__(self, forest: Forest, computed: dict[Node, int]) -> None:
        self.forest, self.computed, self.layers = forest, computed, len(forest.layers)

    def held(self, depth: int, layer: SampledLayer, nodes: Sequence[Node], kept: Sequence[int]) -> list[bool]:
        """Whether a layer of the forest holds each of the nodes that were drawn beside it.

        Args:
            kept: which of them go on.
        """
        inside = frozenset(self.forest.layers[depth].draws)
        return [node in inside for node in nodes]


class _AsNumbers:
    """The same as numbers: nodes are made of what is drawn only.

    Args:
        places: by layer, the place of each continuation by its parent's place and its token.
        computed: places of the beams.
        first: of each layer, its first place among the iteration's nodes.
        beams: places for beams.
    """

    def __init__(self, places: _Places, computed: dict[Node, int], first: Sequence[int], beams: int) -> None:
        self.forest, self.computed, self.layers = Forest(computed=True), computed, len(places)
        self._places, self._first = places, first
        self._above: list[int | None] = list(range(beams))  # of the parents, in their layer

    def held(self, depth: int, layer: SampledLayer, nodes: Sequence[Node], kept: Sequence[int]) -> list[bool]:
        """As `_AsNodes.held`; layer after layer."""
        inside, above = self._places[depth], self._above
        found = [inside.get((above[p], token)) for p, token in zip(layer.parent, layer.token, strict=True)]
        for node, place in zip(nodes, found, strict=True):
            if place is not None:
                self.computed[node] = self._first[depth] + place
        self._above = [found[i] for i in kept]
        return [place is not None for place in found]


class Pipeline:
    """Runs iterations of R requests on the device, one ahead of the host.

    Requests come and go between iterations: what the device did for one that is gone is not looked at.

    Args:
        iteration: made for both models, and for R requests.
        clock: the target's.
        stopped: told why nothing can be launched any more.
    """

    def __init__(
        self,
        iteration: AheadIteration,
        clock: OverlapClock,
        stopped: Callable[[CannotCapture | OutOfMemory], None],
    ) -> None:
        self._iteration, self._clock, self._stopped = iteration, clock, stopped
        layout = iteration.layout
        self._lanes: list[Lane | None] = [None] * layout.requests
        # Of each layer of the forest, its first place among the iteration's nodes.
        self._first = [layout.width + depth * layout.draft_width for depth in range(layout.gamma)]
        self._in_flight: deque[_Iteration] = deque()
        self._usable = True  # else what is in flight still comes back, and the host goes on

    @property
    def forest_shape(self) -> tuple[int, int]:
        """W_S and gamma."""
        return self._iteration.layout.draft_width, self._iteration.layout.gamma

    @property
    def drafts(self) -> bool:
        """Whether its iterations have forests: it is given a draft then."""
        return self._iteration.layout.gamma > 0

    @property
    def steps_s(self) -> float:
        """Seconds that the device's steps took the host, on a machine without one (`Captures.steps_s`)."""
        return self._iteration.captures.steps_s

    def seat(self, target: Any, draft: Any, forests: bool = True) -> Seat:
        """A place for a request that these models serve: `HfTreeModel`s, or `RequestModel`s.

        Args:
            forests: whether anybody looks at the forests; else they stay numbers, and the host's share of an
                iteration does not grow with them. With stop strings they are always looked at: a node may end by
                one, which the device cannot see.
        """
        return Seat(self, target, draft, forests)

    @torch.inference_mode()
    def join(self, seat: Seat, request: Request, commit: Commit) -> Lane | None:
        """A lane for a request, from its active set on; None where there is none."""
        models = [model for model in (seat.target, seat.draft) if model is not None]
        limits = [model.max_depth for model in models if model.max_depth is not None]
        deepest = min(limits) - self._iteration.layout.gamma if limits else None
        beams = request.hypotheses.active
        if not self._usable or None not in self._lanes or not isinstance(request.sampler, SeededSampler):
            return None
        layout = self._iteration.layout
        computed = [[node for node in beams if node in model.tree] for model in models]
        # The host draws a layer of `cover` from what it knows, without another target call.
        if any(computed) and not layout.drawn:
            return None
        if not all(node.parent is not None and node.parent in seat.target.tree for node in beams):
            return None
        if layout.drawn and not isinstance(request.draft_sampler, SeededSampler):
            return None
        uniforms, drafting = self._streams(request)
        rules = _rules(request, seat.target.tree.prompt_length - 1 + request.trie.budget)
        places = [*beams, *[None] * (request.width - len(beams))]
        anew = layout.memory_size > 0 and isinstance(request.dynamic_width, ThresholdWidth)
        lane = Lane(
            seat, request, seat.target, seat.draft, commit, uniforms, drafting, rules, None, deepest, anew, places
        )  # fmt: skip
        if not lane.fits(beams[0].depth):
            return None
        for model, nodes in zip(models, computed, strict=True):  # the iteration computes them itself
            model.tree.roll_back(nodes)
            model.logits.forget(nodes)
        lane.state = self._state_of(lane)
        self._lanes[self._lanes.index(None)] = lane
        # With one lane nobody else can join: the device may begin while the host is busy.
        if len(self._lanes) == 1 and not self._launch([lane]):
            self._leave(lane)
            return None
        return lane

    def _streams(self, request: Request) -> tuple[Uniforms, Uniforms | None]:
        """The random numbers of p, and of q where forests are drawn."""
        layout = self._iteration.layout
        assert isinstance(layout, CoverLayout)
        assert isinstance(request.sampler, SeededSampler)
        uniforms = Uniforms(request.sampler, layout.numbers)
        if not layout.drawn:
            return uniforms, None
        assert isinstance(request.draft_sampler, SeededSampler)
        return uniforms, Uniforms(request.draft_sampler, layout.gamma * layout.draft_width)

    @torch.inference_mode()
    def step(self, ahead: bool = True) -> None:
        """Launch the next iteration, wait for the one in flight, and commit what it decided.

        Args:
            ahead: whether to launch; without, what was in flight is the last, and lanes may move (`Seat.move`).

        `commit` of every lane is called for every layer, in order, with its draws and, where there is a
        drafted layer beside it, whether the forest holds each, or the verdicts on that layer's draws; it returns
        whether the request goes on. Past a layer where it does not, what the device did is dropped.

        Raises:
            RunError: a model gave logits that are not finite.
        """
        lanes = [lane for lane in self._lanes if lane is not None]
        if not self._in_flight and (not lanes or not self._launch(lanes)):
            for lane in lanes:
                self._leave(lane)
            return
        if ahead and len(self._in_flight) == 1:
            self._launch_ahead()
        iteration = self._in_flight.popleft()
        wanted = [part is not None and not part.void for part in iteration.parts]
        outcomes = self._iteration.wait(iteration.flight, wanted)
        done: list[tuple[Part, Committed]] = []
        for part, outcome in zip(iteration.parts, outcomes, strict=True):
            if part is None or outcome is None:
                continue
            lane = part.lane
            lane.target.calls += 1
            if lane.draft is not None:
                lane.draft.calls += self._iteration.layout.gamma
            done.append((part, self._commit(part, outcome)))
        for part, one in done:
            lane = part.lane
            lane.beams = one.beams
            lane.above = one.parents if one.layers > self._iteration.layout.gamma > 0 else []
        # What could not be launched before its beams were known may be now, before the caches are told.
        alive = [part.lane for part, one in done if one.whole]
        everyone = len(alive) == sum(lane is not None for lane in self._lanes)
        fit = all(lane.fits(lane.request.hypotheses.active[0].depth) for lane in alive)
        starts_anew = any(lane.anew for lane in alive)
        if ahead and alive and everyone and fit and not self._in_flight and not starts_anew:
            self._launch(alive)
        for part, one in done:
            self._adopt(part, one)
            part.lane.seat.forest = one.forest
            self._go_on(part.lane, one)
        if not self._in_flight:
            self._clock.idle()

    @property
    def empty(self) -> bool:
        """Whether no request is in the iterations."""
        return all(lane is None for lane in self._lanes)

    def release(self) -> None:
        """Let go of what was captured; it is captured anew when somebody joins."""
        self._iteration.captures.release()

    def has(self, lane: Lane) -> bool:
        """Whether the request is in the iterations."""
        return any(lane is one for one in self._lanes)

    def leave(self, lane: Lane) -> None:
        """A request goes, whatever the device is doing for it."""
        if self.has(lane):
            self._leave(lane)
        if self.empty:
            self._in_flight.clear()
            self._clock.idle()

    def _go_on(self, lane: Lane, one: Committed) -> None:
        """Keep a lane if the device goes on from where it is; its next part then learns of its beams."""
        following = self._part_of(lane)
        if (
            not one.whole
            or not self._usable
            or (following is None and (self._in_flight or lane.anew or not lane.fits(one.depth)))
        ):
            self._leave(lane)
        elif following is not None:
            following.beams, following.above = lane.beams, lane.above
        else:
            lane.settle()

    def _leave(self, lane: Lane) -> None:
        for iteration in self._in_flight:
            for part in iteration.parts:
                if part is not None and part.lane is lane and not part.void:
                    part.void = True
                    part.space.release()
        self._lanes[self._lanes.index(lane)] = None
        lane.settle()

    def _part_of(self, lane: Lane) -> Part | None:
        """The lane's part of the iteration in flight behind the one that was committed."""
        parts = self._in_flight[0].parts if self._in_flight else []
        return next((part for part in parts if part is not None and part.lane is lane), None)

    # Launching.

    def _state_of(self, lane: Lane) -> np.ndarray:
        beams = lane.request.hypotheses.active
        above = [node.parent for node in beams if node.parent is not None]
        draft_rows: list[int] = []
        if lane.draft is not None:
            tree = lane.draft.tree
            if lacking := [node for node in dict.fromkeys(above) if node not in tree]:
                lane.draft.forward(lacking)
            draft_rows = [tree.mask_row(node) for node in above]
        return self._iteration.state_of(
            [node.token for node in beams],
            [node.score for node in beams],
            [lane.target.tree.mask_row(node) for node in above],
            draft_rows,
            lane.target.tree.position(beams[0]),
        )

    def _launch_ahead(self) -> None:
        """Launch the iteration that follows, for those that may need one and have room for it.

        Beams grow by one to gamma + 1 tokens first.
        """
        if not self._usable:
            return
        ahead = []
        for lane in self._lanes:
            if lane is None:
                continue
            depth = lane.request.hypotheses.active[0].depth
            if lane.state is not None or (  # it joins now
                depth + 1 < lane.request.trie.budget and lane.fits(depth + self._iteration.layout.gamma + 1)
            ):
                ahead.append(lane)
        if ahead:
            self._launch(ahead)

    def _launch(self, lanes: Sequence[Lane]) -> bool:
        parts: list[Part | None] = []
        sent: list[Any] = []
        if not self._usable:
            return False
        try:
            for lane in self._lanes:
                if lane is None or not any(lane is one for one in lanes):
                    parts.append(None)
                    sent.append(None)
                    continue
                space = Space.of(
                    self._iteration.layout, lane.target.tree, None if lane.draft is None else lane.draft.tree
                )
                parts.append(Part(lane, space))
                sent.append(self._sent(lane, space))
            flight = self._iteration.launch(sent)
        except (CannotCapture, OutOfMemory) as error:
            for part in parts:
                if part is not None:
                    part.space.release()
            self._usable = False
            self._stopped(error)
            return False
        for part in parts:
            if part is not None and (part.lane.state is not None or not self._in_flight):
                part.beams, part.above = part.lane.beams, part.lane.above
                part.lane.state = None
        self._in_flight.append(_Iteration(flight, parts))
        return True

    def _sent(self, lane: Lane, space: Space) -> Any:
        """What an iteration is sent of a request."""
        layout = self._iteration.layout
        assert isinstance(layout, CoverLayout)
        origin = lane.target.tree.position(lane.request.hypotheses.active[0])
        ahead = lane.uniforms.ahead(layout.window)
        drafting = None
        if lane.drafting is not None:
            flying = sum(
                any(part is not None and part.lane is lane for part in one.parts) for one in self._in_flight
            )
            drafting = lane.drafting.ahead(flying + 1)[flying]
        return Sent(space, ahead, origin, lane.rules, lane.state, drafting)

    # Committing.

    def _commit(self, part: Part, outcome: Any) -> Committed:
        """Make nodes of what came back, commit its layers, and say where the request goes on."""
        lane, request, uniforms, commit = part.lane, part.lane.request, part.lane.uniforms, part.lane.commit
        if lane.drafting is not None:
            lane.drafting.use()
        drafted = self._drafted(lane, part.beams, outcome.drafted)
        above, whole = part.beams, True
        reached = next(node.depth for node in above if node is not None)
        searching = self._iteration.layout.kept > 0
        draws: list[Node] = []
        passed = True
        for depth, layer in enumerate(outcome.sampled):
            for i, parent in enumerate(above):
                if parent is not None and not layer.finite[i]:
                    raise lane.target.logits.fail(parent)
            uniforms.use()
            draws = []
            for p, token, logp in zip(layer.parent, layer.token, layer.logp, strict=True):
                parent = above[p]
                assert parent is not None
                node = request.trie.child(parent, token)
                node.score = logp if searching else parent.score + logp
                draws.append(node)
            shown, kept = draws, list(range(len(draws)))
            if searching:
                # The device knows the candidates that end by themselves, and takes the best of the others.
                going = [i for i, node in enumerate(shown) if node.token not in request.trie.eos_ids]
                kept = going[: request.width]
                draws = [shown[i] for i in kept]
            above = living(draws)
            held: list[bool] | None = None
            if depth < drafted.layers and passed:  # else it is drawn from the one beam that is kept
                # The device looks for nodes that may have children; a drafted end is drafted as well.
                held = drafted.held(depth, layer, shown, kept)
                passed = all(held[i] for i, node in zip(kept, above, strict=True) if node is not None)
                if self._iteration.layout.drawn:
                    held = layer.verdicts
            goes_on = commit(shown, held)
            # The device knows nothing of stop strings and budgets.
            whole = goes_on and all(node.finish in (None, "eos") for node in draws)
            reached += 1
            if not whole:
                break
        if request.kv_one and whole:
            best = max((node for node in above if node is not None), key=lambda node: node.score)
            above = [node if node is best else None for node in above]
        parents = [node.parent for node in draws if node.parent is not None]
        return Committed(
            drafted.forest, whole, above, parents, reached, len(outcome.sampled), drafted.computed
        )

    def _drafted(
        self, lane: Lane, beams: list[Node | None], layers: list[DraftedLayer]
    ) -> _AsNodes | _AsNumbers:
        """What was drafted below `beams`, as far as the budget has room: its last layer needs no forest."""
        room = lane.request.trie.budget - next(node.depth for node in beams if node is not None) - 1
        layers = layers[: max(0, room)]
        computed = {node: i for i, node in enumerate(beams) if node is not None}
        if not lane.seat.forests:
            return _AsNumbers(self._numbers(lane, beams, layers), computed, self._first, len(beams))
        forest, placed = self._nodes(lane, beams, layers)
        for first, nodes in zip(self._first, placed, strict=False):
            computed.update((node, first + i) for i, node in enumerate(nodes) if node is not None)
        return _AsNodes(forest, computed)

    def _numbers(self, lane: Lane, beams: list[Node | None], layers: list[DraftedLayer]) -> _Places:
        """The forest by places and tokens."""
        numbered: _Places = []
        parents = [i for i, node in enumerate(beams) if node is not None]
        for drafted in layers:
            if not parents:
                break
            if not drafted.finite[parents].all():
                self._nodes(lane, beams, layers)  # tells which node it was
            above, tokens = drafted.parent[drafted.draws].tolist(), drafted.token[drafted.draws].tolist()
            places: dict[tuple[int | None, int], int] = {}
            for i, key in enumerate(zip(above, tokens, strict=True)):
                places.setdefault(key, i)
            numbered.append(places)
            parents = [i for i, token in enumerate(tokens) if token not in lane.request.trie.eos_ids]
        return numbered

    def _nodes(
        self, lane: Lane, beams: list[Node | None], layers: list[DraftedLayer]
    ) -> tuple[Forest, list[list[Node | None]]]:
        """The forest, and the nodes of each layer by their places in it."""
        trie = lane.request.trie
        shown: list[DraftLayer] = []
        placed: list[list[Node | None]] = []
        parents, stopped = beams, False
        for drafted in layers:
            places = [i for i, parent in enumerate(parents) if parent is not None]
            if not places:
                break
            if not all(drafted.finite[i] for i in places):
                raise lane.draft.logits.fail(next(node for node in parents if node is not None))
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

    def _adopt(self, part: Part, done: Committed) -> None:
        """Tell the caches which nodes of a reservation may live on; the next `retain` enters them."""
        layout = self._iteration.layout
        # The next iteration computes its beams itself.
        computed = {node: place for node, place in done.computed.items() if node.depth < done.depth}
        target, draft = part.space.trees
        target.commit(part.space.target, computed)
        if draft is None or part.space.draft is None:
            return
        places: dict[Node, int] = {}
        for i, node in enumerate(part.above):
            places.setdefault(node, i)
        end = layout.draft_nodes - layout.width  # the forest's last layer is not computed by the draft
        for node, place in computed.items():
            if place < end:
                places[node] = layout.width + place
        draft.commit(part.space.draft, places)


class Seat:
    """A request's place in a `Pipeline` (`model.protocol.Engine`)."""

    def __init__(self, pipeline: Pipeline, target: Any, draft: Any, forests: bool = True) -> None:
        self.pipeline, self.target, self.draft, self.forests = pipeline, target, draft, forests
        self.forest = Forest()
        self._lane: Lane | None = None

    def begin(self, request: Request, commit: Commit) -> bool:
        """Take a lane, if it has none."""
        if self._lane is None or not self.pipeline.has(self._lane):
            self._lane = self.pipeline.join(self, request, commit)
        return self._lane is not None

    def step(self) -> None:
        """One iteration for all who have a seat."""
        self.pipeline.step()

    def move(self, pipeline: Pipeline, draft: Any) -> None:
        """Go on in another pipeline; what is in flight for the request is dropped (`Pipeline.step`).

        Args:
            draft: the model as the request sees it, or None where nothing is drafted there.
        """
        lane = self._lane if self._lane is not None and self.pipeline.has(self._lane) else None
        self.leave()
        self.pipeline, self.draft, self.forest = pipeline, draft, Forest()
        if draft is not None:  # since it was last asked, most of what it knows has died
            draft.retain(() if lane is None else lane.request.hypotheses.active)
        if lane is not None:
            self._lane = pipeline.join(self, lane.request, lane.commit)

    def leave(self) -> None:
        """The request goes: nobody will ask for what is in flight for it."""
        if self._lane is not None:
            self.pipeline.leave(self._lane)
            self._lane = None

    def retain(self, leaves: Iterable[Node]) -> None:
        """Free every node that is neither one of `leaves` nor above one, in both trees."""
        leaves = list(leaves)
        for model in (self.target, self.draft):
            if model is not None:
                model.tree.retain(leaves)


def _rules(request: Request, last: int) -> Rules:
    """What a request's layers are drawn under; `last`: the position of its budget's last token."""
    processor, rule = request.processor, request.dynamic_width
    rules = Rules(processor.temperature, processor.enough, min_width=request.width, last=last)
    if isinstance(rule, DistinctWidth):
        rules = rules._replace(mass=rule.enough, min_width=rule.min_width)
    elif isinstance(rule, ThresholdWidth):
        rules = rules._replace(slack=rule.slack, min_width=rule.min_width)
    return rules._replace(one_beam=request.kv_one)
