"""Active set, finished pool, scores and stop rules, the same for all methods (design.md section 1)."""

from __future__ import annotations

from collections.abc import Sequence

from dsbd_cli.decoding.tree.sequences import Node


class Hypotheses:
    """Distinct unfinished sequences (`active`) and finished ones (`pool`), with the rule when to stop.

    Args:
        root: the prompt; active at the start.
        width: W, also where a threshold makes layers narrower.
        early_stopping: `first`, `heuristic` or `never`.
        length_penalty: alpha in score = l / len ** alpha over generated tokens, EOS counted.
    """

    def __init__(self, root: Node, width: int, early_stopping: str, length_penalty: float) -> None:
        self.active: list[Node] = [root]
        self.pool: list[Node] = []
        self._width = width
        self._early_stopping = early_stopping
        self._alpha = length_penalty

    def score(self, node: Node) -> float:
        """`l(x) / len(x) ** alpha`; 0 for the empty sequence."""
        return node.score / node.depth**self._alpha if node.depth else 0.0

    def commit(self, slots: Sequence[Node]) -> int:
        """Take a layer's draws: equal ones merge, finished ones go to the pool.

        Returns the number of distinct sequences in the layer, finished ones included.
        """
        distinct = list(dict.fromkeys(slots))
        self.active = [node for node in distinct if node.finish is None]
        self.pool += [node for node in distinct if node.finish is not None]
        return len(distinct)

    def keep_best_active(self) -> None:
        """The memory-constrained mode: only the unfinished sequence with the highest l goes on."""
        # max() returns the first of equals, which is the earlier draw.
        self.active = [max(self.active, key=lambda node: node.score)] if self.active else []

    def best_finished(self) -> Node | None:
        """The finished sequence with the best score; ties to the one that finished first."""
        return max(self.pool, key=self.score, default=None)

    def stopped(self) -> bool:
        """Whether decoding ends after the layer just committed."""
        if not self.active:
            return True
        if self._early_stopping == "never":
            return False
        if len(self.pool) >= self._width:
            return True
        best = self.best_finished()
        if self._early_stopping == "first" or best is None:
            return False
        return self.score(best) >= max(self.score(node) for node in self.active)

    def ranking(self) -> list[Node]:
        """Pool and active set together, best score first; ties: finished first, then older first."""
        return sorted([*self.pool, *self.active], key=self.score, reverse=True)
