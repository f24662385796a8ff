"""What every captured iteration is made of: forwards over a pool."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import Span
from dsbd_cli.decoding.model.protocol import Side


class Nodes(NamedTuple):
    """Nodes for one forward: int64 [N] token, position and KV-cache slot of each, and their mask rows [N, .]."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor


def forward(side: Side, nodes: Nodes, used: Tensor, sees: int) -> Tensor:
    """Logits [N, V'] of `nodes`; they are in the pool's buffers afterwards.

    Args:
        used: int64 [1], KV length.
        sees: slots to look at, a bound of it that the capture was made for.
    """
    cache = side.pool.cache
    cache.slots, cache.used, cache.spans = nodes.slots, sees, (Span(0, len(nodes.ids), 0, sees),)
    cache.begins, cache.length = torch.zeros_like(used), used
    return side.forward(cache, nodes.ids, nodes.positions, nodes.mask[:, :sees], 0)


def together(first: Nodes, second: Nodes) -> Nodes:
    """Both in one forward."""
    return Nodes(*(torch.cat(parts) for parts in zip(first, second, strict=True)))
