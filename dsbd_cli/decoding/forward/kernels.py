"""What a fused forward is made of: matrix products with weights laid out for the machine, and C kernels between them.

Eager torch hands a CPU kernel the weights as they lie, and oneDNN reorders them anew at every call;
prepacked, a bfloat16 forward over a few tokens costs about two thirds. A draft may also multiply in
int8: whatever it proposes, what it proposed from is what is recorded, so the output stays exact. One
module, since it is the one place that knows which of these this machine has.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import LogitStore
from dsbd_cli.decoding.cache.logits import Best, finite_logits, log_probabilities, pack, unpack
from dsbd_cli.decoding.cache.transfer import Landing
from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import let_by

_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_LARGEST_HEAD = 1024
# From so many nodes on, waking other threads costs less than they save (28 microseconds for 49,152 logits).
_SHARED_NODES = 12


# Matrix products.


class Linear(Protocol):
    """`x @ weight.T + bias`, plus `add` where given, which may be overwritten; [N, in] to [N, out]."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor: ...


class DenseLinear:
    """Any device, any dtype, the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if add is not None and self.bias is None and x.device.type == "cuda":
            return add.addmm_(x, self.weight.t())  # one kernel; into a new tensor it would copy first
        out = F.linear(x, self.weight, self.bias)
        return out if add is None else out.add_(add)


class PrepackedLinear:
    """oneDNN on x86, the weight copied into the blocks that its kernels read."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops: Any = torch.ops.mkldnn
        # 16 tokens: what the layout is tuned for; it serves any number.
        self._weight = self._ops._reorder_linear_weight(weight, 16)
        self._bias = bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if add is None:
            return self._ops._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return self._ops._linear_pointwise.binary(x, add, self._weight, self._bias, "add")


class Int8Linear:
    """CPU: weights int8 by output row, activations int8 by token; in and out are float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.float()
        scale = weight.abs().amax(1).clamp_min(1e-8) / 127
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a later move to another package
            zero = torch.zeros(len(scale), dtype=torch.long)
            rows = torch.quantize_per_channel(weight, scale, zero, 0, torch.qint8)
            self._packed = _prepacked(rows)
        self._bias = None if bias is None else bias.float()
        self._narrow = not _has_vnni()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        # The kernel has one scale a call, and single tokens have activations a hundred times larger
        # than the rest (measured: half of the draft's agreement lost): scale by token first.
        kernels = c_kernels()
        if kernels is not None and self._bias is None:
            small, sizes = kernels.shrink(x)
            return kernels.grow(self._product(small), sizes, add)
        size = x.abs().amax(-1, keepdim=True).clamp_min(1e-9)
        out = self._product(x / size).mul_(size)
        if self._bias is not None:
            out.add_(self._bias)
        return out if add is None else out.add_(add)

    def _product(self, small: Tensor) -> Tensor:
        """[..., in] of -1 to 1 times the weights, [..., out]: a token's row whoever shares the call."""
        rows = small.reshape(-1, small.shape[-1])
        # The call's scale follows its least and its largest value: a row with both ends makes it one for all.
        ends = rows.new_zeros(1, rows.shape[1])
        ends[0, 0], ends[0, -1] = 1.0, -1.0
        out = torch.ops.quantized.linear_dynamic(torch.cat([rows, ends]), self._packed, self._narrow)
        return cast(Tensor, out[:-1]).view(*small.shape[:-1], -1)


def _prepacked(rows: Tensor) -> Any:
    """Packed by the library that is quicker at this size; what is packed remembers which it was."""
    before = torch.backends.quantized.engine
    # Measured at 1 to 24 tokens: oneDNN leads on large matrices (a head), fbgemm on small ones.
    for engine in ("onednn", "x86", "fbgemm") if rows.numel() >= 1 << 23 else ("x86", "fbgemm", "onednn"):
        if engine in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = engine
            break
    try:
        return torch.ops.quantized.linear_prepack(rows, None)
    finally:
        torch.backends.quantized.engine = before


def fused(linears: Sequence[Any], kind: type, columns: Tensor | None = None) -> Linear:
    """One product for several `torch.nn.Linear` that share their input: outputs side by side.

    Args:
        columns: int64 [in], the order in which the input comes; not for `DenseLinear`.
    """
    weights = [linear.weight.detach() for linear in linears]
    if columns is not None:
        weights = [weight[:, columns] for weight in weights]
    biases = [linear.bias for linear in linears]
    bias = None
    if any(one is not None for one in biases):
        bias = torch.cat([
            weight.new_zeros(len(weight)) if one is None else one.detach()
            for weight, one in zip(weights, biases, strict=True)
        ])  # fmt: skip
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    if kind is DenseLinear and len(weights) > 1:
        # The model keeps working, on views: no weight exists twice.
        for linear, part in zip(linears, weight.split([len(one) for one in weights]), strict=True):
            linear.weight.data = part
    return kind(weight, bias)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed kernels for this dtype here."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    ops: Any = torch.ops.mkldnn
    if not hasattr(ops, "_reorder_linear_weight") or not hasattr(ops, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def can_quantize() -> bool:
    """Whether int8 products exist here and serve a draft.

    Without VNNI instructions sums of 8-bit products overflow, so activations have one bit less, too coarse
    beside a token's largest: the embedded draft's logits were off by 3.8.
    """
    return _has_vnni() and any(engine != "none" for engine in torch.backends.quantized.supported_engines)


def _has_vnni() -> bool:
    return bool(getattr(torch.cpu, "_is_vnni_supported", bool)())


def spare_memory() -> int:
    """Bytes of main memory that are free now; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError) as error:
        let_by(error)
        return 0


# The steps between the products, and the top-n of logits, compiled from `native/kernels.c`.


class CKernels:
    """The compiled functions, on contiguous CPU tensors of float32 or bfloat16.

    Args:
        library: the shared object built from `kernels.c`.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        arguments = {
            "rms": [pointer] * 3 + [number] * 2 + [real],
            "rope": [pointer] * 9 + [number] * 5 + [real],
            "silu": [pointer] * 2 + [number] * 2,
            "rows": [pointer] + [number] * 4 + [pointer] * 3,
        }
        self._functions = {}
        for dtype, suffix in _NAMES.items():
            for name, types in arguments.items():
                function = getattr(loaded, f"{name}_{suffix}")
                function.argtypes = types
                function.restype = ctypes.c_int if name == "rows" else None
                self._functions[name, dtype] = function
        self._team = native.team()
        self._shared = loaded.shared_rows
        self._shared.argtypes = [pointer, pointer, number, pointer, *[number] * 4, *[pointer] * 3]
        self._shared.restype = ctypes.c_int
        self._shrink, self._grow = loaded.shrink, loaded.grow
        self._shrink.argtypes = self._grow.argtypes = [pointer] * 3 + [number] * 2
        self._shrink.restype = self._grow.restype = None

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of [N, width]."""
        out = torch.empty_like(x)
        call = self._functions["rms", x.dtype]
        call(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def rope(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, norms: tuple[Tensor, Tensor] | None,
        keys: Tensor, values: Tensor, heads: int, eps: float,
    ) -> Tensor:  # fmt: skip
        """Rotate, and write keys and values into the pool.

        Args:
            qkv: [N, (heads + 2 groups) size]. cos, sin: [N, size]. slots: int64 [N].
            norms: RMS weights of queries and keys, [size] each, or None.
            keys, values: [1, groups, capacity, size], written at `slots`.

        Returns:
            Queries [N x heads / groups, groups, size], rows in the order (node, head of its group).
        """
        count = qkv.shape[0]
        _, groups, capacity, size = keys.shape
        query = qkv.new_empty((count * heads // groups, groups, size))
        self._functions["rope", qkv.dtype](
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
            None if norms is None else norms[0].data_ptr(), None if norms is None else norms[1].data_ptr(),
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), count, heads, groups, size, capacity, eps,
        )  # fmt: skip
        return query

    def silu(self, both: Tensor) -> Tensor:
        """silu(gate) x up, from gate and up side by side: [N, 2 width] to [N, width]."""
        count, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty((count, width))
        self._functions["silu", both.dtype](both.data_ptr(), out.data_ptr(), count, width)
        return out

    def shrink(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row of float32 [N, width] scaled to a largest absolute value of 1, and the scales [N]."""
        out, sizes = torch.empty_like(x), x.new_empty(x.shape[0])
        self._shrink(x.data_ptr(), out.data_ptr(), sizes.data_ptr(), *x.shape)
        return out, sizes

    def grow(self, x: Tensor, sizes: Tensor, add: Tensor | None) -> Tensor:
        """x * sizes + add by row, in place; all float32."""
        self._grow(x.data_ptr(), sizes.data_ptr(), None if add is None else add.data_ptr(), *x.shape)
        return x

    def top_logits(self, logits: Tensor, vocab: int, best: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The `best` largest raw log-probabilities over the first `vocab` columns of [N, >= vocab].

        Returns:
            ids int64 [N, best], best first and ties to the lower id; log-probabilities float32
            [N, best]; bool [N], whether the row is a distribution (-inf is a probability of 0).
            A head of fewer columns has fewer entries.

        Raises:
            MemoryError: no memory for one row.
        """
        count = logits.shape[0]
        vocab = min(vocab, logits.shape[1])  # C reads what it is told to
        best = min(best, vocab)
        ids = np.empty((count, best), dtype=np.int64)
        logps = np.empty((count, best), dtype=np.float32)
        finite = np.empty(count, dtype=np.uint8)
        out = [array.ctypes.data for array in (ids, logps, finite)]
        call: Any = self._functions["rows", logits.dtype]
        threads = torch.get_num_threads()
        if count >= _SHARED_NODES and threads > 1 and self._team.parallel:
            self._team.threads = threads
            function = ctypes.cast(call, ctypes.c_void_p)
            call = functools.partial(self._shared, ctypes.byref(self._team), function, logits.element_size())
        if call(logits.data_ptr(), logits.stride(0), count, vocab, best, *out):
            raise MemoryError("no memory for a row of logits")
        return ids, logps, finite.astype(bool)

    def rows_of(self, dtype: torch.dtype) -> int:
        """The address of what `top_logits` calls, for C: built once, so that its bits are the same everywhere."""
        return int(ctypes.cast(self._functions["rows", dtype], ctypes.c_void_p).value or 0)


def c_kernels_serve(dtype: torch.dtype, head: int = 0) -> bool:
    """Whether the C kernels exist here for this dtype and head size."""
    return dtype in _NAMES and head <= _LARGEST_HEAD and head % 2 == 0 and c_kernels() is not None


@functools.cache
def c_kernels() -> CKernels | None:
    """The C kernels, compiled if need be; None where that is not possible or not wanted."""
    return native.compiled(lambda: CKernels(native.built("kernels.c")))


def top_logits(logits: Tensor, vocab: int, count: int) -> Best:
    """The `count` most probable tokens of each row of `logits` [N, >= vocab]; one copy to the host."""
    kernels = c_kernels() if logits.device.type == "cpu" and c_kernels_serve(logits.dtype) else None
    if kernels is not None and logits.stride(-1) == 1:
        return Best(*kernels.top_logits(logits, vocab, min(count, vocab)))
    return unpack(landing_logits(logits, vocab, count).wait())


def landing_logits(logits: Tensor, vocab: int, count: int) -> Landing:
    """`top_logits` as `pack` puts it together, without waiting for it."""
    logps = log_probabilities(logits, vocab)
    return Landing(pack(logps, finite_logits(logps), min(count, logps.shape[-1])))


def keep_logits(store: LogitStore, nodes: Sequence[Node], logits: Tensor) -> None:
    """Cache what will be asked of these nodes' logits [N, V']: their top-n, or all of them."""
    if store.size:
        store.put_best(nodes, top_logits(logits, store.vocab, store.size), range(len(nodes)))
    else:
        store.put(nodes, logits)
