"""A request among pipelined iterations: its random numbers, its rules, and its part of each iteration.

What is sent of it, and how what comes back becomes nodes, differ by the kind of iteration: that is a `Host`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from dsbd_cli.decoding.device.iteration import Rules, Space
from dsbd_cli.decoding.device.layout import Sizes
from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth
from dsbd_cli.decoding.model.protocol import Commit
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import Forest, Node

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
        target, draft: the models as it sees them.
        commit: what to do with its layers.
        forests: somebody looks at what was drafted: else that stays numbers (`Seat`).
        uniforms: of its sampler. drafting: of the draft's, where forests are drawn: a row an iteration.
        rules: what its layers are drawn under.
        state: where it starts in the next launch; None: where its last iteration ended.
        deepest: beams deeper than that have no room for an iteration in a context; None: no limit.
        anew: what is not launched ahead starts anew, without what the target said: so it has to beside others, and
            its text depends on the forest.
        beams, above: of its next iteration (`Part`).
        forest: what its last one drafted.
    """

    request: Request
    target: Any
    draft: Any
    commit: Commit
    forests: bool
    uniforms: Uniforms
    drafting: Uniforms | None
    rules: Rules
    state: np.ndarray | None
    deepest: int | None
    anew: bool
    beams: list[Node | None]
    above: list[Node] = field(default_factory=list)
    forest: Forest = field(default_factory=Forest)

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

    def adopt(self, done: Committed, layout: Sizes) -> None:
        """Tell the caches which nodes of the space may live on; the next `retain` enters them."""
        # The next iteration computes its beams itself.
        computed = {node: place for node, place in done.computed.items() if node.depth < done.depth}
        target, draft = self.space.trees
        target.commit(self.space.target, computed)
        if draft is None or self.space.draft is None:
            return
        places: dict[Node, int] = {}
        for i, node in enumerate(self.above):
            places.setdefault(node, i)
        end = layout.draft_nodes - layout.width  # the forest's last layer is not computed by the draft
        for node, place in computed.items():
            if place < end:
                places[node] = layout.width + place
        draft.commit(self.space.draft, places)


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


class Host(Protocol):
    """The host's side of one kind of iteration."""

    def streams(self, request: Request) -> tuple[Uniforms, Uniforms | None]:
        """The random numbers of p, and of q where forests are drawn."""

    def sent(self, lane: Lane, space: Space, flying: int) -> Any:
        """What an iteration is sent of a request.

        Args:
            space: reserved for it.
            flying: iterations in flight that the request is in.
        """

    def committed(self, part: Part, outcome: Any) -> Committed:
        """Make nodes of what came back, commit its layers, and say where the request goes on.

        Raises:
            RunError: a model gave logits that are not finite.
        """


def rules_of(request: Request, last: int) -> Rules:
    """What a request's layers are drawn under; `last`: the position of its budget's last token."""
    processor, rule = request.processor, request.dynamic_width
    rules = Rules(processor.temperature, processor.enough, min_width=request.width, last=last)
    if isinstance(rule, DistinctWidth):
        rules = rules._replace(mass=rule.enough, min_width=rule.min_width)
    elif isinstance(rule, ThresholdWidth):
        rules = rules._replace(slack=rule.slack, min_width=rule.min_width)
    return rules._replace(one_beam=request.kv_one)
