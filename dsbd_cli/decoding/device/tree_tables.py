"""What follows from a token tree's shape alone, as tensors where the tree is drawn and verified."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.device.tree_law import Conditionals
from dsbd_cli.decoding.device.tree_layout import TreeLayout


class Tables:
    """Constants of `TreeIteration`; numbers of places as in `tree_layout.TreeShape`.

    Args:
        layout: of the tree.
        distinct: children are distinct. ends: how many tokens end a text.
        device: where they are to be.
    """

    def __init__(self, layout: TreeLayout, distinct: bool, ends: int, device: torch.device) -> None:
        shape = layout.shape
        places, inner = len(shape), shape.inner
        self._shape, self._device = shape, device

        def put(numbers: np.ndarray | list[Any]) -> Tensor:
            return torch.as_tensor(np.asarray(numbers), device=device)

        everyone = np.arange(places)
        # Of the beam's parent, then of all places.
        self.positions = put([-1, *shape.depth])
        self.children, self.need = put(shape.children), put(shape.need)
        over = shape.above & ~np.eye(places, dtype=bool)
        self.over = put(over)
        counts = np.where(shape.children > 0, 1, 0).sum(1) + 1
        self.taken = put((over * counts).sum(1) + 1)
        self.numbers = put(np.arange(shape.fan))
        # Numbers of the draws below a node that is the i-th to have any: those before them are in `rank`.
        self.steps = [put(np.arange(count) - count) for count in shape.expansion]
        # Of iid children and of ends of a text: which of them each child must not be equal to.
        self.others = [
            None
            if count == 1 or distinct
            else put(np.concatenate([np.tri(count, k=-1, dtype=bool), np.ones((count, ends), dtype=bool)], 1))
            for count in shape.expansion
        ]
        self.root = put([True])
        # Which child is accepted, or A + the place itself: the first accepted is the least number.
        self.nowhere = put(places + everyone[:, None])
        self.none, self.itself = put(everyone[:1]), put(everyone)
        self.to = put(np.concatenate([everyone, everyone]))
        self.begins = put(shape.children[:, :1])
        # What stands for the draft's conditionals where it is not asked.
        size = places - inner, layout.draft_support
        self.unasked = Conditionals(
            torch.zeros(size, dtype=torch.int32, device=device),
            torch.ones(size, dtype=torch.float64, device=device),
        )
        # Of each place below the beam, where it stands among all children.
        number = {child: i for i, child in enumerate(shape.children.flatten().tolist()) if child}
        self.place = put([number[place] for place in range(1, places)])
        # Where the descent ends: of that place, or of the one above it where the draft has not computed it, the place
        # in the draft's tree; whether it has not; and how many tokens there are now.
        self.ends = put(
            np.stack(
                [
                    np.where(everyone < inner, everyone, shape.parent) + 1, everyone >= inner, shape.depth + 1,
                ], 1,
            ).astype(np.int64)
        )  # fmt: skip
        self.padding = torch.zeros(layout.row_count % 2, device=device)

    def inside(self, masks: TreeMasks) -> Tensor:
        """What places add to their mask rows for each other: [A, A]."""
        return self._added(self._shape.above, masks)

    def draft_inside(self, masks: TreeMasks) -> Tensor:
        """The same of the beam's parent and the inner places, where it has been computed before, and where not."""
        inner = self._shape.inner
        both = np.zeros((2, inner + 1, inner + 1), dtype=bool)
        both[:, 1:, 1:] = self._shape.above[:inner, :inner]
        both[:, 0, 0] = both[1, :, 0] = True
        return self._added(both, masks)

    def _added(self, seen: np.ndarray, masks: TreeMasks) -> Tensor:
        added = torch.zeros(seen.shape, dtype=masks.table.dtype, device=self._device)
        return added.masked_fill(~torch.as_tensor(seen, device=self._device), masks.hidden)
