"""What pipelined iterations propose, on the host: the same forests, where the text depends on them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from dsbd_cli.decoding.law.distribution import Row
from dsbd_cli.decoding.methods.proposers import DraftModelProposer
from dsbd_cli.decoding.model.protocol import Compute
from dsbd_cli.decoding.tree.sequences import Forest, Node


class RecallingProposer(DraftModelProposer):
    """Stands the target's conditionals in for the draft's below nodes of the LAST forest, and computes those anew.

    A device keeps no more of what the target has said (`CoverIteration`). The host could keep more, in its cache
    (`Run.survivors`), and then an iteration gets further, and a width that depends on the forest is another.

    Args:
        given, named: of `DraftModelProposer`; without its `target`, nothing is known.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._forest, self._rows = Forest(), dict[Node, Row]()

    def propose(
        self, beams: list[Node], depth: int, width: int | None = None
    ) -> Generator[Compute, None, Forest]:
        self._forest = yield from super().propose(beams, depth, width)
        return self._forest

    def retain(self, leaves: list[Node]) -> None:
        """Take down what the target, whose turn comes afterwards, has said of the forest."""
        nodes = [node for node in self._forest.unfinished() if DraftModelProposer._knows(self, node)]
        self._rows = {node: DraftModelProposer._said(self, node) for node in nodes}
        self._forest = Forest()
        super().retain(leaves)

    def _knows(self, node: Node) -> bool:
        return node in self._rows

    def _said(self, node: Node) -> Row:
        return self._rows[node]
