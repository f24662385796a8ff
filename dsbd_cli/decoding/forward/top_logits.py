"""From logits to what the law needs: raw log-probabilities, the best few of each row, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.forward import native

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


def finite_logits(logps: Tensor) -> Tensor:
    """bool [N]: whether all logits behind these log-probabilities are finite.

    NaN and +inf spoil the whole row, -inf its own entry; either makes the sum no number.
    """
    return torch.isfinite(logps.sum(-1))


def top_logits(logits: Tensor, vocab: int, count: int) -> Best:
    """The `count` most probable tokens of each row of `logits` [N, >= vocab]; one copy to the host."""
    kernels = native.load() if logits.device.type == "cpu" and native.serves(logits.dtype) else None
    if kernels is not None and logits.stride(-1) == 1:
        return Best(*kernels.rows(logits, vocab, min(count, vocab)))
    logps = log_probabilities(logits, vocab)
    return best_of(logps, finite_logits(logps), count)


def best_of(logps: Tensor, finite: Tensor, count: int) -> Best:
    """`top_logits` for log-probabilities at hand: float32 [N, V] and bool [N]."""
    return unpack(pack(logps, finite, min(count, logps.shape[-1])).cpu().numpy())


def pack(logps: Tensor, finite: Tensor, count: int) -> Tensor:
    """The `count` best entries of each row as one tensor for one copy: float32 [N, 2 count + 1].

    Values, ids (the bits of int32), and 1 where the row is finite; sorted as `Best` wants them.
    """
    values, ids = _largest(logps, count)
    return torch.cat([values, ids.int().view(torch.float32), finite.float()[:, None]], dim=1)


def unpack(host: np.ndarray) -> Best:
    """What `pack` put together; views of `host`, which must not be written to again."""
    count = host.shape[1] // 2
    ids = np.ascontiguousarray(host[:, count : 2 * count]).view(np.int32).astype(np.int64)
    return Best(ids, host[:, :count], host[:, -1] > 0)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of [N, V], largest first, ties to the lower id.

    `torch.topk` keeps no order among ties, and bfloat16 logits tie often; so what is ranked is one
    integer an entry, of its value and its id. Whatever is among the largest lies in one of as many
    blocks of ids with the largest maxima, so only those are searched: several times faster.
    """
    rows, width = values.shape
    device = values.device
    ids = torch.arange(width, device=device).expand(rows, -1)
    blocks = width // _BLOCK
    if blocks >= 4 * count:
        maxima = values[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(-1)
        chosen = _ranked(maxima, ids[:, :blocks]).topk(count, dim=-1, sorted=False).indices
        inner = torch.arange(_BLOCK, device=device)
        ids = torch.cat([(chosen[:, :, None] * _BLOCK + inner).flatten(1), ids[:, blocks * _BLOCK :]], dim=1)
        values = values.gather(1, ids)
    best = _ranked(values, ids).topk(count, dim=-1).indices
    return values.gather(1, best), ids.gather(1, best)


def _ranked(values: Tensor, ids: Tensor) -> Tensor:
    """int64, ordered as (value, -id); ids fit in 31 bits."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are one value
    # Negative floats are ordered backwards in their bits.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 - ids
