"""Cosines and sines by position: once for all positions, where they depend on nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Kinds of rope whose turns depend on the position alone.
BY_POSITION = {"default", "linear", "llama3"}


class Turns:
    """Tables of a model's rotary embedding.

    Args:
        rotary: transformers' module.
    """

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        # All are kept: captures hold their addresses, and of capacities that double they are no more than the last.
        self._tables: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, like: Tensor, positions: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin, [>= positions, size] each, in the dtype and on the device of `like` [1, ...]; None where they
        depend on more than the position."""
        if getattr(self._rotary, "rope_type", None) not in BY_POSITION:
            return None
        if not self._tables or max(self._tables) < positions:
            cos, sin = self._rotary(like, torch.arange(positions, device=like.device)[None])
            self._tables[positions] = cos[0].contiguous(), sin[0].contiguous()
        return self._tables[max(self._tables)]
