"""The law of an iteration in a handful of Triton kernels: best rows, drafting, masks, verification.

What `rows.pack`, `device_law`, `TreeMasks.extend` and `DeviceChain._verify` do, which in tensor operations
are a thousand small kernels an iteration: as long as half of a 7B target's forward. float64 where they
have it. One program does the law of a whole layer, for it has a few dozen entries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits a program looks at, the most entries of a row that it looks for, and the most of all parents.
_PART = 1024
MOST_ENTRIES, MOST_JOINT = 64, 1024


@triton.jit
def _ordered(values, ids):
    """int64, ordered as (value, -id)."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 and 0 are one value
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats are ordered backwards in their bits
    return bits.to(tl.int64) * 4294967296 + (2147483647 - ids).to(tl.int64)


@triton.jit(do_not_specialize=["parts"])
def _parts_of_rows(
    logits_ptr, keys_ptr, peaks_ptr, masses_ptr, stride, vocab, parts, COUNT: tl.constexpr, PART: tl.constexpr
):
    """Of one part of one row: its best entries, its maximum, its mass; a mass of NaN where it is not finite."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab
    values = tl.load(logits_ptr + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    good = tl.sum((inside & ~(tl.abs(values) < float("inf"))).to(tl.int32), 0) == 0
    peak = tl.max(values, 0)
    mass = tl.sum(tl.exp(values - peak), 0)
    place = row * parts + part
    tl.store(peaks_ptr + place, peak)
    tl.store(masses_ptr + place, tl.where(good, mass, float("nan")))
    # Not by their value: a NaN may rank below everything, and ids beyond the vocabulary must not come up.
    keys = tl.where(inside, _ordered(values, ids), -9223372036854775807)
    for i in range(COUNT):
        best = tl.max(keys, 0)
        tl.store(keys_ptr + place * COUNT + i, best)
        keys = tl.where(keys == best, -9223372036854775807, keys)


@triton.jit(do_not_specialize=["parts"])
def _whole_rows(
    keys_ptr, peaks_ptr, masses_ptr, out_ptr, parts,
    COUNT: tl.constexpr, PARTS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """The best entries of one row: log-probabilities, ids (bits of int32), and 1 where all is finite."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    peaks = tl.load(peaks_ptr + row * parts + part, mask=part < parts, other=-float("inf"))
    masses = tl.load(masses_ptr + row * parts + part, mask=part < parts, other=0.0)
    peak = tl.max(peaks, 0)
    mass = tl.sum(tl.where(part < parts, masses * tl.exp(peaks - peak), 0.0), 0)
    entry = tl.arange(0, ENTRIES)
    keys = tl.load(
        keys_ptr + row * parts * COUNT + entry, mask=entry < parts * COUNT, other=-9223372036854775807
    )
    out = out_ptr + row * (2 * COUNT + 1)
    finite = (mass < float("inf")) & (tl.abs(peak) < float("inf"))
    for i in range(COUNT):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -9223372036854775807, keys)
        bits = (best >> 32).to(tl.int32)
        value = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
        token = (2147483647 - (best & 0xFFFFFFFF)).to(tl.int32)
        tl.store(out + i, (value - peak) - tl.log(mass))
        tl.store(out + COUNT + i, token.to(tl.float32, bitcast=True))
    tl.store(out + 2 * COUNT, finite.to(tl.float32))


@triton.jit
def _is_end(tokens, eos_ptr, count):
    ended = tokens < 0
    for i in range(count):
        ended = ended | (tokens == tl.load(eos_ptr + i))
    return ended


@triton.jit
def _entries(rows_ptr, at, real, score, COUNT: tl.constexpr, WIDE: tl.constexpr, PARENTS: tl.constexpr):
    """Joint entries of some parents, flat [PARENTS x WIDE]: log weight, log-probability, token, parent."""
    k = tl.arange(0, WIDE)
    inside = real[:, None] & (k < COUNT)[None, :]
    where = rows_ptr + at[:, None] * (2 * COUNT + 1) + k[None, :]
    logp = tl.load(where, mask=inside, other=-float("inf")).to(tl.float64)
    token = tl.load(where + COUNT, mask=inside, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    weight = tl.where(inside, score[:, None] + logp, -float("inf"))
    parent = (tl.arange(0, PARENTS)[:, None] + tl.zeros([PARENTS, WIDE], tl.int32)).to(tl.int64)
    size: tl.constexpr = PARENTS * WIDE
    return (
        tl.reshape(weight, [size]), tl.reshape(logp, [size]), tl.reshape(token, [size]),
        tl.reshape(parent, [size]),
    )  # fmt: skip


@triton.jit
def _heaviest(weight, logp, token, parent, count, SIZE: tl.constexpr, ENTRIES: tl.constexpr):
    """The `count` heaviest entries in order, [SIZE]; ties: the earlier entry. Unused places weigh -inf."""
    place, entry = tl.arange(0, SIZE), tl.arange(0, ENTRIES)
    weights = tl.full([SIZE], -float("inf"), tl.float64)
    logps = tl.full([SIZE], -float("inf"), tl.float64)
    tokens = tl.zeros([SIZE], tl.int64)
    parents = tl.zeros([SIZE], tl.int64)
    left = weight
    for i in range(count):
        top = tl.max(left, 0)
        first = tl.min(tl.where(left == top, entry, ENTRIES), 0)
        chosen = entry == first
        here = place == i
        weights = tl.where(here, top, weights)
        logps = tl.where(here, tl.sum(tl.where(chosen, logp, 0.0), 0), logps)
        tokens = tl.where(here, tl.sum(tl.where(chosen, token, 0), 0), tokens)
        parents = tl.where(here, tl.sum(tl.where(chosen, parent, 0), 0), parents)
        left = tl.where(chosen, -float("inf"), left)
    return weights, logps, tokens, parents


@triton.jit(do_not_specialize=["eos_count", "parent_count", "width", "node_base"])
def _draft(
    rows_ptr, score_ptr, eos_ptr, eos_count, parents_ptr, nodes_ptr, tokens_ptr, weights_ptr, outcome_ptr,
    parent_count, width, node_base,
    COUNT: tl.constexpr, WIDE: tl.constexpr, PARENTS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """`device_law.best_layer`: the `width` most probable distinct continuations."""
    i = tl.arange(0, PARENTS)
    real = i < parent_count
    score = tl.load(score_ptr + i, mask=real, other=-float("inf"))
    weight, logp, token, parent = _entries(rows_ptr, i, real, score, COUNT, WIDE, PARENTS)
    weight, logp, token, parent = _heaviest(weight, logp, token, parent, width, SIZE, PARENTS * WIDE)
    place = tl.arange(0, SIZE)
    own = place < width
    prob = tl.exp(weight - tl.max(weight, 0))
    prob = prob / tl.sum(prob, 0)
    tl.store(parents_ptr + place, parent, mask=own)
    tl.store(nodes_ptr + place, parent + node_base, mask=own)
    tl.store(tokens_ptr + place, token, mask=own)
    ended = _is_end(token, eos_ptr, eos_count)
    tl.store(weights_ptr + place, tl.where(ended, -float("inf"), weight), mask=own)
    tl.store(outcome_ptr + place, parent.to(tl.float64), mask=own)
    tl.store(outcome_ptr + width + place, token.to(tl.float64), mask=own)
    tl.store(outcome_ptr + 2 * width + place, logp, mask=own)
    tl.store(outcome_ptr + 3 * width + place, prob, mask=own)
    tl.store(outcome_ptr + 4 * width + place, place.to(tl.float64), mask=own)
    finite = tl.load(rows_ptr + i * (2 * COUNT + 1) + 2 * COUNT, mask=real, other=0.0)
    tl.store(outcome_ptr + 5 * width + i, finite.to(tl.float64), mask=real)


@triton.jit(do_not_specialize=["wide"])
def _forest_masks(
    table_ptr, out_ptr, base_ptr, parents_ptr, slots_ptr, rows_ptr, table_width, wide,
    ALONE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask rows of a forest, layer by layer, below rows `base`; ALONE: one layer, each below its own."""
    node = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < table_width
    seen = column == tl.load(slots_ptr + node)
    at = (node % wide).to(tl.int64)
    for depth in range(node // wide, 0, -1):
        at = tl.load(parents_ptr + depth * wide + at)
        seen = seen | (column == tl.load(slots_ptr + (depth - 1) * wide + at))
    if not ALONE:
        at = tl.load(parents_ptr + at)
    base = tl.load(base_ptr + at)
    values = tl.load(table_ptr + base * table_width + column, mask=inside)
    values = tl.where(seen, 0.0, values.to(tl.float32)).to(table_ptr.dtype.element_ty)
    tl.store(table_ptr + tl.load(rows_ptr + node) * table_width + column, values, mask=inside)
    tl.store(out_ptr + node.to(tl.int64) * table_width + column, values, mask=inside)


@triton.jit(do_not_specialize=["beams"])
def _catch_up_masks(
    table_ptr, out_ptr, above_ptr, own_ptr, first_ptr, missing_ptr, slots_ptr, rows_ptr, table_width, beams,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of the parents (below `above`), then of the beams: below their parent if it is missing, else `own`."""
    node = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < table_width
    beam = node % beams
    seen = column == tl.load(slots_ptr + node)
    base = tl.load(above_ptr + beam)
    missing = tl.load(missing_ptr)
    if node >= beams:
        parent_slot = tl.load(slots_ptr + tl.load(first_ptr + beam))
        seen = seen | ((column == parent_slot) & (missing != 0))
        base = tl.where(missing != 0, base, tl.load(own_ptr + beam))
    values = tl.load(table_ptr + base * table_width + column, mask=inside)
    values = tl.where(seen, 0.0, values.to(tl.float32)).to(table_ptr.dtype.element_ty)
    tl.store(table_ptr + tl.load(rows_ptr + node) * table_width + column, values, mask=inside)
    tl.store(out_ptr + node.to(tl.int64) * table_width + column, values, mask=inside)


@triton.jit(do_not_specialize=["eos_count", "beams", "wide", "deep", "draft_computed", "size", "window"])
def _verify(
    best_ptr, now_ptr, next_ptr, ids_ptr, rows_ptr, draft_rows_ptr, parents_ptr, tokens_ptr, weights_ptr,
    eos_ptr, eos_count, uniforms_ptr, origin_ptr, outcome_ptr, beams, wide, deep, draft_computed, size, window,
    warp_ptr,
    GREEDY: tl.constexpr, COUNT: tl.constexpr, WIDE: tl.constexpr, BEAMS: tl.constexpr, SIZE: tl.constexpr,
    FOREST: tl.constexpr,
):  # fmt: skip
    """`DeviceChain._verify`: draw layers from the target's joint for as long as their law is known."""
    d = tl.arange(0, BEAMS)
    real = d < beams
    e = tl.arange(0, SIZE)
    f = tl.arange(0, FOREST)
    score = tl.load(now_ptr + beams + d, mask=real, other=0).to(tl.float64, bitcast=True)
    score = tl.where(real, score, -float("inf"))
    at = d.to(tl.int64)
    position = tl.load(now_ptr + 7 * beams + 1)
    begin = (position - tl.load(origin_ptr)).to(tl.int32)
    temperature, top_p = tl.load(warp_ptr), tl.load(warp_ptr + 1)  # as arguments they would be float32
    top_p = tl.where(top_p >= 1.0, 2.0, top_p)
    going = begin == begin
    count = 0
    out_token = tl.zeros([BEAMS], tl.int64)
    out_node = at
    out_score = score
    for depth in range(deep + 1):
        weight, logp, token, parent = _entries(best_ptr, at, real, score, COUNT, WIDE, BEAMS)
        weight, logp, token, parent = _heaviest(weight, logp, token, parent, size, SIZE, BEAMS * WIDE)
        if GREEDY:
            prob = tl.where(e == 0, 1.0, 0.0).to(tl.float64)
        else:
            prob = tl.exp((weight - tl.max(weight, 0)) / temperature)
            prob = prob / tl.sum(prob, 0)
            # Cut where the mass before an entry has reached top-p; the first always stays.
            before = tl.sum(tl.where(e[None, :] < e[:, None], prob[None, :], 0.0), 1)
            prob = tl.where((before < top_p) | (e == 0), prob, 0.0)
            prob = prob / tl.sum(prob, 0)
        # Canonical order: parent, then token.
        key = (parent << 32) | token
        some = prob > 0
        reach = tl.sum(tl.where(key[None, :] <= key[:, None], prob[None, :], 0.0), 1)
        total = tl.max(tl.where(some, reach, 0.0), 0)
        layer = tl.minimum(tl.maximum(begin + depth, 0), window - 1)
        u = tl.load(uniforms_ptr + layer * beams + d, mask=real, other=0).to(tl.float64, bitcast=True)
        far: tl.constexpr = 9223372036854775807
        beyond = some[None, :] & (reach[None, :] > (u * total)[:, None])
        pick = tl.min(tl.where(beyond, key[None, :], far), 1)
        pick = tl.where(pick == far, tl.max(tl.where(some, key, -1), 0), pick)
        mine = some[None, :] & (key[None, :] == pick[:, None])
        new = tl.sum(tl.where(mine, token[None, :], 0), 1)
        above = tl.sum(tl.where(mine, parent[None, :], 0), 1)
        lp = tl.sum(tl.where(mine, logp[None, :], 0.0), 1)
        after = tl.sum(tl.where(mine, weight[None, :], 0.0), 1)
        same = (pick[None, :] == pick[:, None]) & (d[None, :] < d[:, None]) & real[None, :]
        ended = _is_end(new, eos_ptr, eos_count)
        dead = (tl.sum(same.to(tl.int32), 1) > 0) | ended | ~real
        after = tl.where(dead, -float("inf"), after)
        live = after > -float("inf")
        from_node = tl.sum(tl.where(above[:, None] == d[None, :], at[None, :], 0), 1)
        known = d < 0
        place = tl.zeros([BEAMS], tl.int64)
        if depth < deep:
            there = f < wide
            f_at = depth * wide + f
            f_parent = tl.load(parents_ptr + f_at, mask=there, other=-1)
            f_token = tl.load(tokens_ptr + f_at, mask=there, other=-1)
            alive = tl.load(weights_ptr + f_at, mask=there, other=-float("inf")) > -float("inf")
            match = (
                there[None, :] & alive[None, :] & (f_parent[None, :] == from_node[:, None])
                & (f_token[None, :] == new[:, None])
            )  # fmt: skip
            known = tl.sum(match.to(tl.int32), 1) > 0
            index = tl.min(tl.where(match, f[None, :], FOREST), 1)
            place = tl.where(known, (beams + depth * wide + index).to(tl.int64), 0)
        finite = tl.load(best_ptr + at * (2 * COUNT + 1) + 2 * COUNT, mask=real, other=0.0)
        out = outcome_ptr + depth * 5 * beams + d
        tl.store(out, above.to(tl.float64), mask=real)
        tl.store(out + beams, new.to(tl.float64), mask=real)
        tl.store(out + 2 * beams, lp, mask=real)
        tl.store(out + 3 * beams, known.to(tl.float64), mask=real)
        tl.store(out + 4 * beams, finite.to(tl.float64), mask=real)
        count += going.to(tl.int32)  # type: ignore[attr-defined]
        out_token = tl.where(going, new, out_token)
        out_node = tl.where(going, from_node, out_node)
        out_score = tl.where(going, after, out_score)
        unknown = tl.sum((live & ~known).to(tl.int32), 0)
        going = going & (unknown == 0) & (tl.sum(live.to(tl.int32), 0) > 0)
        at, score = place, after
    tl.store(outcome_ptr + (deep + 1) * 5 * beams, count.to(tl.float64))  # type: ignore[attr-defined]
    first = tl.min(
        tl.where((out_node[:, None] == out_node[None, :]) & real[None, :], d[None, :], BEAMS), 1
    ).to(tl.int64)
    tl.store(next_ptr + d, out_token, mask=real)
    tl.store(next_ptr + beams + d, out_score.to(tl.int64, bitcast=True), mask=real)
    tl.store(next_ptr + 2 * beams + d, tl.load(rows_ptr + out_node, mask=real), mask=real)
    if deep > 0:
        last = tl.minimum(out_node, draft_computed - 1)
        tl.store(next_ptr + 3 * beams + d, tl.load(draft_rows_ptr + last, mask=real), mask=real)
        tl.store(next_ptr + 4 * beams + d, tl.load(ids_ptr + out_node, mask=real), mask=real)
        inner = tl.maximum(out_node - beams, 0)
        grand = tl.load(parents_ptr + inner, mask=real, other=0)
        grand = tl.minimum(grand, draft_computed - 1)
        tl.store(next_ptr + 5 * beams + d, tl.load(draft_rows_ptr + grand, mask=real), mask=real)
    tl.store(next_ptr + 6 * beams + d, first, mask=real)
    tl.store(next_ptr + 7 * beams, ((deep > 0) & (count > deep)).to(tl.int64))
    tl.store(next_ptr + 7 * beams + 1, position + count)


def pack_rows(logits: Tensor, vocab: int, count: int) -> Tensor:
    """`rows.pack` of the log-probabilities of logits [N, >= vocab], rows contiguous: float32 [N, 2 count + 1]."""
    rows, parts = logits.shape[0], triton.cdiv(vocab, _PART)
    keys = torch.empty((rows, parts, count), dtype=torch.long, device=logits.device)
    peaks, masses = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
    out = torch.empty((rows, 2 * count + 1), dtype=torch.float32, device=logits.device)
    _parts_of_rows[(rows, parts)](
        logits, keys, peaks, masses, logits.stride(0), vocab, parts, COUNT=count, PART=_PART, num_warps=4
    )
    _whole_rows[(rows,)](
        keys, peaks, masses, out, parts,
        COUNT=count, PARTS=triton.next_power_of_2(parts), ENTRIES=triton.next_power_of_2(parts * count),
        num_warps=4,
    )  # fmt: skip
    return out


def draft_layer(
    packed: Tensor,
    count: int,
    scores: Tensor,
    eos: Tensor,
    forest: Any,
    depth: int,
    beams: int,
    outcome: Tensor,
) -> None:
    """One drafted layer, into row `depth` of the forest's tensors and to `outcome`."""
    width = forest.token.shape[1]
    parents = packed.shape[0]
    _draft[(1,)](
        packed, scores, eos, len(eos), forest.parent[depth], forest.node[depth], forest.token[depth],
        forest.weight[depth], outcome, parents, width, beams + (depth - 1) * width if depth else 0,
        COUNT=count, WIDE=triton.next_power_of_2(count), PARENTS=triton.next_power_of_2(parents),
        SIZE=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip


def forest_masks(
    table: Tensor, base: Tensor, parent: Tensor | None, slots: Tensor, rows: Tensor, wide: int
) -> Tensor:
    """Rows of the mask for a forest of layers of `wide` nodes; None as `parent`: one layer, each below its own base."""
    out = table.new_empty((len(slots), table.shape[1]))
    _forest_masks[(len(slots), triton.cdiv(table.shape[1], _PART))](
        table, out, base, base if parent is None else parent, slots, rows, table.shape[1], wide,
        ALONE=parent is None, BLOCK=_PART, num_warps=4,
    )  # fmt: skip
    return out


def catch_up_masks(table: Tensor, now: Any, slots: Tensor, rows: Tensor, beams: int) -> Tensor:
    """Rows of the mask for the beams' parents and the beams in the draft's pool."""
    out = table.new_empty((len(slots), table.shape[1]))
    _catch_up_masks[(len(slots), triton.cdiv(table.shape[1], _PART))](
        table, out, now.above_row, now.draft_row, now.first, now.missing, slots, rows, table.shape[1], beams,
        BLOCK=_PART, num_warps=4,
    )  # fmt: skip
    return out


def verify(
    best: Tensor, count: int, now: Tensor, after: Tensor, ids: Tensor, rows: Tensor, draft_rows: Tensor, forest: Any,
    eos: Tensor, uniforms: Tensor, origin: Tensor, outcome: Tensor, beams: int, processor: Any, numbers: Tensor,
    window: int,
) -> None:  # fmt: skip
    """All layers of an iteration, to `outcome`, and the next iteration's beams, to `after`.

    `numbers`: the processor's temperature and top-p, float64.
    """
    deep, wide = forest.token.shape
    size = min(processor.top_n, beams * count)
    _verify[(1,)](
        best, now, after, ids, rows, draft_rows, forest.node, forest.token, forest.weight,
        eos, len(eos), uniforms, origin, outcome, beams, wide, deep, len(draft_rows), size, window,
        numbers, GREEDY=processor.greedy, COUNT=count,
        WIDE=triton.next_power_of_2(count), BEAMS=triton.next_power_of_2(beams),
        SIZE=max(2, triton.next_power_of_2(size)), FOREST=max(2, triton.next_power_of_2(wide)), num_warps=1,
    )  # fmt: skip
