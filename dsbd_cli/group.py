"""Processes that hold one target together (`--tensor-parallel`): who they are, and what they tell each other.

Each of them runs the whole program with the same random numbers; what they share are sums inside the target's
forward, whose bits are the same everywhere (docs/design.md section 10, several cards). Whatever one of them
alone would find (a drawn seed, a line of stdin, a measured price, free memory) is therefore the first one's.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from dsbd_cli.batch.shard import Shard
from dsbd_cli.errors import UserError
from dsbd_cli.exchange import Exchange, exchange

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
Norming = Callable[["Tensor", "Tensor", float], "Tensor"]
# A group may wait for the next line of a chat for days.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Team:
    """This process among those that hold one target together, as torchrun describes it in the environment.

    Attributes:
        size: how many they are; 1: each process has a pair of its own.
        place: of this process among them, from 0.
    """

    size: int = 1
    place: int = 0

    @classmethod
    def of(cls, size: int) -> Team:
        """The team of this process where `size` hold one target.

        Raises:
            UserError: an environment that makes no sense, or too few processes for whole teams.
        """
        if size < 1:
            raise UserError(f"--tensor-parallel must be at least 1, not {size}")
        if size == 1:
            return cls()
        shard = Shard.from_env()
        if size > shard.world or shard.world % size:
            if shard.world == 1:
                raise UserError(
                    f"--tensor-parallel {size}: {size} processes hold the target together, and this one was started "
                    f"alone: torchrun --nproc-per-node {size} -m dsbd_cli ..., or leave --tensor-parallel out"
                )
            raise UserError(
                f"--tensor-parallel {size} needs a multiple of {size} processes, and there are {shard.world}: "
                f"torchrun --nproc-per-node {size} -m dsbd_cli ..."
            )
        return cls(size, shard.rank % size)

    @property
    def shard(self) -> Shard:
        """Which team this is, and of how many; prompts are dealt out to teams.

        Raises:
            UserError: an environment that makes no sense.
        """
        own = Shard.from_env()
        return own if self.size == 1 else Shard(own.rank // self.size, own.world // self.size, own.local)

    @property
    def first(self) -> bool:
        """Whether this process speaks and writes for its team."""
        return self.place == 0


class Group:
    """The processes of a team, connected: NCCL between cards, gloo between processors.

    Args:
        rank, size: this process, of how many.
        cards: of all of them, as torch names them on this host; empty without cards, or on several hosts.
    """

    def __init__(self, rank: int, size: int, cards: tuple[str, ...] = ()) -> None:
        self.rank, self.size, self.cards = rank, size, cards
        self.exchange: Exchange | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes, in place or not: the same bits on each of them."""
        if self.exchange is not None and self.exchange.takes(x):
            return self.exchange.sum(x)
        from torch import distributed

        distributed.all_reduce(x)
        return x

    def normed_sum(self, x: Tensor, weight: Tensor, eps: float, rms: Norming) -> tuple[Tensor, Tensor]:
        """The sum of rows [N, width], and `rms` of it and the rest: the same bits on each process."""
        if self.exchange is not None and self.exchange.takes_rows(x):
            return self.exchange.normed_sum(x, weight, eps)
        total = self.sum(x)
        return total, rms(total, weight, eps)

    def side_by_side(self, part: Tensor) -> Tensor:
        """Everybody's columns in order: [N, n] to [N, size n]."""
        from torch import distributed

        count, width = part.shape
        parts = part.new_empty((self.size * count, width))
        # Newer releases of torch warn of the older name.
        gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        gather(parts, part.contiguous())
        return parts.view(self.size, count, width).transpose(0, 1).reshape(count, self.size * width)

    def agreed(self, value: T) -> T:
        """The first process's value (plain values), everywhere."""
        import torch
        from torch import distributed

        box: list[Any] = [value if self.first else None]
        distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]  # type: ignore[no-any-return]

    def least(self, number: int) -> int:
        """The least of everybody's numbers."""
        import torch
        from torch import distributed

        one = torch.tensor([number])
        distributed.all_reduce(one, distributed.ReduceOp.MIN)
        return int(one.item())


class Alone(Group):
    """One process, which agrees with itself."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def sum(self, x: Tensor) -> Tensor:
        return x

    def side_by_side(self, part: Tensor) -> Tensor:
        return part

    def agreed(self, value: T) -> T:
        return value

    def least(self, number: int) -> int:
        return number


class Summed:
    """A forward hook of modules whose weights are split by inputs, for the model's own forward."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, module: Any, inputs: Any, output: Tensor) -> Tensor:
        return self.group.sum(output)


ALONE = Alone()
_joined: Group | None = None


def join(team: Team, *, cuda: bool) -> Group:
    """Meet the others of the team; the same group again at the second call.

    Args:
        cuda: on cards, one a process, which becomes the process's current one.

    Raises:
        UserError: no card for this process, or nobody who says where the others are.
    """
    global _joined
    if team.size == 1:
        return ALONE
    if _joined is None:
        import torch
        from torch import distributed

        if cuda:
            count = torch.cuda.device_count()
            if team.shard.local >= count:
                raise UserError(
                    f"--tensor-parallel wants a card for every process, and this host has {count}: start fewer "
                    "processes here, or give --device cpu"
                )
            torch.cuda.set_device(team.shard.local)
        if not distributed.is_initialized():
            _meet(team, cuda)
        places: list[Any] = [None] * team.size
        distributed.all_gather_object(places, [socket.gethostname(), f"cuda:{team.shard.local}"])
        hosts = {host for host, _ in places}
        cards = tuple(card for _, card in places) if cuda and len(hosts) == 1 else ()
        _joined = Group(distributed.get_rank(), distributed.get_world_size(), cards)
        _joined.exchange = exchange(cards, _joined.rank, _joined.least)
    return _joined


def _meet(team: Team, cuda: bool) -> None:
    from torch import distributed

    shard = Shard.from_env()
    try:
        store, _, _ = next(distributed.rendezvous("env://", shard.rank, shard.world))
    except ValueError as error:
        raise UserError(f"--tensor-parallel needs torchrun ({error})") from None
    store.set_timeout(PATIENCE)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=distributed.PrefixStore(f"replica-{team.shard.rank}", store),
        rank=team.place,
        world_size=team.size,
        timeout=PATIENCE,
    )


def joined() -> Group:
    """The group of this process, once it has met the others; else it is alone."""
    return _joined or ALONE


def group_of(model: Any) -> Group:
    """The processes that hold a model together."""
    return getattr(model, "dsbd_group", None) or ALONE


def depart(code: int) -> None:
    """End this process, if it has joined a group: at once, for captures and connections cannot be undone in turn.

    Args:
        code: 0: the others end their work first.
    """
    if _joined is None:
        return
    import torch
    from torch import distributed

    if code == 0:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        distributed.all_reduce(torch.zeros(1))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
