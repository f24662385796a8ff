"""Which nodes of a request's tree a model has computed, where they lie, and what the next forward needs to know.

Bookkeeping only: it turns nodes into slots, positions and rows of the tree attention mask, and frees
what no sequence needs any more. A node's row is its parent's row plus its own slot
(`buffers.TreeMasks`), so nothing here walks a sequence: the work of a step is that of its new nodes.
Each request has a tree of its own, in a region of the buffers that its model's trees share
(docs/design.md sections 5 and 10). One module, since entering, reserving and freeing a node keep the
same few tables in step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dsbd_cli.decoding.cache.buffers import Slots, Stores
from dsbd_cli.decoding.tree.sequences import Node


@dataclass(frozen=True)
class Plan:
    """One forward over N nodes, parents first.

    Attributes:
        ids, positions, slots: token, position and slot of each node, slots from `begin` on.
        mask_rows: the mask row that each node gets.
        base: the mask row of the nearest ancestor outside this forward.
        sight: the place in this forward of each node's nearest ancestor in it, -1 without one; or `inside` itself.
        used: slots to look at.
        begin: where the tree's region begins.
    """

    ids: list[int]
    positions: list[int]
    slots: list[int]
    mask_rows: list[int]
    base: list[int]
    sight: list[int] | np.ndarray
    used: int
    begin: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def inside(self) -> np.ndarray:
        """bool [N, N], whether node i sees node j of this forward (itself or an ancestor)."""
        if isinstance(self.sight, np.ndarray):
            return self.sight
        inside = np.eye(len(self.sight), dtype=bool)
        for i, above in enumerate(self.sight):
            if above >= 0:
                inside[i] |= inside[above]
        return inside


@dataclass(eq=False, slots=True)
class Reservation:
    """Space for nodes that are only known once they are computed.

    Attributes:
        slots, mask_rows: of each place.
        places: the computed nodes that may live on, with their places; None while the device works on it.
    """

    slots: list[int]
    mask_rows: list[int]
    places: dict[Node, int] | None = None


@dataclass(slots=True)
class _Entry:
    """A computed node: its slot, how many computed children it has, its open mask row (0: closed)."""

    slot: int
    children: int = 0
    mask_row: int = 0


class TreeCache:
    """One request's tree in a region of one model's stores.

    Args:
        stores: keys, values and mask rows.
        begin, size: of the region; without a size the tree has the stores to itself, and they double when
            they run out.

    Attributes:
        slots: which of the region's are in use.
        begin: where they begin in the buffers.
    """

    def __init__(self, stores: Stores, begin: int = 0, size: int | None = None) -> None:
        self.stores = stores
        self.cache, self.masks, self.device = stores.cache, stores.masks, stores.device
        self.slots = Slots(stores.cache.capacity if size is None else size, fixed=size is not None)
        self.begin = begin
        self._root = Node(-1, None)
        self._prompt: list[int] = []
        self._prompt_slots: list[int] = []
        self._entries: dict[Node, _Entry] = {}
        self._tips: set[Node] = set()  # computed nodes without computed children
        self._open: set[Node] = set()  # nodes that hold a mask row: they may still get children
        self._reservations: list[Reservation] = []
        self._lost = False  # buffers could not grow: they hold nothing any more

    @classmethod
    def alone(cls, capacity: int, rows: int, dtype: torch.dtype, device: torch.device) -> TreeCache:
        """A tree with stores of its own, of so many slots and mask rows to start with."""
        return cls(Stores(capacity, rows, capacity, dtype, device))

    # Prompts.

    def shared_prefix(self, ids: Sequence[int]) -> list[int]:
        """Slots that hold the beginning of `ids`, at most all but the last token of it."""
        if self._lost:
            return []
        limit = len(ids) - 1
        shared = 0
        while shared < min(limit, len(self._prompt)) and self._prompt[shared] == ids[shared]:
            shared += 1
        slots = self._prompt_slots[:shared]
        if self._prompt and shared == len(self._prompt):
            below = {(node.parent, node.token): node for node in self._entries if node.parent is not None}
            node = below.get((self._root, ids[shared])) if shared < limit else None
            while node is not None:
                slots.append(self._entries[node].slot)
                node = below.get((node, ids[len(slots)])) if len(slots) < limit else None
        return slots

    def start(self, ids: Sequence[int], root: Node, kept: Sequence[int] = ()) -> None:
        """Free everything but the `kept` slots, which hold the first tokens of the new prompt `ids`; nothing else of it
        is computed yet. `root` stands for it: a node of depth n where it ends with n tokens of an answer."""
        self.close(kept)
        self.slots.reset_peak()
        try:
            self._grow(self.slots.capacity_for(len(ids) + 1 - len(kept)))
        except BaseException:
            self.slots.give(kept)
            raise
        self._lost = False
        self._root, self._prompt, self._prompt_slots = root, list(ids), list(kept)
        entry = self._entries[root] = _Entry(-1, mask_row=self.masks.take(1)[0])
        self.masks.show(
            entry.mask_row, torch.tensor(self._prompt_slots, device=self.device, dtype=torch.long)
        )
        self._tips, self._open = {root}, {root}

    def close(self, kept: Sequence[int] = ()) -> None:
        """The request is over: free all of it but the slots `kept`."""
        self.release_all()
        slots = {
            *self._prompt_slots,
            *(one.slot for node, one in self._entries.items() if node is not self._root),
        }
        self.slots.give(slots - set(kept))
        for node in list(self._open):
            self._close(node)
        self._entries, self._tips, self._prompt, self._prompt_slots = {}, set(), [], []

    def prompt_plan(self, begin: int, end: int) -> Plan:
        """Prompt tokens `begin` to `end`, in order; `sight` is left empty: each sees those before it."""
        entry = self._entries[self._root]
        slots = self._take(end - begin)
        self._prompt_slots += slots
        entry.slot = slots[-1]
        row, count = entry.mask_row, end - begin
        ids, positions = self._prompt[begin:end], list(range(begin, end))
        return Plan(ids, positions, slots, [row] * count, [row] * count, [], self.slots.used, self.begin)

    def straight(self, end: int) -> bool:
        """Whether the first `end` prompt tokens lie in slots 1, 2, ... in order."""
        return self._prompt_slots[:end] == list(range(1, end + 1))

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt, those of an answer that it ends with left out."""
        return len(self._prompt) - self._root.depth

    # Trees.

    def __contains__(self, node: Node) -> bool:
        return node in self._entries or any(
            node in (reservation.places or ()) for reservation in self._reservations
        )

    def missing(self, wanted: Iterable[Node]) -> list[Node]:
        """`wanted` nodes, and their ancestors that are not computed yet, parents first.

        Those that are computed already (their logits were let go of) come before all others.
        """
        batch: dict[Node, None] = {}
        for node in wanted:
            path: list[Node] = []
            while node not in batch and (not path or node not in self._entries):
                path.append(node)
                assert node.parent is not None
                node = node.parent
            batch |= dict.fromkeys(reversed(path))
        known = [node for node in batch if node in self._entries]
        if known:  # no way up goes through them, so their order is that of the question
            known.sort(key=lambda node: node.depth)
            return [*known, *(node for node in batch if node not in self._entries)]
        return list(batch)

    def plan(self, nodes: list[Node]) -> Plan:
        """Enter `nodes` (parents first) into the tree; what their forward needs."""
        place = {node: i for i, node in enumerate(nodes)}
        fresh = [node for node in nodes if node not in self._entries]
        slots = dict(zip(fresh, self._take(len(fresh)), strict=True))
        open_rows = [self._entries[node].mask_row if node in self._open else 0 for node in nodes]
        new_rows = iter(self.masks.take(open_rows.count(0)))
        mask_rows = [row or next(new_rows) for row in open_rows]
        # Only above a node that is known already may others stand between it and one of this forward.
        top = min((node.depth for node in nodes if node not in slots), default=None)
        above: list[int] = []
        base: list[int] = []
        for i, (node, mask_row) in enumerate(zip(nodes, mask_rows, strict=True)):
            parent = node.parent
            assert parent is not None
            above.append(place.get(parent, -1))
            # A known node's own row holds all that its parent's does, and is open.
            base.append(base[above[i]] if above[i] >= 0 else open_rows[i] or self._open_row(parent))
            if above[i] < 0 and top is not None:
                above[i] = self._nearest(parent, place, top)
            if node in slots:
                self._enter(node, slots[node])
            self._entries[node].mask_row = mask_row
            self._open.add(node)
        return Plan(
            [node.token for node in nodes],
            [self.position(node) for node in nodes],
            [self._entries[node].slot for node in nodes],
            mask_rows,
            base,
            above,
            self.slots.used,
            self.begin,
        )

    def reserve(self, count: int) -> Reservation:
        """Slots and mask rows for `count` nodes that are only known once they are computed."""
        reservation = Reservation(self._take(count), self.masks.take(count))
        self._reservations.append(reservation)
        return reservation

    def commit(self, reservation: Reservation, places: dict[Node, int]) -> None:
        """Nodes computed in places of a reservation: the next `retain` enters those that live on."""
        reservation.places = places

    def release(self, reservation: Reservation) -> None:
        """Give a reservation back; nothing of it is entered."""
        self._reservations.remove(reservation)
        self.slots.give(reservation.slots)
        self.masks.give(reservation.mask_rows)

    def release_all(self) -> None:
        """Give back whatever is reserved."""
        for reservation in list(self._reservations):
            self.release(reservation)

    def _settle(self, leaves: Iterable[Node]) -> None:
        """Enter the computed nodes among and above `leaves`; the rest of their reservations is given back.

        Most of a forest dies in the iteration that made it: those nodes are never entered.
        """
        committed = [reservation for reservation in self._reservations if reservation.places is not None]
        entered: dict[int, set[int]] = {id(reservation): set() for reservation in committed}
        for leaf in leaves:
            path: list[tuple[Node, Reservation, int]] = []
            node: Node | None = leaf
            while node is not None and node not in self._entries:
                for reservation in committed:
                    assert reservation.places is not None
                    if (place := reservation.places.get(node)) is not None:
                        path.append((node, reservation, place))
                        break
                node = node.parent
            for new, reservation, place in reversed(path):
                entered[id(reservation)].add(place)
                assert new.parent is not None
                self._enter(new, reservation.slots[place]).mask_row = reservation.mask_rows[place]
                self._open.add(new)
        for reservation in committed:
            kept = entered[id(reservation)]
            self._reservations.remove(reservation)
            self.slots.give(slot for place, slot in enumerate(reservation.slots) if place not in kept)
            self.masks.give(row for place, row in enumerate(reservation.mask_rows) if place not in kept)

    def roll_back(self, nodes: Sequence[Node]) -> None:
        """Take planned nodes (parents first) out again, as if they had never been computed."""
        for node in reversed(nodes):
            if self._entries[node].children == 0:
                self.slots.give([self._remove(node)])
        self._tips = {node for node, entry in self._entries.items() if entry.children == 0}

    def position(self, node: Node) -> int:
        """The position of a node's token."""
        return len(self._prompt) - 1 + node.depth - self._root.depth

    def mask_row(self, node: Node) -> int:
        """The mask row of a computed node."""
        return self._open_row(node)

    def retain(self, leaves: Iterable[Node]) -> set[Node]:
        """Free every node that is neither one of `leaves` nor above one; the nodes that may go on growing.

        Args:
            leaves: they need not be computed yet. The root always stays.
        """
        leaves = list(leaves)
        if self._reservations:
            self._settle(leaves)
        keep = {self._root} & self._entries.keys()
        for leaf in leaves:
            node = leaf
            while node not in self._entries:
                assert node.parent is not None
                node = node.parent
            keep.add(node)
        freed = []
        for tip in self._tips - keep:
            node = tip
            while node not in keep and self._entries[node].children == 0:
                freed.append(self._remove(node))
                assert node.parent is not None
                node = node.parent
        self.slots.give(freed)
        living = (self._tips & self._entries.keys()) | keep
        self._tips = {node for node in living if self._entries[node].children == 0}
        for node in self._open - keep:
            self._close(node)
        return keep

    # Inside.

    def _nearest(self, node: Node, place: dict[Node, int], top: int) -> int:
        """The place of the nearest of `node` and those above it that has one, no higher than depth `top`; or -1."""
        at: Node | None = node
        while at is not None and at.depth >= top:
            if at in place:
                return place[at]
            at = at.parent
        return -1

    def _open_row(self, node: Node) -> int:
        """The mask row of a computed node; drawn anew where it was closed."""
        entry = self._entries[node]
        if not entry.mask_row:
            slots = list(self._prompt_slots)
            at = node
            while at is not self._root:
                slots.append(self._entries[at].slot)
                assert at.parent is not None
                at = at.parent
            entry.mask_row = self.masks.take(1)[0]
            self.masks.show(entry.mask_row, torch.tensor(slots, device=self.device))
            self._open.add(node)
        return entry.mask_row

    def _enter(self, node: Node, slot: int) -> _Entry:
        """Take a computed node in, below its parent."""
        assert node.parent is not None
        parent = self._entries[node.parent]
        parent.children += 1
        self._tips.discard(node.parent)
        self._tips.add(node)
        entry = self._entries[node] = _Entry(slot)
        return entry

    def _remove(self, node: Node) -> int:
        """Take a childless node out; its slot, to be given back."""
        self._close(node)
        assert node.parent is not None
        self._entries[node.parent].children -= 1
        return self._entries.pop(node).slot

    def _close(self, node: Node) -> None:
        """Give back a node's mask row; its keys and values stay."""
        if node in self._open:
            self._open.discard(node)
            self.masks.give([self._entries[node].mask_row])
            self._entries[node].mask_row = 0

    def _take(self, count: int) -> list[int]:
        # Buffers first: slots that were given out where those cannot grow would never come back.
        self._grow(self.slots.capacity_for(count + 1))
        return self.slots.take(count)

    def _grow(self, capacity: int) -> None:
        try:
            self.cache.grow(self.begin + capacity)
        except BaseException:
            self._lost = True
            raise
        self.masks.grow(capacity)
        self.slots.grow(capacity)
