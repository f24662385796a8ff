"""What a recorded iteration is made of: forwards over a pool, drafting a forest, laying it below the beams.

Tensors of fixed shapes only, nothing is read back (`device_loop`, `device_chain`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.device.law_torch import Drafted, best_layer, draft_layer
from dsbd_cli.decoding.device.layout import Side
from dsbd_cli.decoding.forward.logits import finite_logits, log_probabilities, pack
from dsbd_cli.decoding.law.distribution import LogitsProcessor


@dataclass(frozen=True)
class Drafting:
    """How forests are drafted.

    Attributes:
        width, gamma: W_S draws in each of gamma layers.
        processor: T of the draft, or None: take the W_S most probable distinct continuations.
        eos: int64, on the device: draws of these are finished, hence no parents.
    """

    width: int
    gamma: int
    processor: LogitsProcessor | None
    eos: Tensor


class Nodes(NamedTuple):
    """Nodes for one forward: token, position and slot of each, and their rows of the mask."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    mask: Tensor


class BestRows(NamedTuple):
    """Best entries of N rows: float32 and int64 [N, k], and float32 [N], 1 where all logits are numbers."""

    logps: Tensor
    ids: Tensor
    finite: Tensor


def forward(side: Side, nodes: Nodes, used: Tensor, sees: int) -> Tensor:
    """Logits of `nodes`; they are in the pool's buffers afterwards.

    Args:
        used: int64 [1], slots to look at.
        sees: the same as a bound that the recording was made for.
    """
    cache = side.pool.cache
    cache.slots, cache.used, cache.length = nodes.slots, sees, used
    return side.forward(cache, nodes.ids, nodes.positions, nodes.mask[:, :sees], 0)


def best_of_rows(side: Side, logits: Tensor) -> BestRows:
    """The `side.top_n` best entries of each row of logits."""
    logps = log_probabilities(logits, side.vocab)
    packed = pack(logps, finite_logits(logps), side.top_n)
    ids = packed[:, side.top_n : -1].contiguous().view(torch.int32).long()
    return BestRows(packed[:, : side.top_n], ids, packed[:, -1])


def draft_forest(
    side: Side, how: Drafting, logits: Tensor, weights: Tensor, parent_rows: Tensor, position: Tensor,
    space: Tensor, used: Tensor, sees: int, uniforms: Tensor | None, cut: Callable[[], None],
) -> tuple[list[Drafted], list[Tensor]]:  # fmt: skip
    """Draft gamma layers below the beams.

    Args:
        logits: the draft's, of the beams.
        weights: float64, log weights of the beams; -inf for what is none.
        parent_rows: mask rows of the beams in the draft's pool.
        position: int64 [1], of the beams' tokens.
        space: int64 [2, gamma - 1, W_S], slots and mask rows.
        uniforms: float64 [gamma, W_S], or None where the most probable are taken.
        cut: called between the layers (`cuda_graph.Recorder.cut`).

    Returns:
        The layers, and for each whether its parents' logits are numbers.
    """
    drafted: list[Drafted] = []
    finite: list[Tensor] = []
    alone = torch.eye(how.width, dtype=torch.bool, device=logits.device)
    for depth in range(how.gamma):
        best = best_of_rows(side, logits)
        if how.processor is None:
            layer = best_layer(weights, best.ids, best.logps, how.width)
        else:
            assert uniforms is not None
            layer = draft_layer(weights, best.ids, best.logps, how.processor, uniforms[depth])
        drafted.append(layer)
        finite.append(best.finite)
        tokens = layer.token[layer.draws]
        weights = layer.scores.masked_fill(torch.isin(tokens, how.eos), -torch.inf)
        if depth + 1 < how.gamma:
            slots, rows = space[:, depth]
            mask = side.pool.masks.extend(parent_rows[layer.parent[layer.draws]], rows, slots, alone)
            where = (position + depth + 1).expand(how.width)
            logits = forward(side, Nodes(tokens, where, slots, mask), used, sees)
            parent_rows = rows
        cut()
    return drafted, finite


def forest_nodes(
    side: Side, how: Drafting, drafted: list[Drafted], beam_rows: Tensor, position: Tensor, space: Tensor
) -> Nodes:
    """The drafted forest as nodes of `side`'s pool, layer by layer.

    Args:
        beam_rows: mask rows of the beams.
        position: int64 [1], of the beams' tokens.
        space: int64 [2, gamma, W_S], slots and mask rows.
    """
    wide, count = how.width, how.gamma * how.width
    inside = torch.zeros((count, count), dtype=torch.bool, device=space.device)
    bases: list[Tensor] = []
    tokens: list[Tensor] = []
    wheres: list[Tensor] = []
    for depth, layer in enumerate(drafted):
        parent = layer.parent[layer.draws]
        here = slice(depth * wide, (depth + 1) * wide)
        if depth:
            inside[here] = inside[(depth - 1) * wide : depth * wide][parent]
        inside[here, here].fill_diagonal_(True)
        bases.append((bases[-1] if depth else beam_rows)[parent])
        tokens.append(layer.token[layer.draws])
        wheres.append((position + depth + 1).expand(wide))
    slots, rows = space[0].flatten(), space[1].flatten()
    mask = side.pool.masks.extend(torch.cat(bases), rows, slots, inside)
    return Nodes(torch.cat(tokens), torch.cat(wheres), slots, mask)


def together(first: Nodes, second: Nodes) -> Nodes:
    """Both in one forward."""
    return Nodes(*(torch.cat(parts) for parts in zip(first, second, strict=True)))
