"""Several processes under torchrun: who runs which items, and how their results come together.

Items are dealt out to replicas; a replica is one process, or with tensor parallelism a group of N that
hold one target together. Objects travel through the rendezvous store, so that waiting for a slow rank has
no collective to time out; NCCL (gloo on CPU) serves the closing count, and a target's sums (`dsbd_cli.group`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, TypeVar

from dsbd_cli.batch.shard import dealt
from dsbd_cli.group import PATIENCE, Team
from dsbd_cli.world import World as Processes

T = TypeVar("T")


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
        team = Team.of(tensor_parallel)
        self.replica, self.replicas = team.shard.rank, team.shard.world
        self.leader = team.first
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
        if self.tensor_parallel > 1:
            return  # a team meets where its target is loaded (`loading.sharded`)
        self.join(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=distributed.PrefixStore("all", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=PATIENCE,
        )

    def mine(self, items: Sequence[T]) -> list[T]:
        """The items of this replica; the union over replicas is all of them."""
        return [item for place, item in enumerate(items) if dealt(place, self.replicas) == self.replica]

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
        """Leave the process group, and the store that results travel through; a team ends with its process."""
        if self.tensor_parallel == 1:
            super().close()
        self._store = None


def is_first_here() -> bool:
    """Whether this process is rank 0, without asking anyone."""
    return os.environ.get("RANK", "0") == "0"
