"""Products whose weights are split over processes: by inputs, with a sum behind them, or by outputs, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.forward.kernels import Linear, fused
from dsbd_cli.group import Group, Norming


class SummedLinear:
    """A product of which each process has some of the inputs: the sum over all of them, the same bits everywhere.

    Args:
        part: this process's inputs; of a bias only the first process has one.
    """

    def __init__(self, part: Linear, group: Group) -> None:
        self._part, self._group = part, group

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._group.sum(self._own(x, add))

    def normed(self, x: Tensor, add: Tensor, norm: Any, rms: Norming) -> tuple[Tensor, Tensor]:
        """The sum, and it behind `norm` (`llama.Norm`), by one kernel where there is one for both."""
        return self._group.normed_sum(self._own(x, add), norm.weight, norm.eps, rms)

    def _own(self, x: Tensor, add: Tensor | None) -> Tensor:
        # What is added is the same on all, and counts once.
        return self._part(x, add if self._group.first else None)


class SideBySide:
    """A product of which each process computes some of the outputs.

    Args:
        part: this process's outputs, as many as anybody's.
        outputs: of all of them together; what is computed beyond that is cut off.
    """

    def __init__(self, part: Linear, outputs: int, group: Group) -> None:
        self._part, self._outputs, self._group = part, outputs, group

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        out = self._group.side_by_side(self._part(x))[:, : self._outputs]
        return out if add is None else add.add_(out)


class SplitLayers:
    """The layers of a `llama.LlamaForward` on cards that hold it together: sums and the norms behind them in one.

    Args:
        layers: `llama.TritonLayer`. norm: what comes behind them. rms: norms rows.
    """

    def __init__(self, layers: Sequence[Any], norm: Any, rms: Norming) -> None:
        self._layers, self._rms = list(layers), rms
        self._norms = [*(layer.before for layer in self._layers), norm]

    def __call__(
        self, x: Tensor, cache: KVBuffer, cos: Tensor, sin: Tensor, mask: Tensor | None, keep: Tensor | None,
        between: Callable[[int], None],
    ) -> Tensor:  # fmt: skip
        """The last norm of the nodes that `keep` names [K, hidden]; arguments as of `llama.TritonLayer`.

        Args:
            between: called before each layer with its number.
        """
        normed = self._rms(x, self._norms[0].weight, self._norms[0].eps)
        for i, layer in enumerate(self._layers):
            between(i)
            seen = layer.seen(normed, cache, cos, sin, mask)
            if keep is not None and i + 1 == len(self._layers):
                seen, x = seen[keep], x[keep]
            x, normed = layer.out.normed(seen, x, layer.after, self._rms)
            x, normed = layer.down.normed(layer.inner(normed), x, self._norms[i + 1], self._rms)
        return normed


def summed(part: Linear, group: Group) -> Linear:
    """`part` itself in one process alone."""
    return part if group.size == 1 else SummedLinear(part, group)


def head_of(head: Any, kind: type, group: Group) -> Linear:
    """The product with a head (`torch.nn.Linear`) that all have whole: each computes its rows."""
    if group.size == 1:
        return fused([head], kind)
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    each = -(-len(weight) // group.size)
    rows = slice(group.rank * each, (group.rank + 1) * each)
    own, own_bias = weight[rows], None if bias is None else bias[rows]
    if lacking := each - len(own):
        own = F.pad(own, (0, 0, 0, lacking))
        own_bias = None if own_bias is None else F.pad(own_bias, (0, lacking))
    return SideBySide(kind(own, own_bias), len(weight), group)
