"""A whole CPU forward in one call to C: what the two kinds (`amx.py`, `simd.py`) share.

Nothing returns to Python between layers: a small model's forward is bound by reading its weights once
everything else is out of the way. One module, since what C is pointed to is made, kept and handed over together.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer, Stores
from dsbd_cli.decoding.cache.logits import Best
from dsbd_cli.decoding.cache.tree_cache import Plan
from dsbd_cli.decoding.forward import native
from dsbd_cli.decoding.forward.kernels import c_kernels
from dsbd_cli.decoding.forward.records import Layer, Linear, Model, Request, Step
from dsbd_cli.decoding.forward.turns import Turns
from dsbd_cli.loading.ready import packed
from dsbd_cli.loading.ready.packed import Piece, Place

_UNIT = 16
_pointer = ctypes.c_void_p


class WholeForward:
    """Takes the place of `hf.HfForward`; same call as `llama.LlamaForward`.

    Args:
        model: one that `backends` lets through.
        library: the compiled forward.
        int8: whether it multiplies in int8.

    A model that was remembered says where its packed weights are kept (`packed`): they are mapped from there, or
    packed and kept for its next start.

    Attributes:
        dtype: of activations, keys, values and logits.
        takes_plans: whether `best` serves; else `__call__` does.
        relative_node_cost: what a node more costs, in forwards of one node.
    """

    dtype: torch.dtype
    relative_node_cost: float
    int8_activations = False
    reads_length = False
    takes_spans = False
    slot_unit: int = 1
    between: Callable[[], None] | None = None
    _needs_positions = False

    def __init__(self, model: Any, library: Any, int8: bool = False) -> None:
        inner, config = model.model, model.config
        self._library, self._team, self.int8 = library, native.team(), int8
        self._embed, self._rotary = inner.embed_tokens, inner.rotary_emb
        self._turns, self._like = Turns(inner.rotary_emb), torch.empty(0, dtype=self.dtype)
        self._layers = list(inner.layers)
        attention = self._layers[0].self_attn
        self._groups, self._size = int(config.num_key_value_heads), int(attention.head_dim)
        self._kept: list[Any] = []  # what the structures point into
        self._rows = int(model.lm_head.weight.shape[0])
        self._pieces: list[Piece] = []
        place: Place | None = getattr(model, "packed", None)
        found = None if place is None else packed.read(place, self._kept_as())
        if found is not None and [one[:2] for one in found] != _shapes(model):
            found = None
        self._known: Iterator[Piece] | None = None if found is None else iter(found)
        array = (Layer * len(self._layers))(*[self._layer(layer) for layer in self._layers])
        head_norm = getattr(attention, "q_norm", None)
        self._model = Model(
            len(self._layers), config.hidden_size, config.num_attention_heads, self._groups, self._size,
            config.intermediate_size, int(int8), inner.norm.variance_epsilon,
            0.0 if head_norm is None else head_norm.variance_epsilon, attention.scaling,
            array, self._small(inner.norm.weight, self.dtype), self._linear(model.lm_head),
        )  # fmt: skip
        self._kept += [array, self._pieces]
        if place is not None and found is None:
            self.keep(place)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._memory_at = 0, 0  # its address and size
        self._one = threading.Lock()  # Python's own is not held meanwhile, and the memory is one
        self._pools: tuple[Any, int, Any, Any] = (None, 0, None, None)
        self._step = Step()
        self._request = self._step.request
        self._seen: tuple[Any, ...] = (None, 0, None)  # what the step's addresses are of
        self._out = _Out(0, 0)
        self.takes_plans = self._looks_up_in_c()

    def _looks_up_in_c(self) -> bool:
        """Whether C can find tokens and turns itself, as they lie; its step then knows where."""
        # Detached: a module that is moved or cast lets go of the memory of its parameters.
        table, kernels = self._embed.weight.detach(), c_kernels()
        as_they_lie = type(self._embed) is torch.nn.Embedding and table.dtype == self.dtype
        if not as_they_lie or not table.is_contiguous() or not self._turns.by_position or kernels is None:
            return False
        self._tokens = len(table)
        hidden = torch.full((1,), torch.finfo(self.dtype).min, dtype=self.dtype)
        self._kept += [table, hidden]
        self._step.embedding, self._step.hidden = table.data_ptr(), hidden.data_ptr()
        self._step.rows_of = kernels.rows_of(self.dtype)
        return True

    def _layout(self) -> str:
        """What its packed weights are laid out for: another one cannot read them."""
        raise NotImplementedError

    def _kept_as(self) -> str:
        return f"{self._layout()}, {self._rows} rows of the head"

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor | None, int]:
        """Lay out [outputs, inputs] for C: bytes, scales of the outputs, the format."""
        raise NotImplementedError

    def _take(self, piece: Piece) -> Piece:
        """Called for each matrix that was kept: it, or what is computed with in its place."""
        return piece

    def _counted(self, names: Sequence[str]) -> tuple[int, dict[str, int]]:
        """Bytes of all packed weights, and how many weights are in which of the C source's formats."""
        formats: dict[str, int] = {}
        for piece in self._pieces:
            name = names[piece.format]
            formats[name] = formats.get(name, 0) + piece.outputs * piece.inputs
        return sum(piece.weight.nbytes for piece in self._pieces), formats

    def keep(self, place: Place) -> bool:
        """Keep the packed weights for the next start; whether they are there now."""
        layout = self._kept_as()
        return packed.read(place, layout) is not None or packed.write(place, layout, self._pieces)

    def _small(self, weight: Tensor, dtype: torch.dtype) -> int:
        """The address of a small tensor, which is kept."""
        self._kept.append(weight.detach().to(dtype).contiguous())
        return self._kept[-1].data_ptr()

    def _linear(self, *linears: Any, mixed: bool = False) -> Linear:
        if self._known is not None:
            piece = self._take(next(self._known))
        else:
            piece = self._laid_out(linears, mixed)
        self._pieces.append(piece)
        addresses = [
            None if one is None else one.ctypes.data for one in (piece.weight, piece.scale, piece.bias)
        ]
        return Linear(*addresses, piece.inputs, piece.outputs, piece.format)

    def _laid_out(self, linears: tuple[Any, ...], mixed: bool) -> Piece:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.detach()
                for one in linears
            ]
            bias = torch.cat(parts)
        if mixed:
            order = torch.arange(len(weight)).view(2, -1, _UNIT).transpose(0, 1).reshape(-1)
            weight, bias = weight[order], None if bias is None else bias[order]
        bytes_, scale, kind = self._pack(weight)
        small = None if bias is None else padded(bias, 2 * _UNIT)
        return Piece(
            len(weight),
            weight.shape[1],
            kind,
            bytes_.numpy(),
            *(None if one is None else _float32(one) for one in (scale, small)),
        )

    def _layer(self, layer: Any) -> Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)]
        return Layer(
            *[None if norm is None else self._small(norm.weight, self.dtype) for norm in norms],
            self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            self._linear(attention.o_proj),
            self._linear(mlp.gate_proj, mlp.up_proj, mixed=True),
            self._linear(mlp.down_proj),
        )

    def needs_no_mask(self, begin: int) -> bool:
        """Prompt tokens in slots in order never need one."""
        return True

    def __call__(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes named by `keep`; arguments as in `hf.HfForward`.

        Without a mask the nodes are the last tokens of a prompt that fills slots 1, 2, ... in order.

        Raises:
            IndexError: `keep` names what is no node, or more than there are nodes.
        """
        with self._one:
            return self._computed(cache, ids, positions, mask, keep)

    def _computed(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int
    ) -> Tensor:
        count = len(ids)
        x = self._embed(ids).to(self.dtype)
        cos, sin = self._turn(x, positions, cache.capacity)
        if isinstance(keep, int):
            keep = torch.arange(count - keep if keep else 0, count)
        _check_kept(keep.tolist(), count)
        logits = torch.empty((len(keep), self._rows), dtype=self.dtype)
        keys, values = self._pool(cache, x)
        places = cache.note(positions).data_ptr() if self._needs_positions else None
        request = Request(
            count, cache.used, cache.capacity, cache.used - count - 1, x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            None if mask is None else mask.data_ptr(), 0 if mask is None else mask.stride(0),
            cache.slots.data_ptr(), keep.data_ptr(), places, len(keep), keys, values, logits.data_ptr(),
        )  # fmt: skip
        team, model = self._threads(), ctypes.byref(self._model)
        size = self._library.room(model, count, cache.used, cache.capacity, team.threads)
        if self._memory_at[1] < size:
            self._enlarge(size)
        self._library.forward(model, ctypes.byref(request), ctypes.byref(team), self._memory_at[0])
        return logits

    def best(self, stores: Stores, plan: Plan, keep: Sequence[int], vocab: int, count: int) -> Best:
        """The `count` best entries of the logits of nodes `keep` (places in `plan`); tokens from `vocab` on have none.

        Like `TreeMasks.extend`, `__call__` and `kernels.top_logits` one after the other, all of it in C.

        Raises:
            IndexError: a token that has no embedding, or a place in the buffers or in `plan` that is none.
            MemoryError: no memory for a row of logits.
        """
        if min(plan.ids) < 0 or max(plan.ids) >= self._tokens:
            wrong = next(token for token in plan.ids if not 0 <= token < self._tokens)
            raise IndexError(f"token {wrong} of {self._tokens}")
        with self._one:
            cache, step, table = stores.cache, self._step, stores.masks.table
            # What bookkeeping an interruption has torn asks for may lie outside, and C looks at no bounds.
            if (
                max(plan.slots) >= plan.used or plan.used > min(cache.capacity, table.shape[1])
                or max(plan.positions) >= cache.capacity or max(*plan.mask_rows, *plan.base) >= len(table)
            ):  # fmt: skip
                raise IndexError("a node outside the buffers")
            _check_kept(keep, len(plan))
            seen = self._seen
            if not (seen[0] is cache and seen[1] == cache.capacity and seen[2] is table):
                self._point_at(stores)
            numbers = array("q", [
                len(plan), plan.used, len(keep), *plan.ids, *plan.positions, *plan.slots, *plan.mask_rows,
                *plan.base, *plan.sight, *keep,
            ])  # fmt: skip
            step.numbers = numbers.buffer_info()[0]
            out, most = self._out, min(count, vocab, self._rows)
            if len(keep) > out.most or most != out.count or vocab != step.vocab:
                out, self._out = _Out(max(2 * len(keep), out.most), most), _Out(0, 0)
                step.vocab, step.best = vocab, most
                step.best_ids, step.best_logps, step.finite = out.addresses
                self._out = out  # last: interrupted before, the next call writes all of it down
            team = self._threads()
            call = ctypes.byref(self._model), ctypes.byref(step), ctypes.byref(team)
            size = self._library.step(*call, *self._memory_at)
            if size > 0:
                self._enlarge(size)
                size = self._library.step(*call, *self._memory_at)
            if size:
                raise MemoryError("no memory for a row of logits")
            return out.rows(len(keep))

    def _point_at(self, stores: Stores) -> None:
        """Take down the addresses of these buffers."""
        cache, table, step, request = stores.cache, stores.masks.table, self._step, self._request
        self._seen = None, 0, None  # until all are there: it may be interrupted
        turns = self._turns.of(self._like, cache.capacity)
        assert turns is not None  # `takes_plans` says so
        cos, sin = turns
        request.capacity = cache.capacity
        request.keys, request.values = self._pool(cache, table)
        step.cos, step.sin, step.table, step.width = (
            cos.data_ptr(),
            sin.data_ptr(),
            table.data_ptr(),
            table.shape[1],
        )
        step.positions = cache.positions(table.device).data_ptr() if self._needs_positions else None
        self._seen = cache, cache.capacity, table

    def _threads(self) -> native.Team:
        """Those that torch uses now."""
        team = self._team
        team.threads = torch.get_num_threads() if team.parallel else 1
        return team

    def _enlarge(self, size: int) -> None:
        self._memory_at = 0, 0  # until the new one is there: the old one may be gone when this is interrupted
        self._memory = torch.zeros(2 * size, dtype=torch.uint8)
        self._memory_at = self._memory.data_ptr(), 2 * size

    def _turn(self, x: Tensor, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [N, size] each, of the nodes' positions: one is below the slot count."""
        turns = self._turns.of(self._like, capacity)
        if turns is None:
            cos, sin = self._rotary(x, positions[None])
            return cos[0].contiguous(), sin[0].contiguous()
        cos, sin = turns
        return cos[positions], sin[positions]

    def _pool(self, cache: KVBuffer, like: Tensor) -> tuple[Any, Any]:
        """Addresses of every layer's keys and values."""
        if self._pools[0] is not cache or self._pools[1] != cache.capacity:
            pairs = [
                cache.buffers(i, self._groups, self._size, self._size, like) for i in range(len(self._layers))
            ]
            array = _pointer * len(pairs)
            keys, values = (
                array(*[buffer.data_ptr() for buffer in side]) for side in zip(*pairs, strict=True)
            )
            self._pools = cache, cache.capacity, keys, values
        return ctypes.cast(self._pools[2], _pointer), ctypes.cast(self._pools[3], _pointer)


class _Out:
    """Where C writes best entries, `count` of each row: one place for all calls, since its address is dear to find."""

    def __init__(self, most: int, count: int) -> None:
        self.most, self.count = most, count
        self._parts = (
            np.empty((most, count), dtype=np.int64), np.empty((most, count), dtype=np.float32),
            np.empty(most, dtype=bool),
        )  # fmt: skip
        self.addresses = tuple(part.ctypes.data for part in self._parts)

    def rows(self, count: int) -> Best:
        ids, logps, finite = self._parts
        return Best(ids[:count].copy(), logps[:count].copy(), finite[:count].copy())


def _check_kept(keep: Sequence[int], count: int) -> None:
    """Raise where C would read or write outside its buffers, which have a row for each of `count` nodes."""
    if len(keep) > count or (keep and not 0 <= min(keep) <= max(keep) < count):
        raise IndexError(f"logits of nodes outside the forward, which has {count}")


def _shapes(model: Any) -> list[tuple[int, int]]:
    """Outputs and inputs of all matrices, in the order in which they are packed."""
    shapes = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linears in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ):
            shapes.append((sum(len(one.weight) for one in linears), linears[0].weight.shape[1]))
    return [*shapes, tuple(model.lm_head.weight.shape)]


def _float32(values: Tensor) -> np.ndarray:
    return values.float().contiguous().numpy()


def padded(values: Tensor, unit: int) -> Tensor:
    """Up to whole units of outputs."""
    return torch.nn.functional.pad(values, (0, -len(values) % unit))
