"""One look at a run with torch.profiler: host synchronisations, copies, launches and busy time an iteration."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd import DeviceType

from benchmarks.kit.pairs import endless
from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.hf import synchronize
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import Iteration

# Iterations left out at the start: caches grow, graphs are captured.
_SKIP = 3
# What the host waits in; cudaDeviceSynchronize is counted apart, the profiler itself calls it.
_WAITS = re.compile(r"cu(da)?(StreamSynchronize|EventSynchronize|Memcpy)(_ptsz|_v2)*")
_COUNTED = {
    "kernel_launches": re.compile(r"cu(da)?LaunchKernel(ExC|Ex)?"),
    "graph_launches": re.compile(r"cu(da)?GraphLaunch"),
    "device_synchronize": re.compile(r"cu(da)?(DeviceSynchronize|CtxSynchronize)"),
    "copies_to_host": re.compile(r"Memcpy DtoH.*"),
    "copies_to_device": re.compile(r"Memcpy HtoD.*"),
}


def profile(
    decoder: Decoder, arm: Arm, ids: Sequence[int], seed: int, iterations: int = 20
) -> dict[str, Any] | None:
    """What happens in an iteration; None for arms that are not the engine's, or without room for the iterations.

    The same prompt and seed are decoded three times: to warm up, by the clock alone, and profiled. So
    `wall_ms` is not slowed by the profiler, and `busy_ms` (any kernel or copy running) is measured over
    the same iterations.
    """
    if arm.hf:
        return None
    device = decoder.pair.target.device
    # Long enough for all iterations, whatever is accepted.
    budget = (_SKIP + iterations + 1) * (arm.settings.gamma + 2)
    settings = arm.settings.merged({"seed": seed, "max_new_tokens": budget})
    marks: list[float] = []

    def clock() -> None:
        synchronize(device)
        marks.append(time.perf_counter())

    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    _window(decoder, ids, settings, iterations, lambda: None, lambda: None)
    _window(decoder, ids, settings, iterations, clock, clock)
    profiler = torch.profiler.profile(activities=activities)
    count = _window(decoder, ids, settings, iterations, profiler.start, profiler.stop)
    if not count:
        return None
    wall_ms = 1e3 * (marks[1] - marks[0]) / count
    found: dict[str, Any] = {"iterations": count, "wall_ms": wall_ms}
    if device.type == "cuda":
        found |= counts(profiler.events() or (), count)
        found["busy_share"] = found["busy_ms"] / wall_ms
    averages = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)
    found["host_ms"] = {row.key: row.self_cpu_time_total / 1e3 / count for row in averages[:12]}
    return found


def counts(events: Iterable[Any], iterations: int) -> dict[str, float]:
    """Counts and device time an iteration from profiler events (`name`, `device_type`, `time_range` in us)."""
    names: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    for event in events:
        names[event.name] += 1
        # Ranges that a program names are shown on the device too, but nothing runs there because of them.
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            spans.append((event.time_range.start, event.time_range.end))
    result = {"waits": sum(n for name, n in names.items() if _WAITS.fullmatch(name)) / iterations}
    for label, pattern in _COUNTED.items():
        result[label] = sum(n for name, n in names.items() if pattern.fullmatch(name)) / iterations
    return result | {"busy_ms": _covered(spans) / 1e3 / iterations}


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


def _window(
    decoder: Decoder,
    ids: Sequence[int],
    settings: Any,
    iterations: int,
    start: Callable[[], None],
    stop: Callable[[], None],
) -> int:
    """Decode, with `start` and `stop` called around whole iterations; how many there were between."""
    seen = 0
    with endless(decoder), contextlib.closing(decoder.stream(list(ids), settings)) as stream:  # type: ignore[type-var]
        for event in stream:
            if not isinstance(event, Iteration):
                continue
            seen += 1
            if seen == _SKIP:
                start()
            if seen == _SKIP + iterations:
                break
        if seen >= _SKIP:
            stop()
    return max(0, seen - _SKIP)
