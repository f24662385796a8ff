"""What a tree takes it gives back: rows of the attention mask, and slots, in every way that nodes come and go."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsbd_cli.decoding.cache.tree_cache import TreeCache
from dsbd_cli.decoding.tree.sequences import Node

ROWS = 16
PROMPT = [5, 6, 7]


def begun() -> tuple[TreeCache, Node]:
    """A cache of 16 mask rows, of which one is spare and one that of a prompt of three tokens; the prompt."""
    cache = TreeCache.alone(4096, ROWS, torch.float32, torch.device("cpu"))
    root = Node(-1, None)
    cache.start(PROMPT, root)
    computed_prompt(cache)
    return cache, root


def computed_prompt(cache: TreeCache) -> None:
    plan = cache.prompt_plan(0, len(PROMPT))
    cache.masks.causal(plan.base[0], torch.tensor(plan.slots))


def forest(parents: list[Node]) -> list[Node]:
    """Two children of each of two parents, and one grandchild: five nodes, parents first."""
    nodes = [Node(token, parent) for parent in parents[:2] for token in (1, 2)]
    return [*nodes, Node(3, nodes[0])]


def planned(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """A forward over a forest, of which a leaf and an inner node go on as beams."""
    nodes = forest(beams)
    cache.plan(nodes)
    return [nodes[-1], nodes[1]]


def planned_again(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """The same, then beams below an inner node whose row was given back already, and the same nodes anew."""
    leaf, _ = planned(cache, beams)
    cache.retain([leaf])
    assert leaf.parent is not None
    late = Node(9, leaf.parent)
    cache.plan([late])
    cache.plan([late, leaf])
    return [late, leaf]


def withdrawn(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """A forward that failed: its nodes are taken out again."""
    nodes = forest(beams)
    cache.plan(nodes)
    cache.roll_back(nodes)
    return beams


def adopted(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """Nodes that a device computed in places reserved beforehand; two of five live on."""
    reservation = cache.reserve(6)
    nodes = forest(beams)
    cache.commit(reservation, {node: place for place, node in enumerate(nodes)})
    return [nodes[-1], nodes[1]]


def released(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """Places reserved in vain."""
    cache.release(cache.reserve(6))
    return beams


def begun_again(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """A new prompt while nodes are open and places reserved."""
    cache.plan(forest(beams))
    cache.reserve(3)
    root = Node(-1, None)
    cache.start(PROMPT, root)
    computed_prompt(cache)
    return [root]


def beside_another(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """Another request joins, has nodes computed, and leaves."""
    root, other = Node(-1, None), TreeCache(cache.stores, 2048, 64)
    other.start(PROMPT, root)
    computed_prompt(other)
    other.plan(forest([root]))
    other.close()
    return beams


@pytest.mark.parametrize(
    "round_", [planned, planned_again, withdrawn, adopted, released, begun_again, beside_another]
)
def test_mask_rows_come_back(round_: Callable[[TreeCache, list[Node]], list[Node]]) -> None:
    """Sixteen rows are enough for any number of iterations: none makes the table grow."""
    cache, root = begun()
    beams = [root]
    for _ in range(4 * ROWS):
        beams = round_(cache, beams)
        cache.retain(beams)
        rows = [cache.mask_row(node) for node in beams]
        assert len({0, *rows}) == len(rows) + 1, "a row has one owner, and the spare row none"
        assert len(cache.masks.table) == ROWS


def computed(cache: TreeCache, nodes: list[Node], sees: dict[Node, set[int]]) -> None:
    """A forward over `nodes`; `sees` then holds the slots of each one's path."""
    plan = cache.plan(nodes)
    index = [torch.tensor(numbers) for numbers in (plan.base, plan.mask_rows, plan.slots)]
    cache.masks.extend(*index, torch.from_numpy(plan.inside))
    for node, slot in zip(nodes, plan.slots, strict=True):
        assert node.parent is not None
        sees[node] = sees[node.parent] | {slot}


def test_a_row_shows_its_own_path_and_nothing_else_whoever_had_it_before() -> None:
    cache, root = begun()
    beams, sees = [root], {root: {1, 2, 3}}
    for _ in range(4 * ROWS):
        nodes = forest(beams)
        computed(cache, nodes, sees)
        inner, beams = beams[0], [nodes[-1], nodes[1]]
        cache.retain(beams)
        # A late child of a node whose row has been given back, and may be another's by now.
        computed(cache, forest(beams), sees)
        late = Node(9, inner)
        computed(cache, [late], sees)
        cache.retain([*beams, late])
        for node in [*beams, late]:
            seen = torch.nonzero(cache.masks.table[cache.mask_row(node)] == 0)[:, 0]
            assert set(seen.tolist()) == sees[node], "the prompt's slots, its ancestors' and its own"
        cache.retain(beams)
    assert len(cache.masks.table) == ROWS
