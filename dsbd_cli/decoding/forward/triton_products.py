"""Matrix products of few nodes with small weights on a GPU, and all that stands around them, in Triton.

Of a small model's forward (a draft's, mostly) next to nothing is arithmetic: kernels of two to four microseconds
follow each other, nine a layer where each step has its own. Here a layer has five, attention's among them. A norm is
split so that no kernel waits for a whole row: who writes a row also writes it times the next norm's weights
(`scaled`) and sums of its squares by program (`squares`), and who reads it divides the products of `scaled` by the
root. Where the device can start a kernel before the one in front of it has ended (programmatic dependent launch, from
Hopper on), it does: a kernel asks for its weights, waits for the other's numbers and then lets the next one start.

One module, since the kernels of a layer share this form of a row between them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # an older Triton, where nothing starts early
    gdc_wait = gdc_launch_dependents = None

# Shared memory that any device since 2018 gives a program, and loads in flight beyond which nothing is won.
_SHARED_BYTES, _MOST_STAGES = 96 << 10, 9


@triton.jit
def ready(EARLY: tl.constexpr):
    """From here on what earlier kernels wrote may be read, and something be written.

    The next kernel may start, but not pass its own `ready` before this one has ended: what it reads in front of that
    must be constant.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ready_alone(EARLY: tl.constexpr):
    """Likewise, in front of a kernel that reads what was written before this one began."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _ahead(weight_ptr, first, outputs, INPUTS: tl.constexpr, EARLY: tl.constexpr):
    """Have 16 rows of weights brought into the device's cache while the kernel in front runs; waits for nothing.

    (Of 128 threads each asks for an eighth of a row. A draft's weights are in memory: its head, and its target, are
    larger than the cache.)
    """
    if EARLY:
        lane = tl.arange(0, 128)
        row = tl.minimum(first + lane // 8, outputs - 1).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [weight_ptr + row * INPUTS + lane % 8 * (INPUTS // 8), lane * 0 + INPUTS // 4],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _start(
    ids_ptr, positions_ptr, embed_ptr, norm_ptr, cos_ptr, sin_ptr,
    x_ptr, scaled_ptr, squares_ptr, node_cos_ptr, node_sin_ptr, width, size, id_step, position_step,
    NORMED: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One node: its embedding, and the cosines and sines of its position."""
    ready(EARLY)
    node = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < width
    x = tl.load(embed_ptr + tl.load(ids_ptr + node * id_step) * width + at, mask=inside, other=0.0)
    tl.store(x_ptr + node * width + at, x, mask=inside)
    if NORMED:
        wide = x.to(tl.float32)
        weight = tl.load(norm_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(scaled_ptr + node * width + at, (wide * weight).to(x.dtype), mask=inside)
        tl.store(squares_ptr + node, tl.sum(wide * wide, 0))
    dim = tl.arange(0, SIZE)
    own = dim < size
    place = tl.load(positions_ptr + node * position_step) * size + dim
    tl.store(node_cos_ptr + node * size + dim, tl.load(cos_ptr + place, mask=own, other=0.0), mask=own)
    tl.store(node_sin_ptr + node * size + dim, tl.load(sin_ptr + place, mask=own, other=0.0), mask=own)


@triton.jit
def _squares(squares_ptr, rows, parts, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """[PARTS, ROWS]: what each program that wrote the rows added up."""
    part, row = tl.arange(0, PARTS)[:, None], tl.arange(0, ROWS)[None, :]
    return tl.load(squares_ptr + part * rows + row, mask=(part < parts) & (row < rows), other=0.0)


@triton.jit
def _inverse(squares, width, eps):
    """One over the root of the mean square, [ROWS, 1]."""
    return (1.0 / tl.sqrt(tl.sum(squares, 0) / width + eps))[:, None]


@triton.jit(do_not_specialize=["rows", "parts", "capacity"])  # compiled once for all batches
def _heads(
    scaled_ptr, squares_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, slots_ptr, q_weight_ptr, k_weight_ptr,
    query_ptr, keys_ptr, values_ptr, rows, parts, heads, groups, capacity, eps, head_eps,
    INPUTS: tl.constexpr, SIZE: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HALF dimensions of a head and those that they are turned with: product, norm of the head, turn, place.

    (`triton_kernels._rope` says the same of products that are there already.)
    """
    head = tl.program_id(0) // (SIZE // 2 // HALF)
    dim = tl.program_id(0) % (SIZE // 2 // HALF) * HALF + tl.arange(0, HALF)
    low_at = weight_ptr + (head * SIZE + dim[:, None]).to(tl.int64) * INPUTS
    high_at = low_at + SIZE // 2 * INPUTS
    row, deep = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    real = row < rows
    first, outputs = head * SIZE + tl.program_id(0) % (SIZE // 2 // HALF) * HALF, (heads + 2 * groups) * SIZE
    for some in tl.static_range(0, HALF, 16):
        _ahead(weight_ptr, first + some, outputs, INPUTS, EARLY)
        _ahead(weight_ptr, first + SIZE // 2 + some, outputs, INPUTS, EARLY)
    ready_alone(EARLY)  # (in front of attention)
    squares = _squares(squares_ptr, rows, parts, ROWS, PARTS)
    # Asked for in front of the product, which takes as long as they take to come.
    whole = real[:, None] & (dim >= 0)[None, :]
    slot = tl.load(slots_ptr + row, mask=real, other=0)
    turn = row[:, None] * SIZE + dim[None, :]
    c_low = tl.load(cos_ptr + turn, mask=whole, other=0.0)
    c_high = tl.load(cos_ptr + turn + SIZE // 2, mask=whole, other=0.0)
    s_low = tl.load(sin_ptr + turn, mask=whole, other=0.0)
    s_high = tl.load(sin_ptr + turn + SIZE // 2, mask=whole, other=0.0)
    low, high = tl.zeros([ROWS, HALF], tl.float32), tl.zeros([ROWS, HALF], tl.float32)
    for k in range(0, INPUTS, DEPTH):
        x = tl.load(scaled_ptr + row[:, None] * INPUTS + k + deep[None, :], mask=real[:, None], other=0.0)
        low = tl.dot(x, tl.trans(tl.load(low_at + k + deep[None, :])), low)
        high = tl.dot(x, tl.trans(tl.load(high_at + k + deep[None, :])), high)
    inverse = _inverse(squares, INPUTS, eps)
    low, high = low * inverse, high * inverse
    kind = query_ptr.dtype.element_ty
    if BIASED:
        low += tl.load(bias_ptr + head * SIZE + dim).to(tl.float32)[None, :]
        high += tl.load(bias_ptr + head * SIZE + SIZE // 2 + dim).to(tl.float32)[None, :]
    low, high = low.to(kind).to(tl.float32), high.to(kind).to(tl.float32)
    is_query, is_value = head < heads, head >= heads + groups
    if NORMED:  # noqa: SIM102 (known when it is compiled; HALF is a whole half then)
        if head < heads + groups:
            mean = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / SIZE
            inverse = (1.0 / tl.sqrt(mean + head_eps))[:, None]
            which = head + 0 * dim
            near, far = which < heads, which >= heads
            low_weight = tl.load(q_weight_ptr + dim, mask=near, other=0.0).to(tl.float32)
            low_weight += tl.load(k_weight_ptr + dim, mask=far, other=0.0).to(tl.float32)
            high_weight = tl.load(q_weight_ptr + SIZE // 2 + dim, mask=near, other=0.0).to(tl.float32)
            high_weight += tl.load(k_weight_ptr + SIZE // 2 + dim, mask=far, other=0.0).to(tl.float32)
            low = (low_weight[None, :] * (low * inverse).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            high = (high_weight[None, :] * (high * inverse).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    # Where a row's numbers go: its slot of this head's keys or values, or its place among the queries.
    if is_value:
        value_at = ((head - heads - groups).to(tl.int64) * capacity + slot)[:, None] * SIZE + dim[None, :]
        tl.store(values_ptr + value_at, low.to(kind), mask=whole)
        tl.store(values_ptr + value_at + SIZE // 2, high.to(kind), mask=whole)
    else:
        cos_low, cos_high = c_low.to(tl.float32), c_high.to(tl.float32)
        sin_low, sin_high = s_low.to(tl.float32), s_high.to(tl.float32)
        turned_low = (low * cos_low).to(kind).to(tl.float32) - (high * sin_low).to(kind).to(tl.float32)
        turned_high = (high * cos_high).to(kind).to(tl.float32) + (low * sin_high).to(kind).to(tl.float32)
        if is_query:
            shared = heads // groups
            query_at = ((row * shared + head % shared) * groups + head // shared)[:, None] * SIZE + dim[
                None, :
            ]
            tl.store(query_ptr + query_at, turned_low.to(kind), mask=whole)
            tl.store(query_ptr + query_at + SIZE // 2, turned_high.to(kind), mask=whole)
        else:
            key_at = ((head - heads).to(tl.int64) * capacity + slot)[:, None] * SIZE + dim[None, :]
            tl.store(keys_ptr + key_at, turned_low.to(kind), mask=whole)
            tl.store(keys_ptr + key_at + SIZE // 2, turned_high.to(kind), mask=whole)


@triton.jit
def _product(
    x_ptr, weight_ptr, col, rows, outputs,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """[ROWS, COLS] float32: rows of x times the weights of outputs `col`."""
    row, deep = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    real, there = row < rows, col < outputs
    weight_at = weight_ptr + col[:, None].to(tl.int64) * INPUTS + deep[None, :]
    sums = tl.zeros([ROWS, COLS], tl.float32)
    for k in range(0, INPUTS, DEPTH):
        x = tl.load(x_ptr + row[:, None] * INPUTS + k + deep[None, :], mask=real[:, None], other=0.0)
        weight = tl.load(weight_at + k, mask=there[:, None], other=0.0)
        sums = tl.dot(x, tl.trans(weight), sums)
    return sums


@triton.jit(do_not_specialize=["rows"])
def _residual(
    x_ptr, weight_ptr, bias_ptr, add_ptr, norm_ptr, out_ptr, scaled_ptr, squares_ptr, rows, outputs,
    INPUTS: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """COLS outputs of a product, added to what was there; and what the norm behind it needs."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    real, there = row < rows, col < outputs
    _ahead(weight_ptr, tl.program_id(0) * COLS, outputs, INPUTS, EARLY)
    norm = tl.load(norm_ptr + col, mask=there, other=0.0)
    if BIASED:
        bias = tl.load(bias_ptr + col, mask=there, other=0.0)
    ready(EARLY)
    whole = real[:, None] & there[None, :]
    at = row[:, None] * outputs + col[None, :]
    add = tl.load(add_ptr + at, mask=whole, other=0.0)
    sums = _product(x_ptr, weight_ptr, col, rows, outputs, INPUTS, ROWS, COLS, DEPTH) + add.to(tl.float32)
    if BIASED:
        sums += bias.to(tl.float32)[None, :]
    kind = out_ptr.dtype.element_ty
    new = sums.to(kind)
    tl.store(out_ptr + at, new, mask=whole)
    wide = tl.where(whole, new.to(tl.float32), 0.0)
    tl.store(scaled_ptr + at, (wide * norm.to(tl.float32)[None, :]).to(kind), mask=whole)
    tl.store(squares_ptr + tl.program_id(0) * rows + row, tl.sum(wide * wide, 1), mask=real)


@triton.jit(do_not_specialize=["rows", "parts"])
def _gated(
    scaled_ptr, squares_ptr, weight_ptr, out_ptr, rows, parts, inner, eps,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """silu(gate) x up of COLS columns of each, [rows, inner]."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row, deep = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    real, there = row < rows, col < inner
    gate_at = weight_ptr + col[:, None].to(tl.int64) * INPUTS + deep[None, :]
    up_at = gate_at + inner.to(tl.int64) * INPUTS
    _ahead(weight_ptr, tl.program_id(0) * COLS, 2 * inner, INPUTS, EARLY)
    _ahead(weight_ptr, inner + tl.program_id(0) * COLS, 2 * inner, INPUTS, EARLY)
    ready(EARLY)
    squares = _squares(squares_ptr, rows, parts, ROWS, PARTS)
    gate, up = tl.zeros([ROWS, COLS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    for k in range(0, INPUTS, DEPTH):
        x = tl.load(scaled_ptr + row[:, None] * INPUTS + k + deep[None, :], mask=real[:, None], other=0.0)
        gate = tl.dot(x, tl.trans(tl.load(gate_at + k, mask=there[:, None], other=0.0)), gate)
        up = tl.dot(x, tl.trans(tl.load(up_at + k, mask=there[:, None], other=0.0)), up)
    inverse = _inverse(squares, INPUTS, eps)
    kind = out_ptr.dtype.element_ty
    gate = (gate * inverse).to(kind).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    up = (up * inverse).to(kind).to(tl.float32)
    at = row[:, None] * inner + col[None, :]
    tl.store(out_ptr + at, (gate * up).to(kind), mask=real[:, None] & there[None, :])


@triton.jit(do_not_specialize=["rows", "parts"])
def _logits(
    scaled_ptr, squares_ptr, weight_ptr, out_ptr, rows, parts, outputs, eps,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """COLS outputs of the head."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    row = tl.arange(0, ROWS)
    real, there = row < rows, col < outputs
    ready(EARLY)
    squares = _squares(squares_ptr, rows, parts, ROWS, PARTS)
    sums = _product(scaled_ptr, weight_ptr, col, rows, outputs, INPUTS, ROWS, COLS, DEPTH)
    sums = sums * _inverse(squares, INPUTS, eps)
    at = row[:, None].to(tl.int64) * outputs + col[None, :]
    tl.store(out_ptr + at, sums.to(out_ptr.dtype.element_ty), mask=real[:, None] & there[None, :])


class Scaled:
    """Rows times the weights of the norm that comes next, and the sums of their squares.

    Attributes:
        x: [N, width], without those weights. scaled: likewise, with them. squares: float32 [parts, N].
    """

    def __init__(self, like: Tensor, rows: int, width: int, parts: int) -> None:
        self.x, self.scaled = like.new_empty((2, rows, width)).unbind()
        self.squares = torch.empty((parts, rows), dtype=torch.float32, device=like.device)

    def of(self, keep: Tensor) -> Scaled:
        """The rows that `keep` (int64 [K]) names."""
        some = Scaled.__new__(Scaled)
        some.x, some.scaled, some.squares = (
            self.x[keep],
            self.scaled[keep],
            self.squares[:, keep].contiguous(),
        )
        return some


class Products:
    """The kernels, on contiguous CUDA tensors of bfloat16 or float16.

    Args:
        early: whether the device starts a kernel before the one in front of it has ended (`starts_early`).
    """

    def __init__(self, early: bool) -> None:
        self._early = early

    def start(
        self, ids: Tensor, positions: Tensor, embed: Tensor, norm: Tensor | None, turns: tuple[Tensor, Tensor]
    ) -> tuple[Scaled, Tensor, Tensor]:
        """Embeddings [N, width] of `ids`, ready for `norm` where there is one, and their cos and sin [N, size].

        Args:
            ids, positions: int64 [N], of any stride (one position for all is stride 0).
            embed: [V, width]. norm: [width].
            turns: cos and sin of all positions, [positions, size] each.
        """
        count, width, size = len(ids), embed.shape[1], turns[0].shape[1]
        rows = Scaled(embed, count, width, 1)
        cos, sin = embed.new_empty((2, count, size)).unbind()
        _start[(count,)](
            ids, positions, embed, embed if norm is None else norm, *turns, rows.x, rows.scaled, rows.squares,
            cos, sin, width, size, ids.stride(0), positions.stride(0), NORMED=norm is not None,
            WIDTH=triton.next_power_of_2(width), SIZE=triton.next_power_of_2(size), **self._how(4),
        )  # fmt: skip
        return rows, cos, sin

    def heads(
        self, rows: Scaled, eps: float, weight: Tensor, bias: Tensor | None, norms: tuple[Tensor, Tensor] | None,
        head_eps: float, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int,
    ) -> Tensor:  # fmt: skip
        """Queries as `triton_kernels.Kernels.rope` returns them, [N x shared, groups, size]; the rest goes to `slots`.

        Args:
            weight: [(heads + 2 groups) size, width]. bias: likewise without width. norms: of a head's queries, keys.
            keys, values: [1, groups, capacity, size].
        """
        count, inputs = rows.scaled.shape
        _, groups, capacity, size = keys.shape
        half = size // 2 if norms is not None else 16
        query = weight.new_empty((count * heads // groups, groups, size))
        q_weight, k_weight = norms if norms is not None else (weight, weight)
        _heads[((heads + 2 * groups) * (size // 2 // half),)](
            rows.scaled, rows.squares, weight, weight if bias is None else bias, cos, sin, slots, q_weight, k_weight,
            query, keys, values, count, len(rows.squares), heads, groups, capacity, eps, head_eps,
            INPUTS=inputs, SIZE=size, BIASED=bias is not None, NORMED=norms is not None, HALF=half,
            PARTS=triton.next_power_of_2(len(rows.squares)), **self._tile(count, inputs, 2 * half),
        )  # fmt: skip
        return query

    def residual(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Scaled, norm: Tensor) -> Scaled:
        """x @ weight.T + bias + rows.x, ready for `norm`: [N, inputs] to [N, outputs]."""
        count, inputs = x.shape
        outputs = weight.shape[0]
        programs = triton.cdiv(outputs, 16)
        new = Scaled(x, count, outputs, programs)
        _residual[(programs,)](
            x, weight, weight if bias is None else bias, rows.x, norm, new.x, new.scaled, new.squares, count, outputs,
            INPUTS=inputs, BIASED=bias is not None, COLS=16, **self._tile(count, inputs, 16),
        )  # fmt: skip
        return new

    def gated(self, rows: Scaled, eps: float, weight: Tensor) -> Tensor:
        """silu(gate) x up of normed rows; weight [2 inner, width], gate before up. [N, inner]."""
        count, inputs = rows.scaled.shape
        inner = weight.shape[0] // 2
        out = weight.new_empty((count, inner))
        _gated[(triton.cdiv(inner, 16),)](
            rows.scaled, rows.squares, weight, out, count, len(rows.squares), inner, eps, INPUTS=inputs, COLS=16,
            PARTS=triton.next_power_of_2(len(rows.squares)), **self._tile(count, inputs, 32),
        )  # fmt: skip
        return out

    def logits(self, rows: Scaled, eps: float, weight: Tensor) -> Tensor:
        """Normed rows times the head [V, width]: [N, V]."""
        count, inputs = rows.scaled.shape
        outputs = weight.shape[0]
        out = weight.new_empty((count, outputs))
        _logits[(triton.cdiv(outputs, 64),)](
            rows.scaled, rows.squares, weight, out, count, len(rows.squares), outputs, eps, INPUTS=inputs, COLS=64,
            PARTS=triton.next_power_of_2(len(rows.squares)), **self._head_tile(count, inputs),
        )  # fmt: skip
        return out

    def _tile(self, count: int, inputs: int, columns: int) -> dict[str, Any]:
        """Rows and depth of a step, and how many of them are loaded ahead."""
        rows = max(16, triton.next_power_of_2(count))
        depth = 128 if inputs % 128 == 0 else 64
        stages = _SHARED_BYTES // ((rows + columns) * depth * 2)
        stages = max(2, min(_MOST_STAGES, stages, inputs // depth))
        return {"ROWS": rows, "DEPTH": depth, "num_stages": stages} | self._how(4)

    def _head_tile(self, count: int, inputs: int) -> dict[str, Any]:
        """Likewise for a head, which is long enough to be read in turns by few programs of many loads."""
        tile = self._tile(count, inputs, 64)
        return tile | {"num_stages": min(6, tile["num_stages"])}

    def _how(self, warps: int) -> dict[str, Any]:
        return how(self._early, warps)


def how(early: bool, warps: int) -> dict[str, Any]:
    """What a launch of a kernel that is `ready` is told."""
    return {"EARLY": early, "num_warps": warps} | ({"launch_pdl": True} if early else {})


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one in front of it has ended, by device and Triton."""
    return (
        gdc_wait is not None and device.type == "cuda" and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )  # fmt: skip
