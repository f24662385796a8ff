"""What methods ask of the nodes that a model has computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dsbd_cli.decoding.cache.buffers import LogitStore
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Support
from dsbd_cli.decoding.tree.sequences import Node


class Told:
    """The part of a `model.protocol.TreeModel` that is answered from its nodes' logits.

    Attributes:
        logits: of the nodes that are known.
    """

    logits: LogitStore

    def has_logits(self, node: Node) -> bool:
        return node in self.logits

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        return self.logits.joint(parents, scores, processor)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.logits.best(node, count)
