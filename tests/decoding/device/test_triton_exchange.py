"""Sums of two cards through memory that both write: on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from dsbd_cli.exchange_kernels import WORDS_OF_A_PROGRAM, Rows, normed_sum_of_both, sum_of_both

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOM = 4 * WORDS_OF_A_PROGRAM


def words_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.int32)


def sent(x: torch.Tensor, count: int) -> torch.Tensor:
    """The words that the other card finds: each with its count above it."""
    return (words_of(x).long() & 0xFFFFFFFF) | (count << 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_triton_sums_are_those_of_both_parts_whatever_their_sizes(dtype: torch.dtype) -> None:
    here, there = torch.zeros((2, 2, ROOM), dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(ROOM // WORDS_OF_A_PROGRAM, dtype=torch.int32, device=DEVICE)
    per_word = 1 if dtype == torch.float32 else 2
    seen = [0] * len(counts)
    # (Whole numbers: the interpreter does not round to bfloat16 as a card does.)
    generator = torch.Generator().manual_seed(1)
    for words in (3, WORDS_OF_A_PROGRAM, ROOM, 1, WORDS_OF_A_PROGRAM + 1, ROOM - 5, 2):
        own, other = torch.randint(-100, 100, (2, words * per_word), generator=generator)
        own, other = own.to(DEVICE, dtype), other.to(DEVICE, dtype)
        # What the other card has written by now: programs have counted their own sums, in one of two rooms each.
        for program in range(-(-words // WORDS_OF_A_PROGRAM)):
            part = slice(program * WORDS_OF_A_PROGRAM, min(words, (program + 1) * WORDS_OF_A_PROGRAM))
            seen[program] += 1
            here[seen[program] % 2, part] = sent(other, seen[program])[part]
        total = sum_of_both(own, here, there, counts)
        assert torch.equal(total, (own.float() + other.float()).to(dtype))
        assert counts.tolist() == seen
        for program in range(-(-words // WORDS_OF_A_PROGRAM)):
            part = slice(program * WORDS_OF_A_PROGRAM, min(words, (program + 1) * WORDS_OF_A_PROGRAM))
            assert torch.equal(there[seen[program] % 2, part], sent(own, seen[program])[part])


def test_triton_gives_up_on_words_that_do_not_come_where_it_is_told_to() -> None:
    here, there = torch.zeros((2, 2, ROOM), dtype=torch.int64, device=DEVICE)
    counts = torch.zeros(ROOM // WORDS_OF_A_PROGRAM, dtype=torch.int32, device=DEVICE)
    own = torch.ones(8, device=DEVICE)
    assert not torch.equal(sum_of_both(own, here, there, counts, tries=3), 2 * own)
    # An older sum's words are none of this one's.
    here[0, :8] = sent(own, 1)
    assert not torch.equal(sum_of_both(own, here, there, counts, tries=3), 2 * own)


@pytest.mark.parametrize("before", [2**31 - 2, 2**31 - 1, -(2**31), -2])
def test_triton_counts_that_wrap_around_stay_in_their_two_rooms(before: int) -> None:
    # (Between the rooms memory of nobody, where a room of a negative number would lie.)
    _, here, _, there = torch.zeros((4, 2, ROOM), dtype=torch.int64, device=DEVICE)
    counts = torch.full((ROOM // WORDS_OF_A_PROGRAM,), before, dtype=torch.int32, device=DEVICE)
    own = torch.arange(8, dtype=torch.float32, device=DEVICE)
    count = (before + 1 + 2**31) % 2**32 - 2**31
    here[count % 2, :8] = sent(3 * own, count)
    assert torch.equal(sum_of_both(own, here, there, counts, tries=3), 4 * own)
    assert torch.equal(there[count % 2, :8], sent(own, count))
    assert counts[0] == count


PLACES, FEW, MANY = 6, 6 * 40, 6 * 48


def rows() -> Rows:
    """Room for 6 rows."""
    few, many, done = (
        torch.zeros((2, 2, width), dtype=dtype, device=DEVICE)
        for width, dtype in ((FEW, torch.int64), (MANY, torch.int32), (PLACES, torch.int32))
    )
    return Rows(*few, *many, *done, torch.zeros(PLACES, dtype=torch.int32, device=DEVICE))


def arrived(room: Rows, x: torch.Tensor, many: bool) -> None:
    """Write what the other process writes for its next sum, x [N, width]."""
    words = x.shape[1] * x.element_size() // 4
    for row, own in enumerate(x):
        count = int(room.counts[row]) + 1
        at = slice(row * words, (row + 1) * words)
        if many:
            room.many_here[count % 2, at] = words_of(own)
            room.done_here[count % 2, row] = count
        else:
            room.few_here[count % 2, at] = sent(own, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_triton_normed_sums_are_those_of_both_parts_whatever_their_sizes(dtype: torch.dtype) -> None:
    room = rows()
    generator = torch.Generator().manual_seed(1)
    seen = [0] * PLACES
    for count, width, many in (
        (1, 8, False), (6, 40, True), (3, 40, False), (6, 36, True), (6, 36, False), (2, 12, True), (2, 12, True),
        (6, 40, False), (1, 4, None),
    ):  # fmt: skip
        own, other = torch.randint(-100, 100, (2, count, width), generator=generator).to(DEVICE, dtype)
        weight = torch.randint(1, 5, (width,), generator=generator).to(DEVICE, dtype)
        arrived(room, other, bool(many))
        total, normed = normed_sum_of_both(own, weight, 1e-5, room, tries=3, many=many)
        want = (own.float() + other.float()).to(dtype)
        assert torch.equal(total, want)
        wide = want.float()
        inverse = 1 / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt()
        # (The interpreter cuts what a card rounds to bfloat16, here and once more.)
        close = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.7e-2}[dtype]
        torch.testing.assert_close(normed.float(), weight.float() * wide * inverse, rtol=close, atol=1e-6)
        for row in range(count):
            seen[row] += 1
        assert room.counts.tolist() == seen
        # What the other process finds.
        words = width * own.element_size() // 4
        for row in range(count):
            at, place = slice(row * words, (row + 1) * words), seen[row] % 2
            if many:
                assert torch.equal(room.many_there[place, at], words_of(own[row]))
                assert room.done_there[place, row] == seen[row]
            else:
                assert torch.equal(room.few_there[place, at], sent(own[row], seen[row]))


@pytest.mark.parametrize("many", [False, True])
def test_triton_normed_sums_do_not_take_older_words(many: bool) -> None:
    room = rows()
    own, weight = torch.ones((2, 8), device=DEVICE), torch.ones(8, device=DEVICE)
    for _ in range(2):
        arrived(room, own, many)
        assert torch.equal(normed_sum_of_both(own, weight, 0.0, room, 3, many)[0], 2 * own)
    for _ in range(2):  # what stands in both rooms is of sums that were
        assert torch.equal(normed_sum_of_both(own, weight, 0.0, room, 3, many)[0], own)
    # The other may be one sum ahead: its words of the next one stand in the other room.
    arrived(room, own, many)
    room.counts.add_(1)
    arrived(room, 5 * own, many)
    room.counts.sub_(1)
    assert torch.equal(normed_sum_of_both(own, weight, 0.0, room, 3, many)[0], 2 * own)
    assert torch.equal(normed_sum_of_both(own, weight, 0.0, room, 3, many)[0], 6 * own)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("before", [2**31 - 1, -2])
def test_triton_counts_of_rows_wrap_around(before: int, many: bool) -> None:
    room = rows()
    room.counts.add_(before)
    own = torch.arange(16, dtype=torch.float32, device=DEVICE).view(2, 8)
    count = (before + 1 + 2**31) % 2**32 - 2**31
    words = torch.arange(16, device=DEVICE)
    if many:
        room.many_here[count % 2, words] = words_of(3 * own)
        room.done_here[count % 2, :2] = count
    else:
        room.few_here[count % 2, words] = sent(3 * own, count)
    assert torch.equal(normed_sum_of_both(own, torch.ones(8, device=DEVICE), 0.0, room, 3, many)[0], 4 * own)
    assert room.counts[:2].tolist() == [count] * 2


def test_triton_rows_of_another_width_would_take_older_words_and_are_not_taken() -> None:
    room = rows()
    wide, narrow = torch.ones((1, 16), device=DEVICE), torch.ones((2, 8), device=DEVICE)

    def summed(own: torch.Tensor, many: bool) -> torch.Tensor:
        weight = torch.ones(own.shape[1], device=DEVICE)
        return normed_sum_of_both(own, weight, 0.0, room, 3, many)[0]

    assert room.take(1, 16)
    assert not room.take(2, 8)
    assert room.take(2, 16)
    for _ in range(3):
        arrived(room, 5 * wide, False)
        assert torch.equal(summed(wide, False), 6 * wide)
    for _ in range(2):
        arrived(room, narrow, True)
        summed(narrow, True)
    # The third sum of the second row finds the third of a wide row, where nothing has arrived.
    assert torch.equal(summed(narrow, False)[1], 6 * narrow[1])
    room.clear()
    assert not torch.equal(summed(narrow, False)[1], 6 * narrow[1])
    assert room.counts.tolist() == [1, 1, 0, 0, 0, 0]


def test_rows_are_taken_where_there_is_room() -> None:
    room = rows()
    assert not room.take(7, 8)
    assert not room.take(6, 49)
    assert room.take(6, 48)
