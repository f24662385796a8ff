"""Which forward serves which model on this machine, and why not: the one place where that is decided.

`TABLE` lists the forwards, the quickest first; the model's own always comes last. A fused forward is used
only where the self-test (`selftest.py`) then finds it to agree with the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.forward import amx, few, native, simd
from dsbd_cli.decoding.forward.hf import HfForward, layer_kinds
from dsbd_cli.decoding.forward.kernels import (
    DenseLinear,
    Int8Linear,
    PrepackedLinear,
    c_kernels,
    c_kernels_serve,
    can_pack,
    can_quantize,
    spare_memory,
)
from dsbd_cli.decoding.forward.llama import LlamaForward
from dsbd_cli.decoding.forward.plain import why_not_plain, why_other_attention
from dsbd_cli.group import group_of
from dsbd_cli.loading import processor
from dsbd_cli.loading.ready.llama import ReadyLlama

_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Forward(Protocol):
    """Tree nodes in, logits out.

    Attributes:
        dtype: of keys, values and the tree attention mask.
        int8: whether it multiplies in int8 (drafts only: it changes the numbers).
        int8_activations: whether it rounds activations to 8 bits, and no weight.
        reads_length: whether `KVBuffer.length` bounds attention, so that the mask may be wider.
        takes_spans: whether each request's nodes look at its own slots only (`KVBuffer.spans`); else the mask
            must show all slots.
        slot_unit: slots that its attention adds up as one: where a request's begin at a multiple of it, the
            request's numbers are those that it has alone.
        relative_node_cost: what a node more costs, in forwards of one node.
        between: called between some decoder layers while a CUDA graph is captured, or None.
    """

    dtype: torch.dtype
    int8: bool
    int8_activations: bool
    reads_length: bool
    takes_spans: bool
    slot_unit: int
    relative_node_cost: float
    between: Callable[[], None] | None

    def __call__(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes that `keep` names (`hf.HfForward.__call__`)."""

    def needs_no_mask(self, begin: int) -> bool:
        """Whether prompt tokens from `begin` on, in slots in order, can do without a mask."""

    def describe(self) -> str:
        """One line for people."""


class Backend(NamedTuple):
    """One way to compute.

    Attributes:
        name: for people.
        fused: it reads the weights and runs none of the model's code, so `why_not_fused` must find nothing.
        why_not: (model, int8) to the reason why it does not serve the model here; None where it does.
        make: (model, int8) to the forward.
        same: whether it makes the same forward whether int8 is asked for or not.
    """

    name: str
    fused: bool
    why_not: Callable[[Any, bool], str | None]
    make: Callable[[Any, bool], Forward]
    same: Callable[[], bool] = lambda: False


def _why_not_whole(model: Any) -> str | None:
    """What keeps a forward in one call to C from serving a model at all."""
    if model.device.type != "cpu":
        return "a CPU forward"
    return "it knows nothing of sums over processes" if group_of(model).size > 1 else None


def why_no_amx(model: Any, int8: bool) -> str | None:
    if reason := _why_not_whole(model):
        return reason
    if not (int8 or model.dtype == torch.bfloat16):
        return "for bfloat16 models, and for drafts"
    if not processor.amx_likely():
        return "this processor has no AMX, or there is no C compiler"
    attention, config = model.model.layers[0].self_attn, model.config
    size, step = int(attention.head_dim), 64 if int8 else 32
    widths = config.hidden_size, config.intermediate_size, config.num_attention_heads * size
    if any(width % step for width in widths) or size % 32 or size > 128 or model.lm_head.weight.shape[0] % 16:
        return "its sizes are no multiples of a tile's"
    weights = sum(weight.numel() for weight in model.parameters())
    if weights * (2 if int8 else 4) >= spare_memory():
        return "no memory for a second copy of the weights"
    return None if amx.library() is not None else "its C code does not compile here"


def why_no_simd(model: Any, int8: bool) -> str | None:
    if reason := _why_not_whole(model):
        return reason
    if model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return "for float32 and shorter formats"
    attention, config = model.model.layers[0].self_attn, model.config
    size = int(attention.head_dim)
    if size % 16 or size > 128 or config.intermediate_size % 16:
        return "its sizes are no multiples of 16, or its heads too large"
    if sum(weight.numel() * weight.element_size() for weight in model.parameters()) >= spare_memory():
        return "no memory for a second copy of the weights"
    return None if simd.library() is not None else "no C compiler"


def why_no_int8_activations(model: Any) -> str:
    """Why none is rounded to 8 bits, where that was asked for."""
    if reason := why_not_fused(model):
        return reason
    return why_no_simd(model, False) or "none of its weights are in such blocks"


def why_no_code() -> str | None:
    """What the C compiler said, where code was to be compiled and is not there."""
    reason = native.failure()
    return reason if reason is not None and simd.library() is None else None


def _quick_bytes() -> bool:
    """Whether rounding a draft's activations to 8 bits makes it quicker: where int8 rows take part in it."""
    return "8-bit blocks" in simd.rounding()


def _why_no_c(model: Any, int8: bool) -> str | None:
    linear = _linear(model, int8)
    if reason := _why_no_products(model, int8):
        return reason
    if model.device.type != "cpu" or linear is DenseLinear:
        return "a CPU forward with prepacked weights"
    if not c_kernels_serve(_dtype(model, linear), _head(model)):
        return "no C compiler, or a dtype or head size that the kernels do not have"
    return None


def _why_no_products(model: Any, int8: bool) -> str | None:
    return "no int8 products here" if int8 and _linear(model, int8) is not Int8Linear else None


def _why_no_triton(model: Any, int8: bool) -> str | None:
    if model.device.type != "cuda":
        return "a GPU forward"
    if (
        not processor.kernels_wanted()
        or model.dtype not in _GPU_DTYPES
        or _head(model) % 2
        or _head(model) > 256
    ):
        return "switched off, or a dtype or head size that the kernels do not have"
    if not on_current_device(model.device):
        return "the model is not on torch's current device, where Triton launches"
    return None if _triton(model.device) is not None else "Triton is not installed"


def _real(model: Any) -> Any:
    return model.real() if isinstance(model, ReadyLlama) else model


TABLE = (
    Backend("AMX", True, why_no_amx, lambda model, int8: amx.AmxForward(model, int8=int8)),
    Backend(
        "float32 in C",
        True,
        why_no_simd,
        lambda model, int8: simd.SimdForward(model, int8_activations=int8 and _quick_bytes()),
        lambda: not _quick_bytes(),
    ),
    Backend(
        "fused Llama, C kernels",
        True,
        _why_no_c,
        lambda model, int8: LlamaForward(model, _linear(model, int8), c_kernels()),
    ),
    Backend(
        "fused Llama, small products in Triton",
        True,
        lambda model, int8: _why_no_triton(model, int8) or few.why_not(model),
        lambda model, int8: LlamaForward(model, _linear(model, int8), _triton(model.device), few=True),
    ),
    Backend(
        "fused Llama, Triton kernels",
        True,
        _why_no_triton,
        lambda model, int8: LlamaForward(model, _linear(model, int8), _triton(model.device)),
    ),
    Backend(
        "fused Llama, tensor operations",
        True,
        _why_no_products,
        lambda model, int8: LlamaForward(model, _linear(model, int8), None),
    ),
    Backend("Hugging Face", False, lambda model, int8: None, lambda model, int8: HfForward(_real(model))),
)


def candidates(
    model: Any, *, int8: bool = False, int8_activations: bool = False, fused: bool = True, skip: int = 0
) -> Iterator[Forward]:
    """Forwards that may serve `model`, the quickest first; the model's own comes last.

    Args:
        int8: for a draft on a CPU: try those that multiply in int8, or read int8 rows as they are, first.
        int8_activations: try one that rounds activations to 8 bits first.
        fused: False leaves the model's own alone.
        skip: how many of the first are not made at all: the self-test is known to refuse them.
    """
    fused = fused and why_not_fused(model) is None
    if int8_activations and fused and why_no_simd(model, False) is None:
        skip -= 1
        if skip < 0:
            yield simd.SimdForward(model, int8_activations=True)
    for narrow in (True, False) if int8 and fused else (False,):
        for backend in TABLE:
            if (narrow and not backend.fused) or (int8 and not narrow and backend.same()):
                continue  # its turn is later, or was before
            if (fused or not backend.fused) and backend.why_not(model, narrow) is None:
                skip -= 1
                if skip < 0:
                    yield backend.make(model, narrow)


def why_not_fused(model: Any) -> str | None:
    """What keeps `model` from being plainly one of the families, now: see `plain.why_not_plain`."""
    if isinstance(model, ReadyLlama):
        return None  # it was compared with a plain model, bit for bit
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "hooks move its weights"
    if reason := why_not_plain(model) or why_other_attention(model):
        return reason
    if layer_kinds(model.config) != ["full_attention"]:
        return "not all of its decoder layers have full attention"
    if len({weight.device for weight in model.parameters()}) != 1:
        return "its weights are on several devices"
    return None


def on_current_device(device: torch.device) -> bool:
    """Whether Triton, which launches where torch's current device is, would launch on `device`."""
    return device.index in (None, torch.cuda.current_device())


def _linear(model: Any, int8: bool) -> type:
    """Which matrix products this model's device, dtype and memory allow."""
    if model.device.type == "cpu":
        if int8 and can_quantize():
            return Int8Linear
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        if can_pack(model.dtype) and 2 * size < spare_memory():
            return PrepackedLinear
    return DenseLinear


def _dtype(model: Any, linear: type) -> torch.dtype:
    return torch.float32 if linear is Int8Linear else model.dtype


def _head(model: Any) -> int:
    return int(model.model.layers[0].self_attn.head_dim)


def _triton(device: torch.device) -> Any:
    """The Triton kernels for a device, or None where Triton is missing."""
    try:
        from dsbd_cli.decoding.forward.triton_kernels import Kernels
    except ImportError:
        return None
    return Kernels(device)
