"""A forward of Llama-shaped models in as few operations as it takes, from the loaded model's own weights.

Hugging Face's modelling code spends about half of a small model's CPU time outside matrix products:
repeated key/value heads, casts, Python between the steps. This is the same computation without that:
fused projections, prepacked weights (`kernels`), query heads folded into rows of their group (GQA). It is
used only where the self-test finds it to agree with the model's own forward. One module, since a decoder
layer with torch, with C and with Triton is one computation written once and varied in three places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsbd_cli.decoding.cache.buffers import KVBuffer, Span
from dsbd_cli.decoding.forward.few import FewNodes
from dsbd_cli.decoding.forward.kernels import Int8Linear, Linear, PrepackedLinear, fused
from dsbd_cli.decoding.forward.split import SplitLayers, head_of, summed
from dsbd_cli.decoding.forward.turns import Turns
from dsbd_cli.group import ALONE, Group, Norming, group_of

# Where a CUDA graph may be broken (`graphs`): a short piece first, then longer ones.
_FIRST_BREAK, _BREAK_EVERY = 2, 8
# Up to this many query rows a head, folding a group's heads beats repeating keys and values.
_FOLD = 512


class LlamaForward:
    """Takes the place of `hf.HfForward` for the families that `backends` lets through; same call.

    Args:
        model: a loaded model of one of those families.
        linear: the matrix products to use.
        kernels: what runs the steps between them: `kernels.CKernels`, `triton_kernels.Kernels`, or None for
            tensor operations.
        few: few nodes have products of their own (`few.why_not` finds nothing; a GPU).
    """

    relative_node_cost = 0.03
    takes_spans = True
    slot_unit = 1

    def __init__(self, model: Any, linear: type, kernels: Any, *, few: bool = False) -> None:
        self.linear, self.kernels = linear, kernels
        self.int8, self.int8_activations = linear is Int8Linear, False
        self.dtype = torch.float32 if self.int8 else model.dtype
        self.between: Callable[[], None] | None = None
        group = group_of(model)
        self._processes = group.size
        inner = model.model
        self._embed: nn.Embedding = inner.embed_tokens
        self._rotary, self._turns = inner.rotary_emb, Turns(inner.rotary_emb)
        on_gpu = model.device.type == "cuda"
        kind: Any = TorchLayer if kernels is None else TritonLayer if on_gpu else NativeLayer
        self._layers: list[Any] = [
            kind(i, layer, linear, self.dtype, kernels, group) for i, layer in enumerate(inner.layers)
        ]
        # Its attention stops at a length that it reads on the device: one CUDA graph for any length.
        self.reads_length = kind is TritonLayer
        self._norm = Norm(inner.norm, self.dtype)
        self._head = head_of(model.lm_head, linear, group)
        self._products: Any = kernels.products if kind is TritonLayer else None
        split = kind is TritonLayer and group.size > 1
        self._split = SplitLayers(self._layers, self._norm, kernels.rms) if split else None
        self._few = FewNodes(self._layers, self._norm, self._head, self._products) if few else None

    def describe(self) -> str:
        """One line for people: which products and which kernels."""
        compiled = "Triton kernels" if self.reads_length else "C kernels"
        products: dict[type, str] = {Int8Linear: "int8 products", PrepackedLinear: "prepacked weights"}
        return ", ".join((
            "fused Llama forward",
            products.get(self.linear, "torch's products"),
            "tensor operations" if self.kernels is None else compiled,
            *(["few nodes in five kernels a layer"] if self._few is not None else []),
            *([f"split over {self._processes} processes"] if self._processes > 1 else []),
        ))  # fmt: skip

    def needs_no_mask(self, begin: int) -> bool:
        """Whether prompt tokens from `begin` on, in slots in order, can do without a mask."""
        half = self.dtype in (torch.bfloat16, torch.float16)
        return begin == 0 or (half and self._embed.weight.device.type == "cuda")

    def __call__(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes named by `keep`; arguments as in `hf.HfForward`.

        Without a mask the nodes are the last tokens of prompts that fill slots 1, 2, ... in order; with several
        requests (`cache.spans`) they are whole prompts.
        """
        few = self._few if self._few is not None and self._few.serves(len(ids), mask) else None
        rows, x, cos, sin = self._begun(cache, ids, positions, None if few is None else few.first_norm)
        if mask is not None:
            shared = self._layers[0].shared
            if (
                not self.reads_length
                and max(last - first for first, last, *_ in cache.spans) * shared <= _FOLD
            ):
                mask = mask.repeat_interleave(shared, 0)
            mask = mask[None, None]
        kept = keep if isinstance(keep, Tensor) else None
        if isinstance(keep, int) and keep:
            kept = torch.arange(len(ids) - keep, len(ids), device=ids.device)
        if few is not None and rows is not None:
            assert mask is not None
            return few(rows, cache, cos, sin, mask, kept, self._break)
        if self._split is not None:
            return self._head(self._split(x, cache, cos, sin, mask, kept, self._break))
        last = len(self._layers) - 1
        for done, layer in enumerate(self._layers):
            self._break(done)
            x = layer(x, cache, cos, sin, mask, kept if done == last else None)
        return self._head(self._norm(x))

    def _begun(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, norm: Tensor | None
    ) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Embeddings, ready for `norm` where a kernel makes them, as they are, and their cos and sin [N, size]."""
        weight = self._embed.weight
        turns = None
        if self._products is not None and weight.is_contiguous() and weight.dtype == self.dtype:
            turns = self._turns.of(weight[None, :1], cache.capacity)
        if turns is None:
            x = self._embed(ids).to(self.dtype)
            cos, sin = self._rotary(x, positions[None])
            return None, x, cos[0], sin[0]
        rows, cos, sin = self._products.start(ids, positions, weight, norm, turns)
        return rows, rows.x, cos, sin

    def _break(self, done: int) -> None:
        """Where a capture may be broken: before the layer of that number."""
        if self.between is not None and done % _BREAK_EVERY == _FIRST_BREAK and done < len(self._layers) - 2:
            self.between()


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


class Norm:
    """RMS norm over the last dimension."""

    def __init__(self, norm: Any, dtype: torch.dtype) -> None:
        self.weight = norm.weight.detach().to(dtype)
        self.eps = float(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return _rms(x, self.weight, self.eps)


class _Layer:
    """A decoder layer: what all kinds hold, and their order; how it is computed is each kind's own.

    Attributes:
        heads, groups, shared, size: query heads, key/value heads, query heads a key head, their width; of heads
            those that this process has.
    """

    def __init__(
        self, index: int, layer: Any, linear: type, dtype: torch.dtype, kernels: Any, group: Group = ALONE
    ) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.kernels = index, kernels
        self._rms: Norming = _rms if kernels is None else kernels.rms
        self.size = int(attention.head_dim)
        self.heads = int(attention.config.num_attention_heads)
        self.groups = int(attention.config.num_key_value_heads)
        self.shared = self.heads // self.groups
        self.scaling = float(attention.scaling)
        self.before, self.after = (
            Norm(layer.input_layernorm, dtype),
            Norm(layer.post_attention_layernorm, dtype),
        )
        self.head_norms: tuple[Norm, Norm] | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = Norm(attention.q_norm, dtype), Norm(attention.k_norm, dtype)
        self.qkv: Linear = fused([attention.q_proj, attention.k_proj, attention.v_proj], linear)
        self.out: Linear = summed(fused([attention.o_proj], linear, self._columns()), group)
        self.gate_up: Linear = fused([mlp.gate_proj, mlp.up_proj], linear)
        self.down: Linear = summed(fused([mlp.down_proj], linear), group)

    def _columns(self) -> Tensor | None:
        """The order of heads in which `out` gets its input, as columns; None: as the model has them."""
        return None

    def __call__(
        self,
        x: Tensor,
        cache: KVBuffer,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        keep: Tensor | None = None,
    ) -> Tensor:
        """One layer: [N, hidden], or the rows that `keep` names.

        Args:
            x: [N, hidden].
            cache: `slots` and `spans` are set for this forward.
            cos, sin: [N, size], of the nodes' positions.
            mask: additive; [1, 1, N x shared, columns] (rows in the order node, head of a group) or
                [1, 1, N, columns]; None for prompts (`_over_prompts`).
            keep: int64 [K], the nodes that go on behind attention; None: all.
        """
        seen = self.seen(self._rms(x, self.before.weight, self.before.eps), cache, cos, sin, mask)
        if keep is not None:
            seen, x = seen[keep], x[keep]
        x = self.out(seen, x)
        return self.down(self.inner(self._rms(x, self.after.weight, self.after.eps)), x)

    def seen(self, normed: Tensor, cache: KVBuffer, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """What attention gives normed nodes: the input of `out`, [N, heads x size]; arguments as of the layer."""
        raise NotImplementedError

    def inner(self, normed: Tensor) -> Tensor:
        """The input of `down`, of normed nodes."""
        raise NotImplementedError

    def _over_prompts(self, query: Tensor, keys: Tensor, values: Tensor, spans: Sequence[Span]) -> Tensor:
        """Each token of a prompt sees those before it: a request's slots 1, 2, ... hold it in order.

        Args:
            query: [1, heads, N, size], of each request the last tokens up to its slot `used`.
            keys, values: [1, groups, capacity, size].

        Returns:
            [1, heads, N, size].
        """
        parts = []
        for first, last, begin, used in spans:
            own = slice(begin + 1, begin + used)
            options: dict[str, Any] = {"is_causal": True}
            if last - first < used - 1:
                # Late: it brings torch._dynamo, a second or more, and only a prompt that is gone on with needs it.
                from torch.nn.attention.bias import causal_lower_right

                options = {"attn_mask": causal_lower_right(last - first, used - 1)}
            parts.append(
                F.scaled_dot_product_attention(
                    query[:, :, first:last], keys[:, :, own], values[:, :, own], scale=self.scaling,
                    enable_gqa=self.shared > 1, **options,
                )
            )  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def _over_slots(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spans: Sequence[Span]
    ) -> Tensor:
        """Masked attention of each request over its own slots, [1, heads, N, size] to the same.

        Heads may be rows of their group instead: [1, groups, N x shared, size], rows by node.

        Args:
            keys, values: [1, groups, capacity, size].
            mask: [1, 1, rows, columns].
        """
        gqa = query.shape[1] != keys.shape[1]
        rows = query.shape[2] // spans[-1].last  # a node
        parts = []
        for first, last, begin, used in spans:
            at, own = slice(first * rows, last * rows), slice(begin, begin + used)
            parts.append(
                F.scaled_dot_product_attention(
                    query[:, :, at], keys[:, :, own], values[:, :, own], attn_mask=mask[:, :, at, :used],
                    scale=self.scaling, enable_gqa=gqa,
                )
            )  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


class TorchLayer(_Layer):
    """Tensor operations only: any device, any dtype."""

    def seen(self, normed: Tensor, cache: KVBuffer, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        count = len(normed)
        qkv = self.qkv(normed).view(count, self.heads + 2 * self.groups, self.size)
        value = qkv[:, self.heads + self.groups :]
        turn = qkv[:, : self.heads + self.groups]
        if self.head_norms is not None:
            q_norm, k_norm = self.head_norms
            turn = torch.cat([q_norm(turn[:, : self.heads]), k_norm(turn[:, self.heads :])], 1)
        low, high = turn.chunk(2, -1)
        turn = turn * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
        cache.update(turn[:, self.heads :].transpose(0, 1)[None], value.transpose(0, 1)[None], self.index)
        keys, values = cache.keys[self.index], cache.values[self.index]
        query = turn[:, : self.heads].transpose(0, 1)[None]
        if mask is None:
            seen = self._over_prompts(query, keys, values, cache.spans)[0].transpose(0, 1)
        else:
            folded = mask.shape[2] != count
            if folded:
                # Heads that share keys become rows: nothing is repeated but the mask.
                query = query.view(self.groups, self.shared, count, self.size).transpose(1, 2)
                query = query.reshape(1, self.groups, count * self.shared, self.size)
            seen = self._over_slots(query, keys, values, mask, cache.spans)[0]
            if folded:
                seen = seen.view(self.groups, count, self.shared, self.size).transpose(0, 1)
            else:
                seen = seen.transpose(0, 1)
        return seen.reshape(count, self.heads * self.size)

    def inner(self, normed: Tensor) -> Tensor:
        gate, up = self.gate_up(normed).chunk(2, -1)
        return F.silu(gate).mul_(up)


class _KernelLayer(_Layer):
    """Products by torch, everything between them by compiled kernels."""

    def __init__(
        self, index: int, layer: Any, linear: type, dtype: torch.dtype, kernels: Any, group: Group = ALONE
    ) -> None:
        super().__init__(index, layer, linear, dtype, kernels, group)
        norms = self.head_norms
        self.norm_weights = None if norms is None else (norms[0].weight, norms[1].weight)
        self.head_eps = 0.0 if norms is None else norms[0].eps

    def inner(self, normed: Tensor) -> Tensor:
        return self.kernels.silu(self.gate_up(normed))

    def _turned(
        self, x: Tensor, cache: KVBuffer, cos: Tensor, sin: Tensor, **order: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries as `kernels.rope` leaves them, of normed nodes; all keys and values, theirs among them."""
        keys, values = cache.buffers(self.index, self.groups, self.size, self.size, x)
        query = self.kernels.rope(
            self.qkv(x), cos, sin, cache.slots, self.norm_weights, keys, values, self.heads, self.head_eps, **order
        )  # fmt: skip
        return query, keys, values


class NativeLayer(_KernelLayer):
    """CPU: kernels from `native`, attention by torch with the heads of a group as rows.

    Attention then leaves [node, head of a group, group, size]; `out` takes its columns in that order.
    """

    def _columns(self) -> Tensor | None:
        if self.shared == 1:
            return None
        order = torch.arange(self.heads * self.size).view(self.groups, self.shared, self.size)
        return order.transpose(0, 1).reshape(-1)

    def _by_head(self, query: Tensor) -> Tensor:
        """[N x shared, groups, size] as [1, heads, N, size] in the model's order of heads."""
        query = query.view(-1, self.shared, self.groups, self.size)
        return query.permute(2, 1, 0, 3).reshape(1, self.heads, -1, self.size)

    def seen(self, normed: Tensor, cache: KVBuffer, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        query, keys, values = self._turned(normed, cache, cos, sin)
        count = query.shape[0] // self.shared
        if mask is not None and mask.shape[2] == query.shape[0]:
            rows = query.transpose(0, 1)[None]
            seen = self._over_slots(rows, keys, values, mask, cache.spans).transpose(1, 2)
        else:
            if mask is None:
                seen = self._over_prompts(self._by_head(query), keys, values, cache.spans)
            else:
                seen = self._over_slots(self._by_head(query), keys, values, mask, cache.spans)
            seen = seen.view(self.groups, self.shared, count, self.size).permute(2, 1, 0, 3)
        return seen.reshape(count, self.heads * self.size)


class TritonLayer(_KernelLayer):
    """CUDA: kernels and tree attention from `triton_kernels`; prompts by torch's flash attention."""

    def seen(self, normed: Tensor, cache: KVBuffer, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        # Flash attention takes heads of a token side by side as they lie.
        query, keys, values = self._turned(normed, cache, cos, sin, in_order=mask is None)
        if mask is not None:
            return self.attend(query, keys, values, mask, cache)
        by_head = query.view(-1, self.heads, self.size).transpose(0, 1)[None]
        seen = self._over_prompts(by_head, keys, values, cache.spans)
        return seen[0].transpose(0, 1).reshape(-1, self.heads * self.size)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, cache: KVBuffer) -> Tensor:
        """[N x shared, groups, size] over a tree (mask [1, 1, N, columns]): [N, heads x size]."""
        return self.kernels.attend(query, keys, values, mask[0, 0], cache.begins, cache.length, self.scaling)
