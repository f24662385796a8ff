"""One process, or several under torchrun: which of them this is, and how they meet and part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsbd_cli.batch.shard import Shard

if TYPE_CHECKING:
    import torch


class World:
    """This process among its peers, as torchrun describes it in the environment.

    Attributes:
        rank, size: among all processes. local: place on this host.

    Raises:
        UserError: an environment that makes no sense.
    """

    def __init__(self) -> None:
        self.shard = Shard.from_env()
        self.rank, self.size, self.local = self.shard.rank, self.shard.world, self.shard.local

    @property
    def first(self) -> bool:
        return self.rank == 0

    def join(self, backend: str, **how: Any) -> None:
        """Enter the process group; nothing to do for one process alone, or twice.

        Args:
            how: for `init_process_group`.
        """
        from torch import distributed

        if self.size > 1 and not distributed.is_initialized():
            distributed.init_process_group(backend, **how)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over processes, in place."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(tensor)
        return tensor

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()
