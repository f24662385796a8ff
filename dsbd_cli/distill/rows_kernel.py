"""Triton kernel for `attention.rows_attention`: one program a (row, key/value head).

A program walks the filled slots of its row once, in tiles, with a running softmax (online
normaliser), for all query heads of its group together; nothing is masked beyond the last tile and no
key is read twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 64


@triton.jit
def _kernel(
    q_ptr, k_ptr, v_ptr, filled_ptr, out_ptr, scale,
    kv_heads, group,
    qb, qh, kb, kh, ks, ob, oh,
    DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = (program // kv_heads).to(tl.int64)
    head = program % kv_heads
    filled = tl.load(filled_ptr + row)
    dims = tl.arange(0, DIM)
    members = tl.arange(0, GROUP)
    own = members < group
    q_offsets = row * qb + (head * group + members)[:, None] * qh + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=own[:, None], other=0.0)
    best = tl.full([GROUP], -1e30, tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    base = row * kb + head * kh
    for start in range(0, filled, BLOCK):
        slots = start + tl.arange(0, BLOCK)
        inside = slots < filled
        offsets = base + slots[:, None] * ks + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(inside[None, :], scores, -1e30)
        top = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(best - top)
        v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        total = total * shrink + tl.sum(weights, 1)
        best = top
    out = acc / total[:, None]
    o_offsets = row * ob + (head * group + members)[:, None] * oh + dims[None, :]
    tl.store(out_ptr + o_offsets, out.to(out_ptr.dtype.element_ty), mask=own[:, None])


def rows_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scaling: float
) -> torch.Tensor:
    """See `attention.rows_attention`; the innermost dimension of every tensor must be contiguous."""
    batch, heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    _kernel[(batch * kv_heads,)](
        query, keys, values, filled, out, scaling, kv_heads, group,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        out.stride(0), out.stride(1),
        DIM=dim, GROUP=max(16, triton.next_power_of_2(group)), BLOCK=TILE, num_warps=2, num_stages=2,
    )  # fmt: skip
    return out
