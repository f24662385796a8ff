"""Measuring prices: the very forwards that decoding uses, warmed up, in turns, medians; about a second."""

from __future__ import annotations

import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dsbd_cli.decoding import HfTreeModel
from dsbd_cli.loading import processor
from dsbd_cli.loading.hardware import NumberFormat
from dsbd_cli.loading.ready import key
from dsbd_cli.loading.ready.pair import plain_config
from dsbd_cli.others import Window
from dsbd_cli.prices.probe import Probe, measured_now, one_thread, quick, torn
from dsbd_cli.prices.table import Curve, Prices
from dsbd_cli.version import __version__

# Nodes of a forward, in the order in which they are tried: what the first two leave of the time decides
# how many of the others are measured; between and beyond them the curve goes on straight.
COUNTS = (1, 16, 4, 32, 8, 64, 2, 128, 256)
BUDGET = 1.2  # seconds
_ROUNDS = 12
# The slower half of the times of a quiet machine lies within this much of the quicker half.
_UNEVEN = 1.5


def facts_of(target: HfTreeModel, draft: HfTreeModel | None) -> dict[str, Any]:
    """What prices depend on: machine, threads, versions, and of each model its shape, format and forward."""
    models = {"target": target, "draft": draft}
    kinds = {model.device.type for model in models.values() if model is not None}
    facts: dict[str, Any] = {
        "dsbd": __version__,
        "code": key.code_sum(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if "cpu" in kinds:
        facts |= {
            "flags": hashlib.sha256(processor.description().encode()).hexdigest()[:16],
            "threads": torch.get_num_threads(),
        }
    return facts | {role: None if model is None else _facts_of(model) for role, model in models.items()}


def _facts_of(model: HfTreeModel) -> dict[str, Any]:
    model.require_tree()  # the self-test decides which forward it is
    device = model.device
    # As a remembered pair has it, so that its second start finds the prices of its first.
    config = {
        name: value
        for name, value in plain_config(model.model.config).items()
        if name not in ("_name_or_path", "name_or_path", "transformers_version")
    }
    shape = json.dumps(
        [config, sum(one.numel() for one in model.model.parameters())], sort_keys=True, default=str
    )
    return {
        "name": model.name,
        "shape": hashlib.sha256(shape.encode()).hexdigest()[:16],
        "dtype": NumberFormat(model.dtype, model.tree_forward.int8_activations).name,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "forward": model.describe(),
    }


def measure(
    target: HfTreeModel,
    draft: HfTreeModel | None,
    *,
    counts: Sequence[int] = COUNTS,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.perf_counter,
    origin: str | None = None,
    window: Callable[[], Window] = Window,
) -> Prices:
    """The prices of a pair; both trees are started anew, so a prompt must be prefilled afterwards.

    Rounds over all counts, target and draft in turns, so that a machine which slows down slows all. The first
    round warms up: each shape is planned once. Other programs only ever make a forward slower, so a count's
    price is the median of the quicker half of its times.

    Args:
        counts: nodes of a forward, in the order of their worth.
        budget: seconds; the first two counts are measured whatever they take.
        clock: seconds.
        origin: in words; None says when, and whether the machine was busy.
        window: begins to watch what other processes take of the cores.
    """
    models, watched = [model for model in (target, draft) if model is not None], window()
    timed = _timed(models, counts, budget, clock)
    busy = ""
    if origin is None:
        others = watched.share()
        if torn(others) and all(model.device.type == "cpu" for model in models):
            with one_thread():
                timed = _timed(models, counts, budget, clock)
        origin, busy = measured_now(others, uneven=timed.uneven)
    return Prices(timed.curves[0], timed.curves[1] if draft is not None else None, timed.layer, origin, busy)


class _Timed(NamedTuple):
    """Milliseconds by nodes of each model, and of the host's part of a layer; whether times of one forward differ."""

    curves: list[Curve]
    layer: float
    uneven: bool


def _timed(
    models: Sequence[HfTreeModel], counts: Sequence[int], budget: float, clock: Callable[[], float]
) -> _Timed:
    begin = clock()
    probes = [Probe(model, clock) for model in models]
    counts = tuple(count for count in counts if all(probe.holds(count) for probe in probes)) or (1,)
    warm: list[list[float]] = []
    for place, count in enumerate(counts):
        if place >= 2 and clock() - begin > budget / 3:
            break
        warm.append([probe.run(count) for probe in probes])
    counts = counts[: len(warm)]
    rounds: list[list[list[float]]] = []
    while not rounds or (len(rounds) < _ROUNDS and clock() - begin < budget):
        rounds.append([[probe.run(count) for probe in probes] for count in counts])
    times = [
        {count: sorted(one[place][role] for one in rounds) for place, count in enumerate(counts)}
        for role in range(len(probes))
    ]
    curves = [Curve.fitted({count: quick(all_) for count, all_ in curve.items()}) for curve in times]
    uneven = any(statistics.median(all_) > _UNEVEN * quick(all_) for one in times for all_ in one.values())
    return _Timed(curves, quick(sorted(probes[0].layers)), uneven)
