"""A whole CPU forward in one call: matrix tiles (AMX) of x86 processors, `native/tiles.c`.

Takes the place of `llama.LlamaForward` for bfloat16 models, and for drafts of any dtype in int8. A
small model's forward is bound by reading its weights once everything else is out of the way: the
weights are packed in the order in which they are read, and nothing returns to Python between layers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.forward import native
from dsbd_cli.loading import processor

_FLAGS = ("-mamx-tile", "-mamx-int8", "-mamx-bf16")
_PAGE = 1 << 21
_ROPES_BY_POSITION = {"default", "linear", "llama3"}
_pointer, _long, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _pointer), ("scale", _pointer), ("bias", _pointer), ("inputs", _long),
                ("outputs", _long)]  # fmt: skip


class _Layer(ctypes.Structure):
    _fields_ = [*((name, _pointer) for name in ("before", "after", "q_norm", "k_norm")),
                *((name, _Linear) for name in ("qkv", "out", "gate_up", "down"))]  # fmt: skip


class _Model(ctypes.Structure):
    _fields_ = [*((name, _long) for name in ("layers", "hidden", "heads", "groups", "size", "inner", "int8")),
                *((name, _float) for name in ("eps", "head_eps", "scaling")),
                ("layer", ctypes.POINTER(_Layer)), ("norm", _pointer), ("head", _Linear)]  # fmt: skip


class _Request(ctypes.Structure):
    _fields_ = [*((name, _long) for name in ("count", "used", "capacity", "begin")),
                *((name, _pointer) for name in ("x", "cos", "sin", "mask")), ("mask_stride", _long),
                ("slots", _pointer), ("keep", _pointer), ("kept", _long),
                *((name, _pointer) for name in ("keys", "values", "logits"))]  # fmt: skip


@functools.cache
def library() -> Any:
    """The compiled forward, allowed to use the tiles; None where there are none, or no compiler."""
    if not processor.amx_likely():
        return None
    loaded: Any = native.compiled(
        lambda: ctypes.CDLL(str(native.built("kernels.c", "tiles.c", flags=_FLAGS)))
    )
    if loaded is None or loaded.allow() != 0:
        return None
    loaded.room.restype = _long
    loaded.room.argtypes = [_pointer, _long, _long, _long]
    loaded.forward.restype = None
    loaded.forward.argtypes = [_pointer] * 4
    return loaded


class AmxForward:
    """Takes the place of `hf.HfForward`; same call as `llama.LlamaForward`.

    Args:
        model: one that `backends` lets through.
        int8: multiply in int8: for drafts, whatever they propose is what is recorded.

    Attributes:
        dtype: of keys, values and logits.
        int8: whether it multiplies in int8.
        relative_node_cost: what a node more costs, in forwards of one node (measured: 36 nodes cost 1.5).
    """

    dtype = torch.bfloat16
    relative_node_cost = 0.012
    reads_length = False
    takes_spans = False
    between: Callable[[], None] | None = None

    def __init__(self, model: Any, *, int8: bool = False) -> None:
        inner, config = model.model, model.config
        self._library, self._team, self.int8 = library(), native.team(), int8
        self._embed, self._rotary = inner.embed_tokens, inner.rotary_emb
        self._turns: tuple[Tensor, Tensor] | None = None
        self._layers = list(inner.layers)
        attention = self._layers[0].self_attn
        self._groups, self._size = int(config.num_key_value_heads), int(attention.head_dim)
        self._kept: list[Any] = []  # what the structures point into
        self._store = _Store(_weights_of(model), int8)
        self._rows = int(model.lm_head.weight.shape[0])
        array = (_Layer * len(self._layers))(*[self._layer(layer) for layer in self._layers])
        head_norm = getattr(attention, "q_norm", None)
        self._model = _Model(
            len(self._layers), config.hidden_size, config.num_attention_heads, self._groups, self._size,
            config.intermediate_size, int(int8), inner.norm.variance_epsilon,
            0.0 if head_norm is None else head_norm.variance_epsilon, attention.scaling,
            array, self._small(inner.norm.weight), self._linear(model.lm_head),
        )  # fmt: skip
        self._kept.append(array)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pools: tuple[Any, int, Any, Any] = (None, 0, None, None)

    def _small(self, weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> int:
        """The address of a small tensor, which is kept."""
        self._kept.append(weight.detach().to(dtype).contiguous())
        return self._kept[-1].data_ptr()

    def _linear(self, *linears: Any, mixed: bool = False) -> _Linear:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            parts = [
                weight.new_zeros(len(one.weight)) if one.bias is None else one.bias.detach()
                for one in linears
            ]
            bias = torch.cat(parts)
        if mixed:
            order = torch.arange(len(weight)).view(2, -1, 16).transpose(0, 1).reshape(-1)
            weight, bias = weight[order], None if bias is None else bias[order]
        outputs, inputs = weight.shape
        address, scale = self._store.put(weight)
        return _Linear(
            address,
            None if scale is None else self._small(_padded(scale), torch.float32),
            None if bias is None else self._small(_padded(bias), torch.float32),
            inputs,
            outputs,
        )

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        norms += [getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)]
        return _Layer(
            *[None if norm is None else self._small(norm.weight) for norm in norms],
            self._linear(attention.q_proj, attention.k_proj, attention.v_proj),
            self._linear(attention.o_proj),
            self._linear(mlp.gate_proj, mlp.up_proj, mixed=True),
            self._linear(mlp.down_proj),
        )

    def describe(self) -> str:
        """One line for people."""
        return f"AMX forward, {'int8' if self.int8 else 'bfloat16'}"

    def needs_no_mask(self, begin: int) -> bool:
        """Prompt tokens in slots in order never need one."""
        return True

    def __call__(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes named by `keep`; arguments as in `hf.HfForward`.

        Without a mask the nodes are the last tokens of a prompt that fills slots 1, 2, ... in order.
        """
        count = len(ids)
        x = self._embed(ids).to(self.dtype)
        cos, sin = self._turn(x, positions, cache.capacity)
        if isinstance(keep, int):
            keep = torch.arange(count - keep if keep else 0, count)
        logits = torch.empty((len(keep), self._rows), dtype=self.dtype)
        keys, values = self._pool(cache, x)
        request = _Request(
            count, cache.used, cache.capacity, cache.used - count - 1, x.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            None if mask is None else mask.data_ptr(), 0 if mask is None else mask.stride(0),
            cache.slots.data_ptr(), keep.data_ptr(), len(keep), keys, values, logits.data_ptr(),
        )  # fmt: skip
        team = self._team
        team.threads = torch.get_num_threads() if team.parallel else 1
        model = ctypes.byref(self._model)
        size = self._library.room(model, count, cache.used, team.threads)
        if len(self._memory) < size:
            self._memory = torch.zeros(2 * size, dtype=torch.uint8)
        self._library.forward(model, ctypes.byref(request), ctypes.byref(team), self._memory.data_ptr())
        return logits

    def _turn(self, x: Tensor, positions: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [N, size] each, of the nodes' positions."""
        if getattr(self._rotary, "rope_type", None) not in _ROPES_BY_POSITION:
            cos, sin = self._rotary(x, positions[None])
            return cos[0].contiguous(), sin[0].contiguous()
        if self._turns is None or len(self._turns[0]) < capacity:  # a node's position is below its slot count
            cos, sin = self._rotary(x, torch.arange(capacity)[None])
            self._turns = cos[0].contiguous(), sin[0].contiguous()
        return self._turns[0][positions], self._turns[1][positions]

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


class _Store:
    """One buffer for all packed weights, in large pages where the system has them."""

    def __init__(self, shapes: Sequence[tuple[int, int]], int8: bool) -> None:
        self._int8 = int8
        size = sum(-(-rows // 32) * 32 * columns * (1 if int8 else 2) for rows, columns in shapes)
        self._bytes = torch.empty(size + _PAGE, dtype=torch.uint8)
        self._at = -self._bytes.data_ptr() % _PAGE
        library().large_pages(_pointer(self._bytes.data_ptr() + self._at), _long(size // _PAGE * _PAGE))

    def put(self, weight: Tensor) -> tuple[int, Tensor | None]:
        """Pack [outputs, inputs]; its address, and for int8 one scale an output."""
        tiles, scale = packed(weight, self._int8)
        flat = tiles.view(torch.uint8).flatten()
        place = self._bytes[self._at : self._at + len(flat)]
        place.copy_(flat)
        self._at += len(flat)
        return place.data_ptr(), scale


def _weights_of(model: Any) -> list[tuple[int, int]]:
    """Shapes of all matrices that a forward reads."""
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [(module.out_features, module.in_features) for module in linears]


def _padded(values: Tensor) -> Tensor:
    """Up to whole units of 32 outputs."""
    return torch.nn.functional.pad(values, (0, -len(values) % 32))


def packed(weight: Tensor, int8: bool) -> tuple[Tensor, Tensor | None]:
    """A weight [outputs, inputs] in the order in which `native/tiles.c` reads it, and its scales.

    Returns:
        [units of 32 outputs, steps of 64 bytes, 2 halves, 16, 16 outputs, 2 or 4 inputs]; float32
        [outputs] for int8, else None.
    """
    scale = None
    if int8:
        wide = weight.float()
        scale = wide.abs().amax(1).clamp_min(1e-8) / 127
        weight = (wide / scale[:, None]).round().to(torch.int8)
    else:
        weight = weight.to(torch.bfloat16)
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 32))
    together = 4 if int8 else 2
    parts = weight.view(len(weight) // 32, 2, 16, weight.shape[1] // (16 * together), 16, together)
    return parts.permute(0, 3, 1, 4, 2, 5).contiguous(), scale
