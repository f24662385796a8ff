"""Forests without a draft model: what followed a beam's last tokens before, in the text or in the target's own rows.

Prompt lookup (Saxena 2023) and token recycling (Luo et al. 2024) as one guess at the target, for several beams. A
node of such a forest costs its place in the target's forward and nothing else, so the forest is built node by
node, the likeliest first, as long as each is worth its price. Only for forests that need no q (`cover` of a fixed
width, the deterministic mode): whatever is proposed, the text is the same (docs/design.md sections 2 and 3). One
module, since a guess, the forest that is made of it and what became of that are one bargain.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from dsbd_cli.decoding.methods.lookup import NOTHING
from dsbd_cli.decoding.methods.proposers import ForestShape
from dsbd_cli.decoding.model.protocol import TreeModel
from dsbd_cli.decoding.tree.events import Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, common_ancestor
from dsbd_cli.errors import RunError
from dsbd_cli.prices import Acceptance, Curve, Prices, best_forest

# How often the next token is one that followed the same last tokens before, by how many agree. Counted on answers of
# the default pair to SQuAD, Spider and MT-Bench prompts, rounded.
_TRUST = {4: 0.7, 3: 0.5, 2: 0.35, 1: 0.15}
_LONGEST = max(_TRUST)
# What the target said behind the same token elsewhere gets all that is left, for it holds about as it stands. Of a
# trust, what the latest, the one before and the third that followed get; older ones get nothing.
_SHARES = (0.7, 0.2, 0.1)
# Entries of a row that are kept, and tokens that any context proposes.
_ENTRIES = 4
# A layer passes where ALL of its draws are in the forest: less often than one of them is. At first this is believed
# of the mass, then what was seen; the newest iteration's weight.
_ALL, _RATE = 0.6, 0.1
# A part of the first belief that comes back with every iteration that was not worth a node: else nothing would be
# tried again.
_FORGETTING = 0.02
# What is believed of layers before anything was tried: `belief` of `Acceptance.assumed`, and how deep.
_BELIEF, _DEEP = (0.52, 0.2, 0.53), 4
# Nodes of a layer that is chosen whole, at most.
_WIDEST = 8
# What the host takes for a node, in target forwards over one.
_HOST = 0.005

Guess = list[tuple[int, float]]


class Ngrams:
    """Statistics of one request's text: a guess at the next token's distribution from its last tokens.

    Args:
        tokens: the prompt.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text: list[int] = []
        # By length: what followed, the latest first.
        self._followed: list[dict[tuple[int, ...], tuple[int, ...]]] = [{} for _ in range(_LONGEST + 1)]
        self._said: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.grow(tokens)

    def __len__(self) -> int:
        return len(self._text)

    def grow(self, tokens: Iterable[int]) -> None:
        """The text goes on."""
        text = self._text
        for token in tokens:
            place, alone = len(text), (token,)
            for size in range(1, min(_LONGEST, place) + 1):
                context, seen = tuple(text[place - size :]), self._followed[size]
                others = [one for one in seen.get(context, ()) if one != token]
                seen[context] = (token, *others[: len(_SHARES) - 1]) if others else alone
            text.append(token)

    def tail(self) -> tuple[int, ...]:
        """The last tokens, as a context."""
        return tuple(self._text[-_LONGEST:])

    def said(self, token: int, tokens: np.ndarray, logps: np.ndarray) -> None:
        """The target's row behind some text that ends with `token`, best first (`TreeModel.best`)."""
        self._said[token] = tokens.copy(), logps.copy()  # views of what a whole forward said

    def guess(self, context: tuple[int, ...]) -> Guess:
        """(token, probability), the probabilities summing to at most 1.

        Args:
            context: the last tokens, at most as many as `tail` gives.
        """
        found: dict[int, float] = {}
        left = 1.0
        for size in range(min(_LONGEST, len(context)), 0, -1):
            followed = self._followed[size].get(context[len(context) - size :])
            if followed:
                share = _TRUST[size] * left
                for token, part in zip(followed, _SHARES, strict=False):
                    found[token] = found.get(token, 0.0) + share * part
                left -= share
        row = self._said.get(context[-1]) if context else None
        if row is not None:
            for token, prob in _as_guess(*row):
                found[token] = found.get(token, 0.0) + left * prob
        return list(found.items())


def _as_guess(tokens: np.ndarray, logps: np.ndarray) -> Guess:
    return [(token, math.exp(logp)) for token, logp in zip(tokens.tolist(), logps.tolist(), strict=True)]


class _Queue:
    """Nodes that may be made, likeliest first, of equals the first one found: above what, and the last tokens."""

    def __init__(self) -> None:
        self._nodes: list[tuple[float, int, Node, tuple[int, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def push(self, weight: float, parent: Node, context: tuple[int, ...]) -> None:
        heappush(self._nodes, (-weight, self._count, parent, context))
        self._count += 1

    def pop(self) -> tuple[float, Node, tuple[int, ...]]:
        less, _, parent, context = heappop(self._nodes)
        return -less, parent, context


class NgramForests:
    """Proposes forests of `Ngrams`, as large as each node is worth, and learns how far they get.

    Exactness: a forest is chosen from the past alone, as `ForestShape`'s are, and the text does not depend on it.

    Args:
        target: whose rows are recycled; where it knows a node already (`Run.survivors`) its own row is the guess.
        trie: of the request. prompt: token ids that `trie.root` stands for.
        prices: of the pair, in milliseconds.
        beams: distinct beams at first (`prices.distinct_beams`).
        most: nodes of a forest.
        distinct: so many beams go on from every layer, however likely each is: a layer of fewer nodes never passes, and
            a node alone is worth nothing. Layers are then chosen whole, by what their widths passed. 0: equal draws
            are one beam.
        entries: of a target's row that may be asked for; 0: any number.

    Attributes:
        requests: how many share each forward.
        forests: how many were proposed that were not empty.
    """

    def __init__(
        self, target: TreeModel, trie: Trie, prompt: Sequence[int], prices: Prices, beams: float, most: int,
        entries: int = 0, distinct: int = 0,
    ) -> None:  # fmt: skip
        self._target, self._trie, self._prices, self._most = target, trie, prices, most
        self._entries = min(entries or _ENTRIES, _ENTRIES)
        self._ngrams, self._prompt = Ngrams(prompt), len(prompt)
        self._last = prompt[-1] if len(prompt) else None
        self._forest, self._masses, self._beams = Forest(), [0.0], [trie.root]
        self.requests, self.forests = 1, 0
        plain = prices.target(beams) + prices.layer_ms
        self._plain, self._layers, self._ms = plain, assumed_gain(prices, beams), plain
        self._passed, self._mass = _ALL, 1.0
        self._shape: ForestShape | None = None
        self._idle = False  # no forest pays: nothing need be known
        if distinct:
            known = Acceptance.assumed(beams, _DEEP, min(most, _WIDEST), least=distinct, belief=_BELIEF)
            # A try would cost a layer's nodes, where a draft's costs its forward.
            self._shape = ForestShape(without_draft(prices), known, rate=_RATE, tries=False)

    @property
    def gain(self) -> float:
        """Layers a millisecond, in times those of plain beams."""
        return self._layers * self._plain / self._ms

    def propose(self, beams: list[Node], depth: int) -> Forest:
        """A forest of at most `depth` layers on the unfinished `beams` (their `score` is known)."""
        self._masses, self._beams = [0.0] * depth, beams
        found = self._by_nodes(depth) if self._shape is None else self._by_layers(depth, self._shape)
        drafted = [
            DraftLayer(list(dict.fromkeys(map(_above, nodes))), NOTHING, nodes) for nodes in found if nodes
        ]
        self._forest = Forest(drafted)
        return self._forest

    def _by_nodes(self, depth: int) -> list[list[Node]]:
        """By layer: the likeliest nodes, as long as each is worth its price."""
        beams, layers = self._beams, [list[Node]() for _ in range(depth)]
        at, count, cost = beams[0].depth + 1, 0, self._cost(len(beams), 0)
        # What a layer is worth: the time that layers take as things go.
        worth = min(1.0, self._passed / self._mass) * self._ms / self._layers
        more = self._cost(len(beams), 1) - cost
        queue = self._begun(more / worth)
        while queue and count < self._most:
            weight, parent, context = queue.pop()
            if weight * worth <= more:
                break
            node = self._trie.child(parent, context[-1])
            count, cost, place = count + 1, cost + more, node.depth - at
            more = self._cost(len(beams), count + 1) - cost
            layers[place].append(node)
            self._masses[place] += weight
            if node.finish is None and place + 1 < depth:
                self._continue(queue, node, context, weight, more / worth)
        return layers

    def _by_layers(self, depth: int, shape: ForestShape) -> list[list[Node]]:
        """By layer: as many of the likeliest as `shape` finds best."""
        if self._idle and shape.requests == self.requests:
            return []  # nothing has been learned since
        shape.requests = self.requests
        gamma, width = shape.choose(depth)
        gamma = min(gamma, self._most // width)  # a width is no larger than that
        layers: list[list[Node]] = []
        self._idle = not gamma
        queue = self._begun() if gamma else _Queue()
        while queue and len(layers) < gamma:
            taken = [queue.pop() for _ in range(min(width, len(queue)))]
            layers.append([self._trie.child(parent, context[-1]) for _, parent, context in taken])
            queue = _Queue()
            for node, (weight, _, context) in zip(layers[-1], taken, strict=True):
                if node.finish is None:
                    self._continue(queue, node, context, weight)
        return layers

    def _begun(self, least: float = 0.0) -> _Queue:
        """The children of the beams."""
        queue, text, best = _Queue(), self._ngrams.tail(), max(node.score for node in self._beams)
        weights = [math.exp(node.score - best) for node in self._beams]
        total = sum(weights)
        for node, weight in zip(self._beams, weights, strict=True):
            self._continue(queue, node, self._context(text, node), weight / total, least)
        return queue

    def _continue(
        self, queue: _Queue, node: Node, context: tuple[int, ...], weight: float, least: float = 0.0
    ) -> None:
        """Put a node's likely children into the queue, those of more than `least` weight."""
        row = self._row(node)
        guess = self._ngrams.guess(context) if row is None else _as_guess(*row)
        for token, prob in guess:
            # A draw that ends by itself needs no node.
            if weight * prob > least and token not in self._trie.eos_ids:
                queue.push(weight * prob, node, (*context, token)[-_LONGEST:])

    def _row(self, node: Node) -> tuple[np.ndarray, np.ndarray] | None:
        """What the target said behind a node; None where it was not asked, or said nothing that is finite.

        That is an error where a beam comes to it, and not before: plain beams would never compute this node.
        """
        try:
            return self._target.best(node, self._entries) if self._target.has_logits(node) else None
        except RunError:
            return None

    def _context(self, text: tuple[int, ...], node: Node) -> tuple[int, ...]:
        """The last tokens of a beam; `text` is what all beams begin with."""
        own = node.tail(min(_LONGEST, node.depth - (len(self._ngrams) - self._prompt)))
        return (*text, *own)[-_LONGEST:]

    def _cost(self, beams: int, nodes: int) -> float:
        """Milliseconds of an iteration, of this request's share."""
        prices, count = self._prices, self.requests
        host = nodes * _HOST * prices.target(1)
        return prices.target(count * (beams + nodes)) / count + host

    def proposed(self, forest: Forest) -> bool:
        """Whether this is the last one that was proposed here."""
        return forest is self._forest

    def learn(self, layers: Sequence[Layer]) -> None:
        """What became of that one's iteration: the layers that were committed (at least one), from the first on."""
        forest = self._forest
        passed, beams = len(layers) - 1, len(self._beams)
        nodes = sum(len(layer.draws) for layer in forest.layers)
        host = self._prices.layer_ms
        self._layers += _RATE * (len(layers) - self._layers)
        self._ms += _RATE * (self._cost(beams, nodes) + host * len(layers) - self._ms)
        self._plain += _RATE * (self._cost(beams, 0) + host - self._plain)
        self.forests += nodes > 0
        if self._shape is not None:
            if forest.layers:
                self._shape.learn(forest, layers)
        elif nodes:
            self._passed += _RATE * (passed - self._passed)
            self._mass += _RATE * (sum(self._masses) - self._mass)
        else:
            self._passed += _FORGETTING * (_ALL * self._mass - self._passed)

    def see(self, computed: Iterable[Node], active: list[Node]) -> None:
        """The iteration is over: recycle the target's rows of what it computed, and let the text go on.

        Args:
            computed: nodes whose rows the target may have; those of which it has none are left out.
            active: the beams that go on.
        """
        if self._idle:
            return
        for node in computed:
            token = node.token if node.parent is not None else self._last
            if token is not None and (row := self._row(node)) is not None:
                self._ngrams.said(token, *row)
        if active:
            known = len(self._ngrams) - self._prompt
            ancestor = common_ancestor(active)
            if ancestor.depth > known:
                self._ngrams.grow(ancestor.tail(ancestor.depth - known))


def without_draft(prices: Prices) -> Prices:
    """What forests cost that the host makes alone."""
    return Prices(prices.target, Curve((1,), (_HOST * prices.target(1),)), prices.layer_ms)


def assumed_gain(prices: Prices, beams: float) -> float:
    """What such forests are believed to gain before anything was tried: layers a millisecond, in times plain beams."""
    known, priced = Acceptance.assumed(beams, _DEEP, _WIDEST, belief=_BELIEF), without_draft(prices)
    return best_forest(priced, known, max_gamma=_DEEP, max_draft_width=_WIDEST).gain


def _above(node: Node) -> Node:
    assert node.parent is not None
    return node.parent
