"""What proposes forests (docs/design.md section 2)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from dsbd_cli.decoding.law.distribution import (
    LogitsProcessor,
    Row,
    Sampler,
    Support,
    draw_layer,
    joint,
    most_probable,
    pass_over,
)
from dsbd_cli.decoding.methods.best_first import most_probable_nodes
from dsbd_cli.decoding.model.protocol import Compute, TreeModel
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, draft_room


class Proposer(Protocol):
    """Whatever proposes a forest: a draft model today."""

    @property
    def exhausted(self) -> bool:
        """Whether it can't go on (out of context): decoding goes on plain, same law."""

    def begin(self, beams: list[Node], depth: int) -> None:
        """Launch what `propose` will be asked for next, where a device can work on its own."""

    def propose(
        self, beams: list[Node], depth: int, width: int | None = None
    ) -> Generator[Compute, None, Forest]:
        """A forest of at most `depth` layers on the unfinished `beams` (their `score` is known).

        Yields what has to be computed on the way.

        Args:
            width: the most draws of a layer, where that is to be less than W_S.
        """

    def retain(self, leaves: list[Node]) -> None:
        """The iteration is over: only `leaves` and their ancestors matter from now on."""


class CapturedProposer(Protocol):
    """A proposer on a device (`device.proposer`), which has no place for every iteration."""

    def falling_back_to(self, host: Proposer) -> Proposer:
        """This one, with the proposer that it asks where it has no place."""


class DraftModelProposer:
    """Draws each layer from the draft model's `q_beam`, or takes its most probable continuations.

    Layer 1 weighs the parents by the TARGET's l, which is known exactly and a better proposal than
    the draft's own prefix likelihood; deeper layers add the draft's conditionals on top. Below a node that
    the target has computed already (`Run.survivors`) its own conditionals stand in for the draft's.

    Args:
        draft: the draft model, prefilled with the same prompt.
        width: W_S.
        best: take the W_S most probable distinct continuations (`cover`) instead of draws.
        mass: of those, only the first that hold this much of their joint probability together.
        distinct: draws without replacement, as the target's.
        target: the target, where its conditionals may be used: with `best` only, for q must be the draft's.
        target_top: how many best entries of a target row may be asked for; 0: any number.
        nodes: of a forest that the target is to compute, the most probable ones; 0: all.
        numbers: layers that every forest has random numbers for, however deep it is: a device can then be given
            those of the next before it is known how deep this one is.
    """

    def __init__(
        self, draft: TreeModel, trie: Trie, processor: LogitsProcessor, width: int, sampler: Sampler, best: bool,
        mass: float = 1.0, distinct: bool = False, target: TreeModel | None = None, target_top: int = 0,
        nodes: int = 0, numbers: int = 0,
    ) -> None:  # fmt: skip
        self._draft, self._trie, self._processor = draft, trie, processor
        self._width, self._sampler, self._best, self._mass = width, sampler, best, mass
        self._distinct, self._target, self._nodes = distinct, target, nodes
        self._numbers = numbers
        self._entries = min(target_top or processor.top_n, processor.top_n)
        self.exhausted = False

    def begin(self, beams: list[Node], depth: int) -> None:
        """Nothing: the host draws every layer before the next one can be computed."""

    def propose(
        self, beams: list[Node], depth: int, width: int | None = None
    ) -> Generator[Compute, None, Forest]:
        layers: list[DraftLayer] = []
        width = self._width if width is None else width
        room = draft_room(self._draft.max_depth, beams)
        self.exhausted = room <= 0
        # Below a token that the draft does not have, nothing is drafted.
        beams = [node for node in beams if self._draft.reads(node)]
        if not beams:
            return Forest()
        parents, scores = beams, [node.score for node in beams]
        probable: dict[Node, float] = {}
        for _ in range(min(depth, room)):
            if unknown := [node for node in parents if not self._knows(node)]:
                yield Compute(self._draft, unknown)
            support = self._joint(parents, scores)
            if self._best:
                sample = [int(i) for i in most_probable(support, width, self._mass)]
            else:
                sample = draw_layer(self._sampler, support.prob, width, self._distinct)
            draws = [self._trie.child(parents[support.parent[i]], int(support.token[i])) for i in sample]
            layers.append(DraftLayer(parents, support, draws))
            found = {
                node: scores[support.parent[i]] + float(support.logp[i])
                for node, i in zip(draws, sample, strict=True)
                if node.finish is None
            }
            if not found:
                break
            probable |= found
            parents, scores = list(found), list(found.values())
        if len(layers) < self._numbers:
            pass_over(self._sampler, (self._numbers - len(layers)) * self._width)
        if self._nodes:
            layers = most_probable_nodes(layers, probable, self._nodes, self._knows)
        return Forest(layers)

    def _knows(self, node: Node) -> bool:
        """Whether the target's own conditionals below a node are there."""
        return self._target is not None and self._target.has_logits(node)

    def _said(self, node: Node) -> Row:
        """Those conditionals."""
        assert self._target is not None
        return Row(*self._target.best(node, self._entries))

    def _joint(self, parents: list[Node], scores: list[float]) -> Support:
        """`q_beam` over these parents, the target's conditionals where they are known."""
        if not any(map(self._knows, parents)):
            return self._draft.joint(parents, scores, self._processor)
        rows = [
            self._said(node) if self._knows(node) else Row(*self._draft.best(node, self._processor.top_n))
            for node in parents
        ]
        return joint(scores, rows, self._processor)

    def retain(self, leaves: list[Node]) -> None:
        self._draft.retain(leaves)
