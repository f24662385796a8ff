"""What trees take they give back: rows of the attention mask, and slots, in every way that nodes come and go.

Every node sees its own prompt and ancestors and nothing else, whoever else is in the cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from dsbd_cli.decoding.cache.tree_cache import TreeCache
from dsbd_cli.decoding.tree.sequences import Node

CPU = torch.device("cpu")


class World:
    """A cache, and what every computed node must see, by slot."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = TreeCache(8, 4, torch.float32, CPU)
        self.prompts: dict[Node, list[int]] = {}  # slots of each root's prompt
        self.slots: dict[Node, int] = {}
        self.leaves: dict[Node, list[Node]] = {}

    def sees(self, node: Node) -> set[int]:
        seen = set()
        while node.parent is not None:
            seen.add(self.slots[node])
            node = node.parent
        return seen | set(self.prompts[node])

    def join(self) -> None:
        root, ids = Node(-1, None), [self.rng.randrange(9) for _ in range(self.rng.randint(1, 7))]
        self.cache.add(ids, root)
        plan = self.cache.prompt_plan(root, 0, len(ids))
        self.cache.masks.causal(plan.mask_rows[0], torch.tensor(plan.slots))
        self.prompts[root], self.leaves[root] = list(plan.slots), [root]
        assert self.cache.prompt_length(root) == len(ids)

    def leave(self) -> None:
        root = self.rng.choice(list(self.prompts))
        self.cache.drop(root)
        del self.prompts[root], self.leaves[root]
        self.forget()

    def forward(self) -> None:
        """One forward over new nodes of all requests."""
        wanted = []
        for leaves in self.leaves.values():
            for leaf in self.rng.sample(leaves, min(2, len(leaves))):
                child = Node(self.rng.randrange(9), leaf)
                wanted += [child, Node(self.rng.randrange(9), child)][: self.rng.randint(1, 2)]
        batch = self.cache.missing(wanted)
        plan = self.cache.plan(batch)
        tensors = (torch.tensor(part) for part in (plan.base, plan.mask_rows, plan.slots))
        mask = self.cache.masks.extend(*tensors, torch.from_numpy(plan.inside))
        for i, node in enumerate(batch):
            self.slots[node] = plan.slots[i]
            assert set(torch.nonzero(mask[i] == 0)[:, 0].tolist()) == self.sees(node)
            root = node
            while root.parent is not None:
                root = root.parent
            assert plan.positions[i] == len(self.prompts[root]) - 1 + node.depth
            self.leaves[root].append(node)

    def retain(self) -> None:
        for root, leaves in self.leaves.items():
            self.leaves[root] = self.rng.sample(leaves, self.rng.randint(1, min(3, len(leaves))))
        self.cache.retain([leaf for leaves in self.leaves.values() for leaf in leaves])
        self.forget()

    def forget(self) -> None:
        kept: set[Node] = set()
        for leaves in self.leaves.values():
            for leaf in leaves:
                node = leaf
                while node.parent is not None:
                    kept.add(node)
                    node = node.parent
        self.slots = {node: slot for node, slot in self.slots.items() if node in kept}
        self.check()

    def check(self) -> None:
        used = [*self.slots.values(), *(slot for slots in self.prompts.values() for slot in slots)]
        assert len(set(used)) == len(used)
        assert self.cache.slots.live == len(used)
        rows = self.cache.masks.table.shape[0] - 1 - len(self.cache.masks._free)
        held = {leaf for leaves in self.leaves.values() for leaf in leaves} | set(self.prompts)
        assert rows == len(held)


@pytest.mark.parametrize("seed", range(8))
def test_requests_join_and_leave_and_nothing_leaks(seed):
    world = World(seed)
    for _ in range(300):
        step = world.rng.random()
        if not world.prompts or (step < 0.15 and len(world.prompts) < 6):
            world.join()
        elif step < 0.25:
            world.leave()
        elif step < 0.7:
            world.forward()
        else:
            world.retain()
    while world.prompts:
        world.leave()
    assert world.cache.slots.live == 0
    assert len(world.cache.masks._free) == world.cache.masks.table.shape[0] - 1


def test_a_node_that_is_only_reserved_has_the_position_of_its_own_prompt():
    cache, roots = TreeCache(8, 4, torch.float32, CPU), [Node(-1, None), Node(-1, None)]
    for root, length in zip(roots, (3, 9), strict=True):
        cache.add([1] * length, root)
        cache.prompt_plan(root, 0, length)
    child = Node(2, Node(1, roots[1]))
    assert cache.position(child) == 8 + 2
    place = cache.reserve(2)
    cache.commit(place, {child.parent: 0, child: 1})
    assert child in cache
    assert cache.retain([child]) == {*roots, child}
    assert cache.slots.live == 3 + 9 + 2
    cache.drop(roots[1])
    assert cache.slots.live == 3


# One request whose cache is as small as its iterations allow.
ROWS = 16
PROMPT = [5, 6, 7]


def begun() -> tuple[TreeCache, Node]:
    """A cache of 16 mask rows, of which one is spare and one that of a prompt of three tokens; the prompt."""
    cache = TreeCache(4096, ROWS, torch.float32, torch.device("cpu"))
    root = Node(-1, None)
    cache.start(PROMPT, root)
    computed_prompt(cache, root)
    return cache, root


def computed_prompt(cache: TreeCache, root: Node) -> None:
    plan = cache.prompt_plan(root, 0, len(PROMPT))
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
    computed_prompt(cache, root)
    return [root]


def beside_another(cache: TreeCache, beams: list[Node]) -> list[Node]:
    """Another request joins, has nodes computed, and leaves."""
    root = Node(-1, None)
    cache.add(PROMPT, root)
    computed_prompt(cache, root)
    cache.plan(forest([root]))
    cache.drop(root)
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
