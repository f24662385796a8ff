"""What is kept of a node between forwards: its keys and values, its row of the tree attention mask, its logits.

A node owns one slot of a key/value buffer (docs/design.md section 5), a sequence is a set of slots, and
a mask says who sees whom. Positions are applied before caching, so slots need no order: dropping a beam
frees its slots and moves nothing. Several requests share a buffer by regions (section 10): slots and
columns of the mask count from the beginning of a request's own. One module, since these are the stores
that a node of `tree_cache` points into.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.logits import Best, best_of, dense_joint, finite_logits, log_probabilities
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, Support, joint
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import RunError

# Slot 0 is never given out: padded rows of a fixed-size forward write there, and only they see it.
SPARE = 0


class Span(NamedTuple):
    """Nodes `first` to `last` (exclusive) of a forward are of one request, whose slots begin at `begin`: it
    looks at the first `used` of them."""

    first: int
    last: int
    begin: int
    used: int


class Slots:
    """Which slots of a request are free. Lowest first, so that the used part stays short and forwards cheap.

    Args:
        fixed: never grow: whoever asked for a request to be served has planned its memory.

    Attributes:
        capacity: slots there are, the spare one included; grows by doubling.
        live: slots given out and not freed.
        peak: the largest `live` since `reset_peak`.
    """

    def __init__(self, capacity: int, fixed: bool = False) -> None:
        self.capacity = capacity
        self._fixed = fixed
        self.peak = 0
        self._clear()

    def _clear(self) -> None:
        self.live = 0
        self._free = list(range(1, self.capacity))
        self._sorted = True  # so is a heap that nothing was pushed on
        self._taken = bytearray(self.capacity)
        self._taken[SPARE] = 1
        self._top = 1

    @property
    def used(self) -> int:
        """One past the highest slot in use: all that a forward has to look at."""
        return self._top

    def take(self, count: int) -> list[int]:
        """The `count` lowest free slots, ascending; doubles the capacity until they exist."""
        while len(self._free) < count:
            self.grow(2 * self.capacity)
        if self._sorted:  # a prompt takes hundreds, before its forward can begin
            slots, self._free = self._free[:count], self._free[count:]
        else:
            slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self._taken[slot] = 1
        self.live += count
        self.peak = max(self.peak, self.live)
        if slots:
            self._top = max(self._top, slots[-1] + 1)
        return slots

    def give(self, slots: Iterable[int]) -> None:
        """Free `slots`, each given out before."""
        given = list(slots)
        for slot in given:
            if slot == SPARE or not self._taken[slot]:
                raise ValueError(f"slot {slot} is not in use")
            self._taken[slot] = 0
            self.live -= 1
        if not self.live:
            self._clear()
            return
        self._sorted = self._sorted and not given
        for slot in given:
            heapq.heappush(self._free, slot)
        while not self._taken[self._top - 1]:
            self._top -= 1

    def grow(self, capacity: int) -> None:
        """Make room up to `capacity` slots; never shrinks."""
        if capacity <= self.capacity:
            return
        if self._fixed:
            raise RuntimeError(
                f"a request needs more than the {self.capacity} slots that were planned for it"
            )
        # Appending larger numbers keeps a heap a heap.
        self._free.extend(range(self.capacity, capacity))
        self._taken.extend(bytes(capacity - self.capacity))
        self.capacity = capacity

    def capacity_for(self, count: int) -> int:
        """The capacity, doubled until `count` slots and those in use fit."""
        capacity = self.capacity
        while capacity < count + self.live:
            capacity *= 2
        return capacity

    def reset_peak(self) -> None:
        self.peak = self.live


class KVBuffer:
    """The cache that Hugging Face modelling code is handed: `update` writes at chosen slots.

    Buffers are made at the first update, when the layer shows its shape: `[1, heads, capacity, size]`.
    Duck-typed on purpose: a subclass of `transformers.Cache` would bring lengths, masks and layers
    that mean a sequence, not a tree.

    Attributes:
        slots: int64 [N] on the device, where the running forward writes.
        used: how many slots the running forward looks at; with several requests up to where the last one's end.
        spans: whose nodes are whose, requests in order.
        begins, length: int64 [R] on the device, where each request's slots begin and how many it looks at, for
            attention that reads them there; each has N / R nodes then.
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots = torch.zeros(0, dtype=torch.long)
        self.used = 0
        self.spans: tuple[Span, ...] = ()
        self.begins = torch.zeros(1, dtype=torch.long)
        self.length = torch.zeros(1, dtype=torch.long)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self._positions = torch.zeros(0, dtype=torch.long)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write `key`, `value` ([1, heads, N, size]) at `slots`; returns both up to `used`."""
        keys, values = self.buffers(layer_idx, key.shape[1], key.shape[3], value.shape[3], key)
        # (Under autocast keys and values come in two dtypes, and attention takes them in the shorter one.)
        keys.index_copy_(2, self.slots, key.to(keys.dtype))
        values.index_copy_(2, self.slots, value.to(values.dtype))
        return keys[:, :, : self.used], values[:, :, : self.used]

    def buffers(
        self, layer: int, heads: int, key_size: int, value_size: int, like: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A layer's keys and values, `[1, heads, capacity, size]` each, of the kind of `like`."""
        if layer not in self.keys:
            # Zeros, not empty: a masked slot has weight 0, but 0 x NaN is NaN.
            keys = like.new_zeros((1, heads, self.capacity, key_size))
            self.values[layer] = like.new_zeros((1, heads, self.capacity, value_size))
            self.keys[layer] = keys  # last: both are there, wherever it is interrupted
        return self.keys[layer], self.values[layer]

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        """Asked for positions and masks only, both of which are given: no sequence has a length here."""
        return 0

    def note(self, positions: Tensor) -> Tensor:
        """Write down the positions of this forward's slots; returns those of all slots up to `used`.

        (Only models with a sliding window ask.)
        """
        self.positions(positions.device).index_copy_(0, self.slots, positions)
        return self._positions[: self.used]

    def positions(self, device: torch.device) -> Tensor:
        """int64 [capacity]: the position of each slot, of those that `note` or C has written down."""
        if len(self._positions) < self.capacity:
            larger = torch.zeros(self.capacity, dtype=torch.long, device=device)
            larger[: len(self._positions)] = self._positions
            self._positions = larger
        return self._positions

    @torch.inference_mode()
    def copy(self, begin: int, to: int, count: int) -> None:
        """Slots from `to` on get what `count` slots from `begin` on hold, their positions too; none is both."""
        for store in (self.keys, self.values):
            for buffer in store.values():
                buffer[:, :, to : to + count] = buffer[:, :, begin : begin + count]
        if len(self._positions):
            places = self.positions(self._positions.device)
            places[to : to + count] = places[begin : begin + count]

    def grow(self, capacity: int) -> None:
        """Enlarge every buffer to `capacity` slots, contents kept.

        One at a time, so that little memory is held twice. Where it runs out midway all are let go of: the next
        forward makes them anew.
        """
        if capacity <= self.capacity:
            return
        try:
            self._enlarge(capacity)
        except BaseException:
            self.let_go()
            raise
        finally:
            self.capacity = capacity  # whoever holds addresses learns from it that they are none any more

    @torch.inference_mode(False)
    def _enlarge(self, capacity: int) -> None:
        for store in (self.keys, self.values):
            for layer, old in store.items():
                new = old.new_zeros((*old.shape[:2], capacity, old.shape[3]))
                new[:, :, : self.capacity] = old
                store[layer] = new

    def let_go(self) -> None:
        """Hold no buffers: the next forward makes them anew."""
        self.keys.clear()
        self.values.clear()

    def clear(self) -> None:
        """Zero everything: what a broken forward wrote must not reach a later one."""
        for store in (self.keys, self.values):
            for buffer in store.values():
                buffer.zero_()

    @property
    def bytes_per_slot(self) -> int:
        """Keys and values of one token over all layers; 0 before the first forward."""
        buffers = [*self.keys.values(), *self.values.values()]
        return sum(buffer[:, :, 0].numel() * buffer.element_size() for buffer in buffers)


class TreeMasks:
    """Who sees which slot: one additive row per open node (a node that may still get children).

    A row is never mended: a slot is freed only together with everything below it, so no open row
    shows a freed slot, and a slot given out again starts unseen.

    Args:
        slots: row length.
        dtype: the model's; hidden slots hold its most negative number, seen ones 0. (Boolean masks
            are silently wrong under eager attention.)
    """

    @torch.inference_mode(False)  # a table that is written to from anywhere
    def __init__(self, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.hidden = torch.finfo(dtype).min
        self.table = torch.full((rows, slots), self.hidden, dtype=dtype, device=device)
        # Row 0 belongs to the spare slot, so that no padded row is hidden from everything (NaN).
        self.table[0, SPARE] = 0
        self._free = list(range(rows - 1, 0, -1))

    def take(self, count: int) -> list[int]:
        """`count` row numbers; what they held is to be overwritten."""
        while len(self._free) < count:
            rows, slots = self.table.shape
            self._resize(2 * rows, slots)
            self._free.extend(range(2 * rows - 1, rows - 1, -1))
        return [self._free.pop() for _ in range(count)]

    def give(self, rows: Iterable[int]) -> None:
        self._free.extend(rows)

    def grow(self, slots: int) -> None:
        if slots > self.table.shape[1]:
            self._resize(self.table.shape[0], slots)

    @torch.inference_mode(False)
    def _resize(self, rows: int, slots: int) -> None:
        old = self.table
        self.table = old.new_full((rows, slots), self.hidden)
        self.table[: old.shape[0], : old.shape[1]] = old

    def show(self, row: int, slots: Tensor) -> None:
        """Make `row` see exactly `slots`."""
        self.table[row] = self.hidden
        self.see(row, slots)

    def see(self, row: int, slots: Tensor) -> None:
        """Let `row` see `slots` (int64 [N]) as well."""
        # A number that is stored by an index waits for the device.
        self.table[row].index_fill_(0, slots, 0.0)

    def causal(self, row: int, slots: Tensor) -> Tensor:
        """[N, table width]: what `row` sees, and of `slots` (int64 [N]) each its own and those before it.

        `row` sees all of them afterwards.
        """
        count = len(slots)
        mask = self.table[row].repeat(count, 1)
        mask.index_copy_(1, slots, mask.new_full((count, count), self.hidden).triu(1))
        self.see(row, slots)
        return mask

    def extend(self, base: Tensor, rows: Tensor, slots: Tensor, inside: Tensor) -> Tensor:
        """Rows for N new nodes, from the row of each one's nearest ancestor that existed before.

        Args:
            base, rows: int64 [N], rows to start from and rows to write.
            slots: int64 [N], the new nodes' slots.
            inside: bool [N, N], whether node i sees node j of this batch (itself, ancestors).

        Returns:
            [N, table width], the mask of the forward.
        """
        mask = self.table.index_select(0, base)
        own = torch.zeros_like(inside, dtype=mask.dtype).masked_fill_(~inside, self.hidden)
        mask.index_copy_(1, slots, own)
        self.table.index_copy_(0, rows, mask)
        return mask


class Stores:
    """What trees of one model share: keys and values, and rows of the mask.

    Attributes:
        cache, masks: the two; the mask's columns are the slots of one request.
    """

    def __init__(
        self, capacity: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device = device
        self.cache = KVBuffer(capacity)
        self.masks = TreeMasks(rows, columns, dtype, device)

    def pointers(self) -> tuple[int, int]:
        """Changes whenever a buffer is replaced by a larger one: recordings hold addresses."""
        return self.cache.capacity, self.masks.table.data_ptr()


# Logits.


class _Dense(NamedTuple):
    """A whole row, left where the forward put it: float32 [V], and whether it is finite."""

    logps: Tensor
    finite: bool


class _Sparse(NamedTuple):
    """A node's best entries on the host: row `place` of `block`."""

    block: Best
    place: int


class LogitStore:
    """Cached logits by node, and the questions the law asks of them.

    Args:
        model: what errors call it, such as `the target model (name)`.
        dtype: the model's, for errors.
        vocab: columns that count.
        ids: the tokens of these columns, int64 ascending; None: a column is its token.

    Attributes:
        name, vocab, ids: as given.
        size: how many best entries of each node's logits are kept (top-n); 0: full logits.
        tainted: a row that is not finite was asked for.
    """

    def __init__(self, model: str, dtype: torch.dtype, vocab: int, ids: np.ndarray | None = None) -> None:
        self.name, self._dtype, self.vocab = model, str(dtype).removeprefix("torch."), vocab
        self.ids = ids if ids is None else ids[:vocab]
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
        """Keep the full logits [N, V'] of these nodes (`size` 0)."""
        logps = log_probabilities(logits, self.vocab)
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
        """`law.distribution.joint` over the parents' logits.

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
            return self._tokens(best.tokens[0]), best.logps[0]
        tokens, logps = row.block.tokens[row.place], row.block.logps[row.place]
        if count > len(tokens) < self.vocab:
            raise ValueError(f"{count} entries of a row asked for, {len(tokens)} were prepared")
        return self._tokens(tokens[:count]), logps[:count]

    def whole(self, node: Node) -> Tensor:
        """A whole row by column, float32 [V] where the forward put it, finite or not (`size` 0 only)."""
        row = self._rows[node]
        if isinstance(row, _Sparse):
            raise ValueError("whole rows asked for, only the best entries were prepared")
        return row.logps

    def fail(self, node: Node) -> RunError:
        """The error for a node whose logits are not finite."""
        self.tainted = True
        wider = {"float16": "try --dtype bfloat16 or float32, or ", "bfloat16": "try --dtype float32, or "}
        return RunError(
            f"{self.name} gave logits that are not finite at step {node.depth} in {self._dtype}: "
            f"{wider.get(self._dtype, '')}check its weights"
        )

    def _checked(self, node: Node) -> _Dense | _Sparse:
        row = self._rows[node]
        if not (row.finite if isinstance(row, _Dense) else row.block.finite[row.place]):
            raise self.fail(node)
        return row

    def _tokens(self, columns: np.ndarray) -> np.ndarray:
        return columns if self.ids is None else self.ids[columns]

    def _whole(self, node: Node) -> Tensor:
        self._checked(node)
        return self.whole(node)

    def _row(self, node: Node, size: int) -> Row:
        if size:
            return Row(*self.best(node, size))
        logps = self._whole(node).cpu().numpy().astype(np.float64)
        return Row(
            self._tokens(np.arange(len(logps))), logps
        )  # a head may have fewer rows than there are tokens


class Told:
    """The part of a `model.protocol.TreeModel` that is answered from its nodes' logits.

    Attributes:
        logits: of the nodes that are known.
    """

    logits: LogitStore

    def has_logits(self, node: Node) -> bool:
        return node in self.logits

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        return self.logits.joint(parents, scores, processor)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.logits.best(node, count)
