"""What goes to the device for an iteration and what comes back: the only description of either.

Every block is int64 with one row a request; a field is a range of columns, floats by their bits. The
host (numpy), the torch law (views) and the Triton kernels (`start` as a constant) all use these fields.
One module, since every block of an iteration is made of the same few sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.forward.graphs import PLAN_ROWS


class Field(NamedTuple):
    """A range of a row: `row[at].reshape(shape)`, for floats `.view(float64)` (or float32) before that."""

    at: slice
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        return int(self.at.start)

    def of(self, block: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        """The field of every request: a view [R, *shape] of `block`, int64 [R, size]."""
        part = block[:, self.at]
        return (part if dtype is torch.int64 else part.view(dtype)).unflatten(1, self.shape)


class Columns:
    """Hands out ranges one behind the other."""

    def __init__(self) -> None:
        self.size = 0

    def __call__(self, *shape: int) -> Field:
        begin, self.size = self.size, self.size + prod(shape)
        return Field(slice(begin, self.size), shape)


class StateFields(NamedTuple):
    """The beams that an iteration of a request starts from, [W] each; on the device between iterations.

    Attributes:
        token: of each beam.
        score: float64, log weight; -inf where there is no beam.
        row: the parent's mask row in the target's tree.
        draft_row: the parent's in the draft's tree, if the draft has computed it.
        above, above_row: the parent's token and the grandparent's mask row in the draft's tree, if not.
        first: the first beam with the same parent.
        known: the place of each among the nodes of the iteration before, counted from 1; 0 where it was none of them.
        missing: [1], 1 if the draft has not computed the parents.
        position: [1], of the beams' tokens.
    """

    token: Field
    score: Field
    row: Field
    draft_row: Field
    above: Field
    above_row: Field
    first: Field
    known: Field
    missing: Field
    position: Field


class CoverRequestFields(NamedTuple):
    """What the host sends of a request.

    Attributes:
        target_slots, target_rows: [W + gamma x W_S], reserved: for the beams, then the forest by layers.
        draft_slots, draft_rows: [2 W + (gamma - 1) x W_S]: for the beams' parents, the beams, the forest.
        begin, draft_begin: [1], where the request's slots begin in either's buffers.
        used, draft_used: [1], KV length of either.
        fresh: [1], 1 where the request starts from `start` and not from where its last iteration ended.
        start: [state size], a state.
        origin: [1], the position below whose tokens the first uniforms draw.
        temperature, top_p: float64 [1].
        mass, min_width: float64 and int64 [1], a layer has as many draws as continuations hold that mass
            of p, at least min_width; min_width W: W draws in every layer.
        slack: float64 [1], where it is not negative a layer has instead the most draws that stay in the forest
            with probability 1 - slack, at least min_width; W where no forest is beside it.
        last: [1], the position of the budget's last token: no forest is beside that layer.
        one_beam: [1], 1 where only the beam of the highest score goes on behind an iteration.
        uniforms: float64 [window, `numbers`].
        draft_uniforms: float64 [gamma, W_S], where the forest is drawn.
    """

    target_slots: Field
    target_rows: Field
    draft_slots: Field
    draft_rows: Field
    begin: Field
    draft_begin: Field
    used: Field
    draft_used: Field
    fresh: Field
    start: Field
    origin: Field
    temperature: Field
    top_p: Field
    mass: Field
    min_width: Field
    slack: Field
    last: Field
    one_beam: Field
    uniforms: Field
    draft_uniforms: Field


class ForestFields(NamedTuple):
    """A drafted forest in an outcome.

    Attributes:
        parent, token: [gamma, W_S] by draw; the parent is a place among the draws (or beams) above.
        weight: float64 [gamma, W_S], log weight as a parent; -inf below what nothing grows.
        support_parent, support_token: [gamma, M], the distribution that was drawn from, canonical order.
            (Where the most probable were taken it is the draws themselves, and M = W_S.)
        logp, prob: float64 [gamma, M]; prob 0: outside the support.
        draws: [gamma, W_S], indices into the support; -1 behind the last where there are fewer distinct ones.
        finite: [gamma, max(W, W_S)] by parent, 1 where its draft logits are numbers.
    """

    parent: Field
    token: Field
    weight: Field
    support_parent: Field
    support_token: Field
    logp: Field
    prob: Field
    draws: Field
    finite: Field


class VerifiedFields(NamedTuple):
    """The layers that the target drew, [gamma + 1, W] each.

    Under beam search (`CoverLayout.kept`) a layer is its best candidates, best first: parent, token and logp are
    [gamma + 1, kept] then, and logp is the float32 score. The first W that do not end are the next beams.

    Attributes:
        parent: place among the draws above (for the first layer: among the beams); -1 where there is no
            draw, behind all others: the layer is narrower.
        token: of the draw. logp: float64, its raw log-probability.
        finite: by place above, 1 where its target logits are numbers.
        verdicts: [gamma + 1, W_S] where the forest's draws are tested: 1 accepted, 0 rejected, -1 not looked at.
        layers: [1], how many of them hold.
    """

    parent: Field
    token: Field
    logp: Field
    finite: Field
    verdicts: Field
    layers: Field


def _forest(add: Columns, width: int, draft_width: int, gamma: int, support: int | None) -> ForestFields:
    draws = [add(gamma, draft_width) for _ in range(3)]
    if support is None:
        parts = [*draws[:2], add(gamma, draft_width), add(gamma, draft_width), add(0, draft_width)]
    else:
        parts = [*(add(gamma, support) for _ in range(4)), add(gamma, draft_width)]
    return ForestFields._make([*draws, *parts, add(gamma, max(width, draft_width))])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of an iteration that drafts and verifies (`iteration.AheadIteration`), whatever it drafts.

    Attributes:
        requests: R.
        width, draft_width, gamma: W, W_S and gamma; gamma 0 where nothing is drafted.
        kept: candidates of a layer of beam search; 0 where layers are drawn.
        drawn: M, where the forest is draws of q that are accepted or not; 0 where it is the most probable
            continuations.
        nodes, draft_nodes: places that a request needs in either tree.
        state_size, request_size, outcome_size: columns of each block.
        memory_size: of what an iteration leaves for the forest of the next.
    """

    requests: int
    width: int
    draft_width: int
    gamma: int
    kept: int = 0
    drawn: int = 0
    nodes: int
    draft_nodes: int
    state_size: int
    request_size: int
    outcome_size: int
    memory_size: int = 0


@dataclass(frozen=True, kw_only=True)
class CoverLayout(Sizes):
    """Blocks of an iteration that drafts and verifies forests (`CoverIteration`).

    Attributes:
        continues: a layer that was not accepted whole goes on where the forest holds what it was filled up with.
        numbers: random numbers that a layer has: W to draw with, and before them one to test each draw of q with.
        recalled: entries of a row of the target's logits that the next iteration may propose from; 0 where it
            proposes by the draft alone.
        window: layers that uniforms are sent for: this iteration's and those of the one before it.
        state, request, forest, verified: the fields. outcome holds forest and verified.
        rows: float32 by pairs, in a memory behind its forest: the target's packed best entries (`logits.pack`) of
            all nodes, `row_count` numbers.
    """

    continues: bool
    numbers: int
    recalled: int
    window: int
    state: StateFields
    request: CoverRequestFields
    forest: ForestFields
    verified: VerifiedFields
    rows: Field
    row_count: int

    @classmethod
    def of(
        cls, requests: int, width: int, draft_width: int, gamma: int, kept: int = 0, drawn: int = 0,
        recalled: int = 0, continues: bool = False,
    ) -> CoverLayout:  # fmt: skip
        nodes = width + gamma * draft_width
        draft_nodes = 2 * width + (gamma - 1) * draft_width if gamma else 0
        tested = draft_width if drawn else 0
        window, numbers = 2 * (gamma + 1), tested + width
        state, request, outcome = Columns(), Columns(), Columns()
        state_fields = StateFields._make([*(state(width) for _ in range(8)), state(1), state(1)])
        request_fields = CoverRequestFields._make(
            [request(nodes), request(nodes), request(draft_nodes), request(draft_nodes)]
            + [request(1) for _ in range(5)]
            + [request(state.size)]
            + [request(1) for _ in range(8)]
            + [request(window, numbers), request(gamma if drawn else 0, draft_width)]
        )
        forest = _forest(outcome, width, draft_width, gamma, drawn or None)
        memory, row_count = Columns(), nodes * (2 * recalled + 1) if recalled else 0
        memory(outcome.size if recalled else 0)
        rows = memory((row_count + 1) // 2)
        widths = [kept or width] * 3 + [width]
        verified = VerifiedFields._make(
            [*(outcome(gamma + 1, size) for size in (*widths, tested)), outcome(1)]
        )
        return cls(
            requests=requests, width=width, draft_width=draft_width, gamma=gamma, kept=kept, drawn=drawn,
            continues=continues, numbers=numbers, nodes=nodes, draft_nodes=draft_nodes, recalled=recalled,
            window=window, state=state_fields, request=request_fields, forest=forest, verified=verified, rows=rows,
            row_count=row_count, state_size=state.size, request_size=request.size, outcome_size=outcome.size,
            memory_size=memory.size,
        )  # fmt: skip


class DraftRequestFields(NamedTuple):
    """What the host sends where the host verifies.

    Attributes:
        draft_plan, target_plan: [7, N] (`graphs.pad`), the beams and what each model has missed of them.
        beams, beam_rows: [W], places of the beams in the draft's plan, and their rows in the target's tree.
        scores: float64 [W], log weights; -inf where there is no beam.
        position: [1], of the beams' tokens.
        draft_slots, draft_rows: [(gamma - 1) x W_S], reserved, by layers. target_slots, target_rows:
            [gamma x W_S].
        temperature, top_p: float64 [1], of the draft.
        draft_uniforms: float64 [gamma, W_S].
    """

    draft_plan: Field
    target_plan: Field
    beams: Field
    beam_rows: Field
    scores: Field
    position: Field
    draft_slots: Field
    draft_rows: Field
    target_slots: Field
    target_rows: Field
    temperature: Field
    top_p: Field
    draft_uniforms: Field


@dataclass(frozen=True)
class DraftLayout:
    """Blocks of an iteration after which the host verifies (`DraftIteration`); one request.

    Attributes:
        width, draft_width, gamma: W, W_S and gamma.
        rows: float32 by pairs, the target's packed best entries (`logits.pack`): of its plan's nodes,
            then of the forest; [(N + gamma x W_S), 2 top_n + 1] of them, `row_count` numbers.
    """

    width: int
    draft_width: int
    gamma: int
    request: DraftRequestFields
    forest: ForestFields
    rows: Field
    row_count: int
    request_size: int
    outcome_size: int

    @classmethod
    def of(
        cls, width: int, draft_width: int, gamma: int, support: int, top_n: int, draft_size: int, target_size: int
    ) -> DraftLayout:  # fmt: skip
        """Args: support: M. top_n: of the target. draft_size, target_size: nodes of the padded plans."""
        request, outcome = Columns(), Columns()
        count = gamma * draft_width
        plans = [request(PLAN_ROWS, draft_size), request(PLAN_ROWS, target_size)]
        beams = [request(width), request(width), request(width), request(1)]
        small = [request(count - draft_width) for _ in range(2)]
        space = [request(count) for _ in range(2)]
        request_fields = DraftRequestFields._make(
            [*plans, *beams, *small, *space, request(1), request(1), request(gamma, draft_width)]
        )
        forest = _forest(outcome, width, draft_width, gamma, support)
        row_count = (target_size + count) * (2 * top_n + 1)
        rows = outcome((row_count + 1) // 2)
        return cls(
            width, draft_width, gamma, request_fields, forest, rows, row_count, request.size, outcome.size
        )
