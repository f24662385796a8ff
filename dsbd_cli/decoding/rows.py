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
    return torch.log_softmax(logits[..., :vocab], dim=-1, dtype=torch.float32)


def finite_rows(logps: Tensor) -> Tensor:
    """bool [N]: whether all logits behind these log-probabilities are finite.

    NaN and +inf spoil the whole row, -inf its own entry; either makes the sum no number.
    """
    return torch.isfinite(logps.sum(-1))


def best_rows(logits: Tensor, vocab: int, count: int) -> Best:
    """The `count` most probable tokens of each row of `logits` [N, >= vocab]; one copy to the host."""
    kernels = native.load() if logits.device.type == "cpu" and native.serves(logits.dtype) else None
    if kernels is not None and logits.stride(-1) == 1:
        return Best(*kernels.rows(logits, vocab, min(count, vocab)))
    logps = log_probabilities(logits, vocab)
    return best_of(logps, finite_rows(logps), count)


def best_of(logps: Tensor, finite: Tensor, count: int) -> Best:
    """`best_rows` for log-probabilities at hand: float32 [N, V] and bool [N]."""
    count = min(count, logps.shape[-1])
    return unpack(pack(logps, finite, count).cpu().numpy(), logps, count)


def pack(logps: Tensor, finite: Tensor, count: int) -> Tensor:
    """The best entries of each row and a margin, as one tensor for one copy: float32 [N, 2 fetched + 1].

    Values, ids (the bits of int32), and 1 where the row is finite.
    """
    values, ids = _largest(logps, min(logps.shape[-1], count + _MARGIN))
    return torch.cat([values, ids.int().view(torch.float32), finite.float()[:, None]], dim=1)


def unpack(host: np.ndarray, logps: Tensor, count: int) -> Best:
    """What `pack` put together, sorted and cut to `count`; `logps` is asked where a tie goes beyond it."""
    fetch = host.shape[1] // 2
    values = host[:, :fetch]
    ids = np.ascontiguousarray(host[:, fetch : 2 * fetch]).view(np.int32).astype(np.int64)
    finite = host[:, -1] > 0
    order = np.lexsort((ids, -values), axis=-1)[:, :count]
    tokens = np.take_along_axis(ids, order, axis=-1)
    best = np.take_along_axis(values, order, axis=-1)
    if fetch < logps.shape[-1]:
        # The border value may go on beyond what was fetched: only the whole row knows its lowest ids.
        for i in np.flatnonzero((values.min(-1) == best[:, -1]) & finite):
            row = logps[int(i)]
            tied = torch.nonzero(row >= float(best[i, -1]))[:, 0]
            everyone, worth = tied.cpu().numpy(), row[tied].cpu().numpy()
            order = np.lexsort((everyone, -worth))[:count]
            tokens[i], best[i] = everyone[order], worth[order]
    return Best(tokens, best, finite)


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
