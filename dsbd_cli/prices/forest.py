"""Which forest is worth its price: layers a millisecond, from prices and acceptance. Pure functions, no clock.

A decision is a function of `Prices`, of settings and of counts of what earlier iterations accepted; it is taken
before the iteration's forest is drafted, so every law stays exact (docs/design.md sections 2 and 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dsbd_cli.prices.table import Prices
from dsbd_cli.settings import Settings

# What is believed of a pair before anything is known of it: one beam's next token is among the draft's k best
# with probability 1 - _MISS * k ** -_RANK, and D distinct beams all are with that to the power D ** _JOINT.
# Fitted to layers a call of the default pair (W 1 to 8, W_S 1 to 24, sampled and deterministic), within 0.25.
_MISS, _RANK, _JOINT = 0.394, 0.35, 0.9
# Distinct beams among W independent draws, about (measured: 1.36 of 2, 1.8 of 4, 2.66 of 8).
_DISTINCT = 0.42
# What iterations with a forest must promise, in times those without, for the draft has to read prompts: on an H200 a
# promise of 1.28 made 1.10 times the tokens (32 at a time), one of 1.19 made 0.88 times (64).
_WORTH = 1.25

# What the host takes for a drafted layer (its joint, its draws, its nodes), in committed layers: 0.23 ms for 0.16 on
# a Zen 4.
_DRAFTED = 1.5


class Shape(NamedTuple):
    """The most that an iteration drafts for a request: `gamma` layers of `draft_width` nodes; 0 layers is no forest."""

    gamma: int
    draft_width: int


class Promise(NamedTuple):
    """A forest, and what it promises: layers a millisecond, in times those of plain beams; 1 for none."""

    shape: Shape
    gain: float


def draft_widths(most: int) -> tuple[int, ...]:
    """Widths that are looked at, `most` among them: 1, 2, 3, 4, 6, 8, 12, 16, ..."""
    found, step = [], 1
    while step < most:
        found += [step, *([step * 3 // 2] if step > 1 else [])]
        step *= 2
    return (*(width for width in found if width < most), most)


def distinct_beams(width: int, *, without_replacement: bool = False) -> float:
    """How many distinct beams `width` draws leave, about; all of them where beams are distinct by rule."""
    return float(width) if without_replacement else width**_DISTINCT


def beams_of(settings: Settings) -> float:
    """How many distinct beams a layer of these settings leaves, about."""
    apart = settings.deterministic or settings.draws == "distinct"
    return distinct_beams(settings.beams, without_replacement=apart)


@dataclass(frozen=True)
class Acceptance:
    """How far forests get.

    Attributes:
        widths: draft widths W_S, ascending.
        passes: [layer of the forest][width]: probability that the layer passes where those above it did.
        nodes: [width]: distinct unfinished nodes that a layer holds on average where W_S is its limit.
        beams: distinct beams that this was seen with.
    """

    widths: tuple[int, ...]
    passes: tuple[tuple[float, ...], ...]
    nodes: tuple[float, ...]
    beams: float = 1.0

    @classmethod
    def assumed(
        cls, beams: float, gamma: int, draft_width: int, *, pruned: bool = False, least: int = 1,
        belief: tuple[float, float, float] = (_MISS, _RANK, _JOINT),
    ) -> Acceptance:  # fmt: skip
        """What is believed before anything was tried.

        Args:
            beams: distinct beams (`distinct_beams`).
            gamma, draft_width: of the largest forest.
            pruned: layers end where they hold enough of the draft's mass: about four nodes of eight.
            least: narrower layers never pass (W draws have to be accepted, of W_S).
            belief: (miss, rank, joint): one beam's next token is among the k best with probability
                1 - miss * k ** -rank, and D distinct beams all are with that to the power D ** joint.
        """
        miss, rank, joint = belief
        widths = draft_widths(draft_width)
        passes = tuple(
            (1 - miss * width**-rank) ** beams**joint if width >= least else 0.0 for width in widths
        )
        nodes = tuple(width**0.7 if pruned else float(width) for width in widths)
        return cls(widths, (passes,) * gamma, nodes, beams)

    def at(self, draft_width: int) -> int:
        """The place of the widest of `widths` that is not above `draft_width`; the first where none is."""
        return max([0, *(i for i, width in enumerate(self.widths) if width <= draft_width)])

    def for_beams(self, beams: float) -> Acceptance:
        """The same pair with another number of distinct beams: more of them are rarely all inside."""
        power = (beams / self.beams) ** _JOINT
        passes = tuple(tuple(one**power for one in layer) for layer in self.passes)
        return Acceptance(self.widths, passes, self.nodes, beams)


def expected_layers(gamma: int, width: float, draft_width: int, acceptance: Acceptance) -> float:
    """Layers that a target call commits on average: 1, and one more for each drafted layer that is passed.

    Args:
        gamma: drafted layers, at most those that `acceptance` knows of.
        width: distinct beams (`distinct_beams`); `acceptance` is carried over to them.
        draft_width: W_S.
    """
    seen = acceptance if width == acceptance.beams else acceptance.for_beams(width)
    at = seen.at(draft_width)
    layers = reached = 1.0
    for passes in seen.passes[:gamma]:
        reached *= passes[at]
        layers += reached
    return layers


def layers_per_ms(
    prices: Prices, acceptance: Acceptance, shape: Shape, *, requests: int = 1, beams: float | None = None
) -> float:
    """Layers a millisecond of all `requests` together, where each drafts `shape`; their nodes are paid together.

    A target call reads each request's beams and forest, the first draft forward the beams and a further one the
    layer above it.

    Args:
        beams: distinct beams of a request; None takes those of `acceptance`.
    """
    live = acceptance.beams if beams is None else beams
    layers = expected_layers(shape.gamma, live, shape.draft_width, acceptance)
    inside = acceptance.nodes[acceptance.at(shape.draft_width)] if shape.gamma else 0.0
    ms = prices.target(requests * (live + shape.gamma * inside)) + prices.layer_ms * requests * layers
    if shape.gamma:
        if prices.draft is None:
            return 0.0
        ms += prices.draft(requests * live) + (shape.gamma - 1) * prices.draft(requests * inside)
        ms += shape.gamma * _DRAFTED * prices.layer_ms * requests
    return requests * layers / ms


def best_forest(
    prices: Prices,
    acceptance: Acceptance,
    *,
    requests: int = 1,
    beams: float | None = None,
    max_gamma: int,
    max_draft_width: int,
    widths: Sequence[int] | None = None,
) -> Promise:
    """The forest of each request that makes most layers a millisecond; gamma 0 is plain beams, without a draft.

    Of equally good ones the smallest is taken.

    Args:
        prices: of the machine and the pair.
        acceptance: of a request, or the mean of all.
        requests: how many share each forward.
        beams: distinct beams of a request; None takes those of `acceptance`.
        max_gamma, max_draft_width: limits.
        widths: draft widths to choose from; None takes those of `acceptance`.
    """
    best = Shape(0, 1)
    most = plain = layers_per_ms(prices, acceptance, best, requests=requests, beams=beams)
    if prices.draft is None:
        return Promise(best, 1.0)
    live = acceptance.beams if beams is None else beams
    seen = acceptance if live == acceptance.beams else acceptance.for_beams(live)
    host = _DRAFTED * prices.layer_ms * requests
    first = prices.draft(requests * live) + host
    for width in acceptance.widths if widths is None else widths:
        if width > max_draft_width:
            break
        # `layers_per_ms` for each depth in turn; this runs in every iteration on a CPU.
        at = seen.at(width)
        inside = requests * seen.nodes[at]
        further = prices.draft(inside) + host
        layers = reached = 1.0
        for gamma, passes in enumerate(seen.passes[:max_gamma], 1):
            reached *= passes[at]
            layers += reached
            ms = prices.target(requests * live + gamma * inside) + prices.layer_ms * requests * layers
            found = requests * layers / (ms + first + (gamma - 1) * further)
            if found > most * (1 + 1e-12):
                best, most = Shape(gamma, width), found
    return Promise(best, most / plain)


def best_iteration(
    prices: Prices,
    acceptance: Acceptance,
    *,
    requests: int,
    width: int,
    max_gamma: int,
    max_draft_width: int,
    host_ms: tuple[float, float, float, float],
) -> Shape:
    """`best_forest` for iterations of fixed sizes on a device, which the host commits while the next one runs.

    A request then has `width` places for beams, live or not, in the target's forward and twice as many in the
    draft's first one; whoever is slower, host or device, sets the pace.

    Args:
        width: W.
        host_ms: what the host needs for one request's part of an iteration, for its forest, for each layer and for
            each node of the forest.
    """
    best, most, plain = Shape(0, 1), 0.0, 0.0
    request, forest, layer, node = host_ms
    for shape in [best, *(Shape(gamma, at) for at in acceptance.widths if at <= max_draft_width
                          for gamma in range(1, max_gamma + 1))]:  # fmt: skip
        gamma, inside = shape
        layers = expected_layers(gamma, acceptance.beams, inside, acceptance)
        device = prices.target(requests * (width + gamma * inside))
        if gamma:
            if prices.draft is None:
                break
            device += prices.draft(requests * 2 * width) + (gamma - 1) * prices.draft(requests * inside)
        host = requests * (request + layer * layers + (forest + node * gamma * inside if gamma else 0.0))
        found = requests * layers / max(device, host)
        # A draft has to see the prompt as well.
        if found > most * (1 + 1e-9) and (not gamma or found > _WORTH * plain):
            best, most = shape, found
        plain = plain or found
    return best
