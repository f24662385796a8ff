"""Pipelined iterations: the device is one iteration ahead of the host, which commits what it decided.

Launching ahead, waiting, committing and dropping are one call, `step`, so their order cannot be got
wrong. docs/design.md section 3 (why a device can run ahead) and section 5 (the cache).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsbd_cli.decoding.device.iteration import AheadIteration, Space
from dsbd_cli.decoding.device.lanes import Committed, Host, Lane, Part, rules_of
from dsbd_cli.decoding.forward.capture import InFlight, OverlapClock
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.law.width import ThresholdWidth
from dsbd_cli.decoding.model.protocol import Commit
from dsbd_cli.decoding.tree.request import Request


@dataclass
class _Iteration:
    flight: InFlight
    parts: list[Part | None]


class Pipeline:
    """Runs iterations of R requests on the device, one ahead of the host.

    Requests come and go between iterations: what the device did for one that is gone is not looked at.

    Args:
        iteration: made for both models, and for R requests.
        host: of that kind of iteration.
        clock: the target's.
        stopped: told why nothing can be launched any more.
    """

    def __init__(
        self,
        iteration: AheadIteration,
        host: Host,
        clock: OverlapClock,
        stopped: Callable[[CannotCapture | OutOfMemory], None],
    ) -> None:
        self._iteration, self._host, self._clock, self._stopped = iteration, host, clock, stopped
        self._lanes: list[Lane | None] = [None] * iteration.layout.requests
        self._in_flight: deque[_Iteration] = deque()
        self._usable = True  # else what is in flight still comes back, and the host goes on

    @property
    def forest_shape(self) -> tuple[int, int]:
        """W_S and gamma."""
        return self._iteration.layout.draft_width, self._iteration.layout.gamma

    @property
    def drafts(self) -> bool:
        """Whether its iterations have forests: it is given a draft then."""
        return self._iteration.layout.gamma > 0

    @property
    def steps_s(self) -> float:
        """Seconds that the device's steps took the host, on a machine without one (`Captures.steps_s`)."""
        return self._iteration.captures.steps_s

    @torch.inference_mode()
    def join(self, request: Request, target: Any, draft: Any, commit: Commit, forests: bool) -> Lane | None:
        """A lane for a request, from its active set on; None where there is none.

        Args:
            target, draft, commit, forests: as in `Lane`.
        """
        models = [model for model in (target, draft) if model is not None]
        limits = [model.max_depth for model in models if model.max_depth is not None]
        deepest = min(limits) - self._iteration.layout.gamma if limits else None
        beams = request.hypotheses.active
        if not self._usable or None not in self._lanes or not isinstance(request.sampler, SeededSampler):
            return None
        layout = self._iteration.layout
        computed = [[node for node in beams if node in model.tree] for model in models]
        # The host draws a layer of `cover` from what it knows, without another target call.
        if any(computed) and not layout.drawn:
            return None
        if not all(node.parent is not None and node.parent in target.tree for node in beams):
            return None
        if layout.drawn and not isinstance(request.draft_sampler, SeededSampler):
            return None
        uniforms, drafting = self._host.streams(request)
        rules = rules_of(request, target.tree.prompt_length - 1 + request.trie.budget)
        places = [*beams, *[None] * (request.width - len(beams))]
        anew = layout.memory_size > 0 and isinstance(request.dynamic_width, ThresholdWidth)
        lane = Lane(
            request, target, draft, commit, forests, uniforms, drafting, rules, None, deepest, anew, places
        )  # fmt: skip
        if not lane.fits(beams[0].depth):
            return None
        for model, nodes in zip(models, computed, strict=True):  # the iteration computes them itself
            model.tree.roll_back(nodes)
            model.logits.forget(nodes)
        lane.state = self._state_of(lane)
        self._lanes[self._lanes.index(None)] = lane
        # With one lane nobody else can join: the device may begin while the host is busy.
        if len(self._lanes) == 1 and not self._launch([lane]):
            self._leave(lane)
            return None
        return lane

    @torch.inference_mode()
    def step(self, ahead: bool = True) -> None:
        """Launch the next iteration, wait for the one in flight, and commit what it decided.

        Args:
            ahead: whether to launch; without, what was in flight is the last, and lanes may move (`Seat.move`).

        `commit` of every lane is called for every layer, in order, with its draws and, where there is a
        drafted layer beside it, whether the forest holds each, or the verdicts on that layer's draws; it returns
        whether the request goes on. Past a layer where it does not, what the device did is dropped.

        Raises:
            RunError: a model gave logits that are not finite.
        """
        lanes = [lane for lane in self._lanes if lane is not None]
        if not self._in_flight and (not lanes or not self._launch(lanes)):
            for lane in lanes:
                self._leave(lane)
            return
        if ahead and len(self._in_flight) == 1:
            self._launch_ahead()
        iteration = self._in_flight.popleft()
        wanted = [part is not None and not part.void for part in iteration.parts]
        outcomes = self._iteration.wait(iteration.flight, wanted)
        done: list[tuple[Part, Committed]] = []
        for part, outcome in zip(iteration.parts, outcomes, strict=True):
            if part is None or outcome is None:
                continue
            lane = part.lane
            lane.target.calls += 1
            if lane.draft is not None:
                lane.draft.calls += self._iteration.layout.gamma
            done.append((part, self._host.committed(part, outcome)))
        for part, one in done:
            lane = part.lane
            lane.beams = one.beams
            lane.above = one.parents if one.layers > self._iteration.layout.gamma > 0 else []
        # What could not be launched before its beams were known may be now, before the caches are told.
        alive = [part.lane for part, one in done if one.whole]
        everyone = len(alive) == sum(lane is not None for lane in self._lanes)
        fit = all(lane.fits(lane.request.hypotheses.active[0].depth) for lane in alive)
        starts_anew = any(lane.anew for lane in alive)
        if ahead and alive and everyone and fit and not self._in_flight and not starts_anew:
            self._launch(alive)
        for part, one in done:
            part.adopt(one, self._iteration.layout)
            part.lane.forest = one.forest
            self._go_on(part.lane, one)
        if not self._in_flight:
            self._clock.idle()

    @property
    def empty(self) -> bool:
        """Whether no request is in the iterations."""
        return all(lane is None for lane in self._lanes)

    def release(self) -> None:
        """Let go of what was captured; it is captured anew when somebody joins."""
        self._iteration.captures.release()

    def has(self, lane: Lane) -> bool:
        """Whether the request is in the iterations."""
        return any(lane is one for one in self._lanes)

    def leave(self, lane: Lane) -> None:
        """A request goes, whatever the device is doing for it."""
        if self.has(lane):
            self._leave(lane)
        if self.empty:
            self._in_flight.clear()
            self._clock.idle()

    def _go_on(self, lane: Lane, one: Committed) -> None:
        """Keep a lane if the device goes on from where it is; its next part then learns of its beams."""
        following = self._part_of(lane)
        if (
            not one.whole
            or not self._usable
            or (following is None and (self._in_flight or lane.anew or not lane.fits(one.depth)))
        ):
            self._leave(lane)
        elif following is not None:
            following.beams, following.above = lane.beams, lane.above
        else:
            lane.settle()

    def _leave(self, lane: Lane) -> None:
        for iteration in self._in_flight:
            for part in iteration.parts:
                if part is not None and part.lane is lane and not part.void:
                    part.void = True
                    part.space.release()
        self._lanes[self._lanes.index(lane)] = None
        lane.settle()

    def _part_of(self, lane: Lane) -> Part | None:
        """The lane's part of the iteration in flight behind the one that was committed."""
        parts = self._in_flight[0].parts if self._in_flight else []
        return next((part for part in parts if part is not None and part.lane is lane), None)

    # Launching.

    def _state_of(self, lane: Lane) -> np.ndarray:
        beams = lane.request.hypotheses.active
        above = [node.parent for node in beams if node.parent is not None]
        draft_rows: list[int] = []
        if lane.draft is not None:
            tree = lane.draft.tree
            if lacking := [node for node in dict.fromkeys(above) if node not in tree]:
                lane.draft.forward(lacking)
            draft_rows = [tree.mask_row(node) for node in above]
        return self._iteration.state_of(
            [node.token for node in beams],
            [node.score for node in beams],
            [lane.target.tree.mask_row(node) for node in above],
            draft_rows,
            lane.target.tree.position(beams[0]),
        )

    def _launch_ahead(self) -> None:
        """Launch the iteration that follows, for those that may need one and have room for it.

        Beams grow by one to gamma + 1 tokens first.
        """
        if not self._usable:
            return
        ahead = []
        for lane in self._lanes:
            if lane is None:
                continue
            depth = lane.request.hypotheses.active[0].depth
            if lane.state is not None or (  # it joins now
                depth + 1 < lane.request.trie.budget and lane.fits(depth + self._iteration.layout.gamma + 1)
            ):
                ahead.append(lane)
        if ahead:
            self._launch(ahead)

    def _launch(self, lanes: Sequence[Lane]) -> bool:
        parts: list[Part | None] = []
        sent: list[Any] = []
        if not self._usable:
            return False
        try:
            for place, lane in enumerate(self._lanes):
                if lane is None or not any(lane is one for one in lanes):
                    parts.append(None)
                    sent.append(None)
                    continue
                space = Space.of(
                    self._iteration.layout, lane.target.tree, None if lane.draft is None else lane.draft.tree
                )
                parts.append(Part(lane, space))
                flying = [one.parts[place] for one in self._in_flight]
                count = sum(part is not None and part.lane is lane for part in flying)
                sent.append(self._host.sent(lane, space, count))
            flight = self._iteration.launch(sent)
        except (CannotCapture, OutOfMemory) as error:
            for part in parts:
                if part is not None:
                    part.space.release()
            self._usable = False
            self._stopped(error)
            return False
        for part in parts:
            if part is not None and (part.lane.state is not None or not self._in_flight):
                part.beams, part.above = part.lane.beams, part.lane.above
                part.lane.state = None
        self._in_flight.append(_Iteration(flight, parts))
        return True
