"""Dynamic-width speculative beam decoding: draft a forest, verify it layer by layer (docs/design.md section 3).

One iteration is: the proposer drafts up to gamma layers below the live beams; ONE target call computes
the logits of every node; then layers are committed for as long as their target logits are known. Beam
sampling is this loop without a forest, speculative sampling is it with one beam and one draw a layer.

The rules themselves are in `law/verification.py`; where an engine runs whole iterations on the device
(`device/pipeline.py`), it decides what this page decides, from the same random numbers. One module, since
the loop, the run that it works on and how its needs are served are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from dsbd_cli.decoding.law.distribution import Sampler, Support, draw_layer, pass_over
from dsbd_cli.decoding.law.verification import (
    Verified,
    accept_distinct_draws,
    accept_draws,
    align,
    cover,
    covered,
    keys,
)
from dsbd_cli.decoding.law.width import DistinctWidth
from dsbd_cli.decoding.methods.ngrams import NgramForests
from dsbd_cli.decoding.methods.proposers import ForestShape, Proposer
from dsbd_cli.decoding.model.protocol import Compute, Engine, Need, TreeModel, Turn
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node

# A rule for one draw of p, of (p, q, the draft's draws).
Accept = Callable[[np.ndarray, np.ndarray, list[int], Sampler], Verified]
_Event = TypeVar("_Event")
_Value = TypeVar("_Value")


@dataclass(kw_only=True)
class Run(Request):
    """A request and what serves it.

    Attributes:
        target: prefilled target model.
        proposer: where forests come from, or None for plain decoding.
        keep_answer: leave the best finished sequence in the caches, for a prompt that goes on from it.
        survivors: what of a forest stands below the beams that go on stays computed, for the next one.
        shape: how large a forest is worth drafting, or None for always gamma layers of W_S.
        spare: what proposes where the draft is not worth asking; None: nothing.
        engine: runs `cover` iterations on the device, verification included, or None.
    """

    target: TreeModel
    proposer: Proposer | None = None
    keep_answer: bool = False
    survivors: bool = False
    shape: ForestShape | None = None
    spare: NgramForests | None = None
    engine: Engine | None = None
    _layers: list[Layer] = field(default_factory=list)
    _computed: list[Node] = field(default_factory=list)

    def propose(self) -> Generator[Compute, None, Forest]:
        """The iteration's forest: at most gamma layers, none that the budget has no room for, none that do not pay."""
        depth = self._depth()
        if self.proposer is None or depth <= 0:
            return Forest()
        most, width, spare, forest = depth, None, self.spare, Forest()
        if self.shape is not None:
            if spare is not None:
                self.shape.rival, spare.requests = max(1.0, spare.gain), self.shape.requests
            depth, width = self.shape.choose(most)
        if depth and (spare is None or not self.proposer.exhausted):
            forest = yield from self.proposer.propose(self.hypotheses.active, depth, width)
        # A draft that was asked may have nothing to say: its context is full, or it lacks the beams' last tokens.
        return forest if spare is None or forest.layers else spare.propose(self.hypotheses.active, most)

    def _depth(self) -> int:
        """Layers to draft: the last one of a sequence is drawn from logits already there, so budget less one."""
        return min(self.gamma, self.trie.budget - self.hypotheses.active[0].depth - 1)

    def launch_ahead(self, verify: str) -> None:
        """Launch what the next iteration of `dsbd` needs, where a device can work on its own.

        Text, panels and whatever else is made of this iteration's events then cost no time.
        """
        if self.hypotheses.stopped() or (verify == "cover" and self.logits_known()):
            return
        if self.engine is not None:
            self.engine.begin(self, self.take)
        elif self.proposer is not None and self._depth() > 0:
            self.proposer.begin(self.hypotheses.active, self._depth())
        else:
            self.target.begin(self.hypotheses.active)

    def advance(self, forest: Forest) -> Generator[Compute, None, None]:
        """The one target call of an iteration: the beams not computed yet, and the whole forest."""
        if not forest.computed:
            self._computed = [*self.hypotheses.active, *forest.unfinished()]
            yield Compute(self.target, self._computed)

    def take(self, draws: list[Node], held: list[bool] | None) -> bool:
        """Commit a layer that the engine drew, from the random numbers of `layers_of` (`protocol.Commit`)."""
        verified = None
        if held is not None and self.tested:
            verified = Verified((), tuple(held), sum(held) == len(draws))
        elif held is not None:
            # A finished sequence needs no node of the forest.
            verified = covered(
                (), [one or (None if node.finish else False) for node, one in zip(draws, held, strict=True)]
            )
        self.commit(draws, verified, len(self._layers))
        return not self.hypotheses.stopped()

    def engine_iteration(self, engine: Engine) -> Iterator[Layer | Iteration | Need]:
        """An iteration by the engine, which calls what it was begun with for every layer."""
        yield Turn(engine)
        layers = self.layers_taken()
        yield from layers
        if layers:  # one that has just come in may have to wait for the next iteration
            yield from self.finish_iteration(engine.forest, by=engine)

    def layers_taken(self) -> list[Layer]:
        """The layers that `take` has committed in this iteration."""
        return list(self._layers)

    def p_beam(self) -> Support:
        """The target distribution of the next layer, over active set x vocabulary (all their logits are known)."""
        active = self.hypotheses.active
        return self.target.joint(active, [node.score for node in active], self.processor)

    def logits_known(self) -> bool:
        """Whether the target distribution of the next layer is known without another target call."""
        return all(self.target.has_logits(node) for node in self.hypotheses.active)

    def node(self, support: Support, index: int) -> Node:
        """The sequence that continuation `index` of `p_beam` stands for, with its score."""
        parent = self.hypotheses.active[support.parent[index]]
        node = self.trie.child(parent, int(support.token[index]))
        node.score = parent.score + float(support.logp[index])
        return node

    def commit(
        self, draws: Sequence[Node], verified: Verified | None = None, drafted: int | None = None
    ) -> Layer:
        """Make `draws` the next layer, and test the stop rules through `hypotheses`.

        Args:
            verified: what verification made of the forest's layer; None where there was none to test.
            drafted: place of that layer in the forest.
        """
        for node in self.hypotheses.active:
            node.children = {}  # nothing asks below a parent again; lets dead branches go
        distinct = self.hypotheses.commit(draws)
        layer = Layer(tuple(draws), distinct)
        if verified is not None:
            verdicts = verified.verdicts
            layer = Layer(
                tuple(draws), distinct, len(verdicts), sum(verdicts), verdicts, drafted, verified.passed,
                verified.ended,
            )  # fmt: skip
        self._layers.append(layer)
        return layer

    def sample_layer(self) -> Layer:
        """W draws of `p_beam` (or as many as p alone asks for): the layer of plain beam sampling.

        It always has `tested` + W random numbers: a device can then be given them before p is known.
        """
        support, rule = self.p_beam(), self.dynamic_width
        width = rule.of(support.prob) if isinstance(rule, DistinctWidth) else self.width
        pass_over(self.sampler, self.tested)
        draws = draw_layer(self.sampler, support.prob, width, self.distinct)
        pass_over(self.sampler, self.width - width)
        return self.commit([self.node(support, i) for i in draws])

    def finish_iteration(
        self, forest: Forest, ahead: str | None = None, by: Engine | None = None
    ) -> Iterator[Iteration]:
        """Close an iteration: drop what is dead from the caches, and report.

        Args:
            ahead: the rule by which `dsbd` goes on, if it does: the next iteration is launched first.
            by: the engine that ran the iteration; it frees its caches itself.
        """
        if self.kv_one:
            self.hypotheses.keep_best_active()
        active = self.hypotheses.active
        event = Iteration(tuple(active), forest, tuple(self._layers))
        if self.spare is not None and self.spare.proposed(forest):
            self.spare.learn(self._layers)
        elif self.shape is not None and forest.layers:
            self.shape.learn(forest, self._layers)
        if self.spare is not None:
            self.spare.see(self._computed, active)
        self._layers.clear()
        best = self.hypotheses.best_finished() if self.keep_answer else None
        leaves = active if best is None else [*active, best]
        if self.survivors:
            leaves = [*leaves, *forest.below(active)]
        # The proposer first: it may still look at what the target said of the forest.
        for cache in (self.proposer, self.target) if by is None else (by,):
            if cache is not None:
                cache.retain(leaves)
        if ahead is not None:
            self.launch_ahead(ahead)
        yield event


def dsbd(run: Run, verify: str) -> Iterator[Layer | Iteration | Need]:
    """Decode until the stop rules hold; `verify` is `paper`, `continue` or `cover`."""
    engine = run.engine
    while not run.hypotheses.stopped():
        if engine is not None and engine.begin(run, run.take):
            yield from run.engine_iteration(engine)
            continue
        # With `cover` the first layer behind the prompt is sampled directly: its target logits are there
        # already, so drafting for it would be wasted.
        known = verify == "cover" and run.logits_known()
        forest = Forest() if known else (yield from run.propose())
        yield from run.advance(forest)
        yield from layers_of(run, forest, verify)
        yield from run.finish_iteration(forest, verify)


def layers_of(run: Run, forest: Forest, verify: str) -> Iterator[Layer]:
    """The layers that one iteration commits under the rule `verify`."""
    return cover_layers(run, forest) if verify == "cover" else accept_layers(run, forest, verify)


def accept_layers(run: Run, forest: Forest, verify: str) -> Iterator[Layer]:
    """`paper` and `continue`: accept or reject the forest's draws, layer by layer."""
    for depth, drafted in enumerate(forest.layers):
        layer = verify_layer(run, drafted, depth)
        yield layer
        # A draw that was filled up ends the iteration under `paper`; under `continue` it may be in the forest.
        if run.hypotheses.stopped() or not run.logits_known() or not (layer.passed or verify == "continue"):
            return
    yield run.sample_layer()


def verify_layer(run: Run, drafted: DraftLayer, depth: int, own_rule: Accept | None = None) -> Layer:
    """Commit W_L draws by testing those of one drafted layer against the target distribution.

    Args:
        own_rule: a rule of its own, for layers of one draw.
    """
    support = run.p_beam()
    union, p, q, draws = _aligned(run, support, drafted)
    rule = run.dynamic_width
    if isinstance(rule, DistinctWidth):
        width = rule.of(support.prob)
    else:
        width = run.width if rule is None else rule.for_draws(p, q, len(drafted.draws))
    if own_rule is not None:
        verified = own_rule(p, q, draws, run.sampler)
    else:
        accept = accept_distinct_draws if run.distinct else accept_draws
        verified = accept(p, q, draws, width, run.sampler)
    if run.tested:
        pass_over(run.sampler, run.tested - len(draws) + run.width - width)
    # A draw has mass under p, so its key is one of the support's own (ascending) keys.
    own = np.searchsorted(keys(support.parent, support.token), union[list(verified.draws)])
    return run.commit([run.node(support, int(i)) for i in own], verified, depth)


def _aligned(
    run: Run, support: Support, drafted: DraftLayer
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Keys, p and q on their joint support, and the draws as indices into it.

    Draws below a dead parent are -1, and q lacks them. Distinct draws depend on all earlier ones, so there
    q keeps them, below parents numbered behind the live ones, where p has no mass.
    """
    place = {node: i for i, node in enumerate(run.hypotheses.active)}
    # Where each parent of the draft stands among the accepted ones; -1 for the dead.
    new = np.array([place.get(node, -1) for node in drafted.parents], dtype=np.int64)
    if run.distinct:
        new = np.where(new < 0, len(place) + np.arange(len(new)), new)
    parent = new[drafted.support.parent]
    alive = parent >= 0
    union, p, q = align(
        keys(support.parent, support.token),
        support.prob,
        keys(parent[alive], drafted.support.token[alive]),
        drafted.support.prob[alive],
    )
    number = dict(zip(drafted.parents, new.tolist(), strict=True))
    draws = []
    for node in drafted.draws:
        where = -1 if node.parent is None else number[node.parent]
        key = (where << 32) | node.token
        draws.append(int(np.searchsorted(union, key)) if where >= 0 else -1)
    return union, p, q, draws


def cover_layers(run: Run, forest: Forest) -> Iterator[Layer]:
    """`cover`: sample each layer from the target, and go on while the forest holds every live draw.

    Without a forest this is one layer of beam sampling, from the same random numbers.
    """
    for depth, drafted in enumerate(forest.layers):
        support, rule = run.p_beam(), run.dynamic_width
        if isinstance(rule, DistinctWidth):
            width = rule.of(support.prob)
        else:
            width = run.width if rule is None else rule.for_cover(_mass_held(run, support, drafted))
        nodes: list[Node] = []
        inside = frozenset(drafted.draws)

        def held(
            index: int,
            support: Support = support,
            nodes: list[Node] = nodes,
            inside: frozenset[Node] = inside,
        ) -> bool | None:
            nodes.append(run.node(support, index))
            # A finished sequence needs no node of the forest.
            return nodes[-1] in inside or (None if nodes[-1].finish else run.target.has_logits(nodes[-1]))

        verified = cover(support.prob, width, held, run.sampler, run.distinct)
        pass_over(run.sampler, run.width - width)
        yield run.commit(nodes, verified, depth)
        if run.hypotheses.stopped() or not run.logits_known():
            return
    yield run.sample_layer()


def _mass_held(run: Run, support: Support, drafted: DraftLayer) -> float:
    """p's mass on the continuations in the drafted layer, and on those that finish by EOS.

    One that a stop string would finish counts only if drafted: finding it costs a text each. None
    finishes by length, for the last layer of the budget is never drafted (`Run.propose`).
    """
    place = {node: i for i, node in enumerate(run.hypotheses.active)}
    held = [(place[node.parent] << 32) | node.token for node in drafted.draws if node.parent in place]
    ends = np.isin(support.token, list(run.trie.eos_ids))
    inside = ends | np.isin(keys(support.parent, support.token), held)
    return float(support.prob[inside].sum())


# Needs.


def alone(loop: Iterator[_Event | Need]) -> Iterator[_Event]:
    """A loop with its needs served one by one: a request that shares nothing."""
    for event in loop:
        if isinstance(event, Compute):
            event.model.forward(event.nodes)
        elif isinstance(event, Turn):
            event.engine.step()
        else:
            yield event


def now(steps: Generator[Compute, None, _Value]) -> _Value:
    """What `steps` return, with their needs served one by one."""
    while True:
        try:
            need = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        need.model.forward(need.nodes)
