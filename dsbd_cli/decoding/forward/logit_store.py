"""What a model has said about the nodes that may still be asked about: best entries, or whole rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.forward.full_logits import dense_joint
from dsbd_cli.decoding.forward.top_logits import Best, best_of, finite_logits, log_probabilities, top_logits
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, Support, joint
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import RunError


class _Dense(NamedTuple):
    """A whole row, left where the forward put it: float32 [V], and whether it is finite."""

    logps: Tensor
    finite: bool


class _Sparse(NamedTuple):
    """A node's best entries on the host: row `place` of `block`."""

    block: Best
    place: int


class LogitStore:
    """Rows by node, and the questions the law asks of them.

    Args:
        model: what errors call it, such as `the target model (name)`.
        dtype: the model's, for errors.
        vocab: columns that count.

    Attributes:
        size: how many best entries of each row are kept; 0: whole rows.
        tainted: a row that is not finite was asked for.
    """

    def __init__(self, model: str, dtype: torch.dtype, vocab: int) -> None:
        self._model, self._dtype, self._vocab = model, str(dtype).removeprefix("torch."), vocab
        self._rows: dict[Node, _Dense | _Sparse] = {}
        self.size = 0
        self.tainted = False

    def __contains__(self, node: Node) -> bool:
        return node in self._rows

    def __iter__(self) -> Iterable[Node]:  # type: ignore[override]
        return iter(self._rows)

    def start(self, size: int) -> None:
        """Forget everything; from now on keep `size` entries a row."""
        self._rows, self.size, self.tainted = {}, size, False

    def put(self, nodes: Sequence[Node], logits: Tensor) -> None:
        """Keep what will be asked of these nodes' logits [N, V']."""
        if self.size:
            self.put_best(nodes, top_logits(logits, self._vocab, self.size), range(len(nodes)))
            return
        logps = log_probabilities(logits, self._vocab)
        finite = finite_logits(logps).tolist()
        self._rows.update((node, _Dense(logps[i], finite[i])) for i, node in enumerate(nodes))

    def put_best(self, nodes: Sequence[Node], block: Best, places: Iterable[int]) -> None:
        """Keep rows `places` of `block`, one a node."""
        self._rows.update((node, _Sparse(block, place)) for node, place in zip(nodes, places, strict=True))

    def keep(self, nodes: Collection[Node]) -> None:
        """Forget the rows of all others."""
        self._rows = {node: row for node, row in self._rows.items() if node in nodes}

    def forget(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._rows.pop(node, None)

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        """`law.joint` over the parents' rows.

        Raises:
            RunError: a row is not finite.
        """
        if not processor.top_n and self._whole(parents[0]).device.type == "cuda":
            return dense_joint(scores, torch.stack([self._whole(node) for node in parents]), processor)
        return joint(scores, [self._row(node, processor.top_n) for node in parents], processor)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` best tokens and their float32 log-probabilities. Raises like `joint`."""
        row = self._checked(node)
        if isinstance(row, _Dense):
            best = best_of(row.logps[None], torch.ones(1, device=row.logps.device), count)
            return best.tokens[0], best.logps[0]
        tokens, logps = row.block.tokens[row.place], row.block.logps[row.place]
        if count > len(tokens) < self._vocab:
            raise ValueError(f"{count} entries of a row asked for, {len(tokens)} were prepared")
        return tokens[:count], logps[:count]

    def whole(self, node: Node) -> Tensor:
        """A whole row, float32 [V] where the forward put it, finite or not (`size` 0 only)."""
        row = self._rows[node]
        if isinstance(row, _Sparse):
            raise ValueError("whole rows asked for, only the best entries were prepared")
        return row.logps

    def fail(self, node: Node) -> RunError:
        """The error for a node whose logits are not finite."""
        self.tainted = True
        return RunError(
            f"{self._model} gave logits that are not finite at step {node.depth} in {self._dtype}: "
            "try --dtype float32 or bfloat16, or check its weights"
        )

    def _checked(self, node: Node) -> _Dense | _Sparse:
        row = self._rows[node]
        if not (row.finite if isinstance(row, _Dense) else row.block.finite[row.place]):
            raise self.fail(node)
        return row

    def _whole(self, node: Node) -> Tensor:
        self._checked(node)
        return self.whole(node)

    def _row(self, node: Node, size: int) -> Row:
        if size:
            tokens, logps = self.best(node, size)
            return Row(tokens, logps.astype(np.float64))
        return Row(np.arange(self._vocab), self._whole(node).cpu().numpy().astype(np.float64))
