"""A forward of few nodes of a small Llama-shaped model on a GPU: five kernels a layer (`triton_products`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.group import group_of

# A layer's largest matrix, in bytes. Measured with 3.5 MB; at 33, whose reading is all that counts, torch is as quick.
_LARGEST = 8 << 20
_MOST_NODES = 64


class FewNodes:
    """Logits of at most 64 nodes, by the layers of a `llama.LlamaForward`.

    Args:
        layers: `llama.TritonLayer`. head, norm: what comes behind them.
        products: `triton_products.Products`.
    """

    def __init__(self, layers: Sequence[Any], norm: Any, head: Any, products: Any) -> None:
        self._layers, self._products = list(layers), products
        self._norm, self._head = norm, head
        self.first_norm: Tensor = self._layers[0].before.weight

    def serves(self, count: int, mask: Tensor | None) -> bool:
        """Whether it computes so many nodes; prompts without a mask it does not."""
        return mask is not None and count <= _MOST_NODES

    def __call__(
        self, rows: Any, cache: KVBuffer, cos: Tensor, sin: Tensor, mask: Tensor, keep: Tensor | None,
        between: Callable[[int], None],
    ) -> Tensor:  # fmt: skip
        """Logits [K, V'].

        Args:
            rows: `triton_products.Scaled` of the nodes' embeddings.
            cos, sin: [N, size]. mask: [1, 1, N, columns].
            keep: int64 [K], the nodes whose logits are wanted; None: all.
            between: called before each layer with its number.
        """
        products = self._products
        norms = [*(layer.before.weight for layer in self._layers[1:]), self._norm.weight]
        for i, (layer, norm) in enumerate(zip(self._layers, norms, strict=True)):
            between(i)
            keys, values = cache.buffers(layer.index, layer.groups, layer.size, layer.size, rows.x)
            query = products.heads(
                rows, layer.before.eps, layer.qkv.weight, layer.qkv.bias, layer.norm_weights, layer.head_eps, cos, sin,
                cache.slots, keys, values, layer.heads,
            )  # fmt: skip
            seen = layer.attend(query, keys, values, mask, cache)
            rows = products.residual(seen, layer.out.weight, layer.out.bias, rows, layer.after.weight)
            inner = products.gated(rows, layer.after.eps, layer.gate_up.weight)
            rows = products.residual(inner, layer.down.weight, layer.down.bias, rows, norm)
        return products.logits(rows if keep is None else rows.of(keep), self._norm.eps, self._head.weight)


def why_not(model: Any) -> str | None:
    """Why these products do not serve a model of `plain.FAMILIES`; None where they do.

    Not float16: rows are multiplied by a norm's weights before they are divided by their root mean square, and the
    few large numbers that models have in their rows would then be beyond its end.
    """
    if group_of(model).size > 1:
        return "its weights are split over processes"
    if model.dtype != torch.bfloat16:
        return "for bfloat16"
    half = int(model.model.layers[0].self_attn.head_dim) // 2
    if half < 16 or half & (half - 1):
        return "halves of its heads are no powers of two from 16 on"
    parts = [
        [getattr(place, name) for name in names]
        for layer in model.model.layers
        for place, names in (
            (layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.self_attn, ("o_proj",)),
            (layer.mlp, ("gate_proj", "up_proj")), (layer.mlp, ("down_proj",)),
        )
    ]  # fmt: skip
    if any(part[0].weight.shape[1] % 64 for part in parts):
        return "its sizes are no multiples of 64"
    if max(sum(linear.weight.nbytes for linear in part) for part in parts) > _LARGEST:
        return "its matrices are large"
    if model.lm_head.bias is not None or any(
        layer.mlp.gate_proj.bias is not None for layer in model.model.layers
    ):
        return "its head, or what it gates with, has a bias"
    alone = [
        model.lm_head,
        *(part[0] for part in parts if len(part) == 1),
    ]  # the others are laid side by side anew
    if not all(linear.weight.is_contiguous() and linear.weight.data_ptr() % 16 == 0 for linear in alone):
        return "its weights do not lie in order"
    return None
