"""The forward of Llama-shaped models in as few operations as it takes, from the loaded model's own weights.

Hugging Face's modelling code spends about half of a small model's CPU time outside matrix products:
repeated key/value heads, casts, per-layer Python. This is the same computation without that: fused
projections, packed weights (`linears`), query heads of a group folded into rows. It is used only
where the self-test finds it to agree with the model's own forward; anything unusual is left to that.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsbd_cli.decoding.hf import layer_kinds
from dsbd_cli.decoding.kv_pool import TreeCache
from dsbd_cli.decoding.linears import (
    DenseLinear,
    Int8Linear,
    Linear,
    PackedLinear,
    can_pack,
    can_quantize,
    fused,
    spare_memory,
)

_FAMILIES = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
# Up to this many query rows a head, folding a group's heads beats repeating keys and values.
_FOLD = 512


def serves(model: Any) -> bool:
    """Whether `model` is plainly one of the families below: full attention, SiLU, ordinary layers, no hooks."""
    if type(model).__name__ not in _FAMILIES or layer_kinds(model.config) != ["full_attention"]:
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
            return PackedLinear
    return DenseLinear


class _Layer:
    """One decoder layer: [N, hidden] to [N, hidden]."""

    def __init__(self, index: int, layer: Any, kind: type, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        config = attention.config
        self.index = index
        self.head = int(attention.head_dim)
        self.heads = int(config.num_attention_heads)
        self.groups = int(config.num_key_value_heads)
        self.scaling = float(attention.scaling)
        self.qkv: Linear = fused([attention.q_proj, attention.k_proj, attention.v_proj], kind)
        self.out: Linear = fused([attention.o_proj], kind)
        self.gate_up: Linear = fused([mlp.gate_proj, mlp.up_proj], kind)
        self.down: Linear = fused([mlp.down_proj], kind)
        self.before, self.after = (
            _Norm(layer.input_layernorm, dtype),
            _Norm(layer.post_attention_layernorm, dtype),
        )
        self.q_norm = _Norm(attention.q_norm, dtype) if hasattr(attention, "q_norm") else None
        self.k_norm = _Norm(attention.k_norm, dtype) if hasattr(attention, "k_norm") else None

    def __call__(self, x: Tensor, cache: TreeCache, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        count, shared = len(x), self.heads // self.groups
        qkv = self.qkv(self.before(x)).view(count, self.heads + 2 * self.groups, self.head)
        value = qkv[:, self.heads + self.groups :]
        turn = qkv[:, : self.heads + self.groups]
        if self.q_norm is not None and self.k_norm is not None:
            turn = torch.cat([self.q_norm(turn[:, : self.heads]), self.k_norm(turn[:, self.heads :])], 1)
        # rotate_half with the sign moved into `sin`: x cos + roll(x) sin.
        turn = torch.addcmul(turn * cos, turn.roll(self.head // 2, -1), sin)
        keys, values = cache.update(
            turn[:, self.heads :].transpose(0, 1)[None], value.transpose(0, 1)[None], self.index
        )
        query = turn[:, : self.heads]
        if mask.shape[2] == shared * count:
            # Heads that share keys become rows: nothing is repeated but the mask.
            query = query.reshape(count, self.groups, shared, self.head).permute(1, 2, 0, 3)
            query = query.reshape(1, self.groups, shared * count, self.head)
            seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self.scaling)
            seen = seen.view(self.groups, shared, count, self.head).permute(2, 0, 1, 3)
        else:
            seen = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=True
            )[0].transpose(0, 1)
        x = self.out(seen.reshape(count, self.heads * self.head), x)
        gate, up = self.gate_up(self.after(x)).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up), x)


class _Norm:
    """RMS norm over the last dimension."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        self.weight = norm.weight.detach().to(dtype)
        self.eps = float(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LeanForward:
    """Takes the place of `hf.TreeForward` for the families it serves; same call.

    Args:
        model: one that `serves` accepts.
        int8: multiply in int8 on a CPU (for drafts: it changes the numbers).
        kind: the products to use; None takes what suits the model's device.

    Attributes:
        dtype: of activations, keys and values.
        kind: the products it uses.
    """

    def __init__(self, model: Any, *, int8: bool = False, kind: type | None = None) -> None:
        self.kind = kind or kind_of_linear(model, int8)
        self.dtype = torch.float32 if self.kind is Int8Linear else model.dtype
        inner = model.model
        self._embed: nn.Embedding = inner.embed_tokens
        self._rotary = inner.rotary_emb
        self._layers = [_Layer(i, layer, self.kind, self.dtype) for i, layer in enumerate(inner.layers)]
        self._norm = _Norm(inner.norm, self.dtype)
        self._head = fused([model.lm_head], self.kind)
        half = self._layers[0].head // 2
        self._sign = torch.ones(2 * half, device=model.device, dtype=self.dtype)
        self._sign[:half] = -1

    def __call__(
        self, cache: TreeCache, ids: Tensor, positions: Tensor, mask: Tensor, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes named by `keep`; arguments as in `hf.TreeForward`."""
        x = self._embed(ids).to(self.dtype)
        cos, sin = self._rotary(x, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None] * self._sign
        shared = self._layers[0].heads // self._layers[0].groups
        seen = mask.repeat(shared, 1) if len(ids) * shared <= _FOLD else mask
        for layer in self._layers:
            x = layer(x, cache, cos, sin, seen[None, None])
        if isinstance(keep, int):
            x = x[-keep:] if keep else x
        else:
            x = x[keep]
        return self._head(self._norm(x))
