"""Slots come back, rows never show a freed one, and a grown pool keeps its contents."""

from __future__ import annotations

import random

import pytest
import torch

from dsbd_cli.decoding.cache.buffers import SPARE, KVBuffer, Slots, Stores, TreeMasks
from tests.interrupting import interrupted, points_of


def test_slots_are_lowest_first_and_never_the_spare():
    slots = Slots(8)
    assert slots.take(3) == [1, 2, 3]
    slots.give([2])
    assert slots.take(2) == [2, 4]
    assert slots.used == 5
    assert slots.live == 4
    assert SPARE not in slots.take(3)


def test_used_shrinks_with_what_is_freed_at_the_top():
    slots = Slots(16)
    taken = slots.take(10)
    slots.give(taken[4:9])
    assert slots.used == 11
    slots.give(taken[9:])
    assert slots.used == 5
    assert slots.peak == 10
    slots.reset_peak()
    assert slots.peak == slots.live == 4


@pytest.mark.parametrize("wrong", [SPARE, 7])
def test_freeing_what_is_not_in_use_is_an_error(wrong):
    slots = Slots(8)
    slots.take(2)
    with pytest.raises(ValueError, match="not in use"):
        slots.give([wrong])


def test_random_take_and_give_never_hand_out_a_slot_twice():
    rng = random.Random(0)
    slots, held = Slots(4), []
    for _ in range(500):
        if held and rng.random() < 0.5:
            rng.shuffle(held)
            count = rng.randint(1, len(held))
            slots.give(held[:count])
            del held[:count]
        else:
            held += slots.take(rng.randint(1, 9))
        assert len(set(held)) == len(held) == slots.live
        assert slots.used == max(held, default=0) + 1


def test_cache_writes_at_slots_and_keeps_them_when_it_grows():
    cache = KVBuffer(4)
    cache.slots, cache.used = torch.tensor([3, 1]), 4
    first = torch.arange(12.0).reshape(1, 3, 2, 2)
    keys, values = cache.update(first, -first, 0)
    assert keys.shape == (1, 3, 4, 2)
    assert torch.equal(keys[:, :, [3, 1]], first)
    cache.grow(8)
    cache.slots, cache.used = torch.tensor([6]), 7
    keys, values = cache.update(first[:, :, :1], first[:, :, :1], 0)
    assert torch.equal(keys[:, :, [3, 1]], first)
    assert torch.equal(values[:, :, [3, 1]], -first)
    assert torch.equal(keys[:, :, 6], first[:, :, 0])
    assert cache.bytes_per_slot == 2 * 3 * 2 * 4
    cache.clear()
    assert not any(buffer.any() for buffer in [*cache.keys.values(), *cache.values.values()])


def test_mask_rows_descend_from_their_parents_through_growth():
    masks = TreeMasks(2, 4, torch.float32, torch.device("cpu"))
    root, child, grandchild = masks.take(1)[0], *masks.take(2)  # the second call doubles the rows
    masks.show(root, torch.tensor([1]))
    inside = torch.tensor([[True, False], [True, True]])
    mask = masks.extend(
        torch.tensor([root, root]), torch.tensor([child, grandchild]), torch.tensor([2, 3]), inside
    )
    assert mask.eq(0).tolist() == [[False, True, True, False], [False, True, True, True]]
    masks.grow(6)
    assert masks.table[grandchild].eq(0).tolist() == [False, True, True, True, False, False]
    assert masks.table[0].eq(0).tolist() == [True] + [False] * 5


class Scarce:
    """A buffer's tensor for whose larger copy no memory is left."""

    shape = (1, 1, 4, 2)

    def new_zeros(self, shape):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_buffers_that_cannot_all_grow_are_made_anew():
    """Neither of two sizes, nor where recordings of them point to."""
    stores = Stores(4, 4, 4, torch.float32, torch.device("cpu"))
    one = torch.ones(1, 1, 4, 2)
    keys, values = stores.cache.buffers(0, 1, 2, 2, one)
    keys.fill_(1)
    values.fill_(1)
    stores.cache.values[0] = Scarce()
    before = stores.pointers()
    with pytest.raises(torch.OutOfMemoryError):
        stores.cache.grow(8)
    assert stores.pointers() != before
    again = stores.cache.buffers(0, 1, 2, 2, one)
    assert [buffer.shape for buffer in again] == [(1, 1, 8, 2)] * 2
    assert not any(buffer.any() for buffer in again)
    stores.cache.grow(16)
    assert stores.cache.keys[0].shape[2] == 16


def test_buffers_that_are_being_made_are_there_wholly_or_not():
    """A forward may be given up in the middle, and the next one goes on with them."""

    def used(cache: KVBuffer, size: int) -> tuple[list[int], list[tuple[int, ...]]]:
        cache.grow(size)
        pair = cache.buffers(0, 2, 4, 4, torch.zeros(1))
        return cache.positions(torch.device("cpu")).tolist(), [tuple(one.shape) for one in pair]

    def grown() -> KVBuffer:
        cache = KVBuffer(4)
        cache.positions(torch.device("cpu"))[:] = 7
        return cache

    for point in points_of(lambda: used(grown(), 8)):
        cache = grown()
        interrupted(lambda: used(cache, 8), point)  # noqa: B023
        assert used(cache, 8) == ([7] * 4 + [0] * 4, [(1, 2, 8, 4)] * 2), point
