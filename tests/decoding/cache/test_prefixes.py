"""Prompts that begin alike take over what is computed: the right tokens at the right places, and nothing leaks."""

from __future__ import annotations

import random

import pytest
import torch

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.cache.prefixes import LEAST, Prefixes
from dsbd_cli.decoding.cache.regions import Regions

CPU = torch.device("cpu")


def fingerprint(ids: list[int]) -> int:
    """What the key of the last of these tokens holds in these tests: it depends on all of them."""
    return hash(tuple(ids)) % (1 << 50)


class World:
    """Requests that come and go in one buffer of one layer, whose keys say which tokens they are of."""

    def __init__(self, capacity: int, unit: int = 1) -> None:
        self.cache, self.regions = KVBuffer(capacity), Regions(capacity, unit)
        self.prefixes = Prefixes(self.cache, self.regions)
        self.cache.buffers(0, 1, 1, 1, torch.empty(0, dtype=torch.float64))
        self.members: dict[int, list[int]] = {}  # prompts by begin of region
        self.known: dict[int, int] = {}
        self.computed = 0

    def join(self, ids: list[int], size: int) -> int | None:
        begin = self.regions.take(size)
        while begin is None and self.prefixes.give_way():
            begin = self.regions.take(size)
        if begin is not None:
            self.members[begin], self.known[begin] = ids, 0
        return begin

    @torch.inference_mode()
    def read(self, begin: int, end: int) -> None:
        """Prompt tokens up to `end`; those that another has are taken over."""
        ids = self.members[begin]
        if not self.known[begin]:
            self.known[begin] = self.prefixes.take_over(ids, begin)
            self.check(begin)
        for place in range(self.known[begin], end):
            slot = begin + 1 + place
            self.cache.keys[0][0, 0, slot, 0] = fingerprint(ids[: place + 1])
            self.cache.values[0][0, 0, slot, 0] = -fingerprint(ids[: place + 1])
            self.cache.positions(CPU)[slot] = place
            self.computed += 1
        self.known[begin] = max(self.known[begin], end)
        self.prefixes.computed(begin, ids, self.known[begin])

    def leave(self, begin: int, keep: bool) -> None:
        del self.members[begin], self.known[begin]
        self.prefixes.end(begin, keep)

    def check(self, begin: int) -> None:
        ids, count = self.members[begin], self.known[begin]
        wanted = [fingerprint(ids[: place + 1]) for place in range(count)]
        own = slice(begin + 1, begin + 1 + count)
        assert self.cache.keys[0][0, 0, own, 0].tolist() == wanted
        assert self.cache.values[0][0, 0, own, 0].tolist() == [-one for one in wanted]
        assert self.cache._positions[own].tolist() == list(range(count))


def test_the_longest_common_beginning_is_taken_over_and_the_last_token_never() -> None:
    world, common = World(400), list(range(30))
    for ids in ([*common, 1, 2, 3], [*common, 1, 2, 4, 5], [*common[:20], 7, 7], [*common, 1, 2, 3]):
        begin = world.join(ids, 60)
        assert begin is not None
        world.read(begin, len(ids))
    # 33, then behind 32, 20 and 32 tokens; the last prompt is the first, and its end is computed again.
    assert world.computed == 33 + 2 + 2 + 1


def test_no_more_is_taken_over_than_is_computed_and_a_few_tokens_are_not() -> None:
    world, ids = World(400), list(range(50))
    first = world.join(ids, 60)
    assert first is not None
    world.read(first, 25)
    for count, taken in ((50, 25), (LEAST, 0), (LEAST + 1, LEAST)):
        begin = world.join(ids[:count], 60)
        assert begin is not None
        assert world.prefixes.take_over(ids[:count], begin) == taken


def test_what_ended_is_kept_behind_the_others_and_makes_room_the_oldest_first() -> None:
    world = World(200)
    prompts = [[i] * 20 for i in range(3)]
    for ids in prompts:
        begin = world.join(ids, 50)
        assert begin == 0
        world.read(0, 20)
        world.leave(0, keep=True)
    assert (world.prefixes.slots, world.regions.free) == (63, 137)
    assert world.join([9] * 20, 50) == 0  # where it would be without them
    at = world.join([*prompts[0], 5], 50)
    assert at == 50
    assert world.prefixes.take_over([*prompts[0], 5], at) == 20  # used: no longer the oldest
    assert world.join([8] * 20, 30) == 100
    assert world.prefixes.slots == 63  # there was room
    assert world.join([8] * 20, 25) == 130
    assert [world.prefixes.take_over([*ids, 5], at) for ids in prompts] == [20, 0, 0]
    assert world.prefixes.slots == 21
    assert world.join([8] * 20, 40) == 155
    assert world.prefixes.slots == 0
    assert world.join([8] * 20, 6) is None


def test_a_prompt_is_kept_once_and_one_that_has_no_place_pushes_none_out() -> None:
    world = World(110)
    for ids in ([1] * 30, [1] * 30, [1] * 30):
        assert world.join(ids, 40) == 0
        world.read(0, 30)
        world.leave(0, keep=True)
    assert world.prefixes.slots == 31
    assert world.join([2] * 60, 61) == 0
    world.read(0, 60)
    world.leave(0, keep=True)  # 61 beside its own 61 of 110
    assert world.prefixes.slots == 31
    assert world.join([3] * 30, 40) == 0
    world.leave(0, keep=True)  # of which nothing was computed
    assert world.prefixes.slots == 31
    assert world.prefixes.give_way()
    assert not world.prefixes.give_way()
    assert world.regions.free == 110


@pytest.mark.parametrize("seed", range(8))
def test_requests_join_take_over_and_leave_and_nothing_leaks(seed: int) -> None:
    rng = random.Random(seed)
    world = World(600, rng.choice([1, 32]))
    stems = [[rng.randrange(4) for _ in range(rng.randint(10, 60))] for _ in range(4)]
    taken = 0
    for _ in range(1250):  # 10,000 steps over all seeds
        step = rng.random()
        if not world.members or step < 0.3:
            ids = rng.choice(stems)[: rng.randint(1, 60)] + [
                rng.randrange(4) for _ in range(rng.randint(1, 9))
            ]
            if world.join(ids, len(ids) + rng.randint(2, 60)) is None:
                assert world.prefixes.slots == 0  # those that ended never keep one out
        elif step < 0.7:
            begin = rng.choice(list(world.members))
            before = world.known[begin]
            world.read(begin, rng.randint(1, len(world.members[begin])))
            taken += before == 0 and world.known[begin] > 0
        elif step < 0.95:
            world.leave(rng.choice(list(world.members)), keep=rng.random() < 0.8)
        else:
            world.regions.grow(min(world.regions.capacity + 40, 900))
            world.cache.grow(world.regions.capacity)
        for begin in world.members:
            world.check(begin)
        assert world.regions.free + world.prefixes.slots <= world.regions.capacity
    assert taken > 50
    for begin in list(world.members):
        world.leave(begin, keep=True)
    assert world.prefixes.slots == world.regions.capacity - world.regions.free
    while world.prefixes.give_way():
        pass
    assert world.regions.free == world.regions.capacity
    assert len(world.regions) == 0
