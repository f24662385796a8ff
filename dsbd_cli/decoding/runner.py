"""A Hugging Face causal LM as a `TreeModel`: one tree, one key/value pool, one forward per call.

Every node's mask row is its parent's row plus its own slot (`kv_pool.MaskTable`), so nothing here
walks a sequence: the work a step is that of the new nodes. design.md section 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.hf import TreeForward, context_limit
from dsbd_cli.decoding.kv_pool import MaskTable, Slots, TreeCache
from dsbd_cli.decoding.law import Row, Support, Warp, joint
from dsbd_cli.decoding.rows import Best, best_of, best_rows, finite_rows, log_probabilities
from dsbd_cli.decoding.selftest import check_tree, refuse_unserved
from dsbd_cli.decoding.tree import Node
from dsbd_cli.errors import RunError

# Prompt tokens a forward: keeps the mask and the activations of a long prompt small.
_CHUNK = 2048
_FIRST_SLOTS = 512
_FIRST_ROWS = 64


@dataclass(slots=True)
class _Entry:
    """What the pool holds of a node: its slot, how many known children it has, its open mask row."""

    slot: int
    children: int = 0
    mask_row: int = 0


class _Dense(NamedTuple):
    """A whole row, left where the forward put it: float32 [V], and whether it is finite."""

    logps: Tensor
    finite: bool


class _Sparse(NamedTuple):
    """A node's best entries on the host: row `place` of `block`."""

    block: Best
    place: int


class HfTreeModel:
    """One model over one tree (`decoding.model.TreeModel`).

    Args:
        model: causal LM, in eval mode on its device.
        vocab_size: the tokenizer's; columns beyond it are padding and have probability 0.
        role: what errors call it, `target` or `draft`.
        max_positions: context limit; None takes the config's.

    Attributes:
        calls: forwards since the last `prefill`, that one left out.
        max_depth: deepest node the context limit leaves room for.
        slots_peak: most slots in use at a time since the last `prefill` began.
        notes: what a user should know about how this model was run.
    """

    def __init__(
        self, model: Any, *, vocab_size: int, role: str = "target", max_positions: int | None = None
    ) -> None:
        self.model, self.role = model, role
        self.device, self.dtype = model.device, model.dtype
        self.vocab_size = vocab_size
        self.max_positions = max_positions or context_limit(model)
        self.calls = 0
        self.notes: list[str] = []
        self._forward = TreeForward(model)
        self._slots = Slots(_FIRST_SLOTS)
        self._cache = TreeCache(_FIRST_SLOTS)
        self._masks = MaskTable(_FIRST_ROWS, _FIRST_SLOTS, self.dtype, self.device)
        self._prompt: list[int] = []
        self._prompt_slots: list[int] = []
        self._root = Node(-1, None)
        self._entries: dict[Node, _Entry] = {}
        self._tips: set[Node] = set()
        self._rows: dict[Node, _Dense | _Sparse] = {}
        self._row_size = 0
        self._tainted = False
        self._served = False

    # What the run reports.

    @property
    def name(self) -> str:
        return str(self.model.config.name_or_path or self.model.config.model_type)

    @property
    def max_depth(self) -> int | None:
        return None if self.max_positions is None else self.max_positions - len(self._prompt)

    @property
    def slots_peak(self) -> int:
        return self._slots.peak

    @property
    def bytes_per_slot(self) -> int:
        return self._cache.bytes_per_slot

    @property
    def bytes_peak(self) -> int:
        return self.slots_peak * self.bytes_per_slot

    @property
    def bytes_allocated(self) -> int:
        return self._cache.capacity * self.bytes_per_slot

    def require_tree(self) -> None:
        """Make sure, once, that the tree mask serves this model.

        Raises:
            UserError: the architecture is not served.
        """
        if not self._served:
            refuse_unserved(self.model)
            check_tree(self, self.model, self.vocab_size)
            self._served = True

    # The tree.

    @torch.inference_mode()
    def prefill(
        self, ids: Sequence[int], root: Node, *, row_size: int = 0, reuse: bool = True, room: int = 0
    ) -> None:
        """Start a new tree behind the prompt `ids` (at least one), in one pass.

        Args:
            ids: prompt tokens.
            root: the node that stands for them; known afterwards.
            row_size: how many best entries of each row will be asked for; 0 keeps whole rows.
            reuse: take over the prefix that the last prompt or its answer shares with this one.
            room: slots to have ready beyond the prompt, so that buffers need not grow later.
        """
        kept = self._shared_prefix(ids) if reuse and not self._tainted else []
        self._start_over(ids, kept)
        self._row_size, self._root, self.calls = row_size, root, 0
        self._reserve(len(ids) + 1 + room)
        entry = _Entry(-1, mask_row=self._masks.take(1)[0])
        logits = self._prefill(entry, len(kept))
        entry.slot = self._prompt_slots[-1]
        self._entries[root] = entry
        self._tips = {root}
        self._store([root], logits)

    @torch.inference_mode()
    def forward(self, nodes: Iterable[Node]) -> None:
        wanted = [node for node in dict.fromkeys(nodes) if node not in self._rows]
        if not wanted:
            return
        batch: dict[Node, int] = {}
        for node in wanted:
            self._queue(node, batch)
        nodes, wanted_set = list(batch), set(wanted)
        keep = [i for i, node in enumerate(nodes) if node in wanted_set]
        logits = self._run(nodes, keep)
        self._store([nodes[i] for i in keep], logits)
        self.calls += 1

    def knows(self, node: Node) -> bool:
        return node in self._rows

    def joint(self, parents: Sequence[Node], scores: Sequence[float], warp: Warp) -> Support:
        return joint(scores, [self._row(node, warp.row_size) for node in parents], warp)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        row = self._checked(node)
        if isinstance(row, _Dense):
            best = best_of(row.logps[None], torch.ones(1, device=row.logps.device), count)
            return best.tokens[0], best.logps[0]
        tokens, logps = row.block.tokens[row.place], row.block.logps[row.place]
        if count > len(tokens) < self.vocab_size:
            raise ValueError(f"{count} entries of a row asked for, {len(tokens)} were prepared")
        return tokens[:count], logps[:count]

    def log_row(self, node: Node) -> Tensor:
        """A known node's whole row, float32 [V] on the device (`row_size` 0 only)."""
        row = self._rows[node]
        if isinstance(row, _Sparse):
            raise ValueError("whole rows asked for, only the best entries were prepared")
        return row.logps

    def retain(self, leaves: Iterable[Node]) -> None:
        keep = set()
        for leaf in leaves:
            node = leaf
            while node not in self._entries:
                assert node.parent is not None
                node = node.parent
            keep.add(node)
        keep.add(self._root)
        freed = []
        for tip in self._tips - keep:
            node = tip
            while node not in keep and self._entries[node].children == 0:
                freed.append(self._drop(node))
                assert node.parent is not None
                node = node.parent
        self._slots.give(freed)
        self._tips = {node for node in (self._tips & self._entries.keys()) | keep if self._is_tip(node)}
        for node in [node for node in self._rows if node not in keep]:
            self._close(node)

    # Inside.

    def _queue(self, node: Node, batch: dict[Node, int]) -> None:
        """Add `node` behind its missing ancestors."""
        path: list[Node] = []
        while node not in batch and (not path or node not in self._entries):
            path.append(node)
            assert node.parent is not None
            node = node.parent
        for ancestor in reversed(path):
            batch[ancestor] = len(batch)

    def _run(self, nodes: list[Node], keep: list[int]) -> Tensor:
        """Forward `nodes` (parents first) and enter them into the tree; logits [K, V'] of those in `keep`."""
        count = len(nodes)
        place = {node: i for i, node in enumerate(nodes)}
        fresh = [node for node in nodes if node not in self._entries]
        slots = dict(zip(fresh, self._take_slots(len(fresh)), strict=True))
        mask_rows = self._masks.take(count)
        inside = np.full((count, count), self._masks.hidden, dtype=np.float32)
        base = np.zeros(count, dtype=np.int64)
        for i, (node, mask_row) in enumerate(zip(nodes, mask_rows, strict=True)):
            parent = node.parent
            assert parent is not None
            if parent in place:
                inside[i] = inside[place[parent]]
                base[i] = base[place[parent]]
            else:
                base[i] = self._open_row(parent)
            inside[i, i] = 0
            if node in slots:
                self._entries[node] = _Entry(slots[node], mask_row=mask_row)
                self._entries[parent].children += 1
                self._tips.discard(parent)
                self._tips.add(node)
            else:
                self._entries[node].mask_row = mask_row
        ids = [node.token for node in nodes]
        positions = [len(self._prompt) - 1 + node.depth for node in nodes]
        where = [self._entries[node].slot for node in nodes]
        packed = torch.tensor([ids, positions, where, mask_rows, base.tolist()], device=self.device)
        hidden = torch.from_numpy(inside).to(self.device, self.dtype)
        mask = self._masks.extend(packed[4], packed[3], packed[2], hidden)
        self._cache.slots, self._cache.used = packed[2], self._slots.used
        head = 0 if len(keep) == count else torch.tensor(keep, device=self.device)
        return self._forward(self._cache, packed[0], packed[1], mask[:, : self._slots.used], head)

    def _prefill(self, entry: _Entry, done: int) -> Tensor:
        """Compute prompt tokens from `done` on; logits [1, V'] of the last."""
        logits = torch.zeros(0)
        self._masks.show(
            entry.mask_row, torch.tensor(self._prompt_slots, device=self.device, dtype=torch.long)
        )
        for begin in range(done, len(self._prompt), _CHUNK):
            ids = self._prompt[begin : begin + _CHUNK]
            slots = self._take_slots(len(ids))
            self._prompt_slots += slots
            where = torch.tensor(slots, device=self.device)
            inside = torch.full(
                (len(ids), len(ids)), self._masks.hidden, dtype=self.dtype, device=self.device
            )
            mask = self._masks.table[entry.mask_row, : self._slots.used].repeat(len(ids), 1)
            mask.index_copy_(1, where, inside.triu(1))
            self._cache.slots, self._cache.used = where, self._slots.used
            positions = torch.arange(begin, begin + len(ids), device=self.device)
            logits = self._forward(self._cache, torch.tensor(ids, device=self.device), positions, mask, 1)
            self._masks.table[entry.mask_row, where] = 0
        return logits

    def _store(self, nodes: list[Node], logits: Tensor) -> None:
        """Keep what the law will ask of these nodes' rows [N, V']."""
        if self._row_size:
            block = best_rows(logits, self.vocab_size, self._row_size)
            self._rows.update((node, _Sparse(block, i)) for i, node in enumerate(nodes))
        else:
            logps = log_probabilities(logits, self.vocab_size)
            finite = finite_rows(logits, self.vocab_size).tolist()
            self._rows.update((node, _Dense(logps[i], finite[i])) for i, node in enumerate(nodes))

    def _checked(self, node: Node) -> _Dense | _Sparse:
        row = self._rows[node]
        if not (row.finite if isinstance(row, _Dense) else row.block.finite[row.place]):
            self._tainted = True
            dtype = str(self.dtype).removeprefix("torch.")
            raise RunError(
                f"the {self.role} model ({self.name}) gave logits that are not finite at step {node.depth} "
                f"in {dtype}: try --dtype float32 or bfloat16, or check its weights"
            )
        return row

    def _row(self, node: Node, size: int) -> Row:
        if size:
            tokens, logps = self.best(node, size)
            return Row(tokens, logps.astype(np.float64))
        self._checked(node)
        return Row(np.arange(self.vocab_size), self.log_row(node).cpu().numpy().astype(np.float64))

    def _open_row(self, node: Node) -> int:
        """The mask row of a known node; drawn anew where it was closed."""
        entry = self._entries[node]
        if not entry.mask_row:
            slots = list(self._prompt_slots)
            at = node
            while at is not self._root:
                slots.append(self._entries[at].slot)
                assert at.parent is not None
                at = at.parent
            entry.mask_row = self._masks.take(1)[0]
            self._masks.show(entry.mask_row, torch.tensor(slots, device=self.device))
        return entry.mask_row

    def _is_tip(self, node: Node) -> bool:
        return self._entries[node].children == 0

    def _drop(self, node: Node) -> int:
        self._close(node)
        assert node.parent is not None
        self._entries[node.parent].children -= 1
        return self._entries.pop(node).slot

    def _close(self, node: Node) -> None:
        """Forget a node's row and mask row; its keys and values stay."""
        self._rows.pop(node, None)
        entry = self._entries[node]
        if entry.mask_row:
            self._masks.give([entry.mask_row])
            entry.mask_row = 0

    def _take_slots(self, count: int) -> list[int]:
        slots = self._slots.take(count)
        self._cache.grow(self._slots.capacity)
        self._masks.grow(self._slots.capacity)
        return slots

    def _reserve(self, count: int) -> None:
        """Room for `count` slots; doubling, so that sizes stay few."""
        capacity = self._slots.capacity
        while capacity < count:
            capacity *= 2
        self._slots.grow(capacity)
        self._cache.grow(capacity)
        self._masks.grow(capacity)

    def _shared_prefix(self, ids: Sequence[int]) -> list[int]:
        """Slots that already hold the beginning of `ids`, at most all but the last token of it."""
        limit = len(ids) - 1
        shared = 0
        while shared < min(limit, len(self._prompt)) and self._prompt[shared] == ids[shared]:
            shared += 1
        slots = self._prompt_slots[:shared]
        if shared == len(self._prompt) and self._entries:
            below: dict[tuple[Node, int], Node] = {
                (node.parent, node.token): node for node in self._entries if node.parent is not None
            }
            node = below.get((self._root, ids[shared])) if shared < limit else None
            while node is not None:
                slots.append(self._entries[node].slot)
                node = below.get((node, ids[len(slots)])) if len(slots) < limit else None
        return slots

    def _start_over(self, ids: Sequence[int], kept: list[int]) -> None:
        """Free everything but the `kept` slots, which hold the first tokens of the new prompt `ids`."""
        held = set(kept)
        slots = {*self._prompt_slots, *(entry.slot for entry in self._entries.values())}
        self._masks.give({entry.mask_row for entry in self._entries.values()} - {0})
        self._slots.give(slots - held)
        self._slots.reset_peak()
        self._entries, self._rows, self._tips = {}, {}, set()
        self._prompt, self._prompt_slots = list(ids), list(kept)
        if self._tainted:
            self._cache.clear()
            self._tainted = False
