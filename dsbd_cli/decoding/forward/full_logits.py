"""`law.joint` for whole rows, where they lie: T without top-k acts on every token of every parent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Support


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
    prob = torch.softmax(log_weight / processor.temperature, 0)
    if processor.top_p < 1:
        # Flat indices ascend by parent, then token: a stable sort leaves ties in that order.
        values, order = torch.sort(prob, descending=True, stable=True)
        # The smallest head that reaches top-p: entries before which less than that has gathered.
        count = int((torch.cumsum(values, 0) < processor.top_p).sum()) + 1
        kept = torch.sort(order[:count]).values
        kept = kept[prob[kept] > 0]
    else:
        kept = torch.nonzero(prob > 0)[:, 0]
    packed = torch.stack([kept.double(), wide.flatten()[kept], prob[kept]]).cpu().numpy()
    flat = packed[0].astype(np.int64)
    return Support(flat // vocab, flat % vocab, packed[1], packed[2] / packed[2].sum())
