"""Sums of two cards through memory that both write: on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from dsbd_cli.exchange_kernels import WORDS_OF_A_PROGRAM, sum_of_both

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
