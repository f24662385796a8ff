"""Who does which prompts when a batch runs under torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass

from dsbd_cli.errors import UserError

# The fraction of the golden ratio, in 64 bits.
_GOLDEN = 0x9E3779B97F4A7C15


def dealt(index: int, world: int) -> int:
    """Who of `world` gets prompt `index`: each of them one of any `world` that begin at a multiple of it.

    The order within turns by multiples of the golden ratio, which keep step with no period: files often have their
    kinds of prompts in turns, and by `index` mod `world` one process would get all long answers.
    """
    block, place = divmod(index, world)
    turn = (block * _GOLDEN % 2**64) * world >> 64
    return (place + turn) % world


@dataclass(frozen=True)
class Shard:
    """Process `rank` of `world`; whose a prompt is says `dealt`. `local`: its place on this host."""

    rank: int = 0
    world: int = 1
    local: int = 0

    @classmethod
    def from_env(cls) -> Shard:
        """What torchrun put into RANK, WORLD_SIZE and LOCAL_RANK; one process where it did not.

        Raises:
            UserError: values that make no sense.
        """
        try:
            rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
            local = int(os.environ.get("LOCAL_RANK", rank))
        except ValueError:
            raise UserError(
                "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers, as torchrun sets them"
            ) from None
        if not 0 <= rank < world:
            raise UserError(f"RANK {rank} does not lie in 0..{world - 1} (WORLD_SIZE {world})")
        return cls(rank, world, local)

    def owns(self, index: int) -> bool:
        """Whether this process decodes prompt `index`."""
        return dealt(index, self.world) == self.rank

    def device(self) -> str | None:
        """The CUDA device of this process among several, or None to leave the choice to others."""
        if self.world == 1:
            return None
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return f"cuda:{self.local % count}" if count else None
