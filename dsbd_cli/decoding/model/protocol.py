"""What the methods need of a model: conditionals of nodes of one tree. Served by `runner` (real
weights) and, in tests, by a table with an exactly known law."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Support
from dsbd_cli.decoding.tree.sequences import Node


class TreeModel(Protocol):
    """One model over one tree of nodes (docs/design.md section 5).

    Attributes:
        calls: forwards so far, prefill left out.
    """

    calls: int

    @property
    def max_depth(self) -> int | None:
        """Depth of the deepest node that the context limit leaves room for behind the prompt, or None."""

    def relative_cost(self, draft: Any) -> float | None:
        """What one more drafted layer costs, in calls of this target; None where a forward costs about the same
        whatever is in it."""

    def prefill(self, ids: Sequence[int], root: Node) -> None:
        """Start a new tree: compute the prompt; `root` stands for it and becomes known."""

    def forward(self, nodes: Iterable[Node]) -> None:
        """One forward over those of `nodes`, and of their ancestors, that are not known yet."""

    def has_logits(self, node: Node) -> bool:
        """Whether `joint` can be asked with this node as a parent."""

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        """`law.joint` over the parents' conditionals; every parent is known."""

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` most probable tokens of a known node (or all there are), best first, and
        their raw float32 log-probabilities; ties go to the lower id."""

    def retain(self, leaves: Iterable[Node]) -> None:
        """Forget every node that is neither one of `leaves` nor an ancestor of one."""
