"""Milliseconds of a forward over a few new nodes, measured here and now, as decoding runs it."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

PREFIX = 128
REPEATS = 7
ROW = 10  # best entries of each node's row, which a forward is asked for too


class Costs:
    """Forward times of models by name, measured on first use with `PREFIX` tokens already cached.

    Args:
        models: causal LMs in the formats that decoding would use; the one called `draft` as a draft (on a
            CPU it multiplies in int8).

    Raises:
        UserError: an architecture that decoding does not serve.
    """

    def __init__(self, models: dict[str, Any]) -> None:
        from dsbd_cli.decoding import HfTreeModel

        self._trees = {
            name: HfTreeModel(
                model,
                vocab_size=model.config.get_text_config().vocab_size,
                role=name,
                int8=name == "draft" and model.device.type == "cpu",
            )
            for name, model in models.items()
        }
        self.known: dict[tuple[str, int], float] = {}

    def __call__(self, name: str, count: int) -> float:
        if (name, count) not in self.known:
            self.known[name, count] = self._measure(self._trees[name], count)
        return self.known[name, count]

    @staticmethod
    def _measure(tree: Any, count: int) -> float:
        from dsbd_cli.decoding import Node

        root = Node(-1, None)
        generator = torch.Generator().manual_seed(0)
        draw = torch.randint(0, tree.vocab_size, (PREFIX + count,), generator=generator).tolist()
        tree.prefill(draw[:PREFIX], root, top_n=ROW)
        times = []
        for _ in range(REPEATS + 2):
            nodes = [Node(token, root) for token in draw[PREFIX:]]
            began = time.perf_counter()
            tree.forward(nodes)  # its rows have reached the host when it returns
            times.append(1000 * (time.perf_counter() - began))
            tree.retain([root])
        return statistics.median(times[2:])
