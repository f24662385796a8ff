"""The Triton kernel of `exchange.Exchange`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Always the same ones: a program's count of its sums is that of its words.
WORDS_OF_A_PROGRAM = 1024


@triton.jit(do_not_specialize=["words", "tries"])
def _sum(x, out, here, there, counts, words, tries, ROOM: tl.constexpr, WIDE: tl.constexpr, BF16: tl.constexpr,
         EACH: tl.constexpr):  # fmt: skip
    program = tl.program_id(0)
    count = tl.load(counts + program) + 1
    at = program * EACH + tl.arange(0, EACH)
    valid = at < words
    # Two rooms in turns: by the sum after the next the other card has read this one, for it wrote the next behind it.
    # (`&`, for the remainder of a count beyond 2^31, which is negative, may be -1.)
    place = (count & 1) * ROOM + at
    own = tl.load(x + at, mask=valid, other=0)
    # A word and its count in one store of 8 bytes: both are there, or neither is.
    tl.store(there + place, (own.to(tl.int64) & 0xFFFFFFFF) | (count.to(tl.int64) << 32), mask=valid)
    got = tl.load(here + place, mask=valid, other=0, volatile=True)
    tried = 0
    while (tl.max((valid & ((got >> 32) != count)).to(tl.int32), 0) > 0) & ((tries == 0) | (tried < tries)):
        got = tl.load(here + place, mask=valid, other=0, volatile=True)
        tried += 1
    other = tl.where((got >> 32) == count, got.to(tl.int32), 0)
    if WIDE:
        total = (own.to(tl.float32, bitcast=True) + other.to(tl.float32, bitcast=True)).to(
            tl.int32, bitcast=True
        )
    else:
        low = _short(_float(own, BF16) + _float(other, BF16), BF16)
        high = _short(_float(own >> 16, BF16) + _float(other >> 16, BF16), BF16)
        total = low | (high << 16)
    tl.store(out + at, total, mask=valid)
    tl.store(counts + program, count)


@triton.jit
def _float(word, BF16: tl.constexpr):
    """The number in the lower 16 bits."""
    half = (word & 0xFFFF).to(tl.int16)
    if BF16:
        return half.to(tl.bfloat16, bitcast=True).to(tl.float32)
    else:
        return half.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _short(number, BF16: tl.constexpr):
    """A number as the lower 16 bits of a word."""
    if BF16:
        half = number.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        half = number.to(tl.float16).to(tl.int16, bitcast=True)
    return half.to(tl.int32) & 0xFFFF


def sum_of_both(x: Tensor, here: Tensor, there: Tensor, counts: Tensor, tries: int = 0) -> Tensor:
    """x and the other process's x: a new tensor of the same shape and dtype (16 or 32 bits a number).

    Args:
        x: contiguous; whole words of 32 bits.
        here, there: int64 [2, words]: what the other process writes, and what it reads.
        counts: int32 [programs]: sums so far, by program.
        tries: how often to look for the other's words; 0: until they are there.
    """
    out = torch.empty_like(x)
    words = x.view(-1).view(torch.int32)
    _sum[(max(1, triton.cdiv(len(words), WORDS_OF_A_PROGRAM)),)](
        words, out.view(-1).view(torch.int32), here, there, counts, len(words), tries, ROOM=here.shape[1],
        WIDE=x.dtype == torch.float32, BF16=x.dtype == torch.bfloat16, EACH=WORDS_OF_A_PROGRAM,
    )  # fmt: skip
    return out
