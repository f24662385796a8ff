"""A whole CPU forward in float32, on the vector units of any processor: `native/simd.c`.

Weights are kept in the narrowest format that holds each of them to the bit: a GGUF file's 4 and 8-bit blocks
stay blocks, a bfloat16 checkpoint stays bfloat16, a draft's int8 rows stay int8. They are widened to float32
in registers, so the numbers are those of the de-quantised model in float32 up to the order of sums, and a
forward of one node reads a quarter to an eighth of its bytes. Asked to, it rounds activations to 8 bits where they
meet 4-bit blocks, and 8-bit ones where the processor sums four products of bytes at once (`native/int8.c`). What a
node gives does not depend on the nodes beside it.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.forward.records import Linear, prototyped
from dsbd_cli.decoding.forward.whole import WholeForward
from dsbd_cli.loading import processor

# In the order of the C source, the narrowest first.
FORMATS = ("4-bit blocks", "8-bit blocks", "bfloat16", "float16", "float32")
_LINE = 64
_pointer, _long = ctypes.c_void_p, ctypes.c_long


def library(level: str | None = None) -> Any:
    """The compiled forward; None without a compiler.

    Args:
        level: of `processor.LEVELS`; None: `level_here()`.
    """
    return _library(level or level_here())


def level_here() -> str:
    """The highest level of this processor that the compiler knows too: an old one may not."""
    return _level_below(processor.level())


@functools.cache
def _level_below(highest: str) -> str:
    below = reversed(processor.levels(highest))
    return next((name for name in below if _library(name) is not None), highest)


@functools.cache
def _library(level: str) -> Any:
    return native.compiled(lambda: _loaded(level))


def _loaded(level: str, flags: Sequence[str] = ()) -> Any:
    sources = (
        "kernels.c",
        "meet.c",
        "whole.h",
        "narrow.c",
        "pairs.c",
        "quads.c",
        "int8.c",
        "heads.c",
        "simd.c",
    )
    # Sums and products are fused where the source says so, and nowhere else: see `fused` there.
    built = native.built(*sources, flags=["-ffp-contract=off", *flags], level=level)
    loaded: Any = ctypes.CDLL(str(built))
    loaded.packed_bytes.restype, loaded.packed_bytes.argtypes = _long, [_long] * 3
    loaded.pack.restype, loaded.pack.argtypes = ctypes.c_int, [_pointer, _long, _long, _long, _pointer]
    loaded.narrows.restype, loaded.narrows.argtypes = ctypes.c_int, [_long]
    loaded.multiply.restype, loaded.multiply.argtypes = None, [_pointer, _pointer, _long, _long, _pointer]
    return prototyped(loaded)


class SimdForward(WholeForward):
    """Vectors: float32 activations, weights as narrow as they allow.

    Args:
        model: one that `backends` lets through.
        level: as in `library`.
        int8_activations: round activations to 8 bits where they meet 4-bit blocks.

    Attributes:
        int8_activations: whether it does: it was asked to, and there are such blocks.
    """

    dtype = torch.float32
    _needs_positions = True

    def __init__(self, model: Any, level: str | None = None, *, int8_activations: bool = False) -> None:
        self.level = level or level_here()
        super().__init__(model, library(level), int8_activations)
        self.int8 = False  # weights are what they were
        # Widening and reading is what one node costs, multiplying what each costs.
        self.bytes_read, self.formats = self._counted(FORMATS)
        self.int8_activations = int8_activations and not self.formats.keys().isdisjoint(rounding(self.level))
        self.relative_node_cost = min(0.5, 0.045 * 4 * sum(self.formats.values()) / self.bytes_read)

    def _layout(self) -> str:
        return f"float32 in C, {self.level}"

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None, int]:
        packed, kind = pack(self._library, weight)
        return packed, None, kind

    def describe(self) -> str:
        """One line for people; prices are kept by it."""
        most = max(self.formats, key=lambda name: self.formats[name])
        short = ", activations in 8 bits" if self.int8_activations else ""
        return f"float32 forward in C ({self.level}), weights in {most}{short}"


def rounding(level: str | None = None) -> tuple[str, ...]:
    """The formats for which activations can be rounded to 8 bits: 8-bit blocks where the processor sums four
    products of bytes at once.

    Args:
        level: as in `library`.
    """
    loaded = library(level)
    return () if loaded is None else tuple(name for kind, name in enumerate(FORMATS) if loaded.narrows(kind))


def pack(
    library: Any, weight: Tensor, kinds: tuple[int, ...] = tuple(range(len(FORMATS)))
) -> tuple[Tensor, int]:
    """[outputs, inputs] in the first of the formats `kinds` that changes none of its weights.

    Returns:
        bytes for `native/simd.c`, aligned to its cache lines; the format's place in `FORMATS`.

    Raises:
        ValueError: none of them fits (float32 does always).
    """
    sample = weight[:: max(1, len(weight) // 8)].float().contiguous()
    for kind in kinds:
        # A few rows tell most formats from the rest before all rows are packed.
        if _packed(library, sample, kind) is not None:
            whole = _packed(library, weight.float().contiguous(), kind)
            if whole is not None:
                return whole, kind
    raise ValueError(f"no format of {kinds} holds this weight")


def _packed(library: Any, weight: Tensor, kind: int) -> Tensor | None:
    rows, inputs = weight.shape
    size = library.packed_bytes(rows, inputs, kind)
    if size < 0:
        return None
    unaligned = torch.zeros(size + _LINE, dtype=torch.uint8)
    packed = unaligned[-unaligned.data_ptr() % _LINE :][:size]
    fits = library.pack(weight.data_ptr(), rows, inputs, kind, packed.data_ptr())
    if fits < 0:
        raise MemoryError("no memory to pack a weight")
    return packed if fits else None


def product(
    library: Any, packed: Tensor, kind: int, outputs: int, x: Tensor, *, int8: bool = False
) -> Tensor:
    """x [N, inputs] times a packed weight: [N, outputs], on the calling thread; int8: activations of 8 bits."""
    linear = Linear(packed.data_ptr(), None, None, x.shape[1], outputs, kind)
    out = torch.empty((len(x), outputs))
    library.multiply(ctypes.byref(linear), x.data_ptr(), len(x), int(int8), out.data_ptr())
    return out
