"""What proposes forests, and how large they are worth drafting (docs/design.md section 2).

One module, since every iteration asks both: each module more that a steady iteration crosses is one more to read.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
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
from dsbd_cli.decoding.tree.events import Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, draft_room
from dsbd_cli.prices import Acceptance, Prices, Promise, Shape, best_forest, layers_per_ms

# Weight of the newest observation: the last five or so decide.
_RATE = 0.2
# A depth that was not tried comes to be believed as good as the one above it: else it is never tried again.
_FORGETTING = 0.05
# Iterations without a forest before one layer is tried again: as few as the first after one that passed, twice
# as many after each that was in vain.
_FIRST_REST, _LONGEST_REST = 4, 64
# What a try may cost of what was decoded since the last one: the draft has to read all that it has not seen.
_TRIAL = 0.1
# What the first forest must promise, in times plain beams: beliefs are rough, where what plain beams cost is known.
_WORTH = 1.1
# Layers within which it must have earned that the draft reads the prompt: most answers have as many.
_EARNED_IN = 48


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
                sample = most_probable(support, width, self._mass).tolist()
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


class ForestShape:
    """The forest that promises most layers a millisecond; none where plain beams do.

    Exactness: the shape is chosen before an iteration's forest is drafted, from the layers that earlier iterations
    passed; that is a function of the past, and given the past every layer is drawn from its own distribution
    whatever is drafted below it (docs/design.md section 3). Prices are numbers of a file, not times of this run,
    so one seed gives one text as long as the file stays.

    Args:
        prices: of the pair.
        acceptance: what is believed at first.
        narrow: whether layers may be narrower than W_S. A dynamic width depends on its layer, so it is given
            the whole of it.
        drawn: the forest's layers are draws, which are looked at one by one (`paper`, `continue`), not the most
            probable continuations.
        unread: prompt tokens that the draft has not read yet.
        layers: how many there will be at most.
        rate: weight of the newest observation.
        tries: whether what is not believed to pay is tried now and then.

    Attributes:
        requests: how many share each forward, so that their nodes are paid together; 1 where the text depends on
            the forest (all but `cover` of a fixed width and the deterministic mode): a request's text must not
            depend on its neighbours.
        rival: what is to be had without the draft, in times plain beams (`ngrams.NgramForests`).
    """

    def __init__(
        self, prices: Prices, acceptance: Acceptance, *, narrow: bool = True, drawn: bool = False,
        unread: int = 0, layers: int = _EARNED_IN, rate: float = _RATE, tries: bool = True,
    ) -> None:  # fmt: skip
        self._prices, self._beams, self._drawn = prices, acceptance.beams, drawn
        self._widths = acceptance.widths
        self._choice = self._widths if narrow else self._widths[-1:]
        self._first = acceptance.passes
        self._passes = [list(layer) for layer in acceptance.passes]
        self._nodes = list(acceptance.nodes)
        self.requests, self.rival, self._rate, self._tries = 1, 1.0, rate, tries
        self._rest, self._resting, self._unread = _FIRST_REST, 0, float(unread)
        self._earned_in = min(layers, _EARNED_IN)
        # Where no forest could pay even if all of it passed, none is ever tried.
        self._always = Acceptance(
            self._widths, ((1.0,) * len(self._widths),) * len(self._passes), acceptance.nodes
        )
        self._hopeless = self._best(self._always, len(self._passes)).gain <= self._needed()
        self._limit = self._widths[-1]  # W_S of the forest under way
        # By limit and requests: what is best; until something is learned.
        self._known: dict[tuple[int, int], Promise] = {}

    def begins(self, most: int) -> bool:
        """Whether the first forest, at most `most` layers deep, is worth that the draft reads the prompt.

        It is then taken to read it at once; else when it is first asked, or never.
        """
        begins = self._believed(most).gamma > 0
        if begins:
            self._unread = 0.0
        return begins

    def choose(self, most: int) -> Shape:
        """The shape of the next forest, at most `most` (at least 1) layers deep."""
        if self._hopeless and self.requests == 1:
            return Shape(0, 1)
        shape = self._believed(most)
        if shape.gamma:
            self._resting, self._unread = 0, 0.0
        elif self._tries:
            self._resting += 1
            if (
                self._resting > self._rest
                and self._affordable()
                and self._best(self._always, most).gain > self._needed()
            ):
                self._resting, self._rest, self._unread = 0, min(2 * self._rest, _LONGEST_REST), 0.0
                known, tries = self._acceptance(), [Shape(1, width) for width in self._choice]
                shape = max(tries, key=lambda one: self._worth(known, one))
        self._limit = shape.draft_width
        return shape

    def learn(self, forest: Forest, layers: Sequence[Layer]) -> None:
        """What became of an iteration's forest: the layers that were committed, from the first on."""
        tried = 0
        self._known.clear()
        for drafted, layer in zip(forest.layers[: len(self._passes)], layers, strict=False):
            self._see(tried, drafted, layer)
            tried += 1
            if not layer.passed:
                break
            # Where something else is proposed one layer that passed is no reason to try again so soon.
            self._rest = _FIRST_REST if self.rival == 1 else self._rest
        for depth in range(max(1, tried), len(self._passes)):
            above = self._passes[depth - 1]
            row = self._passes[depth]
            self._passes[depth] = [one + _FORGETTING * (a - one) for one, a in zip(row, above, strict=True)]

    def _see(self, depth: int, drafted: DraftLayer, layer: Layer) -> None:
        """Move the beliefs about one depth towards what a layer of each width would have done."""
        used = len(drafted.draws)
        # The draft's mass or its vocabulary ended it: a wider one would have been the same.
        ended = used < self._limit
        needed = least_width(drafted, layer, drawn=self._drawn) if layer.passed else None
        row, first = self._passes[depth], self._first[depth]
        lost = max([0.0, *(first[i] for i, width in enumerate(self._widths) if width <= used)])
        size = len({node for node in drafted.draws if node.finish is None})
        for i, width in enumerate(self._widths):
            if needed is not None:
                goal = float(width >= needed)
            elif width <= used or ended:
                goal = 0.0
            else:  # how a wider one would have done is not seen: what is believed at first, given that this failed
                goal = (first[i] - lost) / (1 - lost)
            row[i] += self._rate * (goal - row[i])
            held = min(width, size) if width <= used or ended else max(self._nodes[i], size)
            self._nodes[i] += self._rate * (held - self._nodes[i])

    def _affordable(self) -> bool:
        """Whether the draft catches up for a small part of what the layers since it was last asked have cost."""
        assert self._prices.draft is not None
        behind = self._prices.draft(self._unread + self._resting * self._beams)
        return behind <= _TRIAL * self._resting * self._layer_ms()

    def _needed(self) -> float:
        """What a forest must promise in times plain beams, of which each layer saves a part of the draft's prompt."""
        # Beside what is to be had without the draft its promise is as rough as the first one.
        least = self.rival * (_WORTH if self.rival > 1 else 1.0)
        if not self._unread or self._prices.draft is None:
            return least
        plain = self._earned_in * self._layer_ms()
        behind = self._prices.draft(self._unread)
        return self.rival * max(_WORTH, plain / (plain - behind)) if behind < plain else math.inf

    def _layer_ms(self) -> float:
        """What a layer of plain beams costs a request."""
        return self._prices.target(self.requests * self._beams) / self.requests + self._prices.layer_ms

    def _worth(self, known: Acceptance, shape: Shape) -> float:
        return layers_per_ms(self._prices, known, shape, requests=self.requests)

    def _acceptance(self) -> Acceptance:
        return Acceptance(self._widths, tuple(map(tuple, self._passes)), tuple(self._nodes), self._beams)

    def _believed(self, most: int) -> Shape:
        """What is believed to be best, if it promises enough."""
        key = most, self.requests
        if (found := self._known.get(key)) is None:
            found = self._known[key] = self._best(self._acceptance(), most)
        return found.shape if found.gain > self._needed() else Shape(0, 1)

    def _best(self, known: Acceptance, most: int) -> Promise:
        return best_forest(
            self._prices, known, requests=self.requests, beams=self._beams, max_gamma=most,
            max_draft_width=self._widths[-1], widths=self._choice,
        )  # fmt: skip


def least_width(drafted: DraftLayer, layer: Layer, *, drawn: bool) -> int:
    """The least W_S with which a layer that passed would have passed too.

    Args:
        drafted: the forest's layer.
        layer: what was committed beside it.
        drawn: the forest's layer holds draws of q, looked at one by one.
    """
    if drawn:
        return layer.examined
    place = {node: i for i, node in enumerate(drafted.draws, 1)}
    return max((place.get(node, 1) for node in layer.draws if node.finish is None), default=1)
