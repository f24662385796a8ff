"""What proposes forests (docs/design.md section 2)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler, most_probable
from dsbd_cli.decoding.model.protocol import Compute, TreeModel
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, draft_room


class Proposer(Protocol):
    """Whatever proposes a forest: a draft model today."""

    exhausted: bool  # the proposer can't go on (out of context): decoding goes on plain, same law

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
    the draft's own prefix likelihood; deeper layers add the draft's conditionals on top.

    Args:
        draft: the draft model, prefilled with the same prompt.
        width: W_S.
        distinct: take the W_S most probable distinct continuations (`cover`) instead of draws.
        mass: of those, only the first that hold this much of their joint probability together.
    """

    def __init__(
        self, draft: TreeModel, trie: Trie, processor: LogitsProcessor, width: int, sampler: Sampler, distinct: bool,
        mass: float = 1.0,
    ) -> None:  # fmt: skip
        self._draft, self._trie, self._processor = draft, trie, processor
        self._width, self._sampler, self._distinct, self._mass = width, sampler, distinct, mass
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
        for _ in range(min(depth, room)):
            yield Compute(self._draft, parents)
            support = self._draft.joint(parents, scores, self._processor)
            if self._distinct:
                sample = [int(i) for i in most_probable(support, width, self._mass)]
            else:
                sample = self._sampler.sample(support.prob, width)
            draws = [self._trie.child(parents[support.parent[i]], int(support.token[i])) for i in sample]
            layers.append(DraftLayer(parents, support, draws))
            found = {
                node: scores[support.parent[i]] + float(support.logp[i])
                for node, i in zip(draws, sample, strict=True)
                if node.finish is None
            }
            if not found:
                break
            parents, scores = list(found), list(found.values())
        return Forest(layers)

    def retain(self, leaves: list[Node]) -> None:
        self._draft.retain(leaves)
