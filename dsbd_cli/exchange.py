"""Sums of two cards of one host in one trip: each writes its part into the other's memory (`group.Group.sum`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class Exchange:
    """Sums of up to some megabytes: 3 to 4 us for some nodes where NCCL takes 9 (docs/speed.md).

    Every word goes with a count that says for which sum it is, so nobody waits for anything but the words (NCCL's LL
    protocol does so): no barrier before them, none behind them. Two cards, for then no order of adding can differ.

    Raises:
        RuntimeError: memory that both can write cannot be had, or a first sum is wrong.
        ImportError: no Triton.
    """

    _WORDS = 1 << 20
    _ROWS, _FEW_WORDS, _MANY_WORDS = 1 << 12, 1 << 18, 1 << 22  # of sums that are normed
    _FIRST_TRIES = 1 << 20  # about a second
    _DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")

    def __init__(self) -> None:
        # One card writes to the other: that takes no multicast, which some hosts cannot spare.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch
        from torch import distributed
        from torch.distributed import _symmetric_memory as symmetric

        from dsbd_cli.exchange_kernels import WORDS_OF_A_PROGRAM, Rows

        everyone = distributed.group.WORLD
        assert everyone is not None

        def shared(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            """Zeros [2, width] that the other process writes, and those that it reads."""
            here = symmetric.empty((2, width), dtype=dtype, device=torch.device("cuda"))
            here.zero_()
            torch.cuda.synchronize()  # before the other writes
            self._handle: Any = symmetric.rendezvous(here, everyone)
            return here, self._handle.get_buffer(1 - self._handle.rank, (2, width), dtype)

        self._here, self._there = shared(self._WORDS, torch.int64)
        self._counts = torch.zeros(self._WORDS // WORDS_OF_A_PROGRAM, dtype=torch.int32, device="cuda")
        few, many, done = (
            shared(self._FEW_WORDS, torch.int64), shared(self._MANY_WORDS, torch.int32),
            shared(self._ROWS, torch.int32),
        )  # fmt: skip
        self._rows = Rows(*few, *many, *done, torch.zeros(self._ROWS, dtype=torch.int32, device="cuda"))
        handle = self._handle
        numbers = torch.arange(3 * WORDS_OF_A_PROGRAM, dtype=torch.float32, device="cuda")
        self._sum(numbers[:0], 1)  # compiled before anybody waits for the other
        for kind in (False, True):
            self._normed(numbers[None], numbers, 0.0, 1, kind)
        torch.cuda.synchronize()
        handle.barrier()
        own = numbers * (1 + 2 * handle.rank)
        sums = [self._sum(own, self._FIRST_TRIES)]
        for kind in (False, True):
            sums.append(self._normed(own[None], numbers, 0.0, self._FIRST_TRIES, kind)[0][0])
        right = all(torch.equal(found, 4 * numbers) for found in sums)
        handle.barrier()
        self._rows.clear()  # a model's rows are of another width
        handle.barrier()
        if not right:
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

    def takes_rows(self, x: Tensor) -> bool:
        """Whether rows [N, width] are for `normed_sum`."""
        row = x.shape[-1] * x.element_size()
        return (
            x.dim() == 2
            and row % 4 == 0
            and self.takes(x[:1])
            and x.is_contiguous()
            and self._rows.take(len(x), row // 4)
        )

    def normed_sum(self, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The sum of rows [N, width], and it normed (RMS): new tensors."""
        return self._normed(x, weight, eps, 0)

    def _normed(
        self, x: Tensor, weight: Tensor, eps: float, tries: int, many: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        from dsbd_cli.exchange_kernels import normed_sum_of_both

        return normed_sum_of_both(x, weight, eps, self._rows, tries, many)

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
