"""The Triton kernels of `exchange.Exchange`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

# Always the same ones: a program's count of its sums is that of its words.
WORDS_OF_A_PROGRAM = 1024
# Up to so many rows a count with every word is quicker than one behind a row.
FEW_ROWS = 40


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


@triton.jit(do_not_specialize=["rows", "tries"])
def _sum_rows(
    x, weight, out, normed, here, there, here_done, there_done, counts, rows, words, eps, tries,
    ROOM: tl.constexpr, WIDE: tl.constexpr, BF16: tl.constexpr, MANY: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """A row of the sum, and the same row normed: as `_sum` and `triton_kernels._rms` one behind the other.

    MANY: words go as they are, and a count behind all of a row's, in one of two places in turns. That takes half of the
    bytes, and a wait until they have arrived.
    """
    row = tl.program_id(0)
    count = tl.load(counts + row) + 1
    at = tl.arange(0, EACH)
    valid = at < words
    place = (count & 1) * ROOM + row * words + at
    own = tl.load(x + row * words + at, mask=valid, other=0)
    tried = 0
    if MANY:
        tl.store(there + place, own, mask=valid)
        done = (count & 1) * rows + row
        tl.debug_barrier()  # all of a row is written before it counts as there
        tl.atomic_xchg(there_done + done, count, sem="release", scope="sys")
        seen = tl.atomic_add(here_done + done, 0, sem="acquire", scope="sys")
        while (seen != count) & ((tries == 0) | (tried < tries)):
            seen = tl.atomic_add(here_done + done, 0, sem="acquire", scope="sys")
            tried += 1
        tl.debug_barrier()
        other = tl.where(seen == count, tl.load(here + place, mask=valid, other=0, volatile=True), 0)
    else:
        tl.store(there + place, (own.to(tl.int64) & 0xFFFFFFFF) | (count.to(tl.int64) << 32), mask=valid)
        got = tl.load(here + place, mask=valid, other=0, volatile=True)
        while (tl.max((valid & ((got >> 32) != count)).to(tl.int32), 0) > 0) & (
            (tries == 0) | (tried < tries)
        ):
            got = tl.load(here + place, mask=valid, other=0, volatile=True)
            tried += 1
        other = tl.where((got >> 32) == count, got.to(tl.int32), 0)
    scale = tl.load(weight + at, mask=valid, other=0)
    if WIDE:
        total = own.to(tl.float32, bitcast=True) + other.to(tl.float32, bitcast=True)
        inverse = 1.0 / tl.sqrt(tl.sum(total * total, 0) / words + eps)
        tl.store(out + row * words + at, total.to(tl.int32, bitcast=True), mask=valid)
        new = scale.to(tl.float32, bitcast=True) * (total * inverse)
        tl.store(normed + row * words + at, new.to(tl.int32, bitcast=True), mask=valid)
    else:
        low = _short(_float(own, BF16) + _float(other, BF16), BF16)
        high = _short(_float(own >> 16, BF16) + _float(other >> 16, BF16), BF16)
        tl.store(out + row * words + at, low | (high << 16), mask=valid)
        near, far = _float(low, BF16), _float(high, BF16)
        inverse = 1.0 / tl.sqrt(tl.sum(near * near + far * far, 0) / (2 * words) + eps)
        near = _float(scale, BF16) * _float(_short(near * inverse, BF16), BF16)
        far = _float(scale >> 16, BF16) * _float(_short(far * inverse, BF16), BF16)
        tl.store(normed + row * words + at, _short(near, BF16) | (_short(far, BF16) << 16), mask=valid)
    tl.store(counts + row, count)


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


@dataclass(frozen=True)
class Rows:
    """Memory of two cards for sums of rows, each row of them always at one place: of one width, or a row would find
    another's older words where its own are to come, and take them if they have its count.

    Attributes:
        few_here, few_there: int64 [2, words]: words and counts that the other process writes, and that it reads.
        many_here, many_there: int32 [2, words]: likewise of many rows, without counts.
        done_here, done_there: int32 [2, rows]: their counts.
        counts: int32 [rows]: sums so far, of whatever kind.
        widths: words of a row, once there was one.
    """

    few_here: Tensor
    few_there: Tensor
    many_here: Tensor
    many_there: Tensor
    done_here: Tensor
    done_there: Tensor
    counts: Tensor
    widths: list[int] = field(default_factory=list)

    def take(self, count: int, words: int) -> bool:
        """Whether there is room for `count` rows of so many words; all others are as wide as the first."""
        if count > len(self.counts) or count * words > self.many_here.shape[1]:
            return False
        if not self.widths:
            self.widths.append(words)
        return self.widths == [words]

    def clear(self) -> None:
        """As if there had been no sums; the other process is not to be in one."""
        for one in (self.few_here, self.many_here, self.done_here, self.counts):
            one.zero_()


def normed_sum_of_both(
    x: Tensor, weight: Tensor, eps: float, room: Rows, tries: int = 0, many: bool | None = None
) -> tuple[Tensor, Tensor]:
    """x and the other process's x, and that sum normed (RMS): new tensors of the same shape and dtype.

    Args:
        x: [N, width], contiguous; rows of whole words of 32 bits.
        weight: of the norm, [width], contiguous, of x's dtype.
        tries: how often to look for the other's words; 0: until they are there.
        many: whether rows go as they are, with a count each; None: what is quicker for so many.
    """
    count = len(x)
    words = x.shape[1] * x.element_size() // 4
    if many is None:
        many = count > FEW_ROWS or count * words > room.few_here.shape[1]
    out, normed = torch.empty((2, *x.shape), dtype=x.dtype, device=x.device).unbind()
    here, there = (room.many_here, room.many_there) if many else (room.few_here, room.few_there)
    _sum_rows[(count,)](
        x.view(torch.int32), weight.view(torch.int32), out.view(torch.int32), normed.view(torch.int32), here, there,
        room.done_here, room.done_there, room.counts, len(room.counts), words, eps, tries, ROOM=here.shape[1],
        WIDE=x.dtype == torch.float32, BF16=x.dtype == torch.bfloat16, MANY=many, EACH=triton.next_power_of_2(words),
        num_warps=8 if words > 1024 else 4,
    )  # fmt: skip
    return out, normed
