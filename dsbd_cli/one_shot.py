"""Small sums of two cards of one host: each reads the other's part itself (`group.Group.sum`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class OneShot:
    """Sums through memory that both cards can read: 8 us where NCCL takes 13 (docs/speed.md).

    Two cards, for then no order of adding can differ.

    Raises:
        RuntimeError: memory that both can read cannot be had.
    """

    _NUMBERS = 1 << 19  # beyond half a million NCCL is as quick

    def __init__(self) -> None:
        # One card reads the other: that takes no multicast, which some hosts cannot spare.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch
        from torch import distributed
        from torch.distributed import _symmetric_memory as symmetric

        everyone = distributed.group.WORLD
        assert everyone is not None
        self._name = everyone.group_name
        self._rooms: dict[Any, Tensor] = {}
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            room = symmetric.empty(self._NUMBERS, dtype=dtype, device=torch.device("cuda"))
            symmetric.rendezvous(room, everyone)
            self._rooms[dtype] = room

    def takes(self, x: Tensor) -> bool:
        """Whether it is a sum for this."""
        fits = x.numel() <= self._NUMBERS and x.numel() * x.element_size() % 16 == 0
        return x.is_cuda and fits and x.dtype in self._rooms

    def sum(self, x: Tensor) -> Tensor:
        """A new tensor."""
        import torch

        part = self._rooms[x.dtype][: x.numel()].view(x.shape)
        part.copy_(x)
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)
        return total


def one_shot(cards: Sequence[str], rank: int, least: Callable[[int], int]) -> OneShot | None:
    """What sums of both cards go through, where there are two that reach each other; the same for both.

    Args:
        cards: `cuda:0` and the like, by rank. rank: this process.
        least: the least of both processes' numbers.
    """
    if len(cards) != 2:
        return None
    import torch

    own, other = (int(card.partition(":")[2]) for card in (cards if rank == 0 else cards[::-1]))
    if not least(int(own != other and torch.cuda.can_device_access_peer(own, other))):
        return None
    try:
        found = OneShot()
    except (RuntimeError, ImportError, AttributeError):  # a torch without it, or a host that shares no memory
        found = None
    return found if least(int(found is not None)) else None
