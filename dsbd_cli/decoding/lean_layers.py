"""One decoder layer of a Llama-shaped model, [N, hidden] to [N, hidden], over the slots of a tree."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dsbd_cli.decoding import native
from dsbd_cli.decoding.kv_pool import TreeCache
from dsbd_cli.decoding.linears import Linear, fused


class Norm:
    """RMS norm over the last dimension."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        self.weight = norm.weight.detach().to(dtype)
        self.eps = float(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _Layer:
    """What both kinds of layer hold.

    Attributes:
        heads, groups, shared, size: query heads, key/value heads, query heads a key head, their width.
    """

    def __init__(self, index: int, layer: Any, kind: type, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index = index
        self.size = int(attention.head_dim)
        self.heads = int(attention.config.num_attention_heads)
        self.groups = int(attention.config.num_key_value_heads)
        self.shared = self.heads // self.groups
        self.scaling = float(attention.scaling)
        self.before, self.after = (
            Norm(layer.input_layernorm, dtype),
            Norm(layer.post_attention_layernorm, dtype),
        )
        self.head_norms: tuple[Norm, Norm] | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = Norm(attention.q_norm, dtype), Norm(attention.k_norm, dtype)
        self.qkv: Linear = fused([attention.q_proj, attention.k_proj, attention.v_proj], kind)
        self.out: Linear = fused([attention.o_proj], kind, self._columns())
        self.gate_up: Linear = fused([mlp.gate_proj, mlp.up_proj], kind)
        self.down: Linear = fused([mlp.down_proj], kind)

    def _columns(self) -> Tensor | None:
        """The order of heads in which `out` gets its input, as columns; None: as the model has them."""
        return None

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, **options: bool) -> Tensor:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=self.scaling, **options
        )


class TorchLayer(_Layer):
    """Tensor operations only: any device, any dtype."""

    def __call__(self, x: Tensor, cache: TreeCache, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        """One layer.

        Args:
            x: [N, hidden].
            cache: `slots` and `used` are set for this forward.
            cos, sin: [N, size], of the nodes' positions.
            mask: additive, [1, 1, N x shared, used] (rows in the order node, head of a group) or
                [1, 1, N, used].
        """
        count = len(x)
        qkv = self.qkv(self.before(x)).view(count, self.heads + 2 * self.groups, self.size)
        value = qkv[:, self.heads + self.groups :]
        turn = qkv[:, : self.heads + self.groups]
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            turn = torch.cat([q_norm(turn[:, : self.heads]), k_norm(turn[:, self.heads :])], 1)
        low, high = turn.chunk(2, -1)
        turn = turn * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
        keys, values = cache.update(
            turn[:, self.heads :].transpose(0, 1)[None], value.transpose(0, 1)[None], self.index
        )
        query = turn[:, : self.heads]
        if mask.shape[2] == count:
            seen = self._attend(query.transpose(0, 1)[None], keys, values, mask, enable_gqa=self.shared > 1)[
                0
            ].transpose(0, 1)
        else:
            # Heads that share keys become rows: nothing is repeated but the mask.
            query = query.view(count, self.groups, self.shared, self.size).transpose(0, 1)
            query = query.reshape(1, self.groups, count * self.shared, self.size)
            seen = self._attend(query, keys, values, mask)
            seen = seen.view(self.groups, count, self.shared, self.size).transpose(0, 1)
        x = self.out(seen.reshape(count, self.heads * self.size), x)
        gate, up = self.gate_up(self.after(x)).chunk(2, -1)
        return self.down(F.silu(gate).mul_(up), x)


class NativeLayer(_Layer):
    """CPU: products and attention by torch, everything between them by `native`; same call."""

    def __init__(self, index: int, layer: Any, kind: type, dtype: torch.dtype) -> None:
        super().__init__(index, layer, kind, dtype)
        kernels = native.load()
        assert kernels is not None
        self._kernels = kernels
        norms = self.head_norms
        self._weights = None if norms is None else (norms[0].weight, norms[1].weight)
        self._eps = 0.0 if norms is None else norms[0].eps

    def _columns(self) -> Tensor | None:
        # Attention leaves [node, head of a group, group, size]; the model has groups outermost.
        if self.shared == 1:
            return None
        order = torch.arange(self.heads * self.size).view(self.groups, self.shared, self.size)
        return order.transpose(0, 1).reshape(-1)

    def __call__(self, x: Tensor, cache: TreeCache, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        count, kernels = len(x), self._kernels
        qkv = self.qkv(kernels.rms(x, self.before.weight, self.before.eps))
        keys, values = cache.buffers(self.index, self.groups, self.size, self.size, x)
        query = kernels.rope(qkv, cos, sin, cache.slots, self._weights, keys, values, self.heads, self._eps)
        keys, values = keys[:, :, : cache.used], values[:, :, : cache.used]
        query = query.transpose(0, 1)
        if mask.shape[2] == count:
            query = query.view(self.groups, count, self.shared, self.size).transpose(1, 2)
            query = query.reshape(1, self.heads, count, self.size)
            seen = self._attend(query, keys, values, mask, enable_gqa=self.shared > 1)
            seen = seen.view(self.groups, self.shared, count, self.size).permute(2, 1, 0, 3)
        else:
            seen = self._attend(query[None], keys, values, mask).transpose(1, 2)
        x = self.out(seen.reshape(count, self.heads * self.size), x)
        both = self.gate_up(kernels.rms(x, self.after.weight, self.after.eps))
        return self.down(kernels.silu(both), x)
