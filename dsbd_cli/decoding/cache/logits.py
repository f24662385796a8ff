"""From logits to what the law asks: raw log-probabilities, and the top-n of each node on the host.

Where top-k bounds the joint, only each node's `top_n` best tokens leave the device; else its full
logits stay where the forward put them, and the joint is built there (docs/design.md section 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Support

_BLOCK = 128


class Best(NamedTuple):
    """The best entries of N rows, on the host.

    Attributes:
        tokens: int64 [N, k], best first, ties to the lower id.
        logps: float32 [N, k], raw log-softmax over the trimmed vocabulary.
        finite: bool [N], whether the row is a distribution (`finite_logits`).
    """

    tokens: np.ndarray
    logps: np.ndarray
    finite: np.ndarray


def log_probabilities(logits: Tensor, vocab: int) -> Tensor:
    """Raw float32 log-softmax over the first `vocab` columns: padded heads get probability 0."""
    return torch.log_softmax(logits[..., :vocab], dim=-1, dtype=torch.float32)


def finite_logits(logps: Tensor) -> Tensor:
    """bool [N]: whether the logits behind these log-probabilities make a distribution.

    NaN, +inf, and nothing but -inf turn the whole row into NaN. A single -inf is a token of probability 0:
    models mask tokens so.
    """
    return ~logps.sum(-1).isnan()


def best_of(logps: Tensor, finite: Tensor, count: int) -> Best:
    """`kernels.top_logits` for log-probabilities at hand: float32 [N, V] and bool [N]."""
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


def dense_joint(scores: Sequence[float], logps: Tensor, processor: LogitsProcessor) -> Support:
    """The same support as `law.joint`, up to rounding; only its non-zero part leaves the device.

    Args:
        scores: [I] log weights of the parents.
        logps: float32 [I, V], raw log-probabilities.
        processor: with temperature above 0 and without top-k (those need only the best entries of a row).
    """
    if processor.top_n:
        raise ValueError("top-k and greedy decoding need only the best entries of each row")
    vocab = logps.shape[1]
    wide = logps.double()
    log_weight = (wide + torch.tensor(scores, dtype=torch.float64, device=logps.device)[:, None]).flatten()
    # The peak first: no temperature then overflows.
    prob = torch.softmax((log_weight - log_weight.max()) / processor.temperature, 0)
    if processor.top_p < 1:
        # Flat indices ascend by parent, then token: a stable sort leaves ties in that order.
        values, order = torch.sort(prob, descending=True, stable=True)
        # The smallest head that reaches top-p: entries before which less than that has gathered.
        count = int((torch.cumsum(values, 0) < processor.enough).sum()) + 1
        kept = torch.sort(order[:count]).values
        kept = kept[prob[kept] > 0]
    else:
        kept = torch.nonzero(prob > 0)[:, 0]
    packed = torch.stack([kept.double(), wide.flatten()[kept], prob[kept]]).cpu().numpy()
    flat = packed[0].astype(np.int64)
    return Support(flat // vocab, flat % vocab, packed[1], packed[2] / packed[2].sum())
