"""A `Sampler` that takes every branch in turn: the exact law of whatever asks it.

The code under test is replayed once per branch; a branch is the list of answers it was given, and
its probability is the product of theirs. Nothing is sampled and nothing is approximated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

Outcome = TypeVar("Outcome", bound=Hashable)
# Branches lighter than this are rounding of an exact 0; the mass they hold is far below the 1e-9 asked for.
_DUST = 1e-15


class Asked(Exception):
    """The code under test asked a question where none was expected."""


class Branching:
    """Answers from a script, and notes the alternatives. Serves as target's and proposer's sampler alike."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.closed = False
        self._script: list[int] = []
        self._options: list[list[tuple[int, float]]] = []
        self._place = 0

    def _choose(self, options: Sequence[tuple[int, float]]) -> int:
        if self.closed:
            raise Asked
        if self._place == len(self._script):
            self._script.append(0)
            self._options.append([option for option in options if option[1] > _DUST])
        answer, probability = self._options[self._place][self._script[self._place]]
        self._place += 1
        self.weight *= probability
        return answer

    def accept(self, numerator: float, denominator: float) -> bool:
        if self.closed:
            raise Asked
        assert 0 < numerator <= 1 + 1e-12
        assert 0 < denominator <= 1 + 1e-12
        sampler = min(1.0, float(numerator) / float(denominator))
        return bool(self._choose([(1, sampler), (0, 1 - sampler)]))

    def sample(self, weights: np.ndarray, count: int) -> list[int]:
        shares = np.asarray(weights, dtype=np.float64)
        assert np.all(shares >= 0)
        options = [(i, share) for i, share in enumerate((shares / shares.sum()).tolist()) if share > 0]
        return [self._choose(options) for _ in range(count)]

    def rewind(self) -> bool:
        """Set the script to the next branch; False when all were taken."""
        while self._script and self._script[-1] + 1 == len(self._options[-1]):
            self._script.pop()
            self._options.pop()
        if not self._script:
            return False
        self._script[-1] += 1
        self._place, self.weight, self.closed = 0, 1.0, False
        return True


def law_of(play: Callable[[Branching], Outcome]) -> dict[Outcome, float]:
    """The exact law of `play`'s result, over everything it asks."""
    law: dict[Outcome, float] = defaultdict(float)
    sampler = Branching()
    while True:
        outcome = play(sampler)
        law[outcome] += sampler.weight
        if not sampler.rewind():
            return dict(law)


def total_variation(first: dict[Outcome, float], second: dict[Outcome, float]) -> float:
    """Half the L1 distance of two laws."""
    keys = first.keys() | second.keys()
    return sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in keys) / 2
