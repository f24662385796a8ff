"""A whole CPU forward in one call: matrix tiles (AMX) of x86 processors, `native/tiles.c`.

Takes the place of `llama.LlamaForward` for bfloat16 models, and for drafts of any dtype in int8. A
small model's forward is bound by reading its weights once everything else is out of the way: the
weights are packed in the order in which they are read, and nothing returns to Python between layers.

Weights in bfloat16 that came from 4 or 8-bit blocks (a GGUF file's) are packed as such blocks again, where
some give back every one of them to the bit (`native/blocks.c`): the numbers are those of bfloat16, for a
third or half of the bytes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.forward.records import prototyped
from dsbd_cli.decoding.forward.whole import WholeForward, padded
from dsbd_cli.loading import processor
from dsbd_cli.loading.ready.packed import Piece

# In the order of the C source, the blocks in the order in which they are tried: rounded at once, or to halves first.
FORMATS = ("bfloat16", "4-bit blocks", "4-bit blocks", "8-bit blocks", "8-bit blocks")
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
    included = "kernels.c", "blocks.c", "meet.c", "whole.h", "vectors.c", "products.c", "attention.c"
    found: Any = ctypes.CDLL(str(native.built(*included, "tiles.c", flags=flags, level=level)))
    found.unit_bytes.restype, found.unit_bytes.argtypes = _long, [_long] * 2
    found.pack.restype, found.pack.argtypes = ctypes.c_int, [_pointer, _long, _long, _long, _pointer]
    found.steps_of.restype, found.steps_of.argtypes = None, [_pointer, _long, _long, _pointer]
    return prototyped(found)


class AmxForward(WholeForward):
    """Matrix tiles: bfloat16, or int8 for drafts.

    Args:
        model: one that `backends` lets through.
        int8: multiply in int8: for drafts, whatever they propose is what is recorded.
        blocks: keep weights in blocks where that changes none of them.

    Attributes:
        bytes_read: of packed weights, by a forward of one node.
        formats: how many weights are in which of `FORMATS`.
    """

    dtype = torch.bfloat16
    slot_unit = 32

    def __init__(self, model: Any, *, int8: bool = False, blocks: bool = True) -> None:
        self._store = _Store(_weights_of(model), int8)
        self._blocks = blocks and not int8
        super().__init__(model, library(), int8)
        self.bytes_read, self.formats = self._counted(FORMATS)
        # Reading is what one node costs, multiplying what each costs: 36 cost 1.5 where tiles are read as they are.
        usual = sum(self.formats.values()) * (1 if int8 else 2)
        self.relative_node_cost = 0.012 * usual / self.bytes_read

    def _layout(self) -> str:
        return f"AMX tiles, {'int8' if self.int8 else 'bfloat16, blocks' if self._blocks else 'bfloat16'}"

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None, int]:
        kind, scale = 0, None
        found = blocks_of(weight) if self._blocks else None
        if found is not None:
            bytes_, kind = found
        else:
            tiles, scale = packed(weight, self.int8)
            bytes_ = tiles.view(torch.uint8).flatten()
        place = torch.from_numpy(self._store.put(bytes_.numpy()))
        return place, None if scale is None else padded(scale, 32), kind

    def _take(self, piece: Piece) -> Piece:
        # Into large pages, which a mapped file has not: a forward reads a tenth faster from them.
        return piece._replace(weight=self._store.put(piece.weight))

    def describe(self) -> str:
        """One line for people; prices are kept by it."""
        most = max(self.formats, key=lambda name: self.formats[name])
        kept = "" if most == FORMATS[0] else f", weights in {most}"
        return f"AMX forward, {'int8' if self.int8 else 'bfloat16'}{kept}"


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


def blocks_of(weight: Tensor) -> tuple[Tensor, int] | None:
    """A weight [outputs, inputs], in bfloat16, in the narrowest blocks that give back each of it; None where none do.

    Returns:
        bytes for `native/blocks.c`; the format's place in `FORMATS`.
    """
    weight = weight.to(torch.bfloat16).contiguous()
    rows, inputs = weight.shape
    if inputs % 32:
        return None
    units = -(-rows // 32)
    workers = max(1, min(torch.get_num_threads(), units))
    for kind in range(1, len(FORMATS)):
        each = library().unit_bytes(inputs, kind)
        packed = torch.zeros(units * each, dtype=torch.uint8)

        def part(i: int, kind: int = kind, each: int = each, packed: Tensor = packed) -> int:
            first, last = units * i // workers, units * (i + 1) // workers
            from_, to = weight[32 * first : 32 * last], packed[each * first :]
            return int(library().pack(from_.data_ptr(), len(from_), inputs, kind, to.data_ptr()))

        with ThreadPoolExecutor(workers) as pool:  # C holds no lock of Python's
            fits = list(pool.map(part, range(workers)))
        if all(fits):
            return packed, kind
    return None


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
