"""From logits to what the law needs: raw log-probabilities, the best few of each row, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding import native

# Entries fetched beyond those asked for, so that a tie at the border can be seen and decided exactly.
_MARGIN = 8
_BLOCK = 128


class Best(NamedTuple):
    """The best entries of N rows, on the host.

    Attributes:
        tokens: int64 [N, k], best first, ties to the lower id.
        logps: float32 [N, k], raw log-softmax over the trimmed vocabulary.
        finite: bool [N], whether every logit of the row is a number.
    """

    tokens: np.ndarray
    logps: np.ndarray
    finite: np.ndarray


def log_probabilities(logits: Tensor, vocab: int) -> Tensor:
    """Raw float32 log-softmax over the first `vocab` columns: padded heads get probability 0."""
    return torch.log_softmax(logits[..., :vocab].float(), dim=-1)


def finite_rows(logits: Tensor, vocab: int) -> Tensor:
    """bool [N]: no NaN and no infinity anywhere in the row (either makes the row's sum no number)."""
    return torch.isfinite(logits[..., :vocab].float().sum(-1))


def best_rows(logits: Tensor, vocab: int, count: int) -> Best:
    """The `count` most probable tokens of each row of `logits` [N, >= vocab]; one copy to the host."""
    kernels = native.load() if logits.device.type == "cpu" and native.serves(logits.dtype) else None
    if kernels is not None and logits.stride(-1) == 1:
        return Best(*kernels.rows(logits, vocab, min(count, vocab)))
    logps = log_probabilities(logits, vocab)
    return best_of(logps, finite_rows(logits, vocab), count)


def best_of(logps: Tensor, finite: Tensor, count: int) -> Best:
    """`best_rows` for log-probabilities at hand: float32 [N, V] and bool [N]."""
    vocab = logps.shape[-1]
    count = min(count, vocab)
    fetch = min(vocab, count + _MARGIN)
    values, ids = _largest(logps, fetch)
    packed = torch.cat([values, ids.int().view(torch.float32), finite.float()[:, None]], dim=1)
    host = packed.cpu().numpy()
    values_np = host[:, :fetch]
    ids_np = np.ascontiguousarray(host[:, fetch : 2 * fetch]).view(np.int32).astype(np.int64)
    good = host[:, -1] > 0
    order = np.lexsort((ids_np, -values_np), axis=-1)[:, :count]
    tokens = np.take_along_axis(ids_np, order, axis=-1)
    best = np.take_along_axis(values_np, order, axis=-1)
    if fetch < vocab:
        # The border value may go on beyond what was fetched: then only a full stable sort is exact.
        for i in np.flatnonzero((values_np[:, -1] == best[:, -1]) & good):
            row = logps[int(i)].cpu().numpy()
            tokens[i] = np.argsort(-row, kind="stable")[:count]
            best[i] = row[tokens[i]]
    return Best(tokens, best, good)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` over the last dimension of [N, V], several times faster for few out of many.

    Whatever is among the largest lies in a block whose maximum is among the largest maxima, so only
    that many blocks are searched.
    """
    rows, width = values.shape
    blocks = width // _BLOCK
    if blocks < 4 * count:
        return torch.topk(values, count, dim=-1)
    whole = values[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    chosen = torch.topk(whole.amax(-1), count, dim=-1, sorted=False).indices
    inner = torch.arange(_BLOCK, device=values.device)
    ids = (chosen[:, :, None] * _BLOCK + inner).flatten(1)
    tail = torch.arange(blocks * _BLOCK, width, device=values.device).expand(rows, -1)
    ids = torch.cat([ids, tail], dim=1)
    best = torch.topk(values.gather(1, ids), count, dim=-1)
    return best.values, ids.gather(1, best.indices)
