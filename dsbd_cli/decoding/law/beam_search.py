"""Beam search's own choice, without draws: the best continuations of the running beams. numpy only.

Hugging Face's (transformers `GenerationMixin._beam_search`), float32 sums included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsbd_cli.decoding.law.distribution import Row


class Candidates(NamedTuple):
    """Continuations, best first.

    Attributes:
        parent: int64 [n], place among the running beams. token: int64 [n].
        score: float32 [n], the sum of raw log-probabilities.
    """

    parent: np.ndarray
    token: np.ndarray
    score: np.ndarray


def candidates_kept(width: int, eos_count: int) -> int:
    """How many candidates a layer keeps: W unfinished ones are left even if every beam ends in each EOS."""
    return max(2, 1 + eos_count) * width


def best_candidates(scores: Sequence[float], rows: Sequence[Row], count: int) -> Candidates:
    """The `count` best of the joint; ties go to the earlier beam, then to the lower token.

    Args:
        scores: [I] float32 sums of the running beams.
        rows: [I] conditionals; each holds at least the `count` best tokens, or all.
    """
    parent = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])
    token = np.concatenate([row.tokens for row in rows])
    logp = np.concatenate([row.logps for row in rows]).astype(np.float32)
    score = logp + np.asarray(scores, dtype=np.float32)[parent]
    order = np.lexsort((token, parent, -score))[:count]
    return Candidates(parent[order], token[order], score[order])
