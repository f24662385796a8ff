"""How many layers are worth drafting: as many as the recent past says will be used. No clocks.

Where a forward costs about the same for any number of nodes (a GPU), a layer too many costs little.
On a CPU it costs a draft forward and its nodes' share of the target's, and prompts differ: on some
the draft is right four layers deep, on others hardly once.

Exactness: the depth is chosen before an iteration's draft, from the layers that earlier iterations
passed; that is a function of the past, and given the past every layer is drawn from its own law
whatever is drafted below it (docs/design.md section 3). Costs are fixed numbers of the pair, not times
measured in this run, so the same seed gives the same tokens again on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

# What is believed of a layer before any was tried. Measured: more costs short answers a third of their speed.
_HOPE = 0.65
# Weight of the newest observation: the last five or so decide.
_RATE = 0.2
# A depth that was not tried comes to be believed as good as the one above it: else it is never tried again.
_DRIFT = 0.05


class DraftLength:
    """Chooses the depth of each iteration's forest.

    Args:
        cost: of one more drafted layer, draft forward and nodes, in target calls; above 0.
    """

    def __init__(self, cost: float) -> None:
        self._cost = cost
        # Sampler that layer i passes if those above it did.
        self._passes: list[float] = []

    def depth(self, most: int) -> int:
        """The depth, 1 to `most` (at least 1), that promises most layers for what it costs."""
        self._passes += [_HOPE] * (most - len(self._passes))
        best, chosen = 0.0, 1
        reached, layers = 1.0, 1.0  # a call yields one layer whatever is drafted
        for depth in range(1, most + 1):
            reached *= self._passes[depth - 1]
            layers += reached
            worth = layers / (1 + self._cost * depth)
            if worth > best:
                best, chosen = worth, depth
        return chosen

    def learn(self, passed: Sequence[bool]) -> None:
        """What became of an iteration's drafted layers that were verified, from the first on."""
        tried = 0
        for tried, good in enumerate(passed, 1):
            self._passes[tried - 1] += _RATE * (float(good) - self._passes[tried - 1])
            if not good:
                break
        for i in range(max(1, tried), len(self._passes)):
            self._passes[i] += _DRIFT * (self._passes[i - 1] - self._passes[i])
