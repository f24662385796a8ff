"""A token tree of fixed shape, and what goes to the device for an iteration over it and what comes back.

Every place of the tree is there in every iteration: below each place of level d lie k_d draws, equal ones and those
below ended ones too, which nobody looks at. So who is above whom never changes, and nothing of a mask or a position
is computed on the device but where it begins (docs/design.md section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np

from dsbd_cli.decoding.device.layout import Columns, Field, Sizes

# No level is as deep as the level of children that a place never has.
NEVER = 1 << 40


class TreeShape:
    """Places by levels, the one of the beam first: numbers 0 to A - 1.

    Args:
        expansion: k_1 to k_gamma.

    Attributes:
        expansion: as given.
        first: [gamma + 2] of each level its first place, and A behind the last.
        parent, depth: int64 [A]; the beam's parent is 0.
        inner: I, places that may have children: all but the last level.
        fan: most children of a place.
        children: int64 [A, fan], 0 where there is none. need: int64 [A, fan], their level; `NEVER` where there is none.
        above: bool [A, A], row: sees itself and what is above it.
        draws, tests: random numbers that a tree and a descent take, at most.
        window, draft_window: how many are sent: those of two iterations, and some that nobody takes.
    """

    def __init__(self, expansion: tuple[int, ...]) -> None:
        self.expansion = expansion
        sizes = list(accumulate(expansion, lambda size, count: size * count, initial=1))
        self.first = list(accumulate(sizes, initial=0))
        places, self.inner, self.fan = sum(sizes), sum(sizes[:-1]), max(expansion)
        self.parent, self.depth = np.zeros((2, places), dtype=np.int64)
        self.children = np.zeros((places, self.fan), dtype=np.int64)
        self.need = np.full((places, self.fan), NEVER)
        self.above = np.eye(places, dtype=bool)
        for level, count in enumerate(expansion, start=1):
            for j in range(sizes[level]):
                place, parent = self.first[level] + j, self.first[level - 1] + j // count
                self.parent[place], self.depth[place] = parent, level
                self.children[parent, j % count], self.need[parent, j % count] = place, level
                self.above[place] |= self.above[parent]
        self.draws, self.tests = places - 1, sum(expansion) + len(expansion) + 1
        self.window, self.draft_window = 2 * self.tests + self.fan, 2 * self.draws

    def __len__(self) -> int:
        return len(self.parent)


def tree_nodes(expansion: tuple[int, ...]) -> int:
    """Nodes of a token tree without its root."""
    return sum(prod(expansion[: depth + 1]) for depth in range(len(expansion)))


class TreeStateFields(NamedTuple):
    """Where an iteration starts, one number each; on the device between iterations.

    Attributes:
        above, token: of the beam's parent, and of the beam.
        missing: 1 if the draft has not computed the parent.
        draft_row: the mask row of the parent in the draft's tree, or of the grandparent where it is missing.
        row: the parent's mask row in the target's tree.
        position: of the beam's token.
        last_used: the last random number of p's that the request has taken. draft_used: how many of q's.
    """

    above: Field
    token: Field
    draft_row: Field
    missing: Field
    row: Field
    position: Field
    last_used: Field
    draft_used: Field


class TreeRequestFields(NamedTuple):
    """What the host sends.

    Attributes:
        target_slots, target_rows: [A], reserved. draft_slots, draft_rows: [1 + I], for the beam's parent and the
            places that may have children.
        begin, draft_begin, length, draft_length: where the request's slots begin in either's buffers, and KV lengths.
        fresh: 1 where it starts from `start`: a state.
        origin, draft_origin: how many random numbers had been taken before the first of `uniforms`, and of
            `draft_uniforms`, which has `fan` unused ones before it.
        last: the position of the budget's last token: nothing is drafted there.
        temperature, top_p: float64.
        uniforms, draft_uniforms: float64, those of this iteration and of the one before it (`TreeShape.window`).
    """

    target_slots: Field
    target_rows: Field
    draft_slots: Field
    draft_rows: Field
    begin: Field
    draft_begin: Field
    length: Field
    draft_length: Field
    fresh: Field
    start: Field
    origin: Field
    draft_origin: Field
    last: Field
    temperature: Field
    top_p: Field
    uniforms: Field
    draft_uniforms: Field


class TreeOutcomeFields(NamedTuple):
    """What comes back.

    Attributes:
        accepted: [I], by place, the child that was accepted of its draws; A + the place itself where none was.
        tested: [I], children that were drawn there.
        tokens: [A].
        filled: [3], the place where the descent ended, the token that was drawn there, and how many random numbers
            of q have been taken.
        support: [I, K'], tokens that the draft drew from, ascending. prob: float64 [I, K']; 0: outside.
        rows: float32 by pairs, packed best entries (`logits.pack`): the target's of all places, then the draft's
            of the inner ones; `row_count` numbers.
    """

    accepted: Field
    tested: Field
    tokens: Field
    filled: Field
    support: Field
    prob: Field
    rows: Field


@dataclass(frozen=True, kw_only=True)
class TreeLayout(Sizes):
    """Blocks of an iteration over a token tree; one request.

    Attributes:
        shape: of the tree.
        top_n, draft_top_n: entries of a packed row of either model.
        support, draft_support: K and K', how many of them T looks at.
        state, request, outcome: the fields.
        row_count: see `TreeOutcomeFields.rows`.
    """

    shape: TreeShape
    top_n: int
    draft_top_n: int
    support: int
    draft_support: int
    state: TreeStateFields
    request: TreeRequestFields
    outcome: TreeOutcomeFields
    row_count: int

    @classmethod
    def of(cls, expansion: tuple[int, ...], top_n: int, draft_top_n: int, support: int) -> TreeLayout:
        """Args: expansion: k_1 to k_gamma. top_n, draft_top_n: as the attributes. support: of T, top-k."""
        shape = TreeShape(expansion)
        places, inner, entries = len(shape), shape.inner, min(support, draft_top_n)
        state, request, outcome = Columns(), Columns(), Columns()
        state_fields = TreeStateFields._make(state(1) for _ in TreeStateFields._fields)
        request_fields = TreeRequestFields._make(
            [request(places), request(places), request(1 + inner), request(1 + inner)]
            + [request(1) for _ in range(5)]
            + [request(state.size)]
            + [request(1) for _ in range(5)]
            + [request(shape.window), request(shape.fan + shape.draft_window)]
        )
        row_count = places * (2 * top_n + 1) + inner * (2 * draft_top_n + 1)
        outcome_fields = TreeOutcomeFields._make(
            outcome(*size)
            for size in (
                (inner,),
                (inner,),
                (places,),
                (3,),
                (inner, entries),
                (inner, entries),
                ((row_count + 1) // 2,),
            )
        )
        return cls(
            requests=1, width=1, draft_width=1, gamma=len(expansion), drawn=entries, nodes=places,
            draft_nodes=1 + inner, state_size=state.size, request_size=request.size, outcome_size=outcome.size,
            shape=shape, top_n=top_n, draft_top_n=draft_top_n, support=min(support, top_n), draft_support=entries,
            state=state_fields, request=request_fields, outcome=outcome_fields, row_count=row_count,
        )  # fmt: skip
