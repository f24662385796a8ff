"""Many requests in one buffer: every node sees its own prompt and ancestors and nothing else, and nothing leaks."""

from __future__ import annotations

import random

import pytest
import torch

from dsbd_cli.decoding.cache.buffers import Stores
from dsbd_cli.decoding.cache.regions import Regions
from dsbd_cli.decoding.cache.tree_cache import TreeCache
from dsbd_cli.decoding.tree.sequences import Node

CPU = torch.device("cpu")
SLOTS, REGION = 600, 96


class Member:
    """A request: its tree, and what every computed node must see, by slot."""

    def __init__(self, stores: Stores, begin: int, rng: random.Random) -> None:
        self.rng, self.root = rng, Node(-1, None)
        self.tree = TreeCache(stores, begin, REGION)
        ids = [rng.randrange(9) for _ in range(rng.randint(1, 7))]
        self.tree.start(ids, self.root)
        plan = self.tree.prompt_plan(0, len(ids))
        stores.masks.causal(plan.mask_rows[0], torch.tensor(plan.slots))
        assert plan.begin == begin
        assert self.tree.prompt_length == len(ids)
        self.prompt = list(plan.slots)
        self.slots: dict[Node, int] = {}
        self.leaves = [self.root]

    def sees(self, node: Node) -> set[int]:
        seen = set(self.prompt)
        while node.parent is not None:
            seen.add(self.slots[node])
            node = node.parent
        return seen

    def forward(self) -> None:
        wanted = []
        for leaf in self.rng.sample(self.leaves, min(2, len(self.leaves))):
            child = Node(self.rng.randrange(9), leaf)
            wanted += [child, Node(self.rng.randrange(9), child)][: self.rng.randint(1, 2)]
        if self.slots and self.rng.random() < 0.3:  # anew, in any order, some with others between them
            wanted += self.rng.sample(list(self.slots), self.rng.randint(1, min(4, len(self.slots))))
            self.rng.shuffle(wanted)
        batch = self.tree.missing(wanted)
        plan = self.tree.plan(batch)
        tensors = (torch.tensor(part) for part in (plan.base, plan.mask_rows, plan.slots))
        mask = self.tree.masks.extend(*tensors, torch.from_numpy(plan.inside))
        for i, node in enumerate(batch):
            if node not in self.slots:
                self.leaves.append(node)
            assert self.slots.setdefault(node, plan.slots[i]) == plan.slots[i]
            assert set(torch.nonzero(mask[i] == 0)[:, 0].tolist()) == self.sees(node)
            assert plan.positions[i] == len(self.prompt) - 1 + node.depth

    def retain(self) -> None:
        self.leaves = self.rng.sample(self.leaves, self.rng.randint(1, min(3, len(self.leaves))))
        self.tree.retain(self.leaves)
        kept: set[Node] = set()
        for leaf in self.leaves:
            node = leaf
            while node.parent is not None:
                kept.add(node)
                node = node.parent
        self.slots = {node: slot for node, slot in self.slots.items() if node in kept}
        used = [*self.slots.values(), *self.prompt]
        assert len(set(used)) == len(used) == self.tree.slots.live
        assert max(used) < REGION

    def rows(self) -> int:
        return len({*self.leaves, self.root})


class World:
    """Requests that come and go in one buffer."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.stores, self.regions = Stores(SLOTS, 4, REGION, torch.float32, CPU), Regions(SLOTS)
        self.members: list[Member] = []

    def join(self) -> None:
        begin = self.regions.take(REGION)
        assert (begin is None) == (len(self.members) == SLOTS // REGION)
        if begin is not None:
            self.members.append(Member(self.stores, begin, self.rng))

    def leave(self) -> None:
        member = self.members.pop(self.rng.randrange(len(self.members)))
        if self.rng.random() < 0.5:
            member.tree.reserve(5)  # what is in flight for it
        member.tree.close()
        self.regions.give(member.tree.begin)

    def retain(self) -> None:
        for member in self.members:
            member.retain()
        rows = self.stores.masks.table.shape[0] - 1 - len(self.stores.masks._free)
        assert rows == sum(member.rows() for member in self.members)


@pytest.mark.parametrize("seed", range(8))
def test_requests_join_and_leave_and_nothing_leaks(seed):
    world = World(seed)
    for _ in range(1250):  # 10,000 steps over all seeds
        step = world.rng.random()
        if not world.members or step < 0.15:
            world.join()
        elif step < 0.25:
            world.leave()
        elif step < 0.7:
            world.rng.choice(world.members).forward()
            if world.rng.random() < 0.7:
                world.retain()
        else:
            world.retain()
    while world.members:
        world.leave()
    assert world.regions.free == SLOTS
    assert len(world.stores.masks._free) == world.stores.masks.table.shape[0] - 1


def test_a_node_that_is_only_reserved_has_the_position_of_its_own_prompt():
    cache, root = TreeCache.alone(8, 4, torch.float32, CPU), Node(-1, None)
    cache.start([1] * 9, root)
    cache.prompt_plan(0, 9)
    child = Node(2, Node(1, root))
    assert cache.position(child) == 8 + 2
    place = cache.reserve(2)
    cache.commit(place, {child.parent: 0, child: 1})
    assert child in cache
    assert cache.retain([child]) == {root, child}
    assert cache.slots.live == 9 + 2
    cache.close()
    assert cache.slots.live == 0


def test_a_request_that_outgrows_its_region_is_an_error_and_no_neighbour_is_touched():
    stores = Stores(64, 4, 16, torch.float32, CPU)
    tree = TreeCache(stores, 16, 8)
    tree.start([1, 2, 3], Node(-1, None))
    with pytest.raises(RuntimeError, match="planned"):
        tree.reserve(9)
    assert stores.cache.capacity == 64


def test_regions_are_taken_lowest_first_and_join_again():
    regions = Regions(10)
    assert [regions.take(4), regions.take(4), regions.take(4)] == [0, 4, None]
    regions.give(0)
    assert regions.take(5) is None
    assert regions.take(3) == 0
    regions.grow(20)
    assert regions.take(5) == 8
    assert (regions.free, regions.used, len(regions)) == (8, 13, 3)


def test_regions_of_a_unit_begin_at_multiples_of_it():
    regions = Regions(100, 32)
    assert [regions.take(size) for size in (5, 33, 4)] == [0, 32, None]
    assert (regions.used, regions.free) == (96, 4)
    regions.give(0)
    assert [regions.take(32), regions.take(1)] == [0, None]


def test_a_region_may_be_taken_at_the_end():
    regions = Regions(100, 32)
    assert [regions.take_last(size) for size in (5, 33, 4)] == [64, 0, None]
    regions.give(0)
    assert [regions.take(4), regions.take_last(4), regions.take(1)] == [0, 32, None]
