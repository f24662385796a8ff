"""The host's side of `CoverIteration`: what is sent of a request, and nodes of what came back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_cli.decoding.device.iteration import DraftedLayer, Outcome, SampledLayer, Sent, Space
from dsbd_cli.decoding.device.lanes import Committed, Lane, Part, Uniforms
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.distribution import SeededSampler, Support
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie

# By layer of a forest: the place of each continuation, by its parent's place and its token.
_Places = list[dict[tuple[int | None, int], int]]


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


class CoverHost:
    """Sends requests to iterations that draft and verify forests, and commits what these decided (`lanes.Host`)."""

    def __init__(self, layout: CoverLayout) -> None:
        self._layout = layout
        # Of each layer of the forest, its first place among the iteration's nodes.
        self._first = [layout.width + depth * layout.draft_width for depth in range(layout.gamma)]

    def streams(self, request: Request) -> tuple[Uniforms, Uniforms | None]:
        """See `lanes.Host`: a row for each layer of p, and a row an iteration for q."""
        layout = self._layout
        assert isinstance(request.sampler, SeededSampler)
        uniforms = Uniforms(request.sampler, layout.numbers)
        if not layout.drawn:
            return uniforms, None
        assert isinstance(request.draft_sampler, SeededSampler)
        return uniforms, Uniforms(request.draft_sampler, layout.gamma * layout.draft_width)

    def sent(self, lane: Lane, space: Space, flying: int) -> Sent:
        """See `lanes.Host`."""
        origin = lane.target.tree.position(lane.request.hypotheses.active[0])
        ahead = lane.uniforms.ahead(self._layout.window)
        drafting = None if lane.drafting is None else lane.drafting.ahead(flying + 1)[flying]
        return Sent(space, ahead, origin, lane.rules, lane.state, drafting)

    def committed(self, part: Part, outcome: Outcome) -> Committed:
        """See `lanes.Host`."""
        lane, request, uniforms, commit = part.lane, part.lane.request, part.lane.uniforms, part.lane.commit
        if lane.drafting is not None:
            lane.drafting.use()
        drafted = self._drafted(lane, part.beams, outcome.drafted)
        above, whole = part.beams, True
        reached = next(node.depth for node in above if node is not None)
        searching = self._layout.kept > 0
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
                if self._layout.drawn:
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
        if not lane.forests:
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


def layer_of(
    trie: Trie, places: list[int], parents: list[Node], drafted: DraftedLayer
) -> tuple[DraftLayer, list[Node | None]]:
    """A layer as the methods see it, and per draw the node that became a parent, or None.

    Args:
        places: which of the device's parents `parents` are.
    """
    parent, token, logp, prob = drafted.parent, drafted.token, drafted.logp, drafted.prob
    if places[-1] != len(places) - 1:  # some draws are no parents: those that are have other numbers
        number = np.full(places[-1] + 1, -1)
        number[places] = np.arange(len(places))
        # Entries of no mass may have no parent; they are not looked at.
        parent = number[np.minimum(parent, places[-1])]
    child, draws = trie.child, drafted.draws
    nodes = [child(parents[p], t) for p, t in zip(parent[draws].tolist(), token[draws].tolist(), strict=True)]
    inside = prob > 0
    if not inside.all():
        parent, token, logp, prob = parent[inside], token[inside], logp[inside], prob[inside]
    return DraftLayer(parents, Support(parent, token, logp, prob), nodes), living(nodes)


def living(nodes: list[Node]) -> list[Node | None]:
    """Draws with None for those below which nothing grows: finished ones, and the later of equal ones."""
    seen: set[Node] = set()
    new: list[Node | None] = []
    for node in nodes:
        new.append(None if node in seen or node.finish is not None else node)
        seen.add(node)
    return new
