"""One iteration's computing without the host: gamma draft steps, then the target over the whole forest.

Captured as one CUDA graph: the draft's draws feed its own next step and the target's forward where they
are, so an iteration copies one block in and one block out, and waits once; the host verifies. What it
needs to know beforehand is only how many nodes there will be: slots and mask rows are reserved, and
those of draws that came to nothing are given back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.logits import Best, unpack
from dsbd_cli.decoding.cache.tree_cache import Plan, Reservation
from dsbd_cli.decoding.device.iteration import DraftedLayer
from dsbd_cli.decoding.device.law_torch import TorchLaw
from dsbd_cli.decoding.device.layout import DraftLayout, Field
from dsbd_cli.decoding.device.steps import Nodes, forward_many, together
from dsbd_cli.decoding.forward.capture import Captures, InFlight, OverlapClock, Steps, slots_to_see
from dsbd_cli.decoding.forward.graphs import node_bucket, pad, seen_inside
from dsbd_cli.decoding.law.distribution import LogitsProcessor
from dsbd_cli.decoding.model.protocol import Side

# Fewer sizes than for single forwards: capturing an iteration is dear, and padding it is not.
_BUCKETS = (8, 16, 32, 64)
# Draft and target sizes that come up for almost every prompt.
_USUAL = ((8, 8), (16, 8))


@dataclass(frozen=True)
class DraftRequest:
    """One iteration, as the host knows it.

    Attributes:
        draft: plan over the beams (all of them) and what the draft has missed of them.
        beams: places of the beams in that plan.
        target: plan over the beams that the target has not computed, and their missing ancestors.
        beam_rows: the beams' mask rows in the target's pool.
        scores: the beams' log weights.
        position: of the beams' tokens.
        draft_space, target_space: for (gamma - 1) x W_S and gamma x W_S nodes, layer by layer.
        uniforms: float64 [gamma, W_S]; None where the most probable are taken.
    """

    draft: Plan
    beams: list[int]
    target: Plan
    beam_rows: list[int]
    scores: list[float]
    position: int
    draft_space: Reservation
    target_space: Reservation
    uniforms: np.ndarray | None


class Launched(NamedTuple):
    """An iteration in flight: its layout, and the nodes of the target's plan."""

    flight: InFlight
    layout: DraftLayout
    nodes: int


class Answer(NamedTuple):
    """What came back.

    Attributes:
        layers: gamma of them.
        rows: the target's best entries: of `DraftRequest.target`'s nodes, then of gamma x W_S forest nodes.
    """

    layers: list[DraftedLayer]
    rows: Best


class DraftIteration:
    """Runs `DraftRequest`s for one pair and one way of drafting.

    Args:
        target, draft: both captured on the same device.
        draft_width, gamma: W_S draws in each of gamma layers.
        width: W, the most beams at a time.
        processor: T of the draft, or None: take the W_S most probable distinct continuations.
        eos_ids: draws of these are finished, hence no parents.
        clock: the target's.
    """

    def __init__(
        self, target: Side, draft: Side, draft_width: int, gamma: int, width: int, processor: LogitsProcessor | None,
        eos_ids: Sequence[int], device: torch.device, clock: OverlapClock,
    ) -> None:  # fmt: skip
        self.target, self.draft = target, draft
        assert target.pool is not None
        assert draft.pool is not None
        self._target_pool, self._draft_pool = target.pool, draft.pool
        self.draft_width, self.gamma, self.width, self.processor = draft_width, gamma, width, processor
        self._law = TorchLaw()
        self._eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self.captures = Captures(device, clock, breaks=(target.forward,))
        self._layout = lru_cache(maxsize=None)(self._layout_of)

    def _layout_of(self, draft_size: int, target_size: int) -> DraftLayout:
        top_n, most = self.draft.top_n, max(self.width, self.draft_width)
        support = self.draft_width if self.processor is None else min(self.processor.top_n, most * top_n)
        return DraftLayout.of(
            self.width, self.draft_width, self.gamma, support, self.target.top_n, draft_size, target_size
        )

    def reserve(self) -> tuple[Reservation, Reservation]:
        """Space in the draft's pool and in the target's."""
        count = self.gamma * self.draft_width
        return self._draft_pool.reserve(count - self.draft_width), self._target_pool.reserve(count)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture what almost every prompt needs, so that no request pays for it later.

        Raises:
            CannotCapture, OutOfMemory: as `launch`.
        """
        draft, target = self._draft_pool, self._target_pool
        spaces = self.reserve()
        nothing = np.zeros((0, 0), dtype=bool)
        plans = [Plan([], [], [], [], [], nothing, pool.slots.used) for pool in (draft, target)]
        # One beam behind the spare slot: its nodes lie in reserved space, which is given back.
        request = DraftRequest(plans[0], [0], plans[1], [0], [0.0], 0, *spaces, None)
        try:
            for sizes in _USUAL:
                key = self._key(request, *sizes)
                if key not in self.captures:
                    self.captures.run(key, self._packed(request, self._layout(*sizes)), self._steps_for(key))
        finally:
            draft.release(spaces[0])
            target.release(spaces[1])

    def launch(self, request: DraftRequest) -> Launched:
        """Launch one iteration on the device; waits for nothing.

        Raises:
            TooLarge, CannotCapture, OutOfMemory: it is not in flight.
        """
        sizes = node_bucket(len(request.draft), _BUCKETS), node_bucket(len(request.target), _BUCKETS)
        layout, key = self._layout(*sizes), self._key(request, *sizes)
        flight = self.captures.launch(key, self._packed(request, layout), self._steps_for(key))
        return Launched(flight, layout, len(request.target))

    def wait(self, launched: Launched) -> Answer:
        """Wait for the one iteration in flight; what came back."""
        layout, row = launched.layout, launched.flight.wait()[0]

        def whole(field: Field) -> np.ndarray:
            return row[field.at].reshape(field.shape)

        def real(field: Field) -> np.ndarray:
            return row[field.at].view(np.float64).reshape(field.shape)

        forest = layout.forest
        fields = (
            whole(forest.support_parent), whole(forest.support_token), real(forest.logp), real(forest.prob),
            whole(forest.draws), whole(forest.finite) > 0,
        )  # fmt: skip
        layers = [DraftedLayer(*(part[i] for part in fields)) for i in range(self.gamma)]
        count = self.gamma * self.draft_width
        numbers = row[layout.rows.at].view(np.float32)[: layout.row_count]
        rows = numbers.reshape(-1, 2 * self.target.top_n + 1)
        if launched.nodes < len(rows) - count:  # without what was only padding
            rows = np.concatenate([rows[: launched.nodes], rows[len(rows) - count :]])
        return Answer(layers, unpack(rows))

    def _key(self, request: DraftRequest, draft_size: int, target_size: int) -> tuple[int, int, int, int]:
        self.captures.valid_for(self._target_pool.stores.pointers(), self._draft_pool.stores.pointers())
        sees = (
            slots_to_see(side.forward, plan.used, side.stores.cache.capacity)
            for side, plan in ((self.draft, request.draft), (self.target, request.target))
        )
        return draft_size, target_size, *sees  # type: ignore[return-value]

    def _packed(self, request: DraftRequest, layout: DraftLayout) -> Tensor:
        """The request block, int64 [1, size]."""
        fields, count = layout.request, len(request.beams)
        block = np.zeros((1, layout.request_size), dtype=np.int64)
        row = block[0]
        row[fields.draft_plan.at] = pad(request.draft, fields.draft_plan.shape[1]).ravel()
        row[fields.target_plan.at] = pad(request.target, fields.target_plan.shape[1]).ravel()
        row[fields.beams.at][:count], row[fields.beam_rows.at][:count] = request.beams, request.beam_rows
        scores = row[fields.scores.at].view(np.float64)
        scores[:] = -np.inf
        scores[:count] = request.scores
        row[fields.position.at] = request.position
        row[fields.draft_slots.at] = request.draft_space.slots
        row[fields.draft_rows.at] = request.draft_space.mask_rows
        row[fields.target_slots.at] = request.target_space.slots
        row[fields.target_rows.at] = request.target_space.mask_rows
        if self.processor is not None:
            row[fields.temperature.at].view(np.float64)[:] = self.processor.temperature
            row[fields.top_p.at].view(np.float64)[:] = self.processor.enough
        if request.uniforms is not None:
            row[fields.draft_uniforms.at].view(np.float64)[:] = request.uniforms.ravel()
        return torch.from_numpy(block)

    # What is captured.

    def _steps_for(self, key: tuple[int, int, int, int]) -> Steps:
        return lambda inputs: self._steps(inputs, *key)

    def _steps(
        self, request: Tensor, draft_size: int, target_size: int, draft_sees: int, target_sees: int
    ) -> list[Tensor]:
        layout, law = self._layout(draft_size, target_size), self._law
        fields, forest, draft_width = layout.request, layout.forest, self.draft_width
        outcome = torch.zeros((1, layout.outcome_size), dtype=torch.long, device=request.device)
        plan, position = fields.draft_plan.of(request)[0], fields.position.of(request)
        used, beams = plan[6, :1], fields.beams.of(request)[0]
        begin = torch.zeros_like(used)
        all_slots, all_rows = fields.draft_slots.of(request), fields.draft_rows.of(request)
        best = law.pack(
            self.draft,
            forward_many(self.draft, self._planned(self.draft, plan), begin, used, draft_sees)[beams],
        )
        scores, base = fields.scores.of(request, torch.float64), plan[3][beams][None]
        for depth in range(self.gamma):
            self._draft_layer(best, scores, depth, layout, request, outcome)
            if depth + 1 < self.gamma:
                scores = forest.weight.of(outcome, torch.float64)[:, depth]
                here = slice(depth * draft_width, (depth + 1) * draft_width)
                slots, rows = all_slots[:, here], all_rows[:, here]
                parent = forest.parent.of(outcome)[:, depth : depth + 1]
                mask = law.forest_masks(self._draft_pool.masks, base, parent, slots, rows)
                where = (position + depth + 1).expand(-1, draft_width).flatten()
                nodes = Nodes(forest.token.of(outcome)[0, depth], where, slots[0], mask)
                best = law.pack(self.draft, forward_many(self.draft, nodes, begin, used, draft_sees))
                base = rows
            self.captures.break_graph()
        plan = fields.target_plan.of(request)[0]
        own = self._planned(self.target, plan)  # first: it writes the rows that the forest's start from
        slots, rows = fields.target_slots.of(request), fields.target_rows.of(request)
        mask = law.forest_masks(
            self._target_pool.masks, fields.beam_rows.of(request), forest.parent.of(outcome), slots, rows
        )
        deep = torch.arange(slots.shape[1], device=request.device) // draft_width + 1
        below = Nodes(forest.token.of(outcome).flatten(), position[0] + deep, slots[0], mask)
        logits = forward_many(self.target, together(own, below), begin, plan[6, :1], target_sees)
        numbers = layout.rows.of(outcome).view(torch.float32)[0]
        numbers[: layout.row_count] = law.pack(self.target, logits).flatten()
        return [outcome]

    def _draft_layer(
        self, best: Tensor, scores: Tensor, depth: int, layout: DraftLayout, request: Tensor, outcome: Tensor
    ) -> None:
        if self.processor is None:
            self._law.draft(best, scores, depth, layout, outcome, self._eos)
            return
        greedy, support = self.processor.greedy, self.processor.top_n
        self._law.draw(best, scores, depth, layout, request, outcome, self._eos, greedy, support)

    def _planned(self, side: Side, plan: Tensor) -> Nodes:
        """What the host has planned, int64 [7, N]."""
        ids, positions, slots, rows, base, bits, _ = plan
        return Nodes(ids, positions, slots, side.stores.masks.extend(base, rows, slots, seen_inside(bits)))
