"""Steps of fixed shapes as CUDA graphs: captured once a size, then replayed; one copy each way, one wait.

On a CPU nothing is captured: a replay runs the same steps again (tests). Nothing here knows what the
steps compute. One module, since a capture, its memory and what is in flight of it come and go together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from dsbd_cli.errors import RunError, first_line, let_by
from dsbd_cli.group import joined

_LEAST_SLOTS = 256
# A wait shorter than this (seconds): what was waited for had ended before.
_AT_ONCE_S = 1e-4

Steps = Callable[[Tensor], list[Tensor]]

# The capture under way in this process, if there is one: its graphs, of which the last is open, and their stream.
_under_way: list[tuple[list[Any], Any]] = []


def quiet(device: torch.device) -> None:
    """Wait for all that is in flight on a device, and end what an interruption may have left of a capture.

    A stream that goes on capturing takes nothing else.
    """
    if device.type == "cuda":
        _end_capture()
        torch.cuda.synchronize(device)


def _end_capture() -> None:
    try:
        for graphs, stream in _under_way:
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    graphs[-1].capture_end()
    except Exception as error:  # it had failed, and is over; interrupted it may not be
        let_by(error)
        _under_way.clear()
        raise
    _under_way.clear()


def slot_bucket(used: int, capacity: int) -> int:
    """KV-cache slots to look at: 256, 384, 512, 768, ... so that few sizes come up; at most `capacity`."""
    size = _LEAST_SLOTS
    while size < used:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return min(size, capacity)


def slots_to_see(forward: Any, used: int, capacity: int) -> int:
    """Slots that a captured forward looks at: all, where its attention stops at a length by itself."""
    return capacity if forward.reads_length else slot_bucket(used, capacity)


class OverlapClock:
    """How much of the time that passes outside the engine the device worked, by the last time that was seen.

    The target model has one; launches and waits tell it (`InFlight`), the decoder asks it.

    Attributes:
        ended_at: when the host last saw work end (`time.perf_counter`).
    """

    def __init__(self) -> None:
        self.ended_at = 0.0
        self._in_flight = 0
        self._takes_s, self._left_s = 0.0, 0.0

    def launched(self) -> None:
        """Work was handed to the device, behind what is in flight."""
        if not self._in_flight:
            self._left_s = self._takes_s
        self._in_flight += 1

    def ended(self, seconds: float | None) -> None:
        """What was launched first has come back after so many seconds of work; None: that is not known."""
        self.ended_at = time.perf_counter()
        self._takes_s = seconds or self._takes_s
        self._in_flight = max(0, self._in_flight - 1)
        self._left_s = self._takes_s

    def idle(self) -> None:
        """Nothing is in flight that anybody will wait for."""
        self._in_flight = 0

    def overlap(self, seconds: float) -> float:
        """How many of `seconds` that passed elsewhere the device worked."""
        worked = min(seconds, self._left_s) if self._in_flight else 0.0
        self._left_s -= worked
        return worked


class InFlight:
    """One launch: pinned host memory on both sides, and when it has come back.

    Attributes:
        seconds: how long the device took, if the host had to wait for it; else None. Known after `wait`.
    """

    def __init__(self, inputs: Tensor, output: Tensor, device: torch.device, clock: OverlapClock) -> None:
        self.seconds: float | None = None
        self._cuda = device.type == "cuda"
        self._staging, self._landing = self._pinned(inputs), self._pinned(output)
        self._event = torch.cuda.Event() if self._cuda else None
        self._device, self._clock = device, clock
        self._launched_at = 0.0

    def _pinned(self, tensor: Tensor) -> Tensor:
        like = torch.empty(tensor.shape, dtype=tensor.dtype)
        return like.pin_memory() if self._cuda else like

    def send(self, request: Tensor, inputs: Tensor) -> None:
        """Copy `request` to the device; waits only for a launch with this memory that was given up."""
        if self._event is not None:
            self._event.synchronize()
        self._staging.copy_(request)
        inputs.copy_(self._staging, non_blocking=True)
        self._mark()

    def launched(self, output: Tensor) -> None:
        """The steps are queued; queue the copy of their `output` behind them."""
        self._landing.copy_(output, non_blocking=True)
        self._mark()
        self._launched_at, self.seconds = time.perf_counter(), None
        self._clock.launched()

    def _mark(self) -> None:
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> np.ndarray:
        """The one synchronisation of an iteration; the output, the caller's own."""
        came = time.perf_counter()
        if self._event is not None:
            self._event.synchronize()
        now = time.perf_counter()
        # A wait that is over at once means that the device had been idle for who knows how long.
        begin = max(self._launched_at, self._clock.ended_at)
        self.seconds = now - begin if now - came > _AT_ONCE_S else None
        self._clock.ended(self.seconds)
        return self._landing.numpy().copy()


@dataclass
class Capture:
    """Steps of one size.

    Attributes:
        inputs: what they read; a replay is preceded by writing here.
        outputs: what they wrote; the first goes to the host.
        replay: runs them again.
        turns: host memory, one for each launch that may be in flight at a time.
    """

    inputs: Tensor
    outputs: list[Tensor]
    replay: Callable[[], None]
    turns: list[InFlight]
    turn: int = -1

    def next_turn(self) -> InFlight:
        self.turn = (self.turn + 1) % len(self.turns)
        return self.turns[self.turn]


class Captures:
    """Captures by key; they share one memory.

    Args:
        device: where the steps run.
        clock: told of launches and ends.
        turns: how many launches may be in flight at a time.
        breaks: forwards that the steps call and that can break a graph themselves (`between`).

    Attributes:
        steps_s: seconds that steps took the host itself, where there is no device to capture them on.
    """

    def __init__(
        self, device: torch.device, clock: OverlapClock, turns: int = 1, breaks: tuple[Any, ...] = ()
    ) -> None:
        self.device, self.clock = device, clock
        self._turns = turns
        self._breaking = list(breaks)
        self._memory: Any = None
        self._pointers: tuple[Any, ...] = ()
        self._captures: dict[Hashable, Capture] = {}
        self._met: set[Hashable] = set()
        self.steps_s = 0.0

    def __len__(self) -> int:
        return len(self._captures)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captures

    def __getitem__(self, key: Hashable) -> Capture:
        return self._captures[key]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._captures)

    def valid_for(self, *pointers: Any) -> None:
        """Let go of every capture unless buffers are where they were at the last call."""
        if pointers != self._pointers:
            self.release()
            self._pointers = pointers

    def launch(self, key: Hashable, request: Tensor, steps: Steps, *, rare: bool = False) -> InFlight:
        """Run `steps` on `request` without waiting; the first output is on its way to the host.

        Args:
            key: the same key means the same shapes and the same operations.
            steps: from the inputs on the device to the outputs, all of fixed shapes; must allow for
                being run several times in a row.
            rare: capture them when their key comes for the second time; a capture costs as much as three runs.

        Raises:
            CannotCapture, OutOfMemory: nothing is in flight of it.
            Whatever a signal's handler raises meanwhile (`errors.let_by`): what is left is torn.
        """
        capture, flight = self._run(key, request, steps, rare)
        flight.launched(capture.outputs[0])
        return flight

    def run(self, key: Hashable, request: Tensor, steps: Steps, *, rare: bool = False) -> list[Tensor]:
        """Like `launch`, but the outputs stay on the device, valid until the next call."""
        return self._run(key, request, steps, rare)[0].outputs

    def _run(self, key: Hashable, request: Tensor, steps: Steps, rare: bool) -> tuple[Capture, InFlight]:
        """Capture or replay: the one place where what the device says of it gets a type."""
        try:
            capture = self._captures.get(key)
            if capture is None and rare and key not in self._met:
                self._met.add(key)
                capture = self._uncaptured(request, steps)
                return capture, capture.next_turn()
            if capture is None:
                capture = self._captures[key] = self._capture(request, steps)
                return capture, capture.next_turn()
            flight = capture.next_turn()
            flight.send(request, capture.inputs)
            capture.replay()
            return capture, flight
        except torch.cuda.OutOfMemoryError as error:
            if joined().size > 1:  # the others have memory, and would wait for this process for ever
                raise RunError(
                    f"no memory is left for captures on {self.device}: give a smaller --width, --gamma or --batch"
                ) from error
            self.release()
            raise OutOfMemory(first_line(error)) from error
        except Exception as error:  # whatever a compiler or a library makes of being captured
            let_by(error)
            raise CannotCapture(first_line(error)) from error

    def _capture(self, request: Tensor, steps: Steps) -> Capture:
        inputs = request.to(self.device, copy=True)
        outputs, replay = self._captured(lambda: steps(inputs))
        turns = [InFlight(inputs, outputs[0], self.device, self.clock) for _ in range(self._turns)]
        return Capture(inputs, outputs, replay, turns)

    def _uncaptured(self, request: Tensor, steps: Steps) -> Capture:
        """`steps`, run as they are, once."""
        inputs = request.to(self.device, copy=True)
        outputs = steps(inputs)
        return Capture(inputs, outputs, lambda: None, [InFlight(inputs, outputs[0], self.device, self.clock)])

    def _captured(self, steps: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        """Run `steps`; their outputs, and what runs them again into these."""
        if self.device.type != "cuda":
            outputs = steps()

            def again() -> None:
                begin = time.perf_counter()
                for old, new in zip(outputs, steps(), strict=True):
                    old.copy_(new)
                self.steps_s += time.perf_counter() - begin

            return outputs, again
        _end_capture()
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
        try:
            for forward in self._breaking:
                forward.between = self.break_graph
            with torch.cuda.stream(side):
                _under_way.append((graphs, side))
                self._begin()
                outputs = steps()
        finally:
            _end_capture()
            for forward in self._breaking:
                forward.between = None

        def replay() -> None:
            for graph in graphs:
                graph.replay()

        replay()
        return outputs, replay

    def break_graph(self) -> None:
        """End a graph here and begin the next one (called by steps between two of their operations).

        Launching a graph takes the host as long as its kernels are many; a short first graph keeps
        the device busy while the host launches the rest.
        """
        if _under_way:
            _under_way[-1][0][-1].capture_end()
            self._begin()

    def _begin(self) -> None:
        graphs, _ = _under_way[-1]
        graphs.append(torch.cuda.CUDAGraph())
        # With several processes a thread of the communication library looks at events of its own meanwhile.
        mode = "thread_local" if joined().size > 1 else "global"
        graphs[-1].capture_begin(pool=self._memory, capture_error_mode=mode)

    def release(self) -> None:
        """Let go of every capture; their memory goes with them, the next ones get their own.

        (A memory that no graph uses any more cannot be captured into again.)
        """
        quiet(self.device)  # one of them may be running
        self._captures.clear()
        self._memory = None
