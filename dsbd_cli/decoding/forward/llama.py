"""The forward of Llama-shaped models in as few operations as it takes, from the loaded model's own weights.

Hugging Face's modelling code spends about half of a small model's CPU time outside matrix products:
repeated key/value heads, casts, per-layer Python. This is the same computation without that: fused
projections, packed weights (`linears`), query heads of a group folded into rows. It is used only
where the self-test finds it to agree with the model's own forward; anything unusual is left to that.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.decoding.cache.kv_buffer import KVBuffer
from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.forward.hf import layer_kinds
from dsbd_cli.decoding.forward.linears import (
    DenseLinear,
    Int8Linear,
    PrepackedLinear,
    can_pack,
    can_quantize,
    fused,
    spare_memory,
)
from dsbd_cli.decoding.forward.llama_layers import NativeLayer, Norm, TorchLayer, TritonLayer

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Where a recording may be cut (`cuda_graph.Recorder.cut`): a short piece first, then longer ones.
_FIRST_CUT, _CUT_EVERY = 2, 8
# Up to this many query rows a head, folding a group's heads beats repeating keys and values.
_FOLD = 512
_GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def serves(model: Any) -> bool:
    """Whether `model` is plainly one of the families below: full attention, SiLU, ordinary layers, no hooks."""
    if type(model).__name__ not in _FAMILIES or layer_kinds(model.config) != ["full_attention"]:
        return False
    if (getattr(model, "tp_size", None) or 1) > 1:  # each process holds a part of every weight
        return False
    plain = {"Linear", "Embedding"}
    for module in model.modules():
        if hasattr(module, "_hf_hook") or (
            getattr(module, "weight", None) is not None
            and type(module).__name__ not in plain
            and not type(module).__name__.endswith("RMSNorm")
        ):
            return False
    layers = model.model.layers
    return len({p.device for p in model.parameters()}) == 1 and all(
        type(layer.mlp.act_fn).__name__.startswith("SiLU") for layer in layers
    )


def kind_of_linear(model: Any, int8: bool) -> type:
    """Which product this model's device, dtype and memory allow."""
    if model.device.type == "cpu":
        if int8 and can_quantize():
            return Int8Linear
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        if can_pack(model.dtype) and 2 * size < spare_memory():
            return PrepackedLinear
    return DenseLinear


def on_current_device(device: torch.device) -> bool:
    """Whether Triton, which launches where torch's current device is, would launch on `device`."""
    return device.index in (None, torch.cuda.current_device())


def gpu_kernels(dtype: torch.dtype, head: int) -> Any:
    """The Triton kernels, or None where Triton or a size is missing, or DSBD_NATIVE=0."""
    if os.environ.get("DSBD_NATIVE") == "0" or dtype not in _GPU_DTYPES or head % 2 or head > 256:
        return None
    try:
        from dsbd_cli.decoding.forward.triton_kernels import Kernels
    except ImportError:
        return None
    return Kernels()


class LlamaForward:
    """Takes the place of `hf.HfForward` for the families it serves; same call.

    Args:
        model: one that `serves` accepts.
        int8: multiply in int8 on a CPU (for drafts: it changes the numbers).
        kind: the products to use; None takes what suits the model's device.
        kernels: use compiled kernels where there are some.

    Attributes:
        dtype: of activations, keys and values.
        kind: the products it uses.
        int8: whether they are in int8.
        kernels: what runs the steps between them, or None for tensor operations.
        reads_length: whether `cache.length` bounds attention, so that `mask` may be wider.
        between: called between some layers, or None.
    """

    def __init__(
        self, model: Any, *, int8: bool = False, kind: type | None = None, kernels: bool = True
    ) -> None:
        self.kind = kind or kind_of_linear(model, int8)
        self.int8 = self.kind is Int8Linear
        self.dtype = torch.float32 if self.int8 else model.dtype
        self.between: Callable[[], None] | None = None
        inner = model.model
        self._embed: nn.Embedding = inner.embed_tokens
        self._rotary = inner.rotary_emb
        layers = list(enumerate(inner.layers))
        head = int(inner.layers[0].self_attn.head_dim)
        compiled: Any = None
        if kernels and self.kind is not DenseLinear and native.serves(self.dtype, head):
            compiled = native.load()
        elif (
            kernels
            and self.kind is DenseLinear
            and model.device.type == "cuda"
            and on_current_device(model.device)
        ):
            compiled = gpu_kernels(self.dtype, head)
        self.kernels = compiled
        self._layers: list[Any]
        if compiled is None:
            self._layers = [TorchLayer(i, layer, self.kind, self.dtype) for i, layer in layers]
        else:
            make = TritonLayer if model.device.type == "cuda" else NativeLayer
            self._layers = [make(i, layer, self.kind, self.dtype, compiled) for i, layer in layers]
        # Its attention stops at a length that it reads on the device: one recording for any length.
        self.reads_length = isinstance(self._layers[0], TritonLayer)
        self._norm = Norm(inner.norm, self.dtype)
        self._head = fused([model.lm_head], self.kind)

    def needs_no_mask(self, begin: int) -> bool:
        """Whether prompt tokens from `begin` on, in slots in order, can do without a mask."""
        half = self.dtype in (torch.bfloat16, torch.float16)
        return begin == 0 or (half and self._embed.weight.device.type == "cuda")

    def __call__(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes named by `keep`; arguments as in `hf.HfForward`.

        Without a mask the nodes are the last tokens of a prompt that fills slots 1, 2, ... in order.
        """
        x = self._embed(ids).to(self.dtype)
        cos, sin = self._rotary(x, positions[None])
        if mask is not None:
            shared = self._layers[0].shared
            if not self.reads_length and len(ids) * shared <= _FOLD:
                mask = mask.repeat_interleave(shared, 0)
            mask = mask[None, None]
        for done, layer in enumerate(self._layers):
            if self.between is not None and done % _CUT_EVERY == _FIRST_CUT and done < len(self._layers) - 2:
                self.between()
            x = layer(x, cache, cos[0], sin[0], mask)
        if isinstance(keep, int):
            x = x[-keep:] if keep else x
        else:
            x = x[keep]
        return self._head(self._norm(x))
