"""Attention over a tree on a GPU, in Triton.

It reads keys and values once for all query heads that share them, only up to the slots in use (a number on the device,
so that one capture serves any length), and splits the slots over enough programs to keep the whole device busy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.decoding.forward.triton_products import how, ready

# Programs to aim for: twice the multiprocessors of a large device.
_PROGRAMS = 264
_MOST_SPLITS = 32
# Slots of a split, at least, where the device is busy without.
_BUSY_SPLIT = 512
# Keys of a step, in numbers: two of them and two of values fit into the shared memory of any device since 2018.
_TILE = 8192


@triton.jit
def _slots_ahead(keys_ptr, values_ptr, base, first, end, size, SLOTS: tl.constexpr):
    """Have keys and values of up to 128 slots brought into the device's cache while the kernel in front runs.

    (A thread asks for a slot. Since the last forward a whole model's weights went through that cache.)
    """
    slot = first + tl.arange(0, 128)
    wanted = (slot < end) & (slot < first + SLOTS)
    where = base + slot.to(tl.int64) * size
    length = tl.where(wanted, size * (keys_ptr.dtype.element_ty.primitive_bitwidth // 8), 0)
    tl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.gt.s32 some, $3, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $3;
        @some cp.async.bulk.prefetch.L2.global [$2], $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,l,r", [keys_ptr + where, values_ptr + where, length], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["all_rows", "rows", "blocks", "capacity"])  # compiled once for all batches
def _attend(
    query_ptr, keys_ptr, values_ptr, mask_ptr, begins_ptr, used_ptr, part_ptr, peak_ptr, mass_ptr, turn_ptr, out_ptr,
    scaling, all_rows, rows, blocks, groups, shared, size, capacity, mask_width,
    EXACT: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr, LEAST: tl.constexpr,
    AHEAD: tl.constexpr, EIGHTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One split of a request's slots for one block of its rows of one group; the last to end joins all of them.

    Args:
        rows, blocks: of each request; `all_rows` of them together.
        LEAST: slots of a split.
        part_ptr, peak_ptr, mass_ptr: of each split: unnormalised output, maximum, mass.
        turn_ptr: zeros, one for each group and block; they are zeros again afterwards.
    """
    group = tl.program_id(0) % groups
    request = tl.program_id(0) // groups // blocks
    block = tl.program_id(0) // groups % blocks
    split, splits = tl.program_id(1), tl.num_programs(1)
    # Written before the kernel in front began, as the mask is and all slots but the nodes' own.
    used = tl.load(used_ptr + request).to(tl.int32)
    start = tl.load(begins_ptr + request)
    span = tl.maximum(tl.cdiv(tl.cdiv(used, splits), SLOTS) * SLOTS, LEAST)
    row = block * ROWS + tl.arange(0, ROWS)
    real = row < rows
    row += request * rows
    dims = tl.arange(0, DIM)
    own = dims < size
    whole = real[:, None] & own[None, :]
    at = (row[:, None] * groups + group) * size + dims[None, :]
    node = row // shared
    base = (group.to(tl.int64) * capacity + start) * size
    first, end = split * span, tl.minimum(used, (split + 1) * span)
    slots = tl.arange(0, SLOTS)
    seen_at = mask_ptr + node[:, None].to(tl.int64) * mask_width + slots[None, :]
    # (Eight columns at a time where rows are so many; those behind the last slot are not looked at.)
    eights = slots // 8 * 8 if EIGHTS else slots
    seen = tl.load(seen_at + first, mask=real[:, None] & (first + eights < end)[None, :], other=-float("inf"))
    if AHEAD:
        _slots_ahead(keys_ptr, values_ptr, base, first, end, size, SLOTS)
    ready(EARLY)
    query = tl.load(query_ptr + at, mask=whole, other=0.0)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    part = tl.zeros([ROWS, DIM], tl.float32)
    for begin in range(first, end, SLOTS):
        slot = begin + slots
        live = slot < used
        where = base + slot[:, None].to(tl.int64) * size + dims[None, :]
        here = live[:, None] & own[None, :]
        keys = tl.load(keys_ptr + where, mask=here, other=0.0)
        values = tl.load(values_ptr + where, mask=here, other=0.0)
        if EXACT:
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
        else:
            scores = tl.dot(query, tl.trans(keys)) * scaling
        # Padded rows see what is live, so that no maximum is -inf in a split that has slots.
        bias = tl.where(real[:, None], seen.to(tl.float32), 0.0)
        scores = tl.where(live[None, :], scores + bias, -float("inf"))
        later = real[:, None] & (begin + SLOTS + eights < end)[None, :]
        seen = tl.load(seen_at + begin + SLOTS, mask=later, other=-float("inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        weight = tl.exp(scores - top[:, None])
        shrink = tl.exp(peak - top)
        if EXACT:
            part = part * shrink[:, None] + tl.dot(weight, values, input_precision="ieee")
        else:
            part = part * shrink[:, None] + tl.dot(weight.to(values.dtype), values)
        mass = mass * shrink + tl.sum(weight, 1)
        peak = top
    live_splits = tl.cdiv(used, span)  # behind a short prompt most splits have no slots
    if split >= live_splits:
        return
    if live_splits > 1:
        place = (split * all_rows + row) * groups + group
        tl.store(part_ptr + place[:, None] * size + dims[None, :], part, mask=whole)
        tl.store(peak_ptr + place, peak, mask=real)
        tl.store(mass_ptr + place, mass, mask=real)
        tl.debug_barrier()  # all of it is written before this split counts as done
        if tl.atomic_add(turn_ptr + tl.program_id(0), 1, sem="acq_rel") != live_splits - 1:
            return
        tl.store(turn_ptr + tl.program_id(0), 0)
        peak = tl.full([ROWS], -float("inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        part = tl.zeros([ROWS, DIM], tl.float32)
        for other in range(live_splits):
            place = (other * all_rows + row) * groups + group
            # .cg: what other programs wrote lies in the L2 cache.
            its_peak = tl.load(peak_ptr + place, mask=real, other=0.0, cache_modifier=".cg")
            its_mass = tl.load(mass_ptr + place, mask=real, other=1.0, cache_modifier=".cg")
            its_part = tl.load(
                part_ptr + place[:, None] * size + dims[None, :], mask=whole, other=0.0, cache_modifier=".cg"
            )
            top = tl.maximum(peak, its_peak)
            shrink, weight = tl.exp(peak - top), tl.exp(its_peak - top)
            part = part * shrink[:, None] + its_part * weight[:, None]
            mass = mass * shrink + its_mass * weight
            peak = top
    # The model's order of heads.
    head = node * groups * shared + group * shared + row % shared
    answer = (part / mass[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * size + dims[None, :], answer, mask=whole)


class Attention:
    """The kernel, on contiguous CUDA tensors.

    Args:
        early: `triton_products.starts_early`.
    """

    def __init__(self, early: bool) -> None:
        self._early = early
        self._turns: list[Tensor] = []  # the last is in use; older recordings may still hold the others

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, begins: Tensor, used: Tensor,
        scaling: float,
    ) -> Tensor:  # fmt: skip
        """Attention of R requests' nodes, N / R of each, over their own slots.

        Args:
            query: [N x shared, groups, size], as `triton_kernels.Kernels.rope` returns it.
            keys, values: [1, groups, capacity, size].
            mask: additive [N, >= used], rows contiguous.
            begins, used: int64 [R], where each request's slots begin, and how many to look at.
            scaling: of the scores.

        What `mask`, `begins` and `used` hold is written before the kernel in front of this one begins.

        Returns:
            [N, heads x size] in the model's order of heads.
        """
        all_rows, groups, size = query.shape
        shared, requests = all_rows // mask.shape[0], len(used)
        rows = all_rows // requests
        exact = query.dtype == torch.float32
        dim = max(16, triton.next_power_of_2(size))
        tile = self.tile(rows, dim, exact)
        blocks = triton.cdiv(rows, tile["ROWS"])
        programs = requests * groups * blocks
        # Joining splits takes time too: a busy device has fewer of short contexts, small blocks more of long ones.
        splits = max(1, min(_MOST_SPLITS, (1 if exact or blocks == 1 else 2) * _PROGRAMS // programs))
        idle = 2 * programs < _PROGRAMS
        least = tile["SLOTS"] if exact or idle else _BUSY_SPLIT
        part = query.new_empty((splits, all_rows, groups, size), dtype=torch.float32)
        peak, mass = query.new_empty((2, splits, all_rows, groups), dtype=torch.float32)
        out = query.new_empty((mask.shape[0], groups * shared * size))
        _attend[(programs, splits)](
            query, keys, values, mask, begins, used, part, peak, mass, self._turns_for(programs, query), out,
            scaling, all_rows, rows, blocks, groups, shared, size, keys.shape[2], mask.stride(0),
            EXACT=exact, DIM=dim, LEAST=least, **tile, **how(self._early, 4 if exact or not idle else 8),
            AHEAD=self._early and size * query.element_size() % 16 == 0,
            EIGHTS=mask.stride(0) % 8 == 0 and mask.data_ptr() % 16 == 0,
        )  # fmt: skip
        return out

    def tile(self, rows: int, dim: int, exact: bool) -> dict[str, int]:
        """Rows and slots of a step, and steps in flight, for so many rows of a request."""
        # In half precision its time is mostly waiting, which many programs of few rows share.
        most = 16 if not exact else 64 if dim <= 128 else 32
        return {
            "ROWS": min(most, max(16, triton.next_power_of_2(rows))),
            "SLOTS": 32 if exact else max(32, min(128, _TILE // dim)),
            "num_stages": 2 if dim <= 128 else 1,
        }

    def _turns_for(self, count: int, like: Tensor) -> Tensor:
        """Zeros that outlive the call: a capture keeps their address, and every use leaves zeros."""
        if not self._turns or len(self._turns[-1]) < count:
            self._turns.append(torch.zeros(max(4096, count), dtype=torch.int32, device=like.device))
        return self._turns[-1]
