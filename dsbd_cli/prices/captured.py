"""Prices of iterations that a device runs as one graph, for many requests: measured once like the others."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from dsbd_cli.decoding import Captures, Nodes, OverlapClock, SharedModel, forward_many, quickest_law
from dsbd_cli.prices.table import Curve, Prices

COUNTS = (1, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
_PROMPT = 320  # slots that a node looks at
_EACH = 16  # nodes of a request, at most
_TIMES = 7


def measure_captured(target: SharedModel, draft: SharedModel | None, top_n: tuple[int, int]) -> Prices:
    """Milliseconds of captured forwards over many requests' nodes, their best entries included.

    Args:
        target, draft: on a CUDA device; what they hold is left alone.
        top_n: entries kept of each row of the target's and of the draft's logits.
    """
    curves = [
        Curve.fitted({count: _milliseconds(model, count, best) for count in COUNTS})
        for model, best in zip((target, draft), top_n, strict=True)
        if model is not None
    ]
    origin = f"captured iterations, measured {time.strftime('%Y-%m-%d %H:%M')}"
    return Prices(curves[0], curves[1] if draft is not None else None, 0.0, origin)


@torch.inference_mode()
def _milliseconds(model: SharedModel, count: int, top_n: int) -> float:
    """The least of some replays of one forward over `count` nodes of requests of 16 each."""
    probe = model.like(max(1, count // _EACH) * (_PROMPT + _EACH), 8, _PROMPT + _EACH)
    side, device = probe.side(top_n), model.model.device
    requests = max(1, count // _EACH)
    each = count // requests
    law = quickest_law(device)
    begins = torch.arange(requests, device=device) * (_PROMPT + _EACH)
    used = torch.full((requests,), _PROMPT + each, device=device)
    place = torch.arange(each, device=device).repeat(requests)
    mask = torch.zeros((count, _PROMPT + _EACH), dtype=probe.stores.masks.table.dtype, device=device)
    nodes = Nodes(torch.zeros_like(place), place + _PROMPT, place + _PROMPT, mask)

    def steps(_: Tensor) -> list[Tensor]:
        return [law.pack(side, forward_many(side, nodes, begins, used, mask.shape[1]))]

    captures = Captures(device, OverlapClock())
    nothing = torch.zeros(1, dtype=torch.long)
    captures.run("once", nothing, steps)
    times = []
    for _ in range(_TIMES):
        torch.cuda.synchronize(device)
        begin = time.perf_counter()
        captures.run("once", nothing, steps)
        torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) * 1e3)
    captures.release()
    return min(times)
