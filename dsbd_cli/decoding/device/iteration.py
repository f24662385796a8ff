"""One iteration's computing without the host: gamma draft steps, then the target over the whole forest.

Recorded as one CUDA graph: the draft's draws feed its own next step and the target's verification
where they are, so an iteration copies one block in and one block out, and waits once. What the host
needs to know beforehand is only how many nodes there will be: slots and mask rows are reserved, and
those of draws that came to nothing are given back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.tree_cache import Plan
from dsbd_cli.decoding.device.layout import Answer, Layer, Request, Side
from dsbd_cli.decoding.device.steps import Drafting, Nodes, draft_forest, forest_nodes, forward, together
from dsbd_cli.decoding.forward.graphs import Flight, Recorder, pad, seen_inside, slots_to_see
from dsbd_cli.decoding.forward.logits import finite_logits, log_probabilities, pack, unpack
from dsbd_cli.decoding.law.distribution import LogitsProcessor

# Fewer sizes than for single forwards: recording an iteration is dear, and padding it is not.
_BUCKETS = (8, 16, 32, 64)
# Draft and target sizes that come up for almost every prompt.
_USUAL = ((8, 8), (16, 8))


def _bucket(count: int) -> int | None:
    return next((bucket for bucket in _BUCKETS if bucket >= count), None)


@dataclass
class _Recorded:
    inputs: Tensor
    staging: Tensor
    packed: Tensor
    landing: Tensor
    replay: Callable[[], None]


class DeviceLoop:
    """Runs `Request`s for one pair and one way of drafting.

    Args:
        target, draft: both recorded on the same device.
        width, gamma: W_S draws in each of gamma layers.
        beams: at most so many beams at a time.
        processor: T of the draft, or None: take the W_S most probable distinct continuations.
        eos_ids: draws of these are finished, hence no parents.
    """

    def __init__(
        self, target: Side, draft: Side, width: int, gamma: int, beams: int, processor: LogitsProcessor | None,
        eos_ids: list[int], device: torch.device,
    ) -> None:  # fmt: skip
        self.target, self.draft = target, draft
        self.width, self.gamma, self.beams, self.processor = width, gamma, beams, processor
        eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self._how = Drafting(width, gamma, processor, eos)
        self._recorder = Recorder(device)
        self._buckets: dict[tuple[int, int, int, int], _Recorded] = {}

    def takes(self, request: Request) -> bool:
        """Whether there are buckets for a request of this size."""
        plans = (request.draft, request.target)
        return len(request.beams) <= self.beams and all(_bucket(len(plan)) for plan in plans)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Record what almost every prompt needs, so that no answer waits for it later."""
        draft, target = self.draft.pool, self.target.pool
        count = self.gamma * self.width
        spaces = draft.reserve(count - self.width), target.reserve(count)
        nothing = np.zeros((0, 0), dtype=bool)
        plans = [Plan([], [], [], [], [], nothing, pool.slots.used) for pool in (draft, target)]
        uniforms = np.zeros((self.gamma, self.width))
        # One beam behind the spare slot: its nodes lie in reserved space, which is given back.
        request = Request(plans[0], [0], plans[1], [0], [0.0], 0, *spaces, uniforms)
        try:
            for sizes in _USUAL:
                key = self._key(request, *sizes)
                if key not in self._buckets:
                    self._buckets[key] = self._record(self._packed(request, *sizes), key)
        finally:
            draft.release(spaces[0])
            target.release(spaces[1])

    def _key(self, request: Request, draft_size: int, target_size: int) -> tuple[int, int, int, int]:
        if self._recorder.moved(self.target.pool.pointers(), self.draft.pool.pointers()):
            self._buckets.clear()
        return (
            draft_size,
            target_size,
            slots_to_see(self.draft.forward, request.draft.used, self.draft.pool),
            slots_to_see(self.target.forward, request.target.used, self.target.pool),
        )

    def launch(self, request: Request) -> Flight:
        """Set off one iteration on the device; waits for nothing."""
        sizes = _bucket(len(request.draft)), _bucket(len(request.target))
        assert sizes[0] is not None
        assert sizes[1] is not None
        key = self._key(request, sizes[0], sizes[1])
        packed = self._packed(request, sizes[0], sizes[1])
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._record(packed, key)
        else:
            bucket.staging.copy_(packed)
            bucket.inputs.copy_(bucket.staging, non_blocking=True)
            bucket.replay()
        bucket.landing.copy_(bucket.packed, non_blocking=True)
        return Flight(bucket.landing, len(request.target))

    def land(self, flight: Flight) -> Answer:
        """Wait for the one iteration under way; what came back."""
        flight.wait(self._recorder)
        return self._answer(flight.landing.numpy(), flight.count)

    # In and out: one tensor each way.

    def _packed(self, request: Request, draft_size: int, target_size: int) -> Tensor:
        """Everything as one int64 vector; float64 by its bits."""
        spare = self.beams - len(request.beams)
        scores = np.array([*request.scores, *[-np.inf] * spare], dtype=np.float64)
        parts = [
            pad(request.draft, draft_size).numpy().ravel(),
            pad(request.target, target_size).numpy().ravel(),
            np.array([*request.beams, *[0] * spare]),
            np.array([*request.beam_rows, *[0] * spare]),
            scores.view(np.int64),
            np.array([request.position]),
            *(
                np.array([reservation.slots, reservation.mask_rows]).ravel()
                for reservation in (request.draft_space, request.target_space)
            ),
            np.ascontiguousarray(request.uniforms, dtype=np.float64).view(np.int64).ravel(),
        ]
        return torch.from_numpy(np.concatenate([part.astype(np.int64, copy=False) for part in parts]))

    def _unpacked(self, inputs: Tensor, draft_size: int, target_size: int) -> list[Tensor]:
        """Views of what `_packed` put together."""
        deep, wide = self.gamma, self.width
        sizes = [
            (7, draft_size), (7, target_size), (self.beams,), (self.beams,), (self.beams,), (1,),
            (2, deep - 1, wide), (2, deep, wide), (deep, wide),
        ]  # fmt: skip
        parts = inputs.split([int(np.prod(size)) for size in sizes])
        return [part.view(size) for part, size in zip(parts, sizes, strict=True)]

    def _answer(self, landed: np.ndarray, nodes: int) -> Answer:
        """What `_steps` has put together, taken apart again.

        Args:
            landed: float32, overwritten by the next launch.
            nodes: of the target's plan.
        """
        host = landed.copy()
        layers, at = [], 0
        for depth in range(self.gamma):
            parents = self.beams if depth == 0 else self.width
            size = self._support(parents)
            end = at + 2 * (4 * size + self.width)
            numbers = host[at:end].view(np.float64)
            with np.errstate(invalid="ignore"):  # what has no parent is NaN, and is not looked at
                whole = numbers.astype(np.int64)  # parents, tokens and draws among them
            at = end + parents
            layers.append(
                Layer(
                    whole[:size],
                    whole[size : 2 * size],
                    numbers[2 * size : 3 * size],
                    numbers[3 * size : 4 * size],
                    whole[4 * size :],
                    host[end:at] > 0,
                )
            )
        forest = self.gamma * self.width
        rows = host[at:].reshape(-1, 2 * self.target.top_n + 1)
        if nodes < len(rows) - forest:  # without what was only padding
            rows = np.concatenate([rows[:nodes], rows[len(rows) - forest :]])
        return Answer(layers, unpack(rows))

    def _support(self, parents: int) -> int:
        """Entries of a layer's support."""
        return min(self.width if self.processor is None else self.processor.top_n, parents * self.draft.top_n)

    # The recorded part.

    def _record(self, packed: Tensor, key: tuple[int, int, int, int]) -> _Recorded:
        inputs = packed.to(self._recorder.device, copy=True)
        outputs, replay = self._recorder.record(lambda: self._steps(inputs, *key), self.target.forward)
        host = self._recorder.host
        return _Recorded(inputs, host(packed), outputs[0], host(outputs[0]), replay)

    def _steps(
        self, inputs: Tensor, draft_size: int, target_size: int, draft_sees: int, target_sees: int
    ) -> list[Tensor]:
        draft_in, target_in, beams, beam_rows, scores, position, draft_space, target_space, uniforms = (
            self._unpacked(inputs, draft_size, target_size)
        )
        used = draft_in[6, :1]
        logits = forward(self.draft, self._planned(self.draft, draft_in), used, draft_sees)[beams]
        drafted, finite = draft_forest(
            self.draft, self._how, logits, scores.view(torch.float64), draft_in[3][beams], position,
            draft_space, used, draft_sees, uniforms.view(torch.float64), self._recorder.cut,
        )  # fmt: skip
        parts: list[Tensor] = []
        for layer, known in zip(drafted, finite, strict=True):
            whole = [
                layer.parent.double(),
                layer.token.double(),
                layer.logp,
                layer.prob,
                layer.draws.double(),
            ]
            parts += [torch.cat(whole).view(torch.float32), known]
        own = self._planned(self.target, target_in)  # first: it writes the rows that the forest's start from
        forest = forest_nodes(self.target, self._how, drafted, beam_rows, position, target_space)
        logits = forward(self.target, together(own, forest), target_in[6, :1], target_sees)
        logps = log_probabilities(logits, self.target.vocab)
        parts.append(pack(logps, finite_logits(logps), self.target.top_n).flatten())
        return [torch.cat(parts)]

    def _planned(self, side: Side, inputs: Tensor) -> Nodes:
        """What the host has planned."""
        ids, positions, slots, rows, base, bits, _ = inputs
        return Nodes(ids, positions, slots, side.pool.masks.extend(base, rows, slots, seen_inside(bits)))
