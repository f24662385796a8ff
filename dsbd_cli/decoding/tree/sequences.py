"""What is generated: the trie of sequences, the hypotheses among them, and drafted forests. No model here.

A sequence IS a node of the trie, so equal draws merge by identity (docs/design.md sections 1 and 2).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from dsbd_cli.decoding.law.distribution import Support


class Node:
    """One generated sequence, by its last token and the node before it.

    Attributes:
        token: last token id; -1 for the root, which stands for the whole prompt.
        parent: the sequence without its last token; None for the root.
        depth: number of generated tokens; 0 for the root.
        score: `l(x)`, the sum of the target's raw log-probabilities (docs/design.md section 1), set
            once the target has drawn this node; nan while only a draft has proposed it.
        finish: None while unfinished, else `eos`, `stop` or `length`.
    """

    __slots__ = ("children", "depth", "finish", "parent", "score", "token")

    def __init__(self, token: int, parent: Node | None) -> None:
        self.token = token
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.score = 0.0 if parent is None else float("nan")
        self.finish: str | None = None
        self.children: dict[int, Node] = {}

    def tokens(self) -> list[int]:
        """Generated token ids from the first to this node's, length `depth`."""
        ids: list[int] = []
        node: Node = self
        while node.parent is not None:
            ids.append(node.token)
            node = node.parent
        return ids[::-1]

    def tail(self, count: int) -> list[int]:
        """The last `count` generated token ids, or fewer where the sequence is shorter."""
        ids: list[int] = []
        node: Node = self
        while node.parent is not None and len(ids) < count:
            ids.append(node.token)
            node = node.parent
        return ids[::-1]

    def __repr__(self) -> str:
        return f"Node({self.tokens()}, score={self.score:.3f}, finish={self.finish})"


class Trie:
    """Makes nodes, each once, and asks `ends` once whether a new one is finished.

    Args:
        ends: the reason why a new node is finished, or None.
        eos_ids: tokens that finish any sequence.
        budget: the depth at which any sequence is finished.
    """

    def __init__(self, ends: Callable[[Node], str | None], eos_ids: Collection[int], budget: int) -> None:
        self.root = Node(-1, None)
        self.eos_ids = frozenset(eos_ids)
        self.budget = budget
        self._ends = ends

    def child(self, parent: Node, token: int) -> Node:
        """The node of `parent` + `token`; made on first use."""
        node = parent.children.get(token)
        if node is None:
            node = parent.children[token] = Node(token, parent)
            node.finish = self._ends(node)
        return node


def common_ancestor(nodes: list[Node]) -> Node:
    """The longest sequence that all `nodes` (at least one) begin with."""
    best = nodes[0]
    for node in nodes[1:]:
        while best.depth > node.depth:
            assert best.parent is not None
            best = best.parent
        while node.depth > best.depth:
            assert node.parent is not None
            node = node.parent
        while best is not node:
            assert best.parent is not None
            assert node.parent is not None
            best, node = best.parent, node.parent
    return best


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

    def commit(self, draws: Sequence[Node]) -> int:
        """Take a layer's draws: equal ones merge, finished ones go to the pool.

        Returns the number of distinct sequences in the layer, finished ones included.
        """
        distinct = list(dict.fromkeys(draws))
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


@dataclass(frozen=True)
class DraftLayer:
    """One drafted layer.

    Attributes:
        parents: the unfinished nodes drafted from; `support.parent` indexes them.
        support: the recorded `q_beam`, exactly what was drawn from.
        draws: the drafted nodes in order, duplicates kept; for `cover` the distinct most probable.
    """

    parents: list[Node]
    support: Support
    draws: list[Node]


@dataclass(frozen=True)
class Forest:
    """The layers of one iteration, the first one's parents being the input beams.

    Attributes:
        computed: the target's logits of its nodes and of the beams are there already.
    """

    layers: list[DraftLayer] = field(default_factory=list)
    computed: bool = False

    def unfinished(self) -> Iterator[Node]:
        """Distinct drafted nodes that a model may be asked about (finished ones are leaves)."""
        for layer in self.layers:
            yield from dict.fromkeys(node for node in layer.draws if node.finish is None)

    def below(self, beams: Collection[Node]) -> list[Node]:
        """Distinct unfinished nodes that stand somewhere below `beams`, in the order of layers."""
        inside, found = set(beams), []
        for node in self.unfinished():
            if node.parent in inside and node not in inside:
                inside.add(node)
                found.append(node)
        return found


def draft_room(max_depth: int | None, beams: list[Node]) -> int:
    """How many layers a draft's context still allows: layer j forwards nodes of depth beams + j - 1.

    Args:
        max_depth: of the deepest node that the context has room for; None: no limit.
    """
    return 1 << 30 if max_depth is None else max_depth - beams[0].depth + 1
