"""Matrix products with weights laid out for the processor they run on.

Eager torch hands a CPU kernel the weights as they lie, and oneDNN reorders them anew at every call;
packed once, a bfloat16 forward over a few tokens costs about two thirds. A draft may also multiply
in int8: whatever it proposes, what it proposed from is what is recorded, so the law stays exact.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dsbd_cli.decoding.forward import native


class Linear(Protocol):
    """`x @ weight.T + bias`, plus `add` where given, which may be overwritten; [N, in] to [N, out]."""

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor: ...


class DenseLinear:
    """Any device, any dtype, the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        if add is not None and self._bias is None and x.device.type == "cuda":
            return add.addmm_(x, self._weight.t())  # one kernel; into a new tensor it would copy first
        out = F.linear(x, self._weight, self._bias)
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
        # Without VNNI instructions sums of 8-bit products overflow: one bit less then.
        self._narrow = not getattr(torch.cpu, "_is_vnni_supported", bool)()

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        # The kernel has one scale a call, and single tokens have activations a hundred times larger
        # than the rest (measured: half of the draft's agreement lost): scale by token first.
        kernels = native.load()
        if kernels is not None and self._bias is None:
            small, sizes = kernels.shrink(x)
            out = torch.ops.quantized.linear_dynamic(small, self._packed, self._narrow)
            return kernels.grow(out, sizes, add)
        size = x.abs().amax(-1, keepdim=True).clamp_min(1e-9)
        out = torch.ops.quantized.linear_dynamic(x / size, self._packed, self._narrow).mul_(size)
        if self._bias is not None:
            out.add_(self._bias)
        return out if add is None else out.add_(add)


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
    """Whether int8 products exist here."""
    return any(engine != "none" for engine in torch.backends.quantized.supported_engines)


def spare_memory() -> int:
    """Bytes of main memory that are free now; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
