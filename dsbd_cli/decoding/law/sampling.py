"""Where all randomness comes from: two questions, so a test can enumerate every answer exactly."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Sampler(Protocol):
    """What a method may ask of fate."""

    def accept(self, numerator: float, denominator: float) -> bool:
        """True with probability min(1, numerator / denominator); never for a numerator of 0."""

    def sample(self, weights: np.ndarray, count: int) -> list[int]:
        """`count` iid indices, index i with probability weights[i] / sum(weights)."""


class SeededSampler:
    """Uniforms of one seeded generator; every answer uses exactly one, in order."""

    def __init__(self, seed: int, stream: int) -> None:
        self._rng = np.random.default_rng([seed, stream])

    def accept(self, numerator: float, denominator: float) -> bool:
        # u * q < p' and not u < p' / q: no division, so q = 0 needs no epsilon (design.md section 3).
        return bool(self._rng.random() * denominator < numerator)

    def uniforms(self, count: int) -> np.ndarray:
        """The uniforms that `sample` would draw with: [count], for draws made elsewhere."""
        return self._rng.random(count)

    def peek(self, count: int) -> np.ndarray:
        """The next `count` uniforms, left to be drawn again."""
        state = self._rng.bit_generator.state
        ahead = self._rng.random(count)
        self._rng.bit_generator.state = state
        return ahead

    def sample(self, weights: np.ndarray, count: int) -> list[int]:
        cumulative = np.cumsum(weights)
        at = np.searchsorted(cumulative, self._rng.random(count) * cumulative[-1], side="right")
        # The product can round up to the full sum; the last index with mass takes that sliver.
        last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
        return [min(int(index), last) for index in at]
