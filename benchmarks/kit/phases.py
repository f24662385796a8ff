"""Where an iteration's time goes: draft, target, verification, the rest.

The engine carries no clocks for this. `Run`'s steps are wrapped from outside while a `Phases` is open,
and the device is waited for at each border, so the sum is a little more than an undisturbed run takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.hf import synchronize
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import Iteration, Run
from dsbd_cli.decoding.device.iteration import CoverIteration

PARTS = ("draft", "target", "verify", "rest")


class Phases:
    """A context manager; `seconds` and `iterations` hold what was decoded while it was open.

    `draft` is making the forest, `target` the one target call (both with their host side), `verify` the
    law and the draws, `rest` freeing what is dead, text, events, and whatever consumes them.

    Where the device verifies too (`decoding.device.pipeline`) nothing is waited for at the borders, for it
    is an iteration ahead: `target` is then how long the host waits for it, `verify` and `rest` overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.iterations = 0
        self._last: float | None = None
        self._kept: dict[str, Any] = {}

    def __enter__(self) -> Phases:
        steps: dict[str, Callable[[Any], Any]] = {
            "propose": self._propose,
            "advance": self._advance,
            "finish_iteration": self._finish,
            "launch_ahead": self._ahead,
        }
        for name, wrap in steps.items():
            self._kept[name] = getattr(Run, name)
            setattr(Run, name, wrap(self._kept[name]))
        self._wait = CoverIteration.wait
        CoverIteration.wait = self._waiting(CoverIteration.wait)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for name, step in self._kept.items():
            setattr(Run, name, step)
        CoverIteration.wait = self._wait  # type: ignore[method-assign]

    def begin(self) -> None:
        """A prompt begins: nothing before its first iteration counts."""
        self._last = None

    def _lap(self, part: str, wait: bool = True) -> None:
        if wait:
            synchronize(self._device)
        now = time.perf_counter()
        if self._last is not None:
            self.seconds[part] += now - self._last
        self._last = now

    def _propose(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(run: Run) -> Any:
            self._lap("rest")
            forest = step(run)
            self._lap("draft")
            return forest

        return timed

    def _advance(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(run: Run, *arguments: Any) -> Any:
            self._lap("rest")
            result = step(run, *arguments)
            self._lap("target")
            self.iterations += 1
            return result

        return timed

    def _ahead(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(run: Run, *arguments: Any) -> None:
            self._lap("rest", wait=run.engine is None)
            step(run, *arguments)
            self._lap("target" if run.proposer is None else "draft", wait=run.engine is None)

        return timed

    def _waiting(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(iteration: CoverIteration, *arguments: Any) -> Any:
            self._lap("rest", wait=False)
            outcomes = step(iteration, *arguments)
            self._lap("target", wait=False)
            self.iterations += 1
            return outcomes

        return timed

    def _finish(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(run: Run, *arguments: Any, **options: Any) -> Iterator[Iteration]:
            self._lap("verify", wait=run.engine is None)
            yield from step(run, *arguments, **options)

        return timed


def breakdown(
    decoder: Decoder, arm: Arm, prompts: Sequence[Sequence[int]], seed: int
) -> dict[str, Any] | None:
    """Milliseconds an iteration in each of `PARTS`, over `prompts`; None for arms that are not the engine's."""
    if arm.hf:
        return None
    with Phases(decoder.pair.target.device) as phases:
        for place, ids in enumerate(prompts):
            phases.begin()
            decoder.generate(list(ids), arm.settings.merged({"seed": seed + place}))
    count = max(1, phases.iterations)
    parts = {part: 1e3 * seconds / count for part, seconds in phases.seconds.items()}
    return {"iterations": phases.iterations, "iteration_ms": sum(parts.values()), **parts}
