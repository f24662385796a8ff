"""A `TreeModel` whose conditionals are an exact table: the ground for laws that must hold to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, Support, joint
from dsbd_cli.decoding.tree.sequences import Node

Path = tuple[int, ...]
PathLaw = Callable[[Path], np.ndarray]


def by_last(table: np.ndarray, start: int = 0) -> PathLaw:
    """The law `table[last token]` [V, V]; row `start` follows the prompt."""
    return lambda path: table[path[-1] if path else start]


def by_path(seed: int, vocab: int, spread: float = 1.0, zeros: float = 0.0) -> PathLaw:
    """A different random conditional [vocab] for every path: no two nodes share a law.

    Args:
        spread: standard deviation of the logits.
        zeros: share of tokens without any mass (never all of them).
    """

    def law(path: Path) -> np.ndarray:
        rng = np.random.default_rng([seed, len(path), *path])
        weights = np.exp(spread * rng.standard_normal(vocab))
        gone = rng.random(vocab) < zeros
        gone[rng.integers(vocab)] = False
        return np.where(gone, 0.0, weights) / weights[~gone].sum()

    return _remembered(law)


def mixed(first: PathLaw, second: PathLaw, share: float) -> PathLaw:
    """`(1 - share) * first + share * second`: a draft that is right up to `share`."""
    return _remembered(lambda path: (1 - share) * first(path) + share * second(path))


def split(law: PathLaw, tokens: Sequence[int], inside: bool) -> PathLaw:
    """`law` on `tokens` alone, or on all others: two such laws have disjoint supports."""

    def half(path: Path) -> np.ndarray:
        row = law(path)
        kept = np.where(np.isin(np.arange(len(row)), tokens) == inside, row, 0.0)
        return kept / kept.sum()

    return _remembered(half)


def _remembered(law: PathLaw) -> PathLaw:
    rows: dict[Path, np.ndarray] = {}

    def cached(path: Path) -> np.ndarray:
        if path not in rows:
            rows[path] = law(path)
        return rows[path]

    return cached


class TableModel:
    """`TreeModel` by a table; it also checks that the engine asks only what a real model could answer.

    Args:
        law: probabilities [V] of the next token after a generated path.
        max_depth: the context limit, as `TreeModel` states it.
    """

    def __init__(self, law: PathLaw, max_depth: int | None = None) -> None:
        self.law = law
        self.calls = 0
        self.max_depth = max_depth
        self.forwarded: list[int] = []  # nodes computed, one entry a call
        self._known: set[Node] = set()  # `joint` may be asked
        self._held: set[Node] = set()  # in the cache
        self._joints: dict[tuple[object, ...], Support] = {}
        self._rows: dict[tuple[Path, int], Row] = {}

    def reads(self, node: Node) -> bool:
        return True

    def prefill(self, ids: Sequence[int], root: Node) -> None:
        self._known, self._held = {root}, {root}

    def forward(self, nodes: Iterable[Node]) -> None:
        new: set[Node] = set()
        for leaf in nodes:
            if leaf in self._known:
                continue
            node: Node | None = leaf
            while node is not None and node not in self._held and node not in new:
                assert node.finish is None, "a finished node was forwarded"
                assert self.max_depth is None or node.depth <= self.max_depth, "past the context"
                new.add(node)
                node = node.parent
            # As with real weights: ancestors are caught up on, but only what was asked for is known.
            self._known.add(leaf)
        if new:
            self.calls += 1
            self.forwarded.append(len(new))
            self._held |= new

    def begin(self, nodes: Iterable[Node]) -> None:
        """A table has no device to work ahead on."""

    def has_logits(self, node: Node) -> bool:
        return node in self._known

    def row(self, node: Node, size: int) -> Row:
        """The `size` best entries (0: all), best first, ties to the lower id."""
        path = tuple(node.tokens())
        if (path, size) not in self._rows:
            # The reference's own logarithm: numpy's differs by a bit on some processors, and ties would
            # break elsewhere.
            logps = np.array(
                [math.log(share) if share > 0 else -math.inf for share in self.law(path).tolist()]
            )
            order = np.lexsort((np.arange(len(logps)), -logps))[: size or None]
            row = Row(order.astype(np.int64), logps[order])
            row.tokens.flags.writeable = row.logps.flags.writeable = False  # many runs read it
            self._rows[path, size] = row
        return self._rows[path, size]

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        assert all(node in self._known for node in parents), "the law of an unknown node was asked"
        assert len(set(parents)) == len(parents) == len(scores)
        key = (tuple(tuple(node.tokens()) for node in parents), tuple(scores), processor)
        if key not in self._joints:
            self._joints[key] = joint(
                scores, [self.row(node, processor.top_n) for node in parents], processor
            )
        return self._joints[key]

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        assert node in self._known, "the law of an unknown node was asked"
        row = self.row(node, count)
        return row.tokens, row.logps.astype(np.float32)

    def retain(self, leaves: Iterable[Node]) -> None:
        kept: set[Node] = set()
        leaves = list(leaves)
        for leaf in leaves:
            node: Node | None = leaf
            while node is not None:
                kept.add(node)
                node = node.parent
        self._held &= kept
        self._known &= set(leaves)
