"""Many requests in one cache: every node sees its own prompt and ancestors and nothing else, and nothing leaks."""

from __future__ import annotations

import random

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
