"""From logits to what the law asks: raw log-probabilities, the top-n of each node on the host, and their store.

Where top-k bounds the joint, only each node's `top_n` best tokens leave the device; else its full
logits stay where the forward put them, and the joint is built there (docs/design.md section 1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.forward.kernels import c_kernels, c_kernels_serve
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, Support, joint
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import RunError

_BLOCK = 128


class Best(NamedTuple):
    """The best entries of N rows, on the host.

    Attributes:
        tokens: int64 [N, k], best first, ties to the lower id.
        logps: float32 [N, k], raw log-softmax over the trimmed vocabulary.
        finite: bool [N], whether every logit of the row is a number.
    """

    tokens: np.ndarray
    logps: np.ndarray
    finite: np.ndarray


def log_probabilities(logits: Tensor, vocab: int) -> Tensor:
    """Raw float32 log-softmax over the first `vocab` columns: padded heads get probability 0."""
    return torch.log_softmax(logits[..., :vocab], dim=-1, dtype=torch.float32)


def finite_logits(logps: Tensor) -> Tensor:
    """bool [N]: whether all logits behind these log-probabilities are finite.

    NaN and +inf spoil the whole row, -inf its own entry; either makes the sum no number.
    """
    return torch.isfinite(logps.sum(-1))


def top_logits(logits: Tensor, vocab: int, count: int) -> Best:
    """The `count` most probable tokens of each row of `logits` [N, >= vocab]; one copy to the host."""
    kernels = c_kernels() if logits.device.type == "cpu" and c_kernels_serve(logits.dtype) else None
    if kernels is not None and logits.stride(-1) == 1:
        return Best(*kernels.top_logits(logits, vocab, min(count, vocab)))
    logps = log_probabilities(logits, vocab)
    return best_of(logps, finite_logits(logps), count)


def best_of(logps: Tensor, finite: Tensor, count: int) -> Best:
    """`top_logits` for log-probabilities at hand: float32 [N, V] and bool [N]."""
    return unpack(pack(logps, finite, min(count, logps.shape[-1])).cpu().numpy())


def pack(logps: Tensor, finite: Tensor, count: int) -> Tensor:
    """The `count` best entries of each row as one tensor for one copy: float32 [N, 2 count + 1].

    Values, ids (the bits of int32), and 1 where the row is finite; sorted as `Best` wants them.
    """
    values, ids = _largest(logps, count)
    return torch.cat([values, ids.int().view(torch.float32), finite.float()[:, None]], dim=1)


def unpack(host: np.ndarray) -> Best:
    """What `pack` put together; views of `host`, which must not be written to again."""
    count = host.shape[1] // 2
    ids = np.ascontiguousarray(host[:, count : 2 * count]).view(np.int32).astype(np.int64)
    return Best(ids, host[:, :count], host[:, -1] > 0)


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row of [N, V], largest first, ties to the lower id.

    `torch.topk` keeps no order among ties, and bfloat16 logits tie often; so what is ranked is one
    integer an entry, of its value and its id. Whatever is among the largest lies in one of as many
    blocks of ids with the largest maxima, so only those are searched: several times faster.
    """
    rows, width = values.shape
    device = values.device
    ids = torch.arange(width, device=device).expand(rows, -1)
    blocks = width // _BLOCK
    if blocks >= 4 * count:
        maxima = values[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).amax(-1)
        chosen = _ranked(maxima, ids[:, :blocks]).topk(count, dim=-1, sorted=False).indices
        inner = torch.arange(_BLOCK, device=device)
        ids = torch.cat([(chosen[:, :, None] * _BLOCK + inner).flatten(1), ids[:, blocks * _BLOCK :]], dim=1)
        values = values.gather(1, ids)
    best = _ranked(values, ids).topk(count, dim=-1).indices
    return values.gather(1, best), ids.gather(1, best)


def _ranked(values: Tensor, ids: Tensor) -> Tensor:
    """int64, ordered as (value, -id); ids fit in 31 bits."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0 and 0 are one value
    # Negative floats are ordered backwards in their bits.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() * 2**32 - ids


def dense_joint(scores: Sequence[float], logps: Tensor, processor: LogitsProcessor) -> Support:
    """The same support as `law.joint`, up to rounding; only its non-zero part leaves the device.

    Args:
        scores: [I] log weights of the parents.
        logps: float32 [I, V], raw log-probabilities.
        processor: with temperature above 0 and without top-k (those need only the best entries of a row).
    """
    if processor.top_n:
        raise ValueError("top-k and greedy decoding need only the best entries of each row")
    vocab = logps.shape[1]
    wide = logps.double()
    log_weight = (wide + torch.tensor(scores, dtype=torch.float64, device=logps.device)[:, None]).flatten()
    prob = torch.softmax(log_weight / processor.temperature, 0)
    if processor.top_p < 1:
        # Flat indices ascend by parent, then token: a stable sort leaves ties in that order.
        values, order = torch.sort(prob, descending=True, stable=True)
        # The smallest head that reaches top-p: entries before which less than that has gathered.
        count = int((torch.cumsum(values, 0) < processor.top_p).sum()) + 1
        kept = torch.sort(order[:count]).values
        kept = kept[prob[kept] > 0]
    else:
        kept = torch.nonzero(prob > 0)[:, 0]
    packed = torch.stack([kept.double(), wide.flatten()[kept], prob[kept]]).cpu().numpy()
    flat = packed[0].astype(np.int64)
    return Support(flat // vocab, flat % vocab, packed[1], packed[2] / packed[2].sum())


class _Dense(NamedTuple):
    """A whole row, left where the forward put it: float32 [V], and whether it is finite."""

    logps: Tensor
    finite: bool


class _Sparse(NamedTuple):
    """A node's best entries on the host: row `place` of `block`."""

    block: Best
    place: int


class LogitStore:
    """Rows by node, and the questions the law asks of them.

    Args:
        model: what errors call it, such as `the target model (name)`.
        dtype: the model's, for errors.
        vocab: columns that count.

    Attributes:
        size: how many best entries of each row are kept; 0: whole rows.
        tainted: a row that is not finite was asked for.
    """

    def __init__(self, model: str, dtype: torch.dtype, vocab: int) -> None:
        self._model, self._dtype, self._vocab = model, str(dtype).removeprefix("torch."), vocab
        self._rows: dict[Node, _Dense | _Sparse] = {}
        self.size = 0
        self.tainted = False

    def __contains__(self, node: Node) -> bool:
        return node in self._rows

    def __iter__(self) -> Iterable[Node]:  # type: ignore[override]
        return iter(self._rows)

    def start(self, size: int) -> None:
        """Forget everything; from now on keep `size` entries a row."""
        self._rows, self.size, self.tainted = {}, size, False

    def put(self, nodes: Sequence[Node], logits: Tensor) -> None:
        """Keep what will be asked of these nodes' logits [N, V']."""
        if self.size:
            self.put_best(nodes, top_logits(logits, self._vocab, self.size), range(len(nodes)))
            return
        logps = log_probabilities(logits, self._vocab)
        finite = finite_logits(logps).tolist()
        self._rows.update((node, _Dense(logps[i], finite[i])) for i, node in enumerate(nodes))

    def put_best(self, nodes: Sequence[Node], block: Best, places: Iterable[int]) -> None:
        """Keep rows `places` of `block`, one a node."""
        self._rows.update((node, _Sparse(block, place)) for node, place in zip(nodes, places, strict=True))

    def keep(self, nodes: Collection[Node]) -> None:
        """Forget the rows of all others."""
        self._rows = {node: row for node, row in self._rows.items() if node in nodes}

    def forget(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._rows.pop(node, None)

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        """`law.joint` over the parents' rows.

        Raises:
            RunError: a row is not finite.
        """
        if not processor.top_n and self._whole(parents[0]).device.type == "cuda":
            return dense_joint(scores, torch.stack([self._whole(node) for node in parents]), processor)
        return joint(scores, [self._row(node, processor.top_n) for node in parents], processor)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The `count` best tokens and their float32 log-probabilities. Raises like `joint`."""
        row = self._checked(node)
        if isinstance(row, _Dense):
            best = best_of(row.logps[None], torch.ones(1, device=row.logps.device), count)
            return best.tokens[0], best.logps[0]
        tokens, logps = row.block.tokens[row.place], row.block.logps[row.place]
        if count > len(tokens) < self._vocab:
            raise ValueError(f"{count} entries of a row asked for, {len(tokens)} were prepared")
        return tokens[:count], logps[:count]

    def whole(self, node: Node) -> Tensor:
        """A whole row, float32 [V] where the forward put it, finite or not (`size` 0 only)."""
        row = self._rows[node]
        if isinstance(row, _Sparse):
            raise ValueError("whole rows asked for, only the best entries were prepared")
        return row.logps

    def fail(self, node: Node) -> RunError:
        """The error for a node whose logits are not finite."""
        self.tainted = True
        return RunError(
            f"{self._model} gave logits that are not finite at step {node.depth} in {self._dtype}: "
            "try --dtype float32 or bfloat16, or check its weights"
        )

    def _checked(self, node: Node) -> _Dense | _Sparse:
        row = self._rows[node]
        if not (row.finite if isinstance(row, _Dense) else row.block.finite[row.place]):
            raise self.fail(node)
        return row

    def _whole(self, node: Node) -> Tensor:
        self._checked(node)
        return self.whole(node)

    def _row(self, node: Node, size: int) -> Row:
        if size:
            tokens, logps = self.best(node, size)
            return Row(tokens, logps.astype(np.float64))
        return Row(np.arange(self._vocab), self._whole(node).cpu().numpy().astype(np.float64))
