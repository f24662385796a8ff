"""Cosines and sines by position: once for all positions, where they depend on nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Kinds of rope whose turns depend on the position alone.
_BY_POSITION = {"default", "linear", "llama3"}


class Turns:
    """Tables of a model's rotary embedding.

    Args:
        rotary: transformers' module.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        # All are kept, for captures and C hold their addresses; each is twice as long as the one before at least.
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def by_position(self) -> bool:
        """Whether a position alone says how its node is turned."""
        return getattr(self._rotary, "rope_type", None) in _BY_POSITION

    def of(self, like: Tensor, positions: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin, [>= positions, size] each, in the dtype and on the device of `like`; None where they depend on
        more than the position."""
        if not self.by_position:
            return None
        if not self._tables or max(self._tables) < positions:
            length = 1 << (positions - 1).bit_length()
            cos, sin = self._rotary(like, torch.arange(length, device=like.device)[None])
            self._tables[length] = cos[0].contiguous(), sin[0].contiguous()
        return self._tables[max(self._tables)]
