"""What proposes forests, and how deep they are worth drafting (docs/design.md section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler, draw_layer, most_probable
from dsbd_cli.decoding.model.protocol import TreeModel
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, draft_room

# What is believed of a layer before any was tried. Measured: more costs short answers a third of their speed.
_PRIOR = 0.65
# Weight of the newest observation: the last five or so decide.
_RATE = 0.2
# A depth that was not tried comes to be believed as good as the one above it: else it is never tried again.
_FORGETTING = 0.05


class Proposer(Protocol):
    """Whatever proposes a forest: a draft model today."""

    exhausted: bool  # the proposer can't go on (out of context): decoding goes on plain, same law

    def begin(self, beams: list[Node], depth: int) -> None:
        """Launch what `propose` will be asked for next, where a device can work on its own."""

    def propose(self, beams: list[Node], depth: int) -> Forest:
        """A forest of at most `depth` layers on the unfinished `beams` (their `score` is known)."""

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
        best: take the W_S most probable distinct continuations (`cover`) instead of draws.
        distinct: draws without replacement, as the target's.
        mass: of those, only the first that hold this much of their joint probability together.
    """

    def __init__(
        self, draft: TreeModel, trie: Trie, processor: LogitsProcessor, width: int, sampler: Sampler, best: bool,
        mass: float = 1.0, distinct: bool = False,
    ) -> None:  # fmt: skip
        self._draft, self._trie, self._processor = draft, trie, processor
        self._width, self._sampler, self._best, self._mass = width, sampler, best, mass
        self._distinct = distinct
        self.exhausted = False

    def begin(self, beams: list[Node], depth: int) -> None:
        """Nothing: the host draws every layer before the next one can be computed."""

    def propose(self, beams: list[Node], depth: int) -> Forest:
        layers: list[DraftLayer] = []
        room = draft_room(self._draft.max_depth, beams)
        self.exhausted = room <= 0
        # Below a token that the draft does not have, nothing is drafted.
        beams = [node for node in beams if self._draft.reads(node)]
        if not beams:
            return Forest()
        parents, scores = beams, [node.score for node in beams]
        for _ in range(min(depth, room)):
            self._draft.forward(parents)
            support = self._draft.joint(parents, scores, self._processor)
            if self._best:
                sample = [int(i) for i in most_probable(support, self._width, self._mass)]
            else:
                sample = draw_layer(self._sampler, support.prob, self._width, self._distinct)
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


class DraftLength:
    """How many layers are worth drafting: as many as the recent past says will be used. No clocks.

    Where a forward costs about the same for any number of nodes (a GPU), a layer too many costs little.
    On a CPU it costs a draft forward and its nodes' share of the target's, and prompts differ: on some
    the draft is right four layers deep, on others hardly once.

    Exactness: the depth is chosen before an iteration's draft, from the layers that earlier iterations
    passed; that is a function of the past, and given the past every layer is drawn from its own
    distribution whatever is drafted below it (docs/design.md section 3). Costs are fixed numbers of the
    pair, not times measured in this run, so one seed gives one text on any machine.

    Args:
        cost: of one more drafted layer, draft forward and nodes, in target calls; above 0.
    """

    def __init__(self, cost: float) -> None:
        self._cost = cost
        # Probability that layer i passes if those above it did.
        self._passes: list[float] = []

    def depth(self, most: int) -> int:
        """The depth, 1 to `most` (at least 1), that promises most layers for what it costs."""
        self._passes += [_PRIOR] * (most - len(self._passes))
        best, chosen = 0.0, 1
        reached, layers = 1.0, 1.0  # a call yields one layer whatever is drafted
        for depth in range(1, most + 1):
            reached *= self._passes[depth - 1]
            layers += reached
            worth = layers / (1 + self._cost * depth)
            if worth > best:
                best, chosen = worth, depth
        return chosen

    def learn(self, passed: Sequence[bool]) -> None:
        """What became of an iteration's drafted layers that were verified, from the first on."""
        tried = 0
        for tried, good in enumerate(passed, 1):
            self._passes[tried - 1] += _RATE * (float(good) - self._passes[tried - 1])
            if not good:
                break
        for i in range(max(1, tried), len(self._passes)):
            self._passes[i] += _FORGETTING * (self._passes[i - 1] - self._passes[i])
