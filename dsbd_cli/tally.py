"""Counting what the methods commit, for `Stats`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsbd_cli.result import Stats

if TYPE_CHECKING:
    from dsbd_cli.decoding import Layer


# Of an adaptive forest that was never begun: it drafts as much as pays, and that was nothing.
NO_FOREST_PAYS = (
    "nothing drafted: by the prices of this machine no forest pays here (--forest full drafts anyway)"
)


class Tally:
    """Adds up layers; `fill` writes the sums into a `Stats`."""

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.distinct: list[int] = []
        self.by_depth: list[list[int]] = []

    def add(self, layer: Layer) -> None:
        self.widths.append(len(layer.draws))
        self.distinct.append(layer.distinct)
        if layer.drafted is not None:
            while len(self.by_depth) <= layer.drafted:
                self.by_depth.append([0, 0])
            self.by_depth[layer.drafted][0] += layer.examined
            self.by_depth[layer.drafted][1] += layer.accepted

    def fill(self, stats: Stats) -> None:
        stats.layers = len(self.widths)
        stats.widths, stats.distinct_widths = self.widths, self.distinct
        stats.accepted_by_depth = self.by_depth
        stats.drafts_examined = sum(examined for examined, _ in self.by_depth)
        stats.drafts_accepted = sum(accepted for _, accepted in self.by_depth)
        stats.acceptance_rate = ratio(stats.drafts_accepted, stats.drafts_examined)
        stats.mean_width = ratio(sum(self.widths), len(self.widths))
        stats.mean_distinct_width = ratio(sum(self.distinct), len(self.distinct))
        stats.layers_per_target_call = ratio(stats.layers, stats.target_calls)


def ratio(part: float, whole: float) -> float | None:
    """part / whole, or None where there is nothing to divide by."""
    return part / whole if whole else None
