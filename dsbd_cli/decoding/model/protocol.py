"""What the methods need of a model, and of an engine that runs whole iterations on a device.

A model gives the conditionals of nodes of one tree; `hf_model` serves it with real weights, tests with a
table of exactly known distributions. An engine is `device.seat.Seat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dsbd_cli.decoding.cache.buffers import Stores
from dsbd_cli.decoding.cache.tree_cache import TreeCache
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Support
from dsbd_cli.decoding.tree.request import Request
from dsbd_cli.decoding.tree.sequences import Forest, Node


@dataclass(frozen=True)
class Compute:
    """What a loop yields before it can go on: `model` is to compute `nodes`.

    Many requests yield these at a time, and one forward then serves all of a model (docs/design.md section 10).
    """

    model: TreeModel
    nodes: list[Node]


@dataclass(frozen=True)
class Turn:
    """What a loop yields before it can go on: an iteration of the engine in which it has a seat."""

    engine: Engine


Need = Compute | Turn


class TreeModel(Protocol):
    """One model over one tree of nodes (docs/design.md section 5).

    Attributes:
        calls: forwards so far, prefill left out.
    """

    calls: int

    @property
    def max_depth(self) -> int | None:
        """Depth of the deepest node that the context limit leaves room for behind the prompt, or None."""

    def reads(self, node: Node) -> bool:
        """Whether the model has an embedding for every generated token of `node`."""

    def prefill(self, ids: Sequence[int], root: Node) -> None:
        """Start a new tree: compute the prompt; `root` stands for it and becomes known."""

    def forward(self, nodes: Iterable[Node]) -> None:
        """One forward over those of `nodes`, and of their ancestors, that are not known yet."""

    def begin(self, nodes: Iterable[Node]) -> None:
        """Launch what `forward` will be asked for next, where a device can work on its own."""

    def has_logits(self, node: Node) -> bool:
        """Whether `joint` can be asked with this node as a parent."""

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        """`law.joint` over the parents' conditionals; every parent is known."""

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` most probable tokens of a known node (or all there are), best first, and
        their raw float32 log-probabilities; ties go to the lower id."""

    def retain(self, leaves: Iterable[Node]) -> None:
        """Forget every node that is neither one of `leaves` nor an ancestor of one."""


@dataclass(frozen=True)
class Side:
    """What a captured iteration needs of one model.

    Attributes:
        forward: its forward (`hf.HfForward` and its like).
        stores: its buffers.
        tree: the one tree in them; None: many requests share them.
        vocab: columns of its head that count.
        top_n: entries that are kept of a row of logits, at most those.
    """

    forward: Any
    stores: Stores
    vocab: int
    top_n: int
    tree: TreeCache | None = None


@dataclass(frozen=True)
class Demand:
    """What a method asks of an engine: the sizes of every request, and what is drawn from.

    Attributes:
        width, draft_width, gamma: W, W_S and gamma; gamma 0 where nothing is drafted.
        processor: T of the target.
        draft_processor: T of the draft, or None: the forest holds its most probable continuations.
        distinct: the target's draws of a layer are distinct.
        search: a layer holds the best continuations (beam search), not draws.
        continues: a layer that was not accepted whole goes on where the forest holds what it was filled up with.
        recalls: a forest may hold what the target has said before: the text is the same whatever it holds.
        tree: expansion of a token tree, k_1 to k_gamma; empty where there is none. tree_rule: how it is verified.
        why_not_pipelined: why this method cannot run ahead of the host; empty where it can.
        why_not_captured: why its forests cannot be drafted in a captured iteration; empty where they can.
    """

    width: int
    draft_width: int
    gamma: int
    processor: LogitsProcessor
    draft_processor: LogitsProcessor | None = None
    distinct: bool = False
    search: bool = False
    continues: bool = False
    recalls: bool = False
    tree: tuple[int, ...] = ()
    tree_rule: str = ""
    why_not_pipelined: str = ""
    why_not_captured: str = ""


# Takes a layer's draws (of beam search: its candidates, best first) and whether the forest holds each, or where its
# own draws are tested the verdicts on those (None: no drafted layer beside it); whether the request goes on.
Commit = Callable[[list[Node], "list[bool] | None"], bool]


class Engine(Protocol):
    """A request's seat in what runs whole iterations on a device, verification included (docs/design.md section 3)."""

    @property
    def forest(self) -> Forest:
        """What the last iteration drafted for this request, as events show it."""

    def begin(self, request: Request, commit: Commit) -> bool:
        """Take the seat, from the request's active set on, unless it is taken already.

        Returns:
            Whether `step` will serve the request: False where a model, a context or a sampler does not allow it.
        """

    def leave(self) -> None:
        """Give the seat up: nobody will ask for what is in flight for it."""

    def step(self) -> None:
        """One iteration for all who have a seat: `commit` is called for every layer of it."""

    def retain(self, leaves: Iterable[Node]) -> None:
        """Forget every node of the request that is neither one of `leaves` nor an ancestor of one."""
