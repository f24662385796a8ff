"""Several processes under torchrun: who runs which items, and how their results come together.

Items are dealt out to replicas; a replica is one process, or with tensor parallelism a group of N that
hold one target together. Objects travel through the rendezvous store, so that waiting for a slow rank has
no collective to time out; NCCL (gloo on CPU) serves tensor parallelism and the closing count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from dsbd_cli.errors import UserError
from dsbd_cli.world import World as Processes

T = TypeVar("T")
PATIENCE = timedelta(days=7)


class World(Processes):
    """This process among its peers.

    Args:
        tensor_parallel: processes that hold one target together.

    Attributes:
        replica, replicas: which group this process is in, and of how many.
        leader: whether this process writes its replica's results.

    Raises:
        UserError: tensor parallelism without enough processes for whole groups.
    """

    def __init__(self, tensor_parallel: int = 1) -> None:
        super().__init__()
        self.device = self.shard.device()
        self.tensor_parallel = tensor_parallel
        if tensor_parallel < 1:
            raise UserError(f"--tensor-parallel must be at least 1, not {tensor_parallel}")
        if tensor_parallel > self.size or self.size % tensor_parallel:
            raise UserError(
                f"--tensor-parallel {tensor_parallel} needs a multiple of {tensor_parallel} processes, and there "
                f"are {self.size}: torchrun --no-python --nproc-per-node {tensor_parallel} dsbd bench ..."
            )
        self.replica, self.replicas = self.rank // tensor_parallel, self.size // tensor_parallel
        self.leader = self.rank % tensor_parallel == 0
        self._store: Any = None
        self._turn = 0

    def start(self) -> None:
        """Meet the other processes; nothing to do for one alone."""
        if self.size == 1 or self._store is not None:
            return
        import torch
        from torch import distributed

        self._store, _, _ = next(distributed.rendezvous("env://", self.rank, self.size))
        self._store.set_timeout(PATIENCE)
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(self.local % torch.cuda.device_count())
        name = f"replica-{self.replica}" if self.tensor_parallel > 1 else "all"
        split = self.tensor_parallel > 1
        self.join(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=distributed.PrefixStore(name, self._store),
            rank=self.rank % self.tensor_parallel if split else self.rank,
            world_size=self.tensor_parallel if split else self.size,
            timeout=PATIENCE,
        )

    def mine(self, items: Sequence[T]) -> list[T]:
        """The items of this replica; the union over replicas is all of them."""
        return [item for place, item in enumerate(items) if place % self.replicas == self.replica]

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value (plain values) on rank 0, in rank order; None elsewhere."""
        if self.size == 1:
            return [value]
        self._turn += 1
        self._store.set(f"gather-{self._turn}-{self.rank}", json.dumps(value))
        if self.rank:
            return None
        keys = [f"gather-{self._turn}-{rank}" for rank in range(self.size)]
        return [json.loads(self._store.get(key)) for key in keys]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (plain values) everywhere."""
        if self.size == 1:
            return value
        self._turn += 1
        key = f"broadcast-{self._turn}"
        if self.rank == 0:
            self._store.set(key, json.dumps(value))
            return value
        return json.loads(self._store.get(key))

    def total(self, count: int) -> int:
        """The sum of a count over all ranks, by one collective (NCCL on cards)."""
        if self.size == 1 or self.tensor_parallel > 1:
            return count
        import torch

        number = torch.tensor([count], device="cuda" if torch.cuda.is_available() else "cpu")
        return int(self.sum(number).item())

    def close(self) -> None:
        """Leave the process group, and the store that results travel through."""
        super().close()
        self._store = None


def is_first_here() -> bool:
    """Whether this process is rank 0, without asking anyone."""
    return os.environ.get("RANK", "0") == "0"
