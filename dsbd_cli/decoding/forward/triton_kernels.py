"""The steps between the products of a Llama-shaped layer on a GPU, in Triton; same calls as `native.Kernels`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.decoding.forward.triton_attention import Attention
from dsbd_cli.decoding.forward.triton_products import Products, how, ready, ready_alone, starts_early


@triton.jit
def _rms(x_ptr, weight_ptr, out_ptr, width, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    ready(EARLY)
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    kind = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + at, (weight * (x * inverse).to(kind).to(tl.float32)).to(kind), mask=inside)


@triton.jit
def _silu(both_ptr, out_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    ready(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(both_ptr + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out_ptr + row * width + at, (gate * up).to(kind), mask=inside)


@triton.jit(do_not_specialize=["capacity"])
def _rope(
    qkv_ptr, cos_ptr, sin_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, query_ptr, keys_ptr, values_ptr,
    heads, groups, size, capacity, eps,
    NORMED: tl.constexpr, IN_ORDER: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS of a node's heads (queries, keys, values in turn): a prompt has too many for a program each."""
    ready_alone(EARLY)  # (in front of attention)
    node = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    slot = tl.load(slots_ptr + node)
    half = size // 2
    at = tl.arange(0, HALF)[None, :]
    inside = (head < heads + 2 * groups)[:, None] & (at < half)
    source = qkv_ptr + (node * (heads + 2 * groups) + head[:, None]) * size + at
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    kind = query_ptr.dtype.element_ty
    is_query, is_value = head < heads, head >= heads + groups
    new_low, new_high = low, high
    if NORMED:
        inverse = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / size + eps)
        near = (at < half) & is_query[:, None]
        far = (at < half) & (head >= heads)[:, None]
        w_low = tl.load(q_weight_ptr + at, mask=near, other=0.0).to(tl.float32)
        w_high = tl.load(q_weight_ptr + half + at, mask=near, other=0.0).to(tl.float32)
        w_low += tl.load(k_weight_ptr + at, mask=far, other=0.0).to(tl.float32)
        w_high += tl.load(k_weight_ptr + half + at, mask=far, other=0.0).to(tl.float32)
        new_low = (w_low * (low * inverse[:, None]).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        new_high = (w_high * (high * inverse[:, None]).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    turned = at < half
    c_low = tl.load(cos_ptr + node * size + at, mask=turned, other=0.0).to(tl.float32)
    c_high = tl.load(cos_ptr + node * size + half + at, mask=turned, other=0.0).to(tl.float32)
    s_low = tl.load(sin_ptr + node * size + at, mask=turned, other=0.0).to(tl.float32)
    s_high = tl.load(sin_ptr + node * size + half + at, mask=turned, other=0.0).to(tl.float32)
    turned_low = (new_low * c_low).to(kind).to(tl.float32) - (new_high * s_low).to(kind).to(tl.float32)
    turned_high = (new_high * c_high).to(kind).to(tl.float32) + (new_low * s_high).to(kind).to(tl.float32)
    low = tl.where(is_value[:, None], low, turned_low).to(kind)
    high = tl.where(is_value[:, None], high, turned_high).to(kind)
    shared = heads // groups
    place = node * heads + head
    if not IN_ORDER:
        place = (node * shared + head % shared) * groups + head // shared
    mine = inside & is_query[:, None]
    tl.store(query_ptr + place[:, None] * size + at, low, mask=mine)
    tl.store(query_ptr + place[:, None] * size + half + at, high, mask=mine)
    mine = inside & ((head >= heads) & (head < heads + groups))[:, None]
    target = keys_ptr + ((head - heads).to(tl.int64) * capacity + slot)[:, None] * size + at
    tl.store(target, low, mask=mine)
    tl.store(target + half, high, mask=mine)
    mine = inside & is_value[:, None]
    target = values_ptr + ((head - heads - groups).to(tl.int64) * capacity + slot)[:, None] * size + at
    tl.store(target, low, mask=mine)
    tl.store(target + half, high, mask=mine)


class Kernels:
    """The kernels on contiguous CUDA tensors.

    Args:
        device: where they will run; None: whatever it is, nothing starts early there.

    Attributes:
        attend: attention over a tree.
        products: those of few nodes with small weights, and what a forward begins with.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._early = device is not None and starts_early(device)
        self.attend, self.products = Attention(self._early), Products(self._early)

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of [N, width]."""
        out = torch.empty_like(x)
        block = triton.next_power_of_2(x.shape[1])
        _rms[(x.shape[0],)](
            x, weight, out, x.shape[1], eps, BLOCK=block, **self._how(8 if block > 1024 else 4)
        )
        return out

    def silu(self, both: Tensor) -> Tensor:
        """silu(gate) x up, from gate and up side by side: [N, 2 width] to [N, width]."""
        count, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty((count, width))
        _silu[(count, triton.cdiv(width, 1024))](both, out, width, BLOCK=1024, **self._how(4))
        return out

    def rope(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, norms: tuple[Tensor, Tensor] | None,
        keys: Tensor, values: Tensor, heads: int, eps: float, *, in_order: bool = False,
    ) -> Tensor:  # fmt: skip
        """Rotate, and write keys and values into the pool; see `native.Kernels.rope`.

        Args:
            in_order: leave queries in the model's order, [N x heads, 1, size].
        """
        count = qkv.shape[0]
        _, groups, capacity, size = keys.shape
        query = qkv.new_empty(
            (count * heads, 1, size) if in_order else (count * heads // groups, groups, size)
        )
        every = heads + 2 * groups
        # Few nodes are spread over all of a device; many would be more programs than it starts quickly.
        each = 1 if count <= 8 else 4 if count <= 64 else 16
        q_weight, k_weight = norms if norms is not None else (qkv, qkv)
        _rope[(count, triton.cdiv(every, each))](
            qkv, cos, sin, slots, q_weight, k_weight, query, keys, values,
            heads, groups, size, capacity, eps,
            NORMED=norms is not None, IN_ORDER=in_order, HEADS=each, HALF=triton.next_power_of_2(size // 2),
            **self._how(1 if each <= 4 else 4),
        )  # fmt: skip
        return query

    def _how(self, warps: int) -> dict[str, Any]:
        return how(self._early, warps)
