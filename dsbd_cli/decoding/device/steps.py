"""What every captured iteration is made of: forwards over a tree."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import Span, Stores
from dsbd_cli.decoding.model.protocol import Side


class Nodes(NamedTuple):
    """Nodes for one forward: int64 [N] token, position and KV-cache slot of each, and their mask rows [N, .]."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor


def forward_many(side: Side, nodes: Nodes, begins: Tensor, used: Tensor, sees: int) -> Tensor:
    """Logits [N, V'] of the nodes of R requests, N / R of each; they are in the buffers afterwards.

    Args:
        begins, used: int64 [R], where each request's slots begin, and its KV length.
        sees: slots to look at, a bound of it that the capture was made for.
    """
    cache, mask = side.stores.cache, nodes.mask[:, :sees]
    slots = nodes.slots
    if side.tree is None:
        slots = slots + begins.repeat_interleave(len(slots) // len(begins))
        if not side.forward.reads_length:
            mask, sees = _flat(mask, begins, side.stores), side.stores.cache.capacity
    cache.slots, cache.used, cache.spans = slots, sees, (Span(0, len(nodes.ids), 0, sees),)
    # Kernels read them as they lie.
    cache.begins, cache.length = begins.contiguous(), used.contiguous()
    return side.forward(cache, nodes.ids, nodes.positions, mask, 0)


def _flat(mask: Tensor, begins: Tensor, stores: Stores) -> Tensor:
    """[N, capacity]: each request's columns where its region is, for attention that reads no regions."""
    nodes, columns = mask.shape
    capacity = stores.cache.capacity
    flat = mask.new_full((nodes, capacity + columns), stores.masks.hidden)
    begin = begins.repeat_interleave(nodes // len(begins))
    flat.scatter_(1, begin[:, None] + torch.arange(columns, device=mask.device), mask)
    return flat[:, :capacity]


def together(first: Nodes, second: Nodes) -> Nodes:
    """Both in one forward."""
    return Nodes(*(torch.cat(parts) for parts in zip(first, second, strict=True)))
