"""Iterations that follow each other on the device: drafts, the target over them, verification, the next beams.

The next beams, where they lie and what their parents' mask rows are stay on the device, so an iteration
can be launched before the host has seen the last one: while it works on one the device is busy with the
next. Nothing here waits for the host. What it gives is free space and uniforms, both of which it has beforehand
(docs/design.md sections 3 and 5). One module, since what an iteration is sent, does on the device and
gives back are the two ends of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.tree_cache import Reservation, TreeCache
from dsbd_cli.decoding.device.law import DeviceLaw
from dsbd_cli.decoding.device.layout import CoverLayout, Field, Sizes
from dsbd_cli.decoding.device.steps import Nodes, forward_many
from dsbd_cli.decoding.forward.capture import Captures, InFlight, OverlapClock, slots_to_see
from dsbd_cli.decoding.model.protocol import Side


class Space(NamedTuple):
    """Space of one request's iteration: `nodes` places in the target's tree, `draft_nodes` in the draft's.

    Attributes:
        target, draft: the places.
        trees: the trees.
    """

    target: Reservation
    draft: Reservation | None
    trees: tuple[TreeCache, TreeCache | None]

    @classmethod
    def of(cls, layout: Sizes, target: TreeCache, draft: TreeCache | None) -> Space:
        """Reserve what one request's iteration needs."""
        return cls(
            target.reserve(layout.nodes),
            None if draft is None else draft.reserve(layout.draft_nodes),
            (target, draft),
        )

    def release(self) -> None:
        """Give it back."""
        target, draft = self.trees
        target.release(self.target)
        if draft is not None and self.draft is not None:
            draft.release(self.draft)


class AheadIteration:
    """Runs iterations of R requests for one pair, or for a target alone; a subclass says what they do.

    Args:
        target: captured. draft: likewise on the same device; None: nothing is drafted.
        law: what is computed between the forwards.
        layout: R and the sizes of every request.
        clock: the target's.
    """

    def __init__(
        self, target: Side, draft: Side | None, law: DeviceLaw, layout: Sizes, device: torch.device,
        clock: OverlapClock,
    ) -> None:  # fmt: skip
        self.target, self.draft, self.law, self.layout = target, draft, law, layout
        # Two in flight: one that the host waits for and the one behind it.
        self.captures = Captures(device, clock, turns=2)
        # Where an iteration finds its beams and what the one before it knew, and where it leaves the next ones.
        size = layout.requests, layout.state_size + layout.memory_size
        self._before, self._behind = torch.zeros((2, *size), dtype=torch.long, device=device)
        self._state, self._memory = self._before.split([layout.state_size, layout.memory_size], 1)
        self._after, self._left = self._behind.split([layout.state_size, layout.memory_size], 1)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Capture the CUDA graph now, so that no request pays for it later.

        Raises:
            CannotCapture, OutOfMemory: as `launch`.
        """
        key = self._key([])
        if key not in self.captures:
            self.captures.run(
                key, self._packed([None] * self.layout.requests), lambda request: self._steps(request, *key)
            )

    @torch.inference_mode()
    def launch(self, sent: Sequence[Any]) -> InFlight:
        """Launch one iteration of R requests, None for a place that nobody has; waits for nothing.

        Raises:
            CannotCapture, OutOfMemory: it is not in flight.
        """
        self._before.copy_(self._behind)
        key = self._key([request.space for request in sent if request is not None])
        return self.captures.launch(key, self._packed(sent), lambda block: self._steps(block, *key))

    def wait(self, flight: InFlight, wanted: Sequence[bool] | None = None) -> list[Any]:
        """Wait for an iteration; what came back of each request, None where it is not wanted."""
        raise NotImplementedError

    def state_of(
        self, tokens: list[int], scores: list[float], rows: list[int], draft_rows: list[int], position: int
    ) -> np.ndarray:
        """A state to start from, int64 [state_size], of at most W beams whose parents both models have computed.

        Args:
            tokens, scores: of the beams, the score their log weight.
            rows, draft_rows: their parents' mask rows in either tree; `draft_rows` empty without a draft.
            position: of the beams' tokens.
        """
        raise NotImplementedError

    def _packed(self, sent: Sequence[Any]) -> Tensor:
        """The request block, int64 [R, size]; None in `sent` for a place that nobody has."""
        raise NotImplementedError

    def _steps(self, request: Tensor, sees: int, draft_sees: int = 0) -> list[Tensor]:
        """What is captured: from the request block to the outcome, int64 [R, size]."""
        raise NotImplementedError

    def _key(self, spaces: Sequence[Space]) -> tuple[int, ...]:
        """KV lengths that a capture looks at; nothing else of an iteration changes."""
        sides = [side for side in (self.target, self.draft) if side is not None]
        self.captures.valid_for(*(side.stores.pointers() for side in sides))
        seen = []
        for i, side in enumerate(sides):
            if side.tree is None:
                seen.append(side.stores.masks.table.shape[1])
                continue
            trees = [tree for space in spaces if (tree := space.trees[i]) is not None] or [side.tree]
            used = max(tree.slots.used for tree in trees)
            seen.append(slots_to_see(side.forward, used, side.stores.cache.capacity))
        return tuple(seen)


class DraftedLayer(NamedTuple):
    """One drafted layer of a request, on the host.

    Attributes:
        parent, token: int64 [M]; logp, prob: float64 [M]; prob 0: outside the support.
        draws: int64 [W_S], indices into the support; fewer where there are no more distinct ones.
        finite: bool by parent, whether its draft logits were numbers.
    """

    parent: np.ndarray
    token: np.ndarray
    logp: np.ndarray
    prob: np.ndarray
    draws: np.ndarray
    finite: np.ndarray


class SampledLayer(NamedTuple):
    """One layer that the target drew, on the host (`layout.VerifiedFields`): by draw, [W_L], but `finite` [W].

    `verdicts` are those of the forest's draws that were looked at, in order, where these are tested. Under beam search
    the others are by candidate, and logp is the score.
    """

    parent: list[int]
    token: list[int]
    logp: list[float]
    finite: list[bool]
    verdicts: list[bool]


class Outcome(NamedTuple):
    """What came back of one request: gamma drafted layers, and the layers sampled (at least one)."""

    drafted: list[DraftedLayer]
    sampled: list[SampledLayer]


class Rules(NamedTuple):
    """What a request's layers are drawn under: fields of `layout.CoverRequestFields`."""

    temperature: float = 1.0
    top_p: float = 1.0
    mass: float = 1.0
    min_width: int = 1
    slack: float = -1.0
    last: int = 1 << 40
    one_beam: bool = False


@dataclass(frozen=True)
class Sent:
    """What the host sends of one request.

    Attributes:
        space: reserved for this iteration.
        uniforms: float64 [window, `numbers`], the first row for draws below tokens at `origin`.
        rules: of the request.
        draft_uniforms: float64 [gamma, W_S], where the forest is drawn.
        state: int64 [state_size], the beams to start from (`CoverIteration.state_of`); None: those that
            its last iteration left.
    """

    space: Space
    uniforms: np.ndarray
    origin: int
    rules: Rules
    state: np.ndarray | None
    draft_uniforms: np.ndarray | None = None


class CoverIteration(AheadIteration):
    """Runs iterations of R requests for one pair, or for a target alone.

    Args:
        target, draft, law, clock: as in `AheadIteration`.
        layout: R and the sizes of every request; what its layers are, draws or beam search.
        greedy, support: temperature 0 and its like; entries of the joint that T looks at (top-k).
        eos_ids: draws of these are finished.
        distinct: a layer's draws are distinct.
    """

    layout: CoverLayout

    def __init__(
        self, target: Side, draft: Side | None, law: DeviceLaw, layout: CoverLayout, greedy: bool, support: int,
        eos_ids: Sequence[int], device: torch.device, clock: OverlapClock, distinct: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(target, draft, law, layout, device, clock)
        self._greedy, self._support, self._distinct = greedy, support, distinct
        self._eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self._state[:, layout.state.position.at] = 1  # a capture runs from here: no position is before 0
        # How far nodes lie behind the beams: those that the draft catches up on, and all of the target's.
        deep = torch.arange(1, layout.gamma + 1, device=device).repeat_interleave(layout.draft_width)
        beams = deep.new_zeros(layout.width)
        self._draft_depths, self._target_depths = torch.cat([beams - 1, beams]), torch.cat([beams, deep])
        self._nobody = self._empty()
        self._everyone = np.arange(layout.draft_width)

    # What the host does.

    def wait(self, flight: InFlight, wanted: Sequence[bool] | None = None) -> list[Outcome | None]:
        """See `AheadIteration`."""
        block = flight.wait()
        if wanted is None:
            wanted = [True] * len(block)
        forest, verified = self.layout.forest, self.layout.verified

        def whole(field: Field) -> np.ndarray:
            return block[:, field.at].reshape(len(block), *field.shape)

        def real(field: Field) -> np.ndarray:
            return block[:, field.at].view(np.float64).reshape(len(block), *field.shape)

        drafted = (
            whole(forest.support_parent), whole(forest.support_token), real(forest.logp), real(forest.prob),
            whole(forest.finite) > 0,
        )  # fmt: skip
        picked = whole(forest.draws) if self.layout.drawn else None
        parents = whole(verified.parent)
        counts, widths = block[:, verified.layers.at][:, 0].tolist(), (parents >= 0).sum(2).tolist()
        sampled = parents.tolist(), whole(verified.token).tolist(), real(verified.logp).tolist()
        finite, verdicts = (whole(verified.finite) > 0).tolist(), whole(verified.verdicts).tolist()
        outcomes: list[Outcome | None] = []
        for r, one in enumerate(wanted):
            if not one:
                outcomes.append(None)
                continue
            parent, token, logp, prob, numbers = (part[r] for part in drafted)
            draws = [self._everyone] * self.layout.gamma
            if picked is not None:
                draws = [row[row >= 0] for row in picked[r]]
            layers = [
                DraftedLayer(parent[i], token[i], logp[i], prob[i], draws[i], numbers[i])
                for i in range(self.layout.gamma)
            ]
            drawn = []
            for i, n in enumerate(widths[r][: counts[r]]):
                p, t, score = (part[r][i][:n] for part in sampled)
                tested = [verdict > 0 for verdict in verdicts[r][i] if verdict >= 0]
                drawn.append(SampledLayer(p, t, score, finite[r][i], tested))
            outcomes.append(Outcome(layers, drawn))
        return outcomes

    def state_of(
        self, tokens: list[int], scores: list[float], rows: list[int], draft_rows: list[int], position: int
    ) -> np.ndarray:
        """See `AheadIteration`."""
        fields, count = self.layout.state, len(tokens)
        state = np.zeros(self.layout.state_size, dtype=np.int64)
        state[fields.token.at][:count] = tokens
        weights = state[fields.score.at].view(np.float64)
        weights[:] = -np.inf
        weights[:count] = scores
        state[fields.row.at][:count] = rows
        state[fields.draft_row.at][: len(draft_rows)] = draft_rows
        state[fields.position.at] = position
        return state

    def _packed(self, sent: Sequence[Sent | None]) -> Tensor:
        """The request block, int64 [R, size]."""
        fields = self.layout.request
        block = np.repeat(self._nobody[None], self.layout.requests, 0)
        rows = [row for row, request in enumerate(sent) if request is not None]
        requests = [request for request in sent if request is not None]
        if not requests:
            return torch.from_numpy(block)
        bits = block.view(np.float64)
        spaces = [request.space for request in requests]
        trees = [space.target for space in spaces], [space.trees[0] for space in spaces]
        self._put(block, rows, trees, fields.target_slots, fields.target_rows, fields.begin, fields.used)
        if self.draft is not None:
            reserved = [space.draft for space in spaces], [space.trees[1] for space in spaces]
            self._put(
                block, rows, reserved, fields.draft_slots, fields.draft_rows, fields.draft_begin, fields.draft_used
            )  # fmt: skip
        block[rows, fields.fresh.at.start] = [request.state is not None for request in requests]
        block[rows, fields.origin.at.start] = [request.origin for request in requests]
        self._write(block, rows, [request.rules for request in requests])
        bits[rows, fields.uniforms.at] = [request.uniforms.ravel() for request in requests]
        for row, request in zip(rows, requests, strict=True):
            if request.state is not None:
                block[row, fields.start.at] = request.state
            if request.draft_uniforms is not None:
                bits[row, fields.draft_uniforms.at] = request.draft_uniforms.ravel()
        return torch.from_numpy(block)

    @staticmethod
    def _put(
        block: np.ndarray, rows: list[int], parts: Any, slots: Field, mask_rows: Field, begin: Field, used: Field
    ) -> None:  # fmt: skip
        """Where each request's nodes go in one model's tree."""
        spaces, trees = parts
        block[rows, slots.at] = [space.slots for space in spaces]
        block[rows, mask_rows.at] = [space.mask_rows for space in spaces]
        block[rows, begin.at.start] = [tree.begin for tree in trees]
        block[rows, used.at.start] = [tree.slots.used for tree in trees]

    def _empty(self) -> np.ndarray:
        """What stands for a request where there is none: one beam behind nothing, in the spare slot and row."""
        fields = self.layout.request
        row = np.zeros(self.layout.request_size, dtype=np.int64)
        row[fields.used.at] = row[fields.draft_used.at] = row[fields.fresh.at] = 1
        row[fields.start.at] = self.state_of([0], [0.0], [0], [0], 1)
        self._write(row[None], [0], [Rules(min_width=self.layout.width)])
        return row

    def _write(self, block: np.ndarray, rows: list[int], rules: Sequence[Rules]) -> None:
        fields, bits = self.layout.request, block.view(np.float64)
        for field, reals in (
            (fields.temperature, [one.temperature for one in rules]), (fields.top_p, [one.top_p for one in rules]),
            (fields.mass, [one.mass for one in rules]), (fields.slack, [one.slack for one in rules]),
        ):  # fmt: skip
            bits[rows, field.at.start] = reals
        for field, numbers in (
            (fields.min_width, [one.min_width for one in rules]), (fields.last, [one.last for one in rules]),
            (fields.one_beam, [one.one_beam for one in rules]),
        ):  # fmt: skip
            block[rows, field.at.start] = numbers

    # What is captured.

    def _steps(self, request: Tensor, sees: int, draft_sees: int = 0) -> list[Tensor]:
        layout, sent, state = self.layout, self.layout.request, self._state
        torch.where(sent.fresh.of(request) != 0, sent.start.of(request), state, out=state)
        outcome = torch.zeros((layout.requests, layout.outcome_size), dtype=torch.long, device=request.device)
        position = layout.state.position.of(state)  # [R, 1]
        if self.draft is not None:
            self._draft_forest(self.draft, request, outcome, position, draft_sees)
        slots, rows = sent.target_slots.of(request), sent.target_rows.of(request)
        width, masks = layout.width, self.target.stores.masks
        own = self.law.forest_masks(
            masks, layout.state.row.of(state), None, slots[:, :width], rows[:, :width]
        )
        ids, mask = layout.state.token.of(state), own
        if self.draft is not None:
            below = self.law.forest_masks(
                masks, rows[:, :width], layout.forest.parent.of(outcome), slots[:, width:], rows[:, width:]
            )
            mask = torch.cat([part.unflatten(0, (layout.requests, -1)) for part in (own, below)], 1).flatten(
                0, 1
            )
            ids = torch.cat([ids, layout.forest.token.of(outcome).flatten(1)], 1)
        where = position + self._target_depths
        nodes = Nodes(ids.flatten(), where.flatten(), slots.flatten(), mask)
        logits = forward_many(
            self.target, nodes, sent.begin.of(request)[:, 0], sent.used.of(request)[:, 0], sees
        )
        best = self.law.pack(self.target, logits)
        self.law.verify(
            best, state, self._after, request, outcome, layout, self._eos, self._greedy, self._support,
            self._distinct,
        )  # fmt: skip
        if layout.recalled:
            self._left[:, : layout.rows.start] = outcome[:, : layout.rows.start]
            rows = layout.rows.of(self._left).view(torch.float32)
            rows[:, : layout.row_count] = best.view(layout.requests, -1)
        return [outcome]

    def _draft_forest(
        self, draft: Side, request: Tensor, outcome: Tensor, position: Tensor, sees: int
    ) -> None:
        """The draft catches up on the beams and drafts gamma layers below them, into `outcome`."""
        layout, law, state = self.layout, self.law, self._state
        requests, width, draft_width = layout.requests, layout.width, layout.draft_width
        all_slots, all_rows = layout.request.draft_slots.of(request), layout.request.draft_rows.of(request)
        begin, used = (
            field.of(request)[:, 0] for field in (layout.request.draft_begin, layout.request.draft_used)
        )
        slots, rows = all_slots[:, : 2 * width], all_rows[:, : 2 * width]
        mask = law.catch_up_masks(draft.stores.masks, state, layout, slots, rows)
        ids = torch.cat([layout.state.above.of(state), layout.state.token.of(state)], 1).flatten()
        nodes = Nodes(ids, (position + self._draft_depths).flatten(), slots.flatten(), mask)
        logits = forward_many(draft, nodes, begin, used, sees).unflatten(0, (requests, 2 * width))
        best = law.pack(draft, logits[:, width:].flatten(0, 1))
        scores, base = layout.state.score.of(state, torch.float64), rows[:, width:]
        forest, known = layout.forest, layout.state.known.of(state)
        deep = self._target_depths[width:].view(layout.gamma, 1, draft_width)
        wheres = (position + deep).flatten(1)  # of all layers at once: [gamma, R x W_S]
        for depth in range(layout.gamma):
            if layout.recalled:
                known = law.recall(best, known, depth, layout, outcome, self._memory)
            if layout.drawn:
                law.draw(
                    best, scores, depth, layout, request, outcome, self._eos, self._greedy, self._support,
                    self._distinct,
                )  # fmt: skip
            else:
                law.draft(best, scores, depth, layout, outcome, self._eos)
            if depth + 1 == layout.gamma:
                return
            scores = forest.weight.of(outcome, torch.float64)[:, depth]
            first = 2 * width + depth * draft_width
            slots, rows = (x[:, first : first + draft_width] for x in (all_slots, all_rows))
            parent = forest.parent.of(outcome)[:, depth : depth + 1]
            mask = law.forest_masks(draft.stores.masks, base, parent, slots, rows)
            ids = forest.token.of(outcome)[:, depth].flatten()
            nodes = Nodes(ids, wheres[depth], slots.flatten(), mask)
            best = law.pack(draft, forward_many(draft, nodes, begin, used, sees))
            base = rows
