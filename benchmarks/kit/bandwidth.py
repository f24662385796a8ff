"""Bytes: what a forward has to read, and what the device's memory can move."""

from __future__ import annotations

import time
from typing import Any

import torch

from dsbd_cli.bench.hf import synchronize

_REPEATS = 12


def read_bytes(model: Any) -> int:
    """Bytes of weights that a forward reads: all but an embedding table that is no head (it is looked up)."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    weights = {id(weight): weight for weight in model.parameters()}
    if table is not head:
        weights.pop(id(table), None)
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


@torch.inference_mode()
def copy_bandwidth(device: torch.device, size: int | None = None) -> float:
    """Bytes a second of a copy within the device's memory, read and written bytes both counted.

    Args:
        device: measured with its current number of threads.
        size: bytes to copy, far beyond any cache; None takes 4 GiB on a GPU and 256 MiB on a CPU.
    """
    size = size or (1 << 32 if device.type == "cuda" else 1 << 28)
    # Random bits: some memories move constants faster.
    source = torch.empty(size // 4, dtype=torch.int32, device=device).random_()
    target = torch.empty_like(source)
    seconds = []
    for _ in range(_REPEATS):
        synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    # The median of what is left after warming up.
    return 2 * size / sorted(seconds[2:])[(_REPEATS - 2) // 2]
