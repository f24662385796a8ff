"""A whole CPU forward in one call: matrix tiles (AMX) of x86 processors, `native/tiles.c`.

Takes the place of `llama.LlamaForward` for bfloat16 models, and for drafts of any dtype in int8. A
small model's forward is bound by reading its weights once everything else is out of the way: the
weights are packed in the order in which they are read, and nothing returns to Python between layers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.forward.whole import WholeForward, padded, prototyped
from dsbd_cli.loading import processor
from dsbd_cli.loading.ready.packed import Piece

_FLAGS = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")
_PAGE = 1 << 21
_pointer, _long = ctypes.c_void_p, ctypes.c_long


@functools.cache
def library() -> Any:
    """The compiled forward, allowed to use the tiles; None where there are none, or no compiler."""
    if not processor.amx_likely():
        return None
    found: Any = native.compiled(lambda: loaded(*_FLAGS))
    return None if found is None or found.allow() != 0 else found


def loaded(*flags: str, level: str | None = None) -> Any:
    """`native/tiles.c`, compiled with these flags for a level of `processor.LEVELS` (None: this processor's).

    Raises:
        OSError, subprocess.SubprocessError: as `native.built`.
    """
    built = native.built("kernels.c", "meet.c", "whole.h", "tiles.c", flags=flags, level=level)
    return prototyped(ctypes.CDLL(str(built)))


class AmxForward(WholeForward):
    """Matrix tiles: bfloat16, or int8 for drafts.

    Args:
        model: one that `backends` lets through.
        int8: multiply in int8: for drafts, whatever they propose is what is recorded.

    Attributes:
        relative_node_cost: measured: 36 nodes cost 1.5.
    """

    dtype = torch.bfloat16
    relative_node_cost = 0.012
    slot_unit = 32

    def __init__(self, model: Any, *, int8: bool = False) -> None:
        self._store = _Store(_weights_of(model), int8)
        super().__init__(model, library(), int8)

    def _layout(self) -> str:
        return f"AMX tiles, {'int8' if self.int8 else 'bfloat16'}"

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None, int]:
        tiles, scale = packed(weight, self.int8)
        place = torch.from_numpy(self._store.put(tiles.view(torch.uint8).flatten().numpy()))
        return place, None if scale is None else padded(scale, 32), 0

    def _take(self, piece: Piece) -> Piece:
        # Into large pages, which a mapped file has not: a forward reads a tenth faster from them.
        return piece._replace(weight=self._store.put(piece.weight))

    def describe(self) -> str:
        """One line for people."""
        return f"AMX forward, {'int8' if self.int8 else 'bfloat16'}"


class _Store:
    """One buffer for all packed weights, in large pages where the system has them."""

    def __init__(self, shapes: Sequence[tuple[int, int]], int8: bool) -> None:
        size = sum(-(-rows // 32) * 32 * columns * (1 if int8 else 2) for rows, columns in shapes)
        self._bytes = torch.empty(size + _PAGE, dtype=torch.uint8)
        self._at = -self._bytes.data_ptr() % _PAGE
        library().large_pages(_pointer(self._bytes.data_ptr() + self._at), _long(size // _PAGE * _PAGE))

    def put(self, tiles: np.ndarray) -> np.ndarray:
        """The bytes of one packed matrix, where they lie now."""
        place = self._bytes[self._at : self._at + len(tiles)].numpy()
        place[:] = tiles
        self._at += len(tiles)
        return place


def _weights_of(model: Any) -> list[tuple[int, int]]:
    """Shapes of all matrices that a forward reads."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [(module.out_features, module.in_features) for module in linears]


def packed(weight: Tensor, int8: bool) -> tuple[Tensor, Tensor | None]:
    """A weight [outputs, inputs] in the order in which `native/tiles.c` reads it, and its scales.

    Returns:
        [units of 32 outputs, steps of 64 bytes, 2 halves, 16, 16 outputs, 2 or 4 inputs]; float32
        [outputs] for int8, else None.
    """
    scale = None
    if int8:
        wide = weight.float()
        scale = wide.abs().amax(1).clamp_min(1e-8) / 127
        weight = (wide / scale[:, None]).round().to(torch.int8)
    else:
        weight = weight.to(torch.bfloat16)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 32))
    together = 4 if int8 else 2
    parts = weight.view(len(weight) // 32, 2, 16, weight.shape[1] // (16 * together), 16, together)
    return parts.permute(0, 3, 1, 4, 2, 5).contiguous(), scale
