"""The processes of a distillation: each has a device, and sums gradients with the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dsbd_cli.world import World as Processes


class World(Processes):
    """This process and the device it works on.

    Args:
        device: `auto`, `cpu`, `cuda`, or one card; among several processes each takes a card of its own.
    """

    def __init__(self, device: str = "auto") -> None:
        super().__init__()
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = self.shard.device() or f"cuda:{self.local}"
        self.device = torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.join("nccl" if self.device.type == "cuda" else "gloo")

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()
