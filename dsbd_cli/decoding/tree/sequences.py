"""The trie of everything generated in one run: a sequence IS a node, so equal draws merge by identity."""

from __future__ import annotations

from collections.abc import Callable, Collection


class Node:
    """One generated sequence, by its last token and the node before it.

    Attributes:
        token: last token id; -1 for the root, which stands for the whole prompt.
        parent: the sequence without its last token; None for the root.
        depth: number of generated tokens; 0 for the root.
        score: `l(x)`, the sum of the target's raw log-probabilities (design.md section 1), set
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
