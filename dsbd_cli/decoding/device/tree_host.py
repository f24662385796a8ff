"""The host's side of `TreeIteration`: what is sent of a request, and nodes of what came back."""

from __future__ import annotations

import numpy as np

from dsbd_cli.decoding.device.iteration import Space
from dsbd_cli.decoding.device.lanes import Committed, Lane, Part, Uniforms
from dsbd_cli.decoding.device.tree_iteration import TreeOutcome, TreeSent
from dsbd_cli.decoding.device.tree_layout import TreeLayout
from dsbd_cli.decoding.law.distribution import SeededSampler, Support
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node

# A lower temperature could make a logit infinite; this one leaves one token too.
_COLDEST = 1e-306


class TreeHost:
    """Sends one request to iterations over token trees, and commits what these decided (`lanes.Host`)."""

    def __init__(self, layout: TreeLayout) -> None:
        self._layout = layout

    def streams(self, request: Request) -> tuple[Uniforms, Uniforms | None]:
        """See `lanes.Host`."""
        # How many numbers an iteration takes depends on what it draws: they are counted one by one.
        assert isinstance(request.sampler, SeededSampler)
        assert isinstance(request.draft_sampler, SeededSampler)
        return Uniforms(request.sampler, 1), Uniforms(request.draft_sampler, 1)

    def sent(self, lane: Lane, space: Space, flying: int) -> TreeSent:
        """See `lanes.Host`; the device knows itself what the iterations in flight take."""
        shape, processor = self._layout.shape, lane.request.processor
        assert lane.drafting is not None
        return TreeSent(
            space=space,
            temperature=max(processor.temperature, _COLDEST),
            top_p=processor.enough if processor.top_p < 1 else np.inf,
            last=lane.rules.last,
            uniforms=lane.uniforms.ahead(shape.window)[:, 0],
            draft_uniforms=lane.drafting.ahead(shape.draft_window)[:, 0],
            origin=lane.uniforms.taken,
            draft_origin=lane.drafting.taken,
            state=lane.state,
        )

    def committed(self, part: Part, outcome: TreeOutcome) -> Committed:
        """See `lanes.Host`."""
        lane, (beam,) = part.lane, part.beams
        assert lane.drafting is not None
        assert beam is not None
        shape, uniforms, trie = self._layout.shape, lane.uniforms, lane.request.trie
        lane.drafting.use(outcome.draft_used - lane.drafting.taken)
        drawn = self._drawn(lane, beam, outcome)
        forest = self._forest(lane, beam, outcome, drawn) if lane.forests else Forest(computed=True)
        node, place, computed = beam, 0, {beam: 0}
        while True:
            row = outcome.best[place]
            if not row[-1]:
                raise lane.target.logits.fail(node)
            verdicts, child = None, len(shape)
            if place < shape.inner and outcome.tested[place]:
                first, child = int(shape.children[place, 0]), outcome.accepted[place]
                verdicts = [False] * min(outcome.tested[place], child - first)
                verdicts += [True] if child < len(shape) else []
            uniforms.use(1 + (0 if verdicts is None else outcome.tested[place]))
            accepted = child < len(shape)
            new = trie.child(node, outcome.tokens[child] if accepted else outcome.filled)
            new.score = node.score + _logp(row, new.token)
            goes_on = lane.commit([new], verdicts)
            # The device knows nothing of stop strings and budgets.
            whole = goes_on and new.finish in (None, "eos")
            if not (whole and accepted):
                break
            # Equal children have theirs below the first of them.
            siblings = outcome.tokens[first : child + 1]
            node, place = new, first + siblings.index(new.token)
            computed[node] = place
        layers = new.depth - beam.depth
        assert new.parent is not None
        return Committed(forest, whole, [new], [new.parent], new.depth, layers, computed)

    def _drawn(self, lane: Lane, beam: Node, outcome: TreeOutcome) -> list[int]:
        """Places with children, as the device knows them: it drew below stop strings too."""
        shape, request = self._layout.shape, lane.request
        room, eos = request.trie.budget - beam.depth, request.trie.eos_ids
        found, places, tokens = [], [0], outcome.tokens
        for place in places:
            if shape.need[place, 0] >= room:
                break
            found.append(place)
            first = int(shape.children[place, 0])
            below = tokens[first : first + outcome.tested[place]]
            places += [
                first + i for i, token in enumerate(below) if token not in eos and token not in below[:i]
            ]
        return found

    def _forest(self, lane: Lane, beam: Node, outcome: TreeOutcome, drawn: list[int]) -> Forest:
        """The tree as events show it: a layer a node, as far as no stop string ended it.

        Raises:
            RunError: the draft's logits of one of the nodes are not finite.
        """
        layout, trie = self._layout, lane.request.trie
        shape, size = layout.shape, layout.draft_support
        ids = outcome.draft_best[:, layout.draft_top_n : layout.draft_top_n + size].view(np.int32)
        logps = np.take_along_axis(outcome.draft_best[:, :size], np.argsort(ids, 1), 1).astype(np.float64)
        layers, nodes = [], {0: beam}
        for place in drawn:
            if (node := nodes.get(place)) is None:
                continue
            if not outcome.draft_best[place, -1]:
                raise lane.draft.logits.fail(node)
            first, weights = int(shape.children[place, 0]), outcome.prob[place]
            inside = weights > 0
            weights, tokens = weights[inside], outcome.support[place][inside]
            support = Support(np.zeros_like(tokens), tokens, logps[place][inside], weights / weights.sum())
            below = outcome.tokens[first : first + outcome.tested[place]]
            draws = [trie.child(node, token) for token in below]
            nodes |= {first + i: draw for i, draw in enumerate(draws) if draw.finish is None}
            layers.append(DraftLayer([node], support, draws))
        return Forest(layers, computed=True)


def _logp(row: np.ndarray, token: int) -> float:
    """The log-probability of a token among packed best entries, float32 [2 k + 1]."""
    count = len(row) // 2
    return float(row[:count][row[count:-1].view(np.int32) == token][0])
