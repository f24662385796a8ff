"""The law of an iteration in a handful of Triton kernels: best entries, drafting, masks, verification.

What `law_torch` does in tensor operations, which are a thousand small kernels an iteration: as long as
half of a 7B target's forward. float64 where that has it. One program does a whole layer (verification:
all layers) of a request, for it has a few dozen entries; every request has a program of its own. How the
draft's draws are tested stands in `acceptance_triton`. One module, since kernels and what launches them agree
on every argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.device.acceptance_triton import (
    accept_distinct_draws,
    accept_draws,
    draws_accepted,
    picked,
    picked_apart,
)
from dsbd_cli.decoding.device.layout import CoverLayout, DraftLayout
from dsbd_cli.decoding.forward.triton_products import how, ready, starts_early
from dsbd_cli.decoding.model.protocol import Side

# Logits a program looks at, the most entries of a row that it looks for, and the most of all parents.
_PART = 1024
_MOST_ENTRIES, _MOST_JOINT = 64, 1024
# The most draws of a layer that a program tests one after the other.
_MOST_TESTED = 32


@triton.jit
def _ordered(values, ids):
    """int64, ordered as (value, -id)."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # + 0.0: -0 and 0 are one value
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # negative floats are ordered backwards in their bits
    return bits.to(tl.int64) * 4294967296 + (2147483647 - ids).to(tl.int64)


@triton.jit(do_not_specialize=["parts"])
def _parts_of_rows(
    logits_ptr, keys_ptr, peaks_ptr, masses_ptr, stride, vocab, parts,
    COUNT: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one part of one row: its best entries, its maximum, its mass; a mass of NaN where it is not finite."""
    ready(EARLY)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab
    values = tl.load(logits_ptr + row * stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    # -inf is a masked token of probability 0; NaN and +inf are nothing.
    good = tl.sum((inside & ~(values < float("inf"))).to(tl.int32), 0) == 0
    peak = tl.max(values, 0)
    mass = tl.sum(tl.exp(values - tl.where(peak > -float("inf"), peak, 0.0)), 0)
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
    COUNT: tl.constexpr, PARTS: tl.constexpr, ENTRIES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best entries of one row: log-probabilities, ids (bits of int32), and 1 where all is finite."""
    ready(EARLY)
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
def _entries(
    rows_ptr, at, real, score,
    COUNT: tl.constexpr, WIDE: tl.constexpr, PARENTS: tl.constexpr, SINGLE: tl.constexpr = False,
):  # fmt: skip
    """Joint entries of some parents, flat [PARENTS x WIDE]: log weight, log-probability, token, parent.

    SINGLE: weights are float32 sums.
    """
    k = tl.arange(0, WIDE)
    inside = real[:, None] & (k < COUNT)[None, :]
    where = rows_ptr + at[:, None] * (2 * COUNT + 1) + k[None, :]
    logp = tl.load(where, mask=inside, other=-float("inf"))
    if SINGLE:
        total = (score.to(tl.float32)[:, None] + logp).to(tl.float64)
    else:
        total = score[:, None] + logp.to(tl.float64)
    logp = logp.to(tl.float64)
    token = tl.load(where + COUNT, mask=inside, other=0.0).to(tl.int32, bitcast=True).to(tl.int64)
    weight = tl.where(inside, total, -float("inf"))
    parent = (tl.arange(0, PARENTS)[:, None] + tl.zeros([PARENTS, WIDE], tl.int32)).to(tl.int64)
    size: tl.constexpr = PARENTS * WIDE
    return (
        tl.reshape(weight, [size]), tl.reshape(logp, [size]), tl.reshape(token, [size]),
        tl.reshape(parent, [size]),
    )  # fmt: skip


@triton.jit
def _heaviest(
    weight, logp, token, parent, count,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, BY_TOKEN: tl.constexpr = False,
):  # fmt: skip
    """The `count` heaviest entries in order, [SIZE]; unused places weigh -inf.

    Ties: the earlier entry; BY_TOKEN: the earlier parent, then the lower token (sums tie where their parts do not).
    """
    place = tl.arange(0, SIZE)
    rank = tl.arange(0, ENTRIES).to(tl.int64)
    if BY_TOKEN:
        rank += ((parent << 32) | token) * ENTRIES
    weights = tl.full([SIZE], -float("inf"), tl.float64)
    logps = tl.full([SIZE], -float("inf"), tl.float64)
    tokens = tl.zeros([SIZE], tl.int64)
    parents = tl.zeros([SIZE], tl.int64)
    left = tl.where(weight == weight, weight, -float("inf"))  # a NaN is behind all else
    # (One after the other: places of all at once are more code than fits where a device keeps it.)
    for i in range(count):
        if BY_TOKEN:
            top = tl.max(left, 0)
            chosen = rank == tl.min(tl.where(left == top, rank, 9223372036854775807), 0)
        else:
            top, first = tl.max(left, 0, return_indices=True)  # of ties the first
            chosen = rank == first
        here = place == i
        weights = tl.where(here, top, weights)
        logps = tl.where(here, tl.sum(tl.where(chosen, logp, 0.0), 0), logps)
        tokens = tl.where(here, tl.sum(tl.where(chosen, token, 0), 0), tokens)
        parents = tl.where(here, tl.sum(tl.where(chosen, parent, 0), 0), parents)
        left = tl.where(chosen, -float("inf"), left)
    return weights, logps, tokens, parents


@triton.jit
def _processed(weight, temperature, top_p, GREEDY: tl.constexpr, SIZE: tl.constexpr):
    """T on weights that are sorted, heaviest first; a `top_p` above 1 is off."""
    e = tl.arange(0, SIZE)
    if GREEDY:
        prob = tl.where(e == 0, 1.0, 0.0).to(tl.float64)
    else:
        prob = tl.exp((weight - tl.max(weight, 0)) / temperature)
        prob = prob / tl.sum(prob, 0)
        # Cut where the mass before an entry has reached top-p; the first always stays.
        before = tl.sum(tl.where(e[None, :] < e[:, None], prob[None, :], 0.0), 1)
        prob = tl.where((before < top_p) | (e == 0), prob, 0.0)
        prob = prob / tl.sum(prob, 0)
    return prob


@triton.jit(do_not_specialize=["eos_count", "parent_count", "score_stride", "outcome_stride", "depth"])
def _draft(
    rows_ptr, score_ptr, score_stride, eos_ptr, eos_count, outcome_ptr, outcome_stride, parent_count, depth,
    WIDTH: tl.constexpr, PARENT: tl.constexpr, TOKEN: tl.constexpr, WEIGHT: tl.constexpr,
    LOGP: tl.constexpr, PROB: tl.constexpr, FINITE: tl.constexpr, FINITE_WIDTH: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr, PARENTS: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`law_torch.best_layer` of one request; PARENT and the like are where the forest's fields begin."""
    ready(EARLY)
    request = tl.program_id(0).to(tl.int64)
    finite_out = outcome_ptr + request * outcome_stride + FINITE + depth * FINITE_WIDTH
    out = outcome_ptr + request * outcome_stride + depth * WIDTH
    i = tl.arange(0, PARENTS)
    real = i < parent_count
    row = request * parent_count + i
    score = tl.load(score_ptr + request * score_stride + i, mask=real, other=-float("inf"))
    weight, logp, token, parent = _entries(rows_ptr, row, real, score, COUNT, WIDE, PARENTS)
    weight, logp, token, parent = _heaviest(weight, logp, token, parent, WIDTH, SIZE, PARENTS * WIDE)
    place = tl.arange(0, SIZE)
    own = place < WIDTH
    prob = tl.exp(weight - tl.max(weight, 0))
    prob = prob / tl.sum(prob, 0)
    ended = _is_end(token, eos_ptr, eos_count)
    weight = tl.where(ended, -float("inf"), weight)
    tl.store(out + PARENT + place, parent, mask=own)
    tl.store(out + TOKEN + place, token, mask=own)
    tl.store(out + WEIGHT + place, weight.to(tl.int64, bitcast=True), mask=own)
    tl.store(out + LOGP + place, logp.to(tl.int64, bitcast=True), mask=own)
    tl.store(out + PROB + place, prob.to(tl.int64, bitcast=True), mask=own)
    finite = tl.load(rows_ptr + row * (2 * COUNT + 1) + 2 * COUNT, mask=real, other=0.0)
    tl.store(finite_out + i, finite.to(tl.int64), mask=real)


@triton.jit(
    do_not_specialize=[
        "eos_count",
        "parent_count",
        "score_stride",
        "request_stride",
        "outcome_stride",
        "depth",
    ]
)
def _draw(
    rows_ptr, score_ptr, score_stride, eos_ptr, eos_count, request_ptr, request_stride, outcome_ptr, outcome_stride,
    parent_count, depth,
    R_TEMPERATURE: tl.constexpr, R_TOP_P: tl.constexpr, R_UNIFORMS: tl.constexpr,
    WIDTH: tl.constexpr, SUPPORT: tl.constexpr, TAKEN: tl.constexpr,
    PARENT: tl.constexpr, TOKEN: tl.constexpr, WEIGHT: tl.constexpr, SUPPORT_PARENT: tl.constexpr,
    SUPPORT_TOKEN: tl.constexpr, LOGP: tl.constexpr, PROB: tl.constexpr, DRAWS: tl.constexpr,
    FINITE: tl.constexpr, FINITE_WIDTH: tl.constexpr, GREEDY: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr, PARENTS: tl.constexpr, SIZE: tl.constexpr, DRAWN: tl.constexpr,
    DISTINCT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`law_torch.draft_layer` of one request: draws, and all that they were drawn from in canonical order."""
    ready(EARLY)
    request = tl.program_id(0).to(tl.int64)
    sent, out = request_ptr + request * request_stride, outcome_ptr + request * outcome_stride
    i = tl.arange(0, PARENTS)
    real = i < parent_count
    row = request * parent_count + i
    score = tl.load(score_ptr + request * score_stride + i, mask=real, other=-float("inf"))
    weight, logp, token, parent = _entries(rows_ptr, row, real, score, COUNT, WIDE, PARENTS)
    weight, logp, token, parent = _heaviest(weight, logp, token, parent, TAKEN, SIZE, PARENTS * WIDE)
    temperature = tl.load(sent + R_TEMPERATURE).to(tl.float64, bitcast=True)
    top_p = tl.load(sent + R_TOP_P).to(tl.float64, bitcast=True)
    prob = _processed(weight, temperature, tl.where(top_p >= 1.0, 2.0, top_p), GREEDY, SIZE)
    e, d = tl.arange(0, SIZE), tl.arange(0, DRAWN)
    key, some = (parent << 32) | token, prob > 0
    # Canonical order; behind it what has no mass, of which an entry may be there twice.
    earlier = tl.where(some[:, None], some[None, :] & (key[None, :] < key[:, None]), e[None, :] < e[:, None])
    earlier = earlier | (some[None, :] & ~some[:, None])
    place = tl.sum(earlier.to(tl.int64), 1)
    u = tl.load(sent + R_UNIFORMS + depth * WIDTH + d, mask=d < WIDTH, other=0).to(tl.float64, bitcast=True)
    if DISTINCT:
        pick = picked_apart(key, prob, prob, tl.full([DRAWN], -1, tl.int64), 0, u, WIDTH, DRAWN)
        absent = pick < 0
    else:
        pick = picked(key, prob, u)
        absent = d < 0
    mine = some[None, :] & (key[None, :] == pick[:, None])
    new = tl.sum(tl.where(mine, token[None, :], 0), 1)
    after = tl.sum(tl.where(mine, weight[None, :], 0.0), 1)
    same = (pick[None, :] == pick[:, None]) & (d[None, :] < d[:, None])
    dead = (tl.sum(same.to(tl.int32), 1) > 0) | _is_end(new, eos_ptr, eos_count) | (pick < 0)
    after = tl.where(dead, -float("inf"), after)
    to, own = out + depth * WIDTH + d, d < WIDTH
    tl.store(to + PARENT, tl.sum(tl.where(mine, parent[None, :], 0), 1), mask=own)
    tl.store(to + TOKEN, new, mask=own)
    tl.store(to + WEIGHT, after.to(tl.int64, bitcast=True), mask=own)
    tl.store(to + DRAWS, tl.where(absent, -1, tl.sum(tl.where(mine, place[None, :], 0), 1)), mask=own)
    to, own = out + depth * SUPPORT + place, e < TAKEN
    tl.store(to + SUPPORT_PARENT, parent, mask=own)
    tl.store(to + SUPPORT_TOKEN, token, mask=own)
    tl.store(to + LOGP, logp.to(tl.int64, bitcast=True), mask=own)
    tl.store(to + PROB, prob.to(tl.int64, bitcast=True), mask=own)
    finite = tl.load(rows_ptr + row * (2 * COUNT + 1) + 2 * COUNT, mask=real, other=0.0)
    tl.store(out + FINITE + depth * FINITE_WIDTH + i, finite.to(tl.int64), mask=real)


@triton.jit(do_not_specialize=["known_stride", "outcome_stride", "memory_stride", "parent_count", "depth"])
def _recall(
    rows_ptr, known_ptr, known_stride, to_ptr, outcome_ptr, outcome_stride, memory_ptr, own_ptr, memory_stride,
    parent_count, depth,
    BEAM_COUNT: tl.constexpr, WIDTH: tl.constexpr, NODES: tl.constexpr, FOREST: tl.constexpr,
    F_PARENT: tl.constexpr, F_TOKEN: tl.constexpr, F_WEIGHT: tl.constexpr, M_ROWS: tl.constexpr,
    COUNT: tl.constexpr, OWN: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`TorchLaw.recall` of one parent; `own_ptr` is the memory as float32, M_ROWS where its rows begin there."""
    ready(EARLY)
    request, i = (tl.program_id(0) // parent_count).to(tl.int64), tl.program_id(0) % parent_count
    known, out = known_ptr + request * known_stride, outcome_ptr + request * outcome_stride
    memory = memory_ptr + request * memory_stride
    if depth > 0:
        here = (depth - 1) * WIDTH + i
        up = tl.load(known + tl.load(out + F_PARENT + here))
        token = tl.load(out + F_TOKEN + here)
        f = tl.arange(0, FOREST)
        there = f < NODES
        layer = f // WIDTH
        above = tl.load(memory + F_PARENT + f, mask=there, other=-1)
        above += tl.where(layer > 0, BEAM_COUNT + (layer - 1) * WIDTH, 0) + 1
        weight = tl.load(memory + F_WEIGHT + f, mask=there, other=0).to(tl.float64, bitcast=True)
        same = there & (up > 0) & (above == up) & (weight > -float("inf"))
        same = same & (tl.load(memory + F_TOKEN + f, mask=there, other=-1) == token)
        index = tl.min(tl.where(same, f, FOREST), 0)
        place = tl.where(index < FOREST, BEAM_COUNT + 1 + index, 0).to(tl.int64)
    else:
        place = tl.load(known + i)
    own = own_ptr + request * 2 * memory_stride + M_ROWS + tl.maximum(place - 1, 0) * (2 * OWN + 1)
    finite = tl.load(own + 2 * OWN)
    place = tl.where(finite > 0, place, 0)
    tl.store(to_ptr + tl.program_id(0), place)
    k = tl.arange(0, WIDE)
    logp = tl.load(own + k, mask=k < FEW, other=-float("inf"))
    ids = tl.load(own + OWN + k, mask=k < FEW, other=0.0)
    to = rows_ptr + tl.program_id(0).to(tl.int64) * (2 * COUNT + 1)
    own_rows = tl.where(k < COUNT, place, 0) > 0
    tl.store(to + k, logp, mask=own_rows)
    tl.store(to + COUNT + k, ids, mask=own_rows)


@triton.jit(do_not_specialize=["base_stride", "parent_stride", "slot_stride", "row_stride", "nodes", "width"])
def _forest_masks(
    table_ptr, out_ptr, base_ptr, base_stride, parents_ptr, parent_stride, slots_ptr, slot_stride,
    rows_ptr, row_stride, table_width, nodes, width,
    ALONE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Mask rows of forests, layer by layer, below rows `base`; ALONE: one layer, each below its own."""
    ready(EARLY)
    request = (tl.program_id(0) // nodes).to(tl.int64)
    node = tl.program_id(0) % nodes
    parents, slots = parents_ptr + request * parent_stride, slots_ptr + request * slot_stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < table_width
    seen = column == tl.load(slots + node)
    at = (node % width).to(tl.int64)
    for depth in range(node // width, 0, -1):
        at = tl.load(parents + depth * width + at)
        seen = seen | (column == tl.load(slots + (depth - 1) * width + at))
    if not ALONE:
        at = tl.load(parents + at)
    base = tl.load(base_ptr + request * base_stride + at)
    values = tl.load(table_ptr + base * table_width + column, mask=inside)
    values = tl.where(seen, 0.0, values.to(tl.float32)).to(table_ptr.dtype.element_ty)
    row = tl.load(rows_ptr + request * row_stride + node)
    tl.store(table_ptr + row * table_width + column, values, mask=inside)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * table_width + column, values, mask=inside)


@triton.jit(do_not_specialize=["state_stride", "slot_stride", "row_stride"])
def _catch_up_masks(
    table_ptr, out_ptr, state_ptr, state_stride, slots_ptr, slot_stride, rows_ptr, row_stride, table_width,
    WIDTH: tl.constexpr, ABOVE_ROW: tl.constexpr, DRAFT_ROW: tl.constexpr, FIRST: tl.constexpr,
    MISSING: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a request's parents (below `above`), then of its beams: below their parent if it is missing, else `own`."""
    ready(EARLY)
    place = tl.program_id(0) % (2 * WIDTH)
    is_beam = place >= WIDTH
    request, beam = (tl.program_id(0) // (2 * WIDTH)).to(tl.int64), place % WIDTH
    state = state_ptr + request * state_stride
    slots = slots_ptr + request * slot_stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < table_width
    node = beam + tl.where(is_beam, WIDTH, 0)
    seen = column == tl.load(slots + node)
    base = tl.load(state + ABOVE_ROW + beam)
    missing = tl.load(state + MISSING)
    if is_beam:
        parent_slot = tl.load(slots + tl.load(state + FIRST + beam))
        seen = seen | ((column == parent_slot) & (missing != 0))
        base = tl.where(missing != 0, base, tl.load(state + DRAFT_ROW + beam))
    values = tl.load(table_ptr + base * table_width + column, mask=inside)
    values = tl.where(seen, 0.0, values.to(tl.float32)).to(table_ptr.dtype.element_ty)
    row = tl.load(rows_ptr + request * row_stride + node)
    tl.store(table_ptr + row * table_width + column, values, mask=inside)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * table_width + column, values, mask=inside)


@triton.jit(do_not_specialize=["state_stride", "request_stride", "outcome_stride", "eos_count"])
def _verify(
    best_ptr, state_ptr, after_ptr, state_stride, request_ptr, request_stride, outcome_ptr, outcome_stride,
    eos_ptr, eos_count,
    BEAM_COUNT: tl.constexpr, DRAFT_WIDTH: tl.constexpr, GAMMA: tl.constexpr, NODES: tl.constexpr,
    WINDOW: tl.constexpr, SUPPORT: tl.constexpr, DRAFT_COMPUTED: tl.constexpr,
    S_TOKEN: tl.constexpr, S_SCORE: tl.constexpr, S_ROW: tl.constexpr, S_DRAFT_ROW: tl.constexpr,
    S_ABOVE: tl.constexpr, S_ABOVE_ROW: tl.constexpr, S_FIRST: tl.constexpr, S_KNOWN: tl.constexpr,
    S_MISSING: tl.constexpr, S_POSITION: tl.constexpr,
    R_ROWS: tl.constexpr, R_DRAFT_ROWS: tl.constexpr, R_ORIGIN: tl.constexpr, R_TEMPERATURE: tl.constexpr,
    R_TOP_P: tl.constexpr, R_MASS: tl.constexpr, R_MIN_WIDTH: tl.constexpr, R_SLACK: tl.constexpr,
    R_LAST: tl.constexpr, R_ONE_BEAM: tl.constexpr, R_UNIFORMS: tl.constexpr,
    F_PARENT: tl.constexpr, F_TOKEN: tl.constexpr, F_WEIGHT: tl.constexpr,
    V_PARENT: tl.constexpr, V_TOKEN: tl.constexpr, V_LOGP: tl.constexpr, V_FINITE: tl.constexpr,
    V_VERDICTS: tl.constexpr, V_LAYERS: tl.constexpr,
    F_SUPPORT_PARENT: tl.constexpr, F_SUPPORT_TOKEN: tl.constexpr, F_PROB: tl.constexpr, F_DRAWS: tl.constexpr,
    KEPT: tl.constexpr, DRAWN: tl.constexpr, ENTRIES: tl.constexpr, CONTINUES: tl.constexpr,
    GREEDY: tl.constexpr, DISTINCT: tl.constexpr,
    COUNT: tl.constexpr, WIDE: tl.constexpr,
    BEAMS: tl.constexpr, SIZE: tl.constexpr, FOREST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`TorchLaw.verify` of one request; S_, R_, F_ and V_ are where the fields of `layout` begin."""
    ready(EARLY)
    number = tl.program_id(0).to(tl.int64)
    state, after_ptr = state_ptr + number * state_stride, after_ptr + number * state_stride
    sent, out = request_ptr + number * request_stride, outcome_ptr + number * outcome_stride
    best_ptr += number * NODES * (2 * COUNT + 1)
    d = tl.arange(0, BEAMS)
    real = d < BEAM_COUNT
    e = tl.arange(0, SIZE)
    f = tl.arange(0, FOREST)
    score = tl.load(state + S_SCORE + d, mask=real, other=0).to(tl.float64, bitcast=True)
    score = tl.where(real, score, -float("inf"))
    at = d.to(tl.int64)
    position = tl.load(state + S_POSITION)
    begin = (position - tl.load(sent + R_ORIGIN)).to(tl.int32)
    # Loaded, not passed: as arguments they would be float32.
    temperature = tl.load(sent + R_TEMPERATURE).to(tl.float64, bitcast=True)
    top_p = tl.load(sent + R_TOP_P).to(tl.float64, bitcast=True)
    top_p = tl.where(top_p >= 1.0, 2.0, top_p)
    mass = tl.load(sent + R_MASS).to(tl.float64, bitcast=True)
    min_width = tl.load(sent + R_MIN_WIDTH)
    slack = tl.load(sent + R_SLACK).to(tl.float64, bitcast=True)
    last = tl.load(sent + R_LAST)
    one_beam = tl.load(sent + R_ONE_BEAM) > 0
    going = begin == begin
    more = begin != begin  # one more layer, from the one beam that is kept
    count = 0
    out_token = tl.zeros([BEAMS], tl.int64)
    out_node = at
    out_score = score
    out_known = at * 0
    depth = begin * 0
    while (depth <= GAMMA) & going:
        weight, logp, token, parent = _entries(best_ptr, at, real, score, COUNT, WIDE, BEAMS, KEPT > 0)
        weight, logp, token, parent = _heaviest(
            weight, logp, token, parent, SUPPORT, SIZE, BEAMS * WIDE, KEPT > 0
        )
        # The forest's layer; its parents' places among all nodes: the beams, then the forest.
        there = f < tl.where(depth < GAMMA, DRAFT_WIDTH, 0)
        f_at = depth * DRAFT_WIDTH + f
        start = tl.where(depth > 0, BEAM_COUNT + (depth - 1) * DRAFT_WIDTH, 0)
        f_parent = tl.load(out + F_PARENT + f_at, mask=there, other=-1) + start
        f_token = tl.load(out + F_TOKEN + f_at, mask=there, other=-1)
        f_weight = tl.load(out + F_WEIGHT + f_at, mask=there, other=0).to(tl.float64, bitcast=True)
        f_alive = there & (f_weight > -float("inf"))
        ends = _is_end(token, eos_ptr, eos_count)
        further = begin == begin
        to = out + depth * BEAM_COUNT + d
        if KEPT > 0:
            # Beam search: the best candidates that do not end are the next beams.
            some = weight > -float("inf")
            goes_on = some & ~ends
            rank = tl.sum(tl.where(e[None, :] < e[:, None], goes_on.to(tl.int32)[None, :], 0), 1)
            mine = goes_on[None, :] & (rank[None, :] == d[:, None]) & real[:, None]
            dead = tl.sum(mine.to(tl.int32), 1) == 0
            shown = out + depth * KEPT + e
            tl.store(shown + V_PARENT, tl.where(some, parent, -1), mask=e < KEPT)
            tl.store(shown + V_TOKEN, token, mask=e < KEPT)
            tl.store(shown + V_LOGP, weight.to(tl.int64, bitcast=True), mask=e < KEPT)
            new = tl.sum(tl.where(mine, token[None, :], 0), 1)
            above = tl.sum(tl.where(mine, parent[None, :], 0), 1)
            after = tl.sum(tl.where(mine, weight[None, :], 0.0), 1)
        else:
            prob = _processed(weight, temperature, top_p, GREEDY, SIZE)
            before = tl.sum(tl.where(e[None, :] < e[:, None], prob[None, :], 0.0), 1)
            # Continuations whose mass the layer's width asks for: what is before them has not reached it.
            wide = tl.maximum(tl.sum(((before < mass) & (prob > 0)).to(tl.int64), 0), min_width)
            wide = tl.minimum(wide, BEAM_COUNT)
            # Canonical order: parent, then token.
            key = (parent << 32) | token
            some = prob > 0
            beside = (depth < GAMMA) & (position + depth + 1 < last)
            layer = tl.minimum(tl.maximum(begin + depth, 0), WINDOW - 1)
            numbers: tl.constexpr = BEAM_COUNT + (DRAFT_WIDTH if DRAWN > 0 else 0)
            uniforms = sent + R_UNIFORMS + layer * numbers
            if DRAWN > 0:
                # The draft's draws as far as they are accepted as draws of p, then those filled up.
                node = tl.sum(tl.where(parent[:, None] == d[None, :], at[None, :], 0), 1)
                m = tl.arange(0, ENTRIES)
                m_at, m_there = depth * DRAWN + m, m < tl.where(depth < GAMMA, DRAWN, 0)
                q_node = tl.load(out + F_SUPPORT_PARENT + m_at, mask=m_there, other=-1) + start
                q_token = tl.load(out + F_SUPPORT_TOKEN + m_at, mask=m_there, other=-1)
                q = tl.load(out + F_PROB + m_at, mask=m_there, other=0).to(tl.float64, bitcast=True)
                draws = tl.load(out + F_DRAWS + f_at, mask=there, other=-1)
                both = (node[:, None] == q_node[None, :]) & (token[:, None] == q_token[None, :])
                shared = tl.sum(tl.where(both & some[:, None], q[None, :], 0.0), 1)
                mine = there[:, None] & some[None, :] & (f_parent[:, None] == node[None, :])
                mine = mine & (f_token[:, None] == token[None, :])
                places = tl.max(tl.where(mine, key[None, :], -1), 1)
                asked = tl.load(uniforms + f, mask=f < DRAFT_WIDTH, other=0).to(tl.float64, bitcast=True)
                # Numbers to draw with stand behind those of the tests, of which there is one a drafted draw.
                tests = tl.where(beside, tl.sum((draws >= 0).to(tl.int32), 0), DRAFT_WIDTH)
                u = tl.load(uniforms + tests + d, mask=real, other=0).to(tl.float64, bitcast=True)
                looks = tl.where(beside & going, DRAFT_WIDTH, 0)
                if DISTINCT:
                    wide = tl.minimum(wide, tl.sum(some.to(tl.int64), 0))
                    pick, verdicts, whole = accept_distinct_draws(
                        key, prob, shared, places, q, draws, wide, beside, looks, asked, u,
                        BEAM_COUNT, BEAMS, FOREST, ENTRIES,
                    )  # fmt: skip
                else:
                    if slack >= 0:
                        # Or: the most draws that are accepted with the probability asked for.
                        reach = draws_accepted(prob, shared, slack, DRAFT_WIDTH, BEAM_COUNT, FOREST)
                        wide = tl.where(beside, tl.maximum(reach, min_width), BEAM_COUNT)
                    shares = tl.sum(tl.where(draws[:, None] == m[None, :], q[None, :], 0.0), 1)
                    pick, verdicts, whole = accept_draws(
                        key, prob, shared, places, shares, wide, beside, looks, asked, u, BEAMS, FOREST
                    )
                tl.store(out + V_VERDICTS + depth * DRAFT_WIDTH + f, verdicts, mask=f < DRAFT_WIDTH)
                further = whole | ~beside | CONTINUES
            else:
                if slack >= 0:
                    # Or: the most draws that stay in the forest, or end, with the probability asked for.
                    node = tl.sum(tl.where(parent[:, None] == d[None, :], at[None, :], 0), 1)
                    inside = f_alive[None, :] & (f_parent[None, :] == node[:, None])
                    inside = inside & (f_token[None, :] == token[:, None])
                    stays = tl.sum(tl.where(ends | (tl.sum(inside.to(tl.int32), 1) > 0), prob, 0.0), 0)
                    power, reach = stays, min_width * 0
                    for _ in range(BEAM_COUNT):
                        reach += (1 - power <= slack).to(tl.int64)
                        power = power * stays
                    wide = tl.where(beside & (more == 0), tl.maximum(reach, min_width), BEAM_COUNT)
                u = tl.load(uniforms + d, mask=real, other=0).to(tl.float64, bitcast=True)
                if DISTINCT:
                    nothing = tl.full([BEAMS], -1, tl.int64)
                    pick = picked_apart(key, prob, prob, nothing, 0, u, BEAM_COUNT, BEAMS)
                else:
                    pick = picked(key, prob, u)
            absent = (pick < 0) | (d >= wide)
            mine = some[None, :] & (key[None, :] == pick[:, None])
            new = tl.sum(tl.where(mine, token[None, :], 0), 1)
            above = tl.sum(tl.where(mine, parent[None, :], 0), 1)
            lp = tl.sum(tl.where(mine, logp[None, :], 0.0), 1)
            after = tl.sum(tl.where(mine, weight[None, :], 0.0), 1)
            same = (pick[None, :] == pick[:, None]) & (d[None, :] < d[:, None]) & real[None, :]
            ended = _is_end(new, eos_ptr, eos_count)
            dead = (tl.sum(same.to(tl.int32), 1) > 0) | ended | absent | ~real
            tl.store(to + V_PARENT, tl.where(absent, -1, above), mask=real)
            tl.store(to + V_TOKEN, new, mask=real)
            tl.store(to + V_LOGP, lp.to(tl.int64, bitcast=True), mask=real)
        after = tl.where(dead, -float("inf"), after)
        live = after > -float("inf")
        from_node = tl.sum(tl.where(above[:, None] == d[None, :], at[None, :], 0), 1)
        match = (
            f_alive[None, :] & (f_parent[None, :] == from_node[:, None]) & (f_token[None, :] == new[:, None])
        )
        held = tl.sum(match.to(tl.int32), 1) > 0
        index = tl.min(tl.where(match, f[None, :], FOREST), 1)
        place = tl.where(held, (BEAM_COUNT + depth * DRAFT_WIDTH + index).to(tl.int64), 0)
        finite = tl.load(best_ptr + at * (2 * COUNT + 1) + 2 * COUNT, mask=real, other=0.0)
        tl.store(to + V_FINITE, finite.to(tl.int64), mask=real)
        count += going.to(tl.int32)  # type: ignore[attr-defined]
        out_token = tl.where(going, new, out_token)
        out_node = tl.where(going, from_node, out_node)
        out_score = tl.where(going, after, out_score)
        out_known = tl.where(going, tl.where(held, place + 1, 0), out_known)
        unknown = tl.sum((live & ~held).to(tl.int32), 0)
        best = tl.min(tl.where(after == tl.max(after, 0), d, BEAMS), 0)
        kept = tl.sum((live & held & (d == best)).to(tl.int32), 0) > 0
        again = one_beam & going & (more == 0) & (unknown > 0) & kept & (DRAWN == 0)
        passed = further & (unknown == 0) & (tl.sum(live.to(tl.int32), 0) > 0)
        going = (going & (more == 0) & passed) | again
        at, score = place, tl.where(again & (d != best), -float("inf"), after)
        more = again
        depth += 1
    if one_beam:
        best = tl.min(tl.where(out_score == tl.max(out_score, 0), d, BEAMS), 0)
        out_score = tl.where(d == best, out_score, -float("inf"))
    tl.store(out + V_LAYERS, count.to(tl.int64))  # type: ignore[attr-defined]
    first = tl.min(
        tl.where((out_node[:, None] == out_node[None, :]) & real[None, :], d[None, :], BEAMS), 1
    ).to(tl.int64)
    tl.store(after_ptr + S_TOKEN + d, out_token, mask=real)
    tl.store(after_ptr + S_SCORE + d, out_score.to(tl.int64, bitcast=True), mask=real)
    tl.store(after_ptr + S_ROW + d, tl.load(sent + R_ROWS + out_node, mask=real), mask=real)
    tl.store(after_ptr + S_FIRST + d, first, mask=real)
    tl.store(after_ptr + S_KNOWN + d, out_known, mask=real)
    tl.store(after_ptr + S_POSITION, position + count)
    if GAMMA > 0:
        is_beam = out_node < BEAM_COUNT
        inner = tl.maximum(out_node - BEAM_COUNT, 0)
        # Rows of what the draft has computed: the beams (behind their parents), then the forest.
        rows = sent + R_DRAFT_ROWS + BEAM_COUNT
        last = tl.minimum(out_node, DRAFT_COMPUTED - 1)
        tl.store(after_ptr + S_DRAFT_ROW + d, tl.load(rows + last, mask=real), mask=real)
        own = tl.load(state + S_TOKEN + out_node, mask=real & is_beam, other=0)
        drafted = tl.load(out + F_TOKEN + inner, mask=real & ~is_beam, other=0)
        tl.store(after_ptr + S_ABOVE + d, tl.where(is_beam, own, drafted), mask=real)
        depth_of = inner // DRAFT_WIDTH
        grand = tl.load(out + F_PARENT + inner, mask=real, other=0)
        grand += tl.where(depth_of > 0, BEAM_COUNT + (depth_of - 1) * DRAFT_WIDTH, 0)
        grand = tl.minimum(grand, DRAFT_COMPUTED - 1)
        tl.store(after_ptr + S_ABOVE_ROW + d, tl.load(rows + grand, mask=real), mask=real)
        tl.store(after_ptr + S_MISSING, (count > GAMMA).to(tl.int64))


def _warps(*sizes: int) -> int:
    """Where draws are tested: the registers of one warp hold tables of 32 x 32 entries, and not 64 x 64."""
    return 1 if max(sizes) <= 32 else 4


class TritonLaw:
    """See `device.law.DeviceLaw`.

    Args:
        device: where it will run; None: whatever it is, no kernel starts early there.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._early = device is not None and starts_early(device)

    def takes(self, layout: CoverLayout, target_top_n: int, draft_top_n: int) -> bool:
        width, draft_width = layout.width, layout.draft_width
        if layout.drawn > _MOST_ENTRIES or (layout.drawn and draft_width > _MOST_TESTED):
            return False
        joint = max(width * target_top_n, max(width, draft_width) * draft_top_n)
        return max(target_top_n, draft_top_n, draft_width, width) <= _MOST_ENTRIES and joint <= _MOST_JOINT

    def pack(self, side: Side, logits: Tensor) -> Tensor:
        """Rows of `logits` must be contiguous."""
        rows, vocab, count = logits.shape[0], side.vocab, side.top_n
        parts = triton.cdiv(vocab, _PART)
        keys = torch.empty((rows, parts, count), dtype=torch.long, device=logits.device)
        peaks, masses = torch.empty((2, rows, parts), dtype=torch.float32, device=logits.device)
        out = torch.empty((rows, 2 * count + 1), dtype=torch.float32, device=logits.device)
        # Started early these many programs would all settle where the head's leave room: on a few multiprocessors.
        _parts_of_rows[(rows, parts)](
            logits, keys, peaks, masses, logits.stride(0), vocab, parts,
            COUNT=count, PART=_PART, EARLY=self._early, num_warps=4,
        )  # fmt: skip
        _whole_rows[(rows,)](
            keys, peaks, masses, out, parts,
            COUNT=count, PARTS=triton.next_power_of_2(parts), ENTRIES=triton.next_power_of_2(parts * count),
            **how(self._early, 4),
        )  # fmt: skip
        return out

    def draft(
        self, best: Tensor, scores: Tensor, depth: int, layout: CoverLayout | DraftLayout, outcome: Tensor,
        eos: Tensor,
    ) -> None:  # fmt: skip
        requests, parents = scores.shape
        count, fields = best.shape[1] // 2, layout.forest
        _draft[(requests,)](
            best, scores, scores.stride(0), eos, len(eos), outcome, outcome.stride(0), parents, depth,
            WIDTH=layout.draft_width, PARENT=fields.parent.start, TOKEN=fields.token.start,
            WEIGHT=fields.weight.start, LOGP=fields.logp.start, PROB=fields.prob.start,
            FINITE=fields.finite.start, FINITE_WIDTH=fields.finite.shape[1],
            COUNT=count, WIDE=triton.next_power_of_2(count), PARENTS=triton.next_power_of_2(parents),
            SIZE=triton.next_power_of_2(layout.draft_width), **how(self._early, 1),
        )  # fmt: skip

    def draw(
        self, best: Tensor, scores: Tensor, depth: int, layout: CoverLayout | DraftLayout, request: Tensor,
        outcome: Tensor, eos: Tensor, greedy: bool, support: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        requests, parents = scores.shape
        count, fields, sent = best.shape[1] // 2, layout.forest, layout.request
        taken = min(1 if greedy else support, parents * count)
        names = {name.upper(): getattr(fields, name).start for name in fields._fields}
        size = max(2, triton.next_power_of_2(taken))
        _draw[(requests,)](
            best, scores, scores.stride(0), eos, len(eos), request, request.stride(0), outcome, outcome.stride(0),
            parents, depth,
            R_TEMPERATURE=sent.temperature.start, R_TOP_P=sent.top_p.start, R_UNIFORMS=sent.draft_uniforms.start,
            WIDTH=layout.draft_width, SUPPORT=fields.prob.shape[1], TAKEN=taken, **names,
            FINITE_WIDTH=fields.finite.shape[1], GREEDY=greedy, COUNT=count, WIDE=triton.next_power_of_2(count),
            PARENTS=triton.next_power_of_2(parents), SIZE=size,
            DRAWN=triton.next_power_of_2(layout.draft_width), DISTINCT=distinct, **how(self._early, _warps(size)),
        )  # fmt: skip

    def recall(
        self, best: Tensor, known: Tensor, depth: int, layout: CoverLayout, outcome: Tensor, memory: Tensor
    ) -> Tensor:
        count, forest, nodes = best.shape[1] // 2, layout.forest, layout.gamma * layout.draft_width
        parents = best.shape[0] // layout.requests
        found = known.new_empty((layout.requests, parents))
        _recall[(best.shape[0],)](
            best, known, known.stride(0), found, outcome, outcome.stride(0),
            memory, memory.view(torch.float32), memory.stride(0), parents, depth,
            BEAM_COUNT=layout.width, WIDTH=layout.draft_width, NODES=nodes, FOREST=triton.next_power_of_2(nodes),
            F_PARENT=forest.parent.start, F_TOKEN=forest.token.start, F_WEIGHT=forest.weight.start,
            M_ROWS=2 * layout.rows.start, COUNT=count, OWN=layout.recalled, FEW=min(count, layout.recalled),
            WIDE=triton.next_power_of_2(count), **how(self._early, 1),
        )  # fmt: skip
        return found

    def forest_masks(
        self, masks: TreeMasks, base: Tensor, parent: Tensor | None, slots: Tensor, rows: Tensor
    ) -> Tensor:
        requests, nodes = slots.shape
        table = masks.table
        out = table.new_empty((requests * nodes, table.shape[1]))
        above = slots if parent is None else parent
        _forest_masks[(requests * nodes, triton.cdiv(table.shape[1], _PART))](
            table, out, base, base.stride(0), above, above.stride(0), slots, slots.stride(0),
            rows, rows.stride(0), table.shape[1], nodes, above.shape[-1],
            ALONE=parent is None, BLOCK=_PART, **how(self._early, 4),
        )  # fmt: skip
        return out

    def catch_up_masks(
        self, masks: TreeMasks, state: Tensor, layout: CoverLayout, slots: Tensor, rows: Tensor
    ) -> Tensor:
        requests, nodes = slots.shape
        table, fields = masks.table, layout.state
        out = table.new_empty((requests * nodes, table.shape[1]))
        _catch_up_masks[(requests * nodes, triton.cdiv(table.shape[1], _PART))](
            table, out, state, state.stride(0), slots, slots.stride(0), rows, rows.stride(0), table.shape[1],
            WIDTH=layout.width, ABOVE_ROW=fields.above_row.start, DRAFT_ROW=fields.draft_row.start,
            FIRST=fields.first.start, MISSING=fields.missing.start, BLOCK=_PART, **how(self._early, 4),
        )  # fmt: skip
        return out

    def verify(
        self, best: Tensor, state: Tensor, after: Tensor, request: Tensor, outcome: Tensor, layout: CoverLayout,
        eos: Tensor, greedy: bool, support: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        count = best.shape[1] // 2
        size = layout.kept or min(1 if greedy else support, layout.width * count)
        places, entries = max(2, triton.next_power_of_2(size)), triton.next_power_of_2(max(1, layout.drawn))
        sent = layout.request
        names: dict[str, int] = {}
        for letter, fields in (("S", layout.state), ("V", layout.verified)):
            names |= {f"{letter}_{name.upper()}": getattr(fields, name).start for name in fields._fields}
        _verify[(layout.requests,)](
            best, state, after, state.stride(0), request, request.stride(0), outcome, outcome.stride(0),
            eos, len(eos),
            BEAM_COUNT=layout.width, DRAFT_WIDTH=max(1, layout.draft_width), GAMMA=layout.gamma,
            NODES=layout.nodes, WINDOW=layout.window, SUPPORT=size,
            DRAFT_COMPUTED=max(1, layout.draft_nodes - layout.width),
            R_ROWS=sent.target_rows.start, R_DRAFT_ROWS=sent.draft_rows.start, R_ORIGIN=sent.origin.start,
            R_TEMPERATURE=sent.temperature.start, R_TOP_P=sent.top_p.start,
            R_MASS=sent.mass.start, R_MIN_WIDTH=sent.min_width.start, R_SLACK=sent.slack.start, R_LAST=sent.last.start,
            R_ONE_BEAM=sent.one_beam.start, R_UNIFORMS=sent.uniforms.start,
            F_PARENT=layout.forest.parent.start, F_TOKEN=layout.forest.token.start,
            F_WEIGHT=layout.forest.weight.start, **names,
            F_SUPPORT_PARENT=layout.forest.support_parent.start, F_SUPPORT_TOKEN=layout.forest.support_token.start,
            F_PROB=layout.forest.prob.start, F_DRAWS=layout.forest.draws.start,
            KEPT=layout.kept, DRAWN=layout.drawn, CONTINUES=layout.continues,
            ENTRIES=entries, GREEDY=greedy, DISTINCT=distinct,
            COUNT=count, WIDE=triton.next_power_of_2(count),
            BEAMS=triton.next_power_of_2(layout.width), SIZE=places,
            FOREST=max(2, triton.next_power_of_2(layout.draft_width)),
            **how(self._early, _warps(places, entries) if layout.drawn else 1),
        )  # fmt: skip
