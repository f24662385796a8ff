"""A forward of few nodes of a small Llama-shaped model on a GPU: five kernels a layer (`triton_products`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.forward.kernels import DenseLinear

# A layer's largest matrix, in bytes: what is larger takes as long as reading it, which torch's products do better.
_LARGEST = 32 << 20
_MOST_NODES = 64


class _Weights(NamedTuple):
    """A layer's: matrices [outputs, inputs], biases or None, and what its norms need."""

    before: Tensor
    after: Tensor
    eps: tuple[float, float]
    qkv: DenseLinear
    out: DenseLinear
    gate_up: Tensor
    down: DenseLinear


class FewNodes:
    """Logits of at most 64 nodes, by the layers of a `llama.LlamaForward`.

    Args:
        layers: `llama.TritonLayer`. head, norm: what comes behind them.
        products: `triton_products.Products`.
    """

    def __init__(self, layers: Sequence[Any], norm: Any, head: DenseLinear, products: Any) -> None:
        self._layers, self._products = list(layers), products
        self._weights = [
            _Weights(
                layer.before.weight, layer.after.weight, (layer.before.eps, layer.after.eps), layer.qkv, layer.out,
                layer.gate_up.weight, layer.down,
            )
            for layer in self._layers
        ]  # fmt: skip
        self._norm, self._head = norm, head
        self.first_norm: Tensor = self._weights[0].before

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
        norms = [*(one.before for one in self._weights[1:]), self._norm.weight]
        for i, (layer, own, norm) in enumerate(zip(self._layers, self._weights, norms, strict=True)):
            between(i)
            keys, values = cache.buffers(layer.index, layer.groups, layer.size, layer.size, rows.x)
            query = products.heads(
                rows, own.eps[0], own.qkv.weight, own.qkv.bias, layer.norm_weights, layer.head_eps, cos, sin,
                cache.slots, keys, values, layer.heads,
            )  # fmt: skip
            seen = layer.attend(query, keys, values, mask, cache)
            rows = products.residual(seen, own.out.weight, own.out.bias, rows, own.after)
            inner = products.gated(rows, own.eps[1], own.gate_up)
            rows = products.residual(inner, own.down.weight, own.down.bias, rows, norm)
        return products.logits(rows if keep is None else rows.of(keep), self._norm.eps, self._head.weight)


def few_nodes(layers: Sequence[Any], norm: Any, head: Any, products: Any) -> FewNodes | None:
    """None where these products do not serve a model: their sizes, its dtype, or weights split over processes.

    Not float16: rows are multiplied by a norm's weights before they are divided by their root mean square, and the
    few large numbers that models have in their rows would then be beyond its end.
    """
    linears = [one for layer in layers for one in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    if not all(isinstance(one, DenseLinear) for one in (*linears, head)):
        return None
    if any(one.bias is not None for one in (head, *(layer.gate_up for layer in layers))):
        return None
    weights = [one.weight for one in linears]
    half = layers[0].size // 2
    if (
        norm.weight.dtype != torch.bfloat16
        or half < 16 or half & (half - 1) or any(weight.shape[1] % 64 for weight in weights)
        or any(weight.nbytes > _LARGEST for weight in weights)
        or not all(_lies_in_order(weight) for weight in (*weights, head.weight))
    ):  # fmt: skip
        return None
    return FewNodes(layers, norm, head, products)


def _lies_in_order(weight: Tensor) -> bool:
    """Whether its rows follow each other from an address on that kernels can read ahead from."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0
