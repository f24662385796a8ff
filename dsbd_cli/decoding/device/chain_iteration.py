"""Iterations of `cover` and of plain sampling that follow each other on the device, verification included.

The next beams, where they lie and what their parents' masks are stay on the device, so an iteration
can be launched before the host has seen the last one: while it works on one the device is busy with the
next. A forest only decides how far an iteration gets, never what is drawn, so nothing here waits for
the host. What the host gives is free space and uniforms, both of which it has_logits beforehand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.tree_cache import Reservation
from dsbd_cli.decoding.device.law_torch import Drafted, draft_layer
from dsbd_cli.decoding.device.layout import Layer, Side
from dsbd_cli.decoding.device.steps import (
    BestRows,
    Drafting,
    Nodes,
    best_of_rows,
    draft_forest,
    forest_nodes,
    forward,
    together,
)
from dsbd_cli.decoding.forward.graphs import AT_ONCE_S, Recorder, slots_to_see
from dsbd_cli.decoding.law.distribution import LogitsProcessor


class State(NamedTuple):
    """The beams that an iteration starts from, W places, on the host or as int64 on the device.

    Attributes:
        token: of each place.
        score: log weight, float64 by its bits; -inf where there is no beam.
        row: the parent's mask row in the target's pool.
        draft_row: the parent's in the draft's pool, if the draft has computed it.
        above, above_row: the parent's token and the grandparent's mask row in the draft's pool, if not.
        first: the first place with the same parent.
        missing: [1], 1 if the draft has not computed the parents.
        position: [1], of the beams' tokens.
    """

    token: Tensor
    score: Tensor
    row: Tensor
    draft_row: Tensor
    above: Tensor
    above_row: Tensor
    first: Tensor
    missing: Tensor
    position: Tensor


class Verified(NamedTuple):
    """One layer that the target drew, W draws, on the host.

    Attributes:
        parent: place among the draws above (for the first layer: among the beams).
        token, logp: int64 and float64 [W].
        known: bool [W], whether the draw lies in the forest.
        finite: bool [W], by place above: whether its logits were numbers.
    """

    parent: np.ndarray
    token: np.ndarray
    logp: np.ndarray
    known: np.ndarray
    finite: np.ndarray


class Outcome(NamedTuple):
    """What came back from one iteration: gamma drafted layers, and the layers committed (at least one)."""

    drafted: list[Layer]
    verified: list[Verified]


class Space(NamedTuple):
    """Space of one iteration: for W beams, then the forest; in the draft's pool for W parents before them."""

    target: Reservation
    draft: Reservation | None


@dataclass
class _Recorded:
    request: Tensor
    outcome: Tensor
    replay: Callable[[], None]


class Landing:
    """Host memory of one iteration under way, and when it has come back.

    Attributes:
        staging, landing: what goes to the device and what will come back.
        seconds: how long the device took, if the host had to wait for it; else None. Known after `wait`.
    """

    def __init__(self, staging: Tensor, landing: Tensor, device: torch.device) -> None:
        self.staging, self.landing = staging, landing
        self.seconds: float | None = None
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def free(self) -> None:
        """Make sure that both may be written to: a launch that was given up may not have begun yet."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()

    def mark(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self, since: float) -> None:
        """The one synchronisation of an iteration; `since` is when the device could begin with it."""
        came = time.perf_counter()
        if self._event is not None:
            self._event.synchronize()
        now = time.perf_counter()
        self.seconds = now - since if now - came > AT_ONCE_S else None


class DeviceChain:
    """Runs chained iterations for one pair, or for a target alone.

    Args:
        target: recorded.
        draft: likewise on the same device; None: nothing is drafted.
        beams: W.
        processor: T.
        draft_width, gamma: of the forest; gamma 0 without a draft.
        eos_ids: draws of these are finished.

    Attributes:
        window: layers for which `launch` is given uniforms: this iteration's and the one's before it.
    """

    def __init__(
        self, target: Side, draft: Side | None, beams: int, processor: LogitsProcessor, draft_width: int, gamma: int,
        eos_ids: list[int], device: torch.device,
    ) -> None:  # fmt: skip
        self.target, self.draft = target, draft
        self.beams, self.processor = beams, processor
        self.gamma, self.width = gamma, draft_width
        self.window = 2 * (gamma + 1)
        self.nodes = beams + gamma * draft_width
        self._how = Drafting(draft_width, gamma, None, torch.tensor(eos_ids, dtype=torch.long, device=device))
        self._numbers = torch.tensor(
            [processor.temperature, processor.top_p], dtype=torch.float64, device=device
        )
        self._recorder = Recorder(device)
        self._buckets: dict[tuple[int, ...], _Recorded] = {}
        size = 7 * beams + 2
        # Where an iteration finds its beams, and where it leaves the next ones.
        self._now, self._next = torch.zeros((2, size), dtype=torch.long, device=device)
        self._now[-1] = 1  # a recording runs from here: there is no position before 0
        host = self._recorder.host
        self._fresh = host(torch.zeros(size, dtype=torch.long))
        self._landings = [
            Landing(
                host(torch.zeros(self._sizes()[0], dtype=torch.long)),
                host(torch.zeros(self._sizes()[1], dtype=torch.float64)),
                device,
            )
            for _ in range(2)
        ]  # fmt: skip
        self._turn = 0

    def takes(self) -> bool:
        """Whether these sizes can be served."""
        return True

    # What the host does.

    @property
    def draft_nodes(self) -> int:
        """Places that the draft needs an iteration."""
        return 2 * self.beams + (self.gamma - 1) * self.width if self.gamma else 0

    def space(self) -> Space:
        """Reservation what one iteration needs."""
        target = self.target.pool.reserve(self.nodes)
        return Space(target, None if self.draft is None else self.draft.pool.reserve(self.draft_nodes))

    def release(self, space: Space) -> None:
        """Give it back."""
        self.target.pool.release(space.target)
        if self.draft is not None and space.draft is not None:
            self.draft.pool.release(space.draft)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record an iteration, so that no answer waits for it later."""
        space = self.space()
        try:
            if self._key() not in self._buckets:
                self._record(self._request(space, np.zeros((self.window, self.beams)), 0))
        finally:
            self.release(space)

    @torch.inference_mode()
    def launch(self, space: Space, uniforms: np.ndarray, position: int, fresh: np.ndarray | None) -> Landing:
        """Set off one iteration on the device; waits for nothing.

        Args:
            space: from `space`; the pools' slots in use are looked up here.
            uniforms: float64 [window, W], the first row for draws below tokens at `position`.
            fresh: `state_of` the beams to start from; None: those that the last iteration left.
        """
        landing = self._landings[self._turn]
        self._turn = 1 - self._turn
        landing.free()
        request = self._request(space, uniforms, position)
        if fresh is None:
            self._now.copy_(self._next)
        else:
            self._fresh.copy_(torch.from_numpy(fresh))
            self._now.copy_(self._fresh, non_blocking=True)
        key = self._key()
        if key not in self._buckets:
            self._record(request)
        bucket = self._buckets[key]
        landing.staging.copy_(torch.from_numpy(request))
        bucket.request.copy_(landing.staging, non_blocking=True)
        bucket.replay()
        landing.landing.copy_(bucket.outcome, non_blocking=True)
        landing.mark()
        return landing

    def land(self, landing: Landing, since: float) -> Outcome:
        """Wait for an iteration; what came back. `since` as for `Landing.wait`."""
        landing.wait(since)
        host = landing.landing.numpy().copy()
        at = 0

        def part(size: int) -> np.ndarray:
            nonlocal at
            at += size
            return host[at - size : at]

        drafted = []
        with np.errstate(invalid="ignore"):  # what has no parent is NaN, and is not looked at
            whole = host.astype(np.int64)
        for depth in range(self.gamma):
            parents = self.beams if depth == 0 else self.width
            begin = at
            _, _, logp, prob, _ = (part(self.width) for _ in range(5))
            ints = whole[begin:at].reshape(5, -1)
            drafted.append(Layer(ints[0], ints[1], logp, prob, ints[4], part(parents) > 0))
        verified = []
        for _ in range(self.gamma + 1):
            begin = at
            _, _, logp, known, finite = (part(self.beams) for _ in range(5))
            ints = whole[begin:at].reshape(5, -1)
            verified.append(Verified(ints[0], ints[1], logp, known > 0, finite > 0))
        return Outcome(drafted, verified[: int(host[-1])])

    def state_of(
        self, tokens: list[int], scores: list[float], rows: list[int], draft_rows: list[int], position: int
    ) -> np.ndarray:
        """A state as `launch` takes it, of at most W beams whose parents both models have computed."""
        nothing = [0] * self.beams
        weights = np.array([*scores, *[-np.inf] * (self.beams - len(scores))]).view(np.int64)
        whole = [(part + nothing)[: self.beams] for part in (tokens, rows, draft_rows)]
        parts = [whole[0], weights, *whole[1:], nothing, nothing, nothing, [0, position]]
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    # In and out: one tensor each way.

    def _sizes(self) -> tuple[int, int]:
        """Of what goes out and of what comes back."""
        request = 2 * (self.nodes + self.draft_nodes) + 3 + self.window * self.beams
        parents = self.beams + (self.gamma - 1) * self.width if self.gamma else 0
        return request, self.gamma * 5 * self.width + parents + (self.gamma + 1) * 5 * self.beams + 1

    def _request(self, space: Space, uniforms: np.ndarray, position: int) -> np.ndarray:
        """Everything as one int64 vector; float64 by its bits."""
        draft = space.draft
        used = self.target.pool.slots.used, 0 if self.draft is None else self.draft.pool.slots.used
        integers = [
            *space.target.slots, *space.target.mask_rows,
            *([*draft.slots, *draft.mask_rows] if draft is not None else []), *used, position,
        ]  # fmt: skip
        return np.concatenate([np.array(integers), np.ascontiguousarray(uniforms).view(np.int64).ravel()])

    def _parts_of(self, request: Tensor) -> tuple[Tensor, ...]:
        """Both spaces [2, nodes], slots in use, the uniforms' position, the uniforms as int64."""
        sizes = [2 * self.nodes, 2 * self.draft_nodes, 1, 1, 1, self.window * self.beams]
        space, draft_space, *rest = request.split(sizes)
        return space.view(2, -1), draft_space.view(2, -1), *rest

    def _beams_now(self) -> State:
        """Views of what an iteration starts from."""
        return State(*self._now.split([*[self.beams] * 7, 1, 1]))

    def _key(self) -> tuple[int, ...]:
        sides = [side for side in (self.target, self.draft) if side is not None]
        if self._recorder.moved(*(side.pool.pointers() for side in sides)):
            self._buckets.clear()
        return tuple(slots_to_see(side.forward, side.pool.slots.used, side.pool) for side in sides)

    # The recorded part.

    def _record(self, request: np.ndarray) -> None:
        key = self._key()
        inputs = torch.from_numpy(request).to(self._recorder.device, copy=True)
        # In one piece: while the host launches it, the device is busy with the iteration before.
        outputs, replay = self._recorder.record(lambda: self._steps(inputs, *key))
        self._buckets[key] = _Recorded(inputs, outputs[0], replay)

    def _steps(self, request: Tensor, sees: int, draft_sees: int = 0) -> list[Tensor]:
        beams, wide, deep = self.beams, self.width, self.gamma
        space, draft_space, used, draft_used, origin, uniforms = self._parts_of(request)
        now = self._beams_now()
        parts: list[Tensor] = []
        drafted: list[Drafted] = []
        draft_rows = draft_space[1, beams:]  # of the beams, then of the forest without its last layer
        if self.draft is not None:
            below = draft_space[:, 2 * beams :].reshape(2, deep - 1, wide)
            logits = forward(
                self.draft, self._caught_up(now, draft_space[:, : 2 * beams]), draft_used, draft_sees
            )
            drafted, finite = draft_forest(
                self.draft, self._how, logits[beams:], now.score.view(torch.float64), draft_rows[:beams],
                now.position, below, draft_used, draft_sees, None, lambda: None,
            )  # fmt: skip
            for layer, good in zip(drafted, finite, strict=True):
                parts += [layer.parent, layer.token, layer.logp, layer.prob, layer.draws, good]
        slots, rows = space[:, :beams]
        alone = torch.eye(beams, dtype=torch.bool, device=request.device)
        mask = self.target.pool.masks.extend(now.row, rows, slots, alone)
        nodes = Nodes(now.token, now.position.expand(beams), slots, mask)
        if drafted:
            forest = space[:, beams:].reshape(2, deep, wide)
            nodes = together(nodes, forest_nodes(self.target, self._how, drafted, rows, now.position, forest))
        best = best_of_rows(self.target, forward(self.target, nodes, used, sees))
        offset = (now.position - origin) * beams + torch.arange((deep + 1) * beams, device=request.device)
        chosen = uniforms.view(torch.float64)[offset.clamp(0, len(uniforms) - 1)].view(deep + 1, beams)
        layers, count, after = self._verify(now, drafted, best, chosen, nodes.ids, space[1], draft_rows)
        self._next.copy_(torch.cat(after))
        return [torch.cat([part.double() for part in (*parts, *layers, count)])]

    def _caught_up(self, now: State, space: Tensor) -> Nodes:
        """The parents (looked at if the draft lacks them) and the beams, for the draft."""
        assert self.draft is not None
        beams = self.beams
        lacking = now.missing.bool()
        inside = torch.eye(2 * beams, dtype=torch.bool, device=space.device)
        which = torch.arange(beams, device=space.device)
        inside[beams:, :beams] = (which[None] == now.first[:, None]) & lacking
        base = torch.cat([now.above_row, torch.where(lacking, now.above_row, now.draft_row)])
        slots, rows = space
        mask = self.draft.pool.masks.extend(base, rows, slots, inside)
        ids = torch.cat([now.above, now.token])
        where = torch.cat([(now.position - 1).expand(beams), now.position.expand(beams)])
        return Nodes(ids, where, slots, mask)

    def _verify(
        self, now: State, drafted: list[Drafted], best: BestRows, uniforms: Tensor, tokens: Tensor,
        rows: Tensor, draft_rows: Tensor,
    ) -> tuple[list[Tensor], Tensor, State]:  # fmt: skip
        """Draw layers for as long as their law is known: `cover_layers` where the rows lie.

        Args:
            best: the target's rows of all N nodes of the iteration: beams, then the forest.
            uniforms: float64 [gamma + 1, W].
            tokens, rows: int64 [N], token and mask row (target's pool) of each node.
            draft_rows: mask rows in the draft's pool, of the nodes that the draft has computed.

        Returns:
            Five parts a layer (`Verified`), how many layers hold, and the next iteration's beams.
        """
        beams, wide = self.beams, self.width
        parts: list[Tensor] = []
        at = torch.arange(beams, device=tokens.device)  # nodes whose rows the next layer is drawn from
        score = now.score.view(torch.float64)
        going = torch.ones(1, dtype=torch.bool, device=tokens.device)
        count = torch.zeros(1, dtype=torch.long, device=tokens.device)
        token, node, after = now.token, at, score
        above: list[Tensor] = []  # of each forest node, its parent's place among all nodes
        for depth in range(self.gamma + 1):
            drawn = draft_layer(score, best.ids[at], best.logps[at], self.processor, uniforms[depth])
            parent, new = drawn.parent[drawn.draws], drawn.token[drawn.draws]
            ended = torch.isin(new, self._how.eos)
            weight = drawn.scores.masked_fill(ended, -torch.inf)
            from_node = at[parent]
            known = torch.zeros(beams, dtype=torch.bool, device=tokens.device)
            place = at
            if depth < self.gamma:
                layer = drafted[depth]
                below = layer.parent[layer.draws]
                begin = beams + depth * wide
                above.append(below if depth == 0 else below + begin - wide)
                alive = torch.isfinite(layer.scores) & ~torch.isin(layer.token[layer.draws], self._how.eos)
                same = (from_node[:, None] == above[-1]) & (new[:, None] == layer.token[layer.draws]) & alive
                known = same.any(1)
                place = torch.where(known, begin + same.int().argmax(1), 0)
            parts += [parent, new, drawn.logp[drawn.draws], known, best.finite[at]]
            count = count + going
            token, node, after = (
                torch.where(going, one, other) for one, other in ((new, token), (from_node, node), (weight, after))
            )  # fmt: skip
            live = torch.isfinite(weight)
            going = going & (known | ~live).all() & live.any()
            at, score = place, weight
        first = (node[:, None] == node).int().argmax(1)
        nothing = torch.zeros_like(node)
        draft_row = above_row = nothing
        if self.gamma:
            computed = len(draft_rows)
            draft_row = draft_rows[node.clamp(max=computed - 1)]
            grand = torch.cat([nothing, *above])[node]
            above_row = draft_rows[grand.clamp(max=computed - 1)]
        missing = (count > self.gamma).long() if self.gamma else torch.zeros_like(count)
        return parts, count, State(
            token, after.view(torch.long), rows[node], draft_row, tokens[node], above_row, first,
            missing, now.position + count,
        )  # fmt: skip
