"""One forward as one replay: CUDA graphs over static buffers, unmodified modelling code inside.

Launching a model's kernels one by one from Python costs several times what they compute (docs/speed.md:
27.4 ms against 9.5 for an 8B on an H100). A forward is therefore padded to the next bucket of node
counts and of slots, and recorded once per bucket, from the copied inputs to the best entries of each
row. In go seven integers a node, out comes one small block: one copy each way, one synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.kv_buffer import SPARE
from dsbd_cli.decoding.cache.tree_cache import Plan, TreeCache
from dsbd_cli.decoding.forward.logits import Best, finite_logits, log_probabilities, pack, unpack

NODE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_LEAST_SLOTS = 256
# A wait shorter than this: what was waited for had ended before.
AT_ONCE_S = 1e-4
_INPUTS = 7  # ids, positions, slots, mask rows, base rows, who sees whom as 64 bits, slots in use


def node_bucket(count: int) -> int | None:
    """The smallest bucket that holds `count` nodes; None above the largest."""
    return next((bucket for bucket in NODE_BUCKETS if bucket >= count), None)


def slot_bucket(used: int, capacity: int) -> int:
    """Slots to look at: 256, 384, 512, 768, 1024, ... so that few sizes come up; at most `capacity`."""
    size = _LEAST_SLOTS
    while size < used:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, capacity)


def slots_to_see(forward: Any, used: int, pool: TreeCache) -> int:
    """Slots that a recorded forward looks at: all, where its attention stops at a length by itself."""
    capacity = pool.cache.capacity
    return capacity if getattr(forward, "reads_length", False) else slot_bucket(used, capacity)


def pad(plan: Plan, size: int) -> Tensor:
    """A plan as int64 [7, size]: padded nodes write to the spare slot, which only they see."""
    count = len(plan)
    packed = np.zeros((_INPUTS, size), dtype=np.int64)
    packed[2, count:] = SPARE
    packed[:5, :count] = plan.ids, plan.positions, plan.slots, plan.mask_rows, plan.base
    seen = np.zeros((size, 64), dtype=bool)
    seen[:count, :count] = plan.inside
    # A padded row hidden from everything would be NaN, and NaN in the spare slot would spread.
    seen[count:, count:size] = True
    packed[5] = np.packbits(seen, axis=1, bitorder="little").view(np.int64)[:, 0]
    packed[6] = plan.used
    return torch.from_numpy(packed)


def seen_inside(bits: Tensor) -> Tensor:
    """bool [N, N] from N words of 64 bits."""
    return ((bits[:, None] >> torch.arange(len(bits), device=bits.device)) & 1).bool()


@dataclass
class _Recorded:
    """One bucket: its buffers, and how to run it again."""

    inputs: Tensor
    staging: Tensor
    logits: Tensor
    packed: Tensor
    landing: Tensor
    replay: Callable[[], None]


class GraphForward:
    """Runs plans over `pool` with `forward`, recorded.

    Args:
        forward: `hf.HfForward` or `llama.LlamaForward`.
        pool: whose buffers the recordings point to; when they grow, everything is recorded anew.
        vocab: columns of the head that count.
        device: where to run. On a CPU nothing is recorded, the same steps run as they are (tests).

    Attributes:
        recordings: how many buckets were recorded so far.
    """

    def __init__(self, forward: Any, pool: TreeCache, vocab: int, device: torch.device) -> None:
        self.forward, self.pool, self.vocab = forward, pool, vocab
        self.recordings = 0
        self._recorder = Recorder(device)
        self._buckets: dict[tuple[int, int, int], _Recorded] = {}

    def takes(self, plan: Plan) -> bool:
        """Whether there is a bucket for a plan of this size."""
        return node_bucket(len(plan)) is not None

    def launch(self, plan: Plan, count: int) -> Flight:
        """Set off the forward of `plan` for the `count` best entries of every node's row; waits for nothing."""
        bucket = self._run(plan, min(count, self.vocab))
        bucket.landing.copy_(bucket.packed, non_blocking=True)
        return Flight(bucket.landing, len(plan))

    def land(self, flight: Flight) -> Best:
        """Wait for the one forward under way; its rows."""
        flight.wait(self._recorder)
        return unpack(flight.landing.numpy()[: flight.count].copy())

    def logits(self, plan: Plan) -> Tensor:
        """Forward `plan`; logits [N, V'], valid until the next forward."""
        return self._run(plan, 0).logits[: len(plan)]

    def _run(self, plan: Plan, size: int) -> _Recorded:
        if self._recorder.moved(self.pool.pointers()):
            self._buckets.clear()
        nodes = node_bucket(len(plan))
        assert nodes is not None
        key = nodes, slots_to_see(self.forward, plan.used, self.pool), size
        packed = pad(plan, nodes)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = self._record(packed, key[1], size)
            self.recordings += 1
        else:
            bucket.staging.copy_(packed)
            bucket.inputs.copy_(bucket.staging, non_blocking=True)
            bucket.replay()
        return bucket

    def _record(self, packed: Tensor, slots: int, size: int) -> _Recorded:
        """Run `packed` for the first time, and keep how."""
        inputs = packed.to(self._recorder.device, copy=True)
        outputs, replay = self._recorder.record(lambda: self._steps(inputs, slots, size), self.forward)
        host = self._recorder.host
        logits, best = outputs
        return _Recorded(inputs, host(packed), logits, best, host(best), replay)

    def _steps(self, inputs: Tensor, slots: int, size: int) -> list[Tensor]:
        """The forward itself, on tensors of fixed shapes."""
        ids, positions, where, rows, base, bits, used = inputs
        mask = self.pool.masks.extend(base, rows, where, seen_inside(bits))
        cache = self.pool.cache
        cache.slots, cache.used, cache.length = where, slots, used[:1]
        logits = self.forward(cache, ids, positions, mask[:, :slots], 0)
        if not size:
            return [logits, logits[:0]]
        logps = log_probabilities(logits, self.vocab)
        return [logits, pack(logps, finite_logits(logps), size)]


class Flight:
    """What is under way on the device.

    Attributes:
        landing: host memory that will hold the outcome.
        count: nodes of it.
        seconds: from the launch to the end, if the host came before it; else None. Known after `wait`.
    """

    def __init__(self, landing: Tensor, count: int) -> None:
        self.landing, self.count = landing, count
        self.seconds: float | None = None
        self._begin = time.perf_counter()

    def wait(self, recorder: Recorder) -> None:
        """The one synchronisation of an iteration."""
        came = time.perf_counter()
        recorder.wait()
        now = time.perf_counter()
        # A wait that is over at once means that the device had been idle for who has_logits how long.
        self.seconds = now - self._begin if now - came > AT_ONCE_S else None


class Recorder:
    """Records steps as CUDA graphs that share one memory; on a CPU steps are run, not recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: Any = None
        self._pointers: tuple[Any, ...] = ()
        self._graphs: list[Any] | None = None

    def record(
        self, steps: Callable[[], list[Tensor]], *forwards: Any
    ) -> tuple[list[Tensor], Callable[[], None]]:
        """Run `steps` on inputs of fixed place; its outputs, and what runs it again into them.

        Args:
            steps: may call `cut` between any two of its operations.
            forwards: those it calls that can cut themselves (`LlamaForward.between`).
        """
        if self.device.type != "cuda":
            outputs = steps()

            def again() -> None:
                for old, new in zip(outputs, steps(), strict=True):
                    old.copy_(new)

            return outputs, again
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            # Libraries set themselves up in the first runs; writing the same slots again is harmless.
            for _ in range(2):
                steps()
        torch.cuda.current_stream(self.device).wait_stream(side)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        graphs: list[Any] = []
        cutting = [forward for forward in forwards if hasattr(forward, "between")]
        try:
            for forward in cutting:
                forward.between = self.cut
            with torch.cuda.stream(side):
                self._graphs = graphs
                self._begin()
                try:
                    outputs = steps()
                finally:
                    graphs[-1].capture_end()
        finally:
            self._graphs = None
            for forward in cutting:
                forward.between = None

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        replay()
        return outputs, replay

    def moved(self, *pointers: Any) -> bool:
        """Whether buffers are elsewhere than at the last call; recordings made until then are to be let go."""
        if pointers == self._pointers:
            return False
        self.forget()
        self._pointers = pointers
        return True

    def forget(self) -> None:
        """Every recording made so far is let go: their memory goes with them, the next ones get their own.

        (A memory that no graph uses any more cannot be recorded into again.)
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # one of them may be running
        self._memory = None

    def cut(self) -> None:
        """End a graph here and begin the next one.

        Launching a graph takes the host as long as its kernels are many; a short first graph keeps
        the device busy while the host launches the rest.
        """
        if self._graphs is not None:
            self._graphs[-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        assert self._graphs is not None
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._memory)

    def host(self, tensor: Tensor) -> Tensor:
        """A host tensor like `tensor`, for copies that need not wait."""
        like = torch.empty(tensor.shape, dtype=tensor.dtype)
        return like.pin_memory() if self.device.type == "cuda" else like

    def wait(self) -> None:
        """The one synchronisation of a forward."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def why_not(model: Any) -> str | None:
    """What keeps a model from being recorded; None where nothing is known to."""
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1:
        return "its weights are spread over several devices"
    if (getattr(model, "tp_size", None) or 1) > 1:
        return "its weights are split over processes"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its weights are moved by hooks"
    scaling = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in scaling.values() if isinstance(part, dict)}
    if {str(scaling.get("rope_type")), *kinds} & {"dynamic", "longrope"}:
        return "its positions depend on the length so far"
    return None
