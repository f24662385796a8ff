"""Iterations over token trees that follow each other on the device: draw a tree, the target over it, descend.

What `iteration.CoverIteration` is for forests; one request. How far the random numbers have come depends on what was
drawn and accepted, so the device counts them (docs/design.md section 3). One module, since what an iteration is sent,
does on the device and gives back are the two ends of one layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.device.iteration import AheadIteration, Space
from dsbd_cli.decoding.device.law import DeviceLaw
from dsbd_cli.decoding.device.steps import Nodes, forward_many
from dsbd_cli.decoding.device.tree_law import (
    RULES,
    Conditionals,
    Drafted,
    conditionals,
    drawn,
    drawn_distinct,
)
from dsbd_cli.decoding.device.tree_layout import TreeLayout
from dsbd_cli.decoding.device.tree_tables import Tables
from dsbd_cli.decoding.forward.capture import InFlight, OverlapClock
from dsbd_cli.decoding.model.protocol import Side


class TreeOutcome(NamedTuple):
    """What came back, on the host; fields as in `tree_layout.TreeOutcomeFields`, and the packed rows apart.

    Attributes:
        end, filled: the place where the descent ended, and the token that was drawn there.
        draft_used: random numbers of q that have been taken.
        best: float32 [A, 2 k + 1], the target's. draft_best: [I, 2 k' + 1].
    """

    accepted: list[int]
    tested: list[int]
    tokens: list[int]
    end: int
    filled: int
    draft_used: int
    support: np.ndarray
    prob: np.ndarray
    best: np.ndarray
    draft_best: np.ndarray


class TreeSent(NamedTuple):
    """What the host sends; see `tree_layout.TreeRequestFields`.

    Attributes:
        space: reserved for this iteration.
        temperature, top_p: of T; top_p infinite where nothing is cut.
        last: the position of the budget's last token.
        uniforms, draft_uniforms: the next ones that nothing committed has taken.
        origin, draft_origin: how many have been taken.
        state: int64 [state_size]; None: where the last iteration ended.
    """

    space: Space
    temperature: float
    top_p: float
    last: int
    uniforms: np.ndarray
    draft_uniforms: np.ndarray
    origin: int
    draft_origin: int
    state: np.ndarray | None


class TreeIteration(AheadIteration):
    """Runs iterations over token trees for one request of a pair.

    Args:
        target, draft, law, clock: as in `AheadIteration`; of the law only `pack` is asked.
        layout: of the tree.
        rule: one of `tree_law.RULES`; children are distinct under `rsd`.
        eos_ids: nothing is drawn below these.
    """

    layout: TreeLayout

    def __init__(
        self, target: Side, draft: Side, law: DeviceLaw, layout: TreeLayout, rule: str, eos_ids: Sequence[int],
        device: torch.device, clock: OverlapClock,
    ) -> None:  # fmt: skip
        super().__init__(target, draft, law, layout, device, clock)
        self._theirs = draft
        self._rule, self._distinct = RULES[rule], rule == "rsd"
        # iid children may be equal, and behind a refused one only K-SEQ accepts its equal.
        self._merges = rule == "spectr" and layout.shape.fan > 1
        self._eos = torch.tensor(eos_ids, dtype=torch.long, device=device)
        self._tables = Tables(layout, self._distinct, len(eos_ids), device)
        self._inside = self._tables.inside(target.stores.masks)
        self._draft_inside = self._tables.draft_inside(draft.stores.masks)
        self._state[:, layout.state.position.at] = 1  # a capture runs from here: no position is before 0
        nobody = np.zeros(layout.request_size, dtype=np.int64)
        fields = layout.request
        for field in (fields.length, fields.draft_length, fields.fresh):
            nobody[field.at] = 1
        nobody[fields.start.at] = self.state_of([0], [0.0], [0], [0], 1)
        nobody[fields.temperature.at].view(np.float64)[:] = 1.0
        self._nobody = nobody

    # What the host does.

    def state_of(
        self, tokens: list[int], scores: list[float], rows: list[int], draft_rows: list[int], position: int
    ) -> np.ndarray:
        """See `AheadIteration`; no random number has been taken there."""
        fields = self.layout.state
        state = np.zeros(self.layout.state_size, dtype=np.int64)
        for field, number in (
            (fields.token, tokens[0]), (fields.row, rows[0]), (fields.draft_row, draft_rows[0]),
            (fields.position, position), (fields.last_used, -1),
        ):  # fmt: skip
            state[field.at] = number
        return state

    def _packed(self, sent: Sequence[Any]) -> Tensor:
        block, fields = self._nobody.copy(), self.layout.request
        one: TreeSent | None = sent[0]
        if one is not None:
            space = one.space
            tree, draft_tree = space.trees
            assert space.draft is not None
            assert draft_tree is not None
            for field, numbers in (
                (fields.target_slots, space.target.slots), (fields.target_rows, space.target.mask_rows),
                (fields.draft_slots, space.draft.slots), (fields.draft_rows, space.draft.mask_rows),
                (fields.begin, tree.begin), (fields.draft_begin, draft_tree.begin),
                (fields.length, tree.slots.used), (fields.draft_length, draft_tree.slots.used),
                (fields.fresh, one.state is not None), (fields.last, one.last), (fields.origin, one.origin),
                # The first of them stands behind some that nobody takes.
                (fields.draft_origin, one.draft_origin - self.layout.shape.fan),
            ):  # fmt: skip
                block[field.at] = numbers
            if one.state is not None:
                block[fields.start.at] = one.state
            bits = block.view(np.float64)
            bits[fields.temperature.at], bits[fields.top_p.at] = one.temperature, one.top_p
            bits[fields.uniforms.at] = one.uniforms
            bits[fields.draft_uniforms.at][self.layout.shape.fan :] = one.draft_uniforms
        return torch.from_numpy(block[None])

    def wait(self, flight: InFlight, wanted: Sequence[bool] | None = None) -> list[TreeOutcome | None]:
        """See `AheadIteration`."""
        block, layout = flight.wait()[0], self.layout
        if wanted is not None and not wanted[0]:
            return [None]
        fields, places = layout.outcome, len(layout.shape)
        end, filled, draft_used = block[fields.filled.at].tolist()
        rows = block[fields.rows.at].view(np.float32)[: layout.row_count]
        border = places * (2 * layout.top_n + 1)
        accepted, tested, tokens = (
            block[field.at].tolist() for field in (fields.accepted, fields.tested, fields.tokens)
        )
        outcome = TreeOutcome(
            accepted, tested, tokens, end, filled, draft_used,
            block[fields.support.at].reshape(fields.support.shape),
            block[fields.prob.at].view(np.float64).reshape(fields.prob.shape),
            rows[:border].reshape(places, -1), rows[border:].reshape(layout.shape.inner, -1),
        )  # fmt: skip
        return [outcome]

    # What is captured.

    def _steps(self, request: Tensor, sees: int, draft_sees: int = 0) -> list[Tensor]:
        layout, tables, state = self.layout, self._tables, self._state
        sent, now, shape = layout.request, layout.state, layout.shape
        state.copy_(torch.where(sent.fresh.of(request) != 0, sent.start.of(request), state))
        one = state[0]
        where = one[now.position.at] + tables.positions
        # Where the numbers of p and of q begin among those that were sent.
        origins = request[0, sent.origin.start : sent.draft_origin.start + 1]
        begins = one[now.last_used.start : now.draft_used.start + 1] - origins
        there = tables.need < sent.last.of(request)[0] - one[now.position.at]
        temperature, top_p = (x.of(request, torch.float64)[0] for x in (sent.temperature, sent.top_p))

        drafted, draft_best, behind = self._draw(request, begins[1:], there, where, draft_sees)
        tokens = torch.cat([one[now.token.at], *(part.flatten() for part in drafted.tokens)])

        slots, rows = sent.target_slots.of(request)[0], sent.target_rows.of(request)[0]
        mask = _entered(
            self.target.stores.masks, one[now.row.at].expand(len(shape)), rows, slots, self._inside
        )
        nodes = Nodes(tokens, where[1:], slots, mask)
        logits = forward_many(self.target, nodes, sent.begin.of(request)[0], sent.length.of(request)[0], sees)
        best = self.law.pack(self.target, logits)

        support = Conditionals(
            *(torch.cat(parts) for parts in zip(*drafted.supports, tables.unasked, strict=True))
        )
        children = tokens[tables.children]
        if drafted.exists:
            exists = torch.cat([tables.root, *(part.flatten() for part in drafted.exists)])
            there = there & exists[tables.children]
        tested = there.sum(1)
        # Every node on the way to a place took one number for each of its draws, and one more.
        taken = tables.taken if not drafted.exists else (tables.over * (tested + 1)).sum(1) + 1
        first = taken + begins[:1]
        uniforms = sent.uniforms.of(request, torch.float64)[0]
        p = conditionals(best, layout.support, temperature, top_p)
        answers = self._rule(p, Drafted(support, children, there), uniforms[first[:, None] + tables.numbers])
        accepted = torch.where(answers.passes, tables.children, tables.nowhere).amin(1)
        to = tables.to
        if self._merges:
            # An equal child has its children where the first of its kind has them.
            same = (children[:, :, None] == children[:, None, :]).int().argmax(2)
            to = torch.cat([tables.none, (same + tables.begins).flatten()[tables.place], tables.itself])
        following = to[accepted]
        end = following[:1]
        for _ in range(layout.gamma - 1):
            end = following[end]

        number = (first + tested)[end]
        pick, _ = drawn(answers.rest[end], uniforms[number][:, None])
        filled = p.tokens[end].gather(1, pick)[0]

        place = tables.ends[end][0]
        draft_row = sent.draft_rows.of(request)[0][place[:1]]
        used = torch.cat([number, behind]) + origins
        row, position = rows[end], one[now.position.at] + place[2:]
        torch.cat([tokens[end], filled, draft_row, place[1:2], row, position, used], out=self._after[0])
        packed = torch.cat([best.flatten(), *(part.flatten() for part in draft_best), tables.padding])
        inner = slice(shape.inner)
        outcome = [
            accepted[inner],
            tested[inner],
            tokens,
            end,
            filled,
            used[1:],
            support.tokens[inner].flatten(),
        ]
        outcome += [support.prob[inner].view(torch.long).flatten(), packed.view(torch.long)]
        return [torch.cat(outcome)[None]]

    def _draw(
        self, request: Tensor, begin: Tensor, there: Tensor, where: Tensor, sees: int
    ) -> tuple[_Levels, list[Tensor], Tensor]:
        """Draw the tree level by level.

        Args:
            begin: int64 [1], the number of q that it begins with. there: bool [A, fan], children that are drawn if
                their parent may have any.
            where: positions of the beam's parent, then of all places.

        Returns:
            The levels, the packed rows of the draft's logits by levels, and the first number of q not taken.
        """
        layout, tables, draft, one = self.layout, self._tables, self._theirs, self._state[0]
        sent, now, shape = layout.request, layout.state, layout.shape
        slots, rows = sent.draft_slots.of(request)[0], sent.draft_rows.of(request)[0]
        # All stand below one row: that of the beam's parent, or that above it where it is computed with them.
        base, own = one[now.draft_row.at].expand(len(rows)), self._draft_inside[one[now.missing.at]][0]
        mask = _entered(draft.stores.masks, base, rows, slots, own)
        starts, length = sent.draft_begin.of(request)[0], sent.draft_length.of(request)[0]
        uniforms = sent.draft_uniforms.of(request, torch.float64)[0]
        temperature, top_p = (x.of(request, torch.float64)[0] for x in (sent.temperature, sent.top_p))
        levels, packed = _Levels([], [], []), []
        alive = there[:1, 0]
        ids, first, last = one[now.above.start : now.token.start + 1], 0, 2
        for level, count in enumerate(shape.expansion):
            nodes = Nodes(ids, where[first:last], slots[first:last], mask[first:last])
            logits = forward_many(draft, nodes, starts, length, sees)
            best = self.law.pack(draft, logits if level else logits[1:])
            packed.append(best)
            support = conditionals(best, layout.draft_support, temperature, top_p)
            # Nodes that may have children come one behind the other.
            rank = torch.cumsum(alive, 0)
            numbers = torch.add(begin, rank, alpha=count)[:, None] + tables.steps[level]
            begin = torch.add(begin, rank[-1:], alpha=count)
            if self._distinct:
                draws, exists = drawn_distinct(support.prob, uniforms[numbers])
                levels.exists.append(exists)
            else:
                draws, _ = drawn(support.prob, uniforms[numbers])
            tokens = support.tokens.gather(1, draws)
            levels.supports.append(support)
            levels.tokens.append(tokens)
            if level + 1 == layout.gamma:
                break
            goes_on = alive[:, None] & there[shape.first[level + 1] : shape.first[level + 2], 0].view_as(
                tokens
            )
            if self._distinct:
                goes_on = goes_on & exists
            if (others := tables.others[level]) is not None:
                # Ends of a text, and equal ones before.
                same = (
                    tokens[:, :, None]
                    == torch.cat([tokens, self._eos.expand(len(tokens), -1)], 1)[:, None, :]
                )
                goes_on = goes_on > (same & others).any(2)
            elif len(self._eos):
                goes_on = goes_on > (tokens[:, :, None] == self._eos).any(2)
            alive, ids = goes_on.flatten(), tokens.flatten().long()
            first, last = 1 + shape.first[level + 1], 1 + shape.first[level + 2]
        return levels, packed, begin


class _Levels(NamedTuple):
    """A tree by levels: what each was drawn from, its tokens [n, k], and where children are distinct whether a draw
    was left [n, k]."""

    supports: list[Conditionals]
    tokens: list[Tensor]
    exists: list[Tensor]


def _entered(masks: TreeMasks, base: Tensor, rows: Tensor, slots: Tensor, own: Tensor) -> Tensor:
    """`TreeMasks.extend` with what new nodes see of each other as it is added: [N, N] of the masks' kind."""
    mask = masks.table.index_select(0, base)
    mask.index_copy_(1, slots, own)
    masks.table.index_copy_(0, rows, mask)
    return mask
