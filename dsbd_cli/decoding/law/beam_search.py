"""Beam search's own choice, without draws: the best continuations of the running beams. numpy only.

Hugging Face's (transformers `GenerationMixin._beam_search`), float32 sums included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dsbd_cli.decoding.law.distribution import FEW, Row


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
    if sum(len(row.tokens) for row in rows) <= FEW:
        return _best_of_few(scores, rows, count)
    parent = np.repeat(np.arange(len(rows)), [len(row.tokens) for row in rows])
    token = np.concatenate([row.tokens for row in rows])
    logp = np.concatenate([row.logps for row in rows]).astype(np.float32)
    score = logp + np.asarray(scores, dtype=np.float32)[parent]
    order = np.lexsort((token, parent, -score))[:count]
    return Candidates(parent[order], token[order], score[order])


def _best_of_few(scores: Sequence[float], rows: Sequence[Row], count: int) -> Candidates:
    """The same entry by entry, which takes less of the caches that a forward has emptied (`distribution.FEW`)."""
    found = [
        (parent, token, float(score) + logp)
        for parent, (score, row) in enumerate(zip(scores, rows, strict=True))
        for token, logp in zip(row.tokens.tolist(), row.logps.tolist(), strict=True)
    ]
    # A sum of two float32 numbers, in float64 first, is rounded to the float32 sum.
    sums = np.array([total for _, _, total in found], dtype=np.float32).tolist()
    best = sorted((-total, parent, token) for total, (parent, token, _) in zip(sums, found, strict=True))[
        :count
    ]
    less, parents, tokens = zip(*best, strict=True)
    return Candidates(np.array(parents), np.array(tokens), -np.array(less, dtype=np.float32))
