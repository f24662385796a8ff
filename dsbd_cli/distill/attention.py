"""Attention over a static key/value buffer whose rows are of different lengths.

The sampler decodes a batch of rows that grow at their own pace. Masked attention over the whole
buffer, with key/value heads repeated, would cost several times the model; here each row reads only
its own filled part, and the query heads of a group share the keys they read.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

NAME = "dsbd_rows"


class RowCache:
    """Keys and values `[rows, kv_heads, size, head_dim]` a layer, filled up to `lengths[row]`.

    Duck-typed for Hugging Face modelling code: `update` stores and returns what attention reads.
    With `prefill` set to `(rows, sources)`, a forward over prompts writes prompt `sources[i]` into row
    `rows[i]` from slot 0; with None, a forward over one token a row writes at `lengths`.
    """

    is_compileable = False

    def __init__(self, layers: int, rows: int, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.layers, self.rows, self.size = layers, rows, size
        self.device, self.dtype = device, dtype
        self.keys: list[torch.Tensor | None] = [None] * layers
        self.values: list[torch.Tensor | None] = [None] * layers
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.index = torch.arange(rows, device=device)
        self.prefill: tuple[torch.Tensor, torch.Tensor] | None = None

    def _buffer(self, store: list[torch.Tensor | None], layer: int, like: torch.Tensor) -> torch.Tensor:
        buffer = store[layer]
        if buffer is None:
            shape = (self.rows, like.shape[1], self.size, like.shape[3])
            buffer = store[layer] = torch.zeros(shape, device=self.device, dtype=self.dtype)
        return buffer

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self._buffer(self.keys, layer_idx, key)
        values = self._buffer(self.values, layer_idx, value)
        if self.prefill is not None:
            rows, sources = self.prefill
            length = key.shape[2]
            keys[rows, :, :length] = key[sources].to(self.dtype)
            values[rows, :, :length] = value[sources].to(self.dtype)
            return key, value
        # Advanced indices on both sides of a slice come first: the target is [rows, kv_heads, head_dim].
        keys[self.index, :, self.lengths] = key[:, :, 0].to(self.dtype)
        values[self.index, :, self.lengths] = value[:, :, 0].to(self.dtype)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


# The cache a forward under way reads its lengths from; modelling code hands none through to attention.
_active: list[RowCache] = []


class using:
    """Context: forwards inside attend over `cache`."""

    def __init__(self, cache: RowCache) -> None:
        self.cache = cache

    def __enter__(self) -> RowCache:
        _active.append(self.cache)
        return self.cache

    def __exit__(self, *_: object) -> None:
        _active.pop()


def rows_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scaling: float
) -> torch.Tensor:
    """One query a row over its filled slots: `[B, H, 1, D]`, `[B, Hkv, S, D]` twice, `[B]` -> `[B, H, 1, D]`."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _triton() is not None:
        head_dim = query.shape[-1]
        if head_dim >= 16 and head_dim & (head_dim - 1) == 0:
            return _triton()(query, keys, values, filled, scaling)  # type: ignore[misc]
    mask = torch.arange(keys.shape[2], device=keys.device)[None, :] < filled[:, None]
    return F.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask[:, None, None, :], scale=scaling, enable_gqa=True
    )


@functools.cache
def _triton() -> Any:
    """The Triton kernel's launcher, or None where Triton is not installed."""
    try:
        from dsbd_cli.distill import rows_kernel
    except ImportError:
        return None
    return rows_kernel.rows_attention


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers under `NAME`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _active and _active[-1].prefill is None:
        out = rows_attention(query, key, value, _active[-1].lengths + 1, scale)
    else:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `NAME` known to transformers (safe to call again)."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
