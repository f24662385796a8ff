"""Sums of two cards of one host in one trip: each writes its part into the other's memory (`group.Group.sum`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Exchange:
    """Sums of up to four megabytes: 3 to 4 us for some nodes where NCCL takes 9 (docs/speed.md).

    Every word goes with a count that says for which sum it is, so nobody waits for anything but the words (NCCL's LL
    protocol does so): no barrier before them, none behind them. Two cards, for then no order of adding can differ.

    Raises:
        RuntimeError: memory that both can write cannot be had, or a first sum is wrong.
        ImportError: no Triton.
    """

    _WORDS = 1 << 20
    _FIRST_TRIES = 1 << 20  # about a second
    _DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")

    def __init__(self) -> None:
        # One card writes to the other: that takes no multicast, which some hosts cannot spare.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch
        from torch import distributed
        from torch.distributed import _symmetric_memory as symmetric

        from dsbd_cli.exchange_kernels import WORDS_OF_A_PROGRAM

        everyone = distributed.group.WORLD
        assert everyone is not None
        shape = (2, self._WORDS)
        self._here = symmetric.empty(shape, dtype=torch.int64, device=torch.device("cuda"))
        self._here.zero_()
        handle: Any = symmetric.rendezvous(self._here, everyone)
        self._there = handle.get_buffer(1 - handle.rank, shape, torch.int64)
        self._counts = torch.zeros(self._WORDS // WORDS_OF_A_PROGRAM, dtype=torch.int32, device="cuda")
        numbers = torch.arange(3 * WORDS_OF_A_PROGRAM, dtype=torch.float32, device="cuda")
        self._sum(numbers[:0], 1)  # compiled before anybody waits for the other
        torch.cuda.synchronize()
        handle.barrier()
        found = self._sum(numbers * (1 + 2 * handle.rank), self._FIRST_TRIES)
        if not torch.equal(found, 4 * numbers):
            raise RuntimeError("a first sum of both cards is wrong")

    def takes(self, x: Tensor) -> bool:
        """Whether it is a sum for this: of whole words where words lie, and not of none, which waits for nobody."""
        size = x.numel() * x.element_size()
        return (
            x.is_cuda and str(x.dtype) in self._DTYPES and size % 4 == 0
            and 0 < size <= 4 * self._WORDS and x.is_contiguous() and x.storage_offset() * x.element_size() % 4 == 0
        )  # fmt: skip

    def sum(self, x: Tensor) -> Tensor:
        """A new tensor."""
        return self._sum(x, 0)

    def _sum(self, x: Tensor, tries: int) -> Tensor:
        from dsbd_cli.exchange_kernels import sum_of_both

        return sum_of_both(x, self._here, self._there, self._counts, tries)


def exchange(cards: Sequence[str], rank: int, least: Callable[[int], int]) -> Exchange | None:
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
        found = Exchange()
    except (RuntimeError, ImportError, AttributeError):  # a torch without it, or a host that shares no memory
        found = None
    return found if least(int(found is not None)) else None
