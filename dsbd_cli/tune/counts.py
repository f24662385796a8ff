"""What a pair accepts, counted over whole runs with wide forests: for predictions, not inside a run."""

from __future__ import annotations

from dsbd_cli.decoding import Iteration, least_width
from dsbd_cli.prices import Acceptance

# First beliefs count as much as this many layers that were seen.
_PRIOR = 2.0


class Counts:
    """Layers of forests, by depth and by the narrowest draft width with which each would have passed.

    Args:
        first: what is believed before anything was seen; its widths and depths are those counted.
        drawn: forests of draws (`paper`, `continue`), not of the most probable continuations.
    """

    def __init__(self, first: Acceptance, *, drawn: bool = False) -> None:
        self._first, self._drawn = first, drawn
        self._passed = [[_PRIOR * one for one in layer] for layer in first.passes]
        self._seen = [[_PRIOR] * len(first.widths) for _ in first.passes]
        self._held = [0.0] * len(first.widths)
        self._layers = 0

    def add(self, iteration: Iteration) -> None:
        """Count one iteration's forest."""
        for depth, (drafted, layer) in enumerate(
            zip(iteration.forest.layers, iteration.layers, strict=False)
        ):
            if depth >= len(self._passed):
                break
            needed = least_width(drafted, layer, drawn=self._drawn) if layer.passed else None
            size = len({node for node in drafted.draws if node.finish is None})
            self._layers += 1
            for i, width in enumerate(self._first.widths):
                self._passed[depth][i] += needed is not None and width >= needed
                self._seen[depth][i] += 1
                self._held[i] += min(width, size)
            if not layer.passed:
                break

    def acceptance(self) -> Acceptance:
        """Frequencies, first beliefs weighed in."""
        passes = tuple(
            tuple(a / b for a, b in zip(passed, seen, strict=True))
            for passed, seen in zip(self._passed, self._seen, strict=True)
        )
        nodes = tuple(
            held / self._layers if self._layers else first
            for held, first in zip(self._held, self._first.nodes, strict=True)
        )
        return Acceptance(self._first.widths, passes, nodes, self._first.beams)
