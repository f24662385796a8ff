"""Random cases on which the writings of the law are compared: numpy (`law/`), torch and Triton.

Triton's kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import numpy as np
import torch

from dsbd_cli.decoding.cache.logits import finite_logits, log_probabilities, pack, unpack
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row

PROCESSORS = [
    LogitsProcessor(0.7, 6, 0.8),
    LogitsProcessor(1.0, 3, 1.0),
    LogitsProcessor(0.0, 6, 1.0),
    LogitsProcessor(2.0, 9, 0.3),
    LogitsProcessor(1.0, 5, 0.0),
]
VOCAB, EOS = 60, [7, 11]


def packed_rows(rng: np.random.Generator, count: int, top_n: int) -> torch.Tensor:
    """Best entries of `count` random nodes: one likely token each, and many ties among the others."""
    values = rng.integers(0, 12, (count, VOCAB)) / 3
    values[np.arange(count), rng.integers(0, VOCAB, count)] += 5
    logits = torch.tensor(values, dtype=torch.float32)
    logps = log_probabilities(logits, VOCAB)
    return pack(logps, finite_logits(logps), top_n)


def rows_of(packed: torch.Tensor) -> list[Row]:
    best = unpack(packed.numpy())
    return [Row(ids, logps.astype(np.float64)) for ids, logps in zip(best.tokens, best.logps, strict=True)]


def words(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64).view(np.int64))


class Given:
    """A sampler of given uniforms."""

    def __init__(self, uniforms):
        self.left = list(uniforms)

    def accept(self, numerator, denominator):
        return self.left.pop(0) * denominator < numerator

    def sample(self, weights, count):
        cumulative = np.cumsum(weights)
        taken = np.array([self.left.pop(0) for _ in range(count)])
        picks = np.searchsorted(cumulative, taken * cumulative[-1], side="right")
        return np.minimum(picks, np.searchsorted(cumulative, cumulative[-1], side="left")).tolist()
