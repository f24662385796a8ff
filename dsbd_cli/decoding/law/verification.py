"""Verifying one drafted layer: pure functions over aligned vectors (docs/design.md section 3). numpy only.

Whatever q is, every slot that comes out is an iid draw of p: that is the whole theorem.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsbd_cli.decoding.law.distribution import Sampler, residual


@dataclass(frozen=True)
class Verified:
    """What verification made of a layer.

    Attributes:
        draws: indices into p, in order of acceptance, then filled ones; W_L of them.
        verdicts: one bool per draw that was looked at.
        passed: every one is an accepted draw.
    """

    draws: tuple[int, ...]
    verdicts: tuple[bool, ...]
    passed: bool

    @property
    def accepted(self) -> int:
        return sum(self.verdicts)


def verify_draws(p: np.ndarray, q: np.ndarray, draws: list[int], width: int, sampler: Sampler) -> Verified:
    """Algorithm 1 with the errata applied: accept draws of q as draws of p, then fill up.

    Args:
        p: [n] target's warped joint over the accepted parents, sums to 1.
        q: [n] draft's warped joint restricted to those parents, NOT renormalised.
        draws: indices into p of the draft's draws, in the order they were drawn; -1 for a draw
            under a dead parent, which p gives no mass.
        width: W_L >= 1.
    """
    chosen: list[int] = []
    verdicts: list[bool] = []
    current = p
    for draw in draws:
        if len(chosen) == width:
            break
        # p'/q, not the printed q/p' (docs/design.md section 7). A dead parent's draw has p' = 0: rejected.
        accepted = draw >= 0 and current[draw] > 0 and sampler.accept(current[draw], q[draw])
        verdicts.append(bool(accepted))
        if accepted:
            chosen.append(draw)
            current = p
        else:
            current = residual(current, q)
    passed = len(chosen) == width
    if not passed:
        # The open chain of rejections owes one draw from its residual; the rest are free draws of p.
        chosen += sampler.sample(current, 1)
        chosen += sampler.sample(p, width - len(chosen)) if len(chosen) < width else []
    return Verified(tuple(chosen), tuple(verdicts), passed)


def align(
    p_keys: np.ndarray, p: np.ndarray, q_keys: np.ndarray, q: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p and q on the union of their supports: (keys, p, q), keys ascending; absent entries are 0."""
    keys = np.union1d(p_keys, q_keys)
    wide_p, wide_q = np.zeros(len(keys)), np.zeros(len(keys))
    wide_p[np.searchsorted(keys, p_keys)] = p
    wide_q[np.searchsorted(keys, q_keys)] = q
    return keys, wide_p, wide_q
