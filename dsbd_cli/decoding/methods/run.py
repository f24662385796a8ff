"""What every method works on: the models, the hypotheses, the settings, and the running count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsbd_cli.decoding.law.distribution import Support
from dsbd_cli.decoding.law.draft_length import DraftLength
from dsbd_cli.decoding.law.width import WidthRule
from dsbd_cli.decoding.methods.proposers import Proposer
from dsbd_cli.decoding.model.protocol import Engine, TreeModel
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import Forest, Node


@dataclass(kw_only=True)
class Run(Request):
    """A request and what serves it.

    Attributes:
        target: prefilled target model.
        widths: the rule for the width of each layer.
        proposer: where forests come from, or None for plain decoding.
        kv_one: the memory-constrained mode.
        keep_answer: leave the best finished sequence in the caches, for a prompt that goes on from it.
        draft_length: how many layers are worth drafting, or None for always gamma.
        engine: runs `cover` iterations on the device, verification included, or None.
    """

    target: TreeModel
    widths: WidthRule
    proposer: Proposer | None = None
    kv_one: bool = False
    keep_answer: bool = False
    draft_length: DraftLength | None = None
    engine: Engine | None = None
    _layers: list[Layer] = field(default_factory=list)

    def propose(self) -> Forest:
        """The iteration's forest: at most gamma layers, and none that the budget leaves no room for."""
        depth = self._depth()
        if self.proposer is None or depth <= 0:
            return Forest()
        if self.draft_length is not None:
            depth = self.draft_length.depth(depth)
        return self.proposer.propose(self.hypotheses.active, depth)

    def _depth(self) -> int:
        """Layers to draft: the last one of a sequence is drawn from known rows, so budget less one."""
        return min(self.gamma, self.trie.budget - self.hypotheses.active[0].depth - 1)

    def look_ahead(self, verify: str) -> None:
        """Set off what the next iteration of `dsbd` needs, where a device can work on its own.

        Text, panels and whatever else is made of this iteration's events then cost no time.
        """
        if self.hypotheses.stopped() or (verify == "cover" and self.known()):
            return
        if self.engine is not None:
            self.engine.begin([self])
        elif self.proposer is not None and self._depth() > 0:
            if (begin := getattr(self.proposer, "begin", None)) is not None:
                begin(self.hypotheses.active, self._depth())
        elif (begin := getattr(self.target, "begin", None)) is not None:
            begin(self.hypotheses.active)

    def advance(self, forest: Forest) -> None:
        """The one target call of an iteration: the beams not computed yet, and the whole forest."""
        if not forest.computed:
            self.target.forward([*self.hypotheses.active, *forest.unfinished()])

    def p_beam(self) -> Support:
        """The law of the next layer, over the active set (all known)."""
        active = self.hypotheses.active
        return self.target.joint(active, [node.score for node in active], self.processor)

    def known(self) -> bool:
        """Whether the law of the next layer is known without another target call."""
        return all(self.target.has_logits(node) for node in self.hypotheses.active)

    def node(self, support: Support, index: int) -> Node:
        """The sequence that continuation `index` of `p_beam` stands for, with its score."""
        parent = self.hypotheses.active[support.parent[index]]
        node = self.trie.child(parent, int(support.token[index]))
        node.score = parent.score + float(support.logp[index])
        return node

    def commit(self, draws: Sequence[Node], **facts: object) -> Layer:
        """Make `draws` the next layer, and test the stop rules through `hypotheses`."""
        for node in self.hypotheses.active:
            node.children = {}  # nothing asks below a parent again; lets dead branches go
        distinct = self.hypotheses.commit(draws)
        layer = Layer(tuple(draws), distinct, **facts)  # type: ignore[arg-type]
        self._layers.append(layer)
        return layer

    def commit_covered(self, draws: Sequence[Node], verdicts: tuple[bool, ...], drafted: int | None) -> Layer:
        """`commit` a layer chosen without the forest, of which `verdicts` says draw by draw what the forest holds.

        Args:
            drafted: place of the forest's layer; None where there is none (and no verdicts).
        """
        return self.commit(
            draws,
            examined=len(verdicts),
            accepted=sum(verdicts),
            verdicts=verdicts,
            drafted=drafted,
            passed=drafted is not None and all(verdicts),
        )

    def draw_layer(self, width: int) -> Layer:
        """`width` iid draws of `p_beam`: the layer of plain beam sampling."""
        support = self.p_beam()
        return self.commit([self.node(support, i) for i in self.sampler.sample(support.prob, width)])

    def finish_iteration(
        self, forest: Forest, ahead: str | None = None, by: Engine | None = None
    ) -> Iterator[Iteration]:
        """Close an iteration: drop what is dead from the caches, and report.

        Args:
            ahead: the rule by which `dsbd` goes on, if it does: the next iteration is set off first.
            by: the engine that ran the iteration; it frees its caches itself.
        """
        if self.kv_one:
            self.hypotheses.keep_best_active()
        active = self.hypotheses.active
        event = Iteration(tuple(active), forest, tuple(self._layers))
        if self.draft_length is not None and forest.layers:
            self.draft_length.learn([layer.passed for layer in self._layers[: len(forest.layers)]])
        self._layers.clear()
        best = self.hypotheses.best_finished() if self.keep_answer else None
        leaves = active if best is None else [*active, best]
        for cache in (self.target, self.proposer) if by is None else (by,):
            if cache is not None:
                cache.retain(leaves)
        if ahead is not None:
            self.look_ahead(ahead)
        yield event
