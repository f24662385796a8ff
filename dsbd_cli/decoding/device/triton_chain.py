"""`DeviceChain` with the law in Triton kernels instead of tensor operations (`triton_law`); same results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.device import law_triton as law
from dsbd_cli.decoding.device.chain_iteration import DeviceChain
from dsbd_cli.decoding.device.layout import Side
from dsbd_cli.decoding.device.steps import Nodes, forward
from dsbd_cli.errors import first_line


class _Forest(NamedTuple):
    """What was drafted, [gamma, W_S] each.

    Attributes:
        parent: place in the layer above (for the first layer: among the beams). node: the same among all nodes.
        token: of the draws.
        weight: float64; -inf for what ends a sequence.
    """

    parent: Tensor
    node: Tensor
    token: Tensor
    weight: Tensor


class TritonChain(DeviceChain):
    """See `DeviceChain`."""

    def takes(self) -> bool:
        """Whether the kernels have room for these sizes."""
        target, draft = self.target.top_n, 0 if self.draft is None else self.draft.top_n
        joint = max(self.beams * target, max(self.beams, self.width) * draft)
        return (
            max(target, draft, self.processor.top_n, self.width, self.beams) <= law.MOST_ENTRIES
            and joint <= law.MOST_JOINT
        )

    def _record(self, request: np.ndarray) -> None:
        try:
            super()._record(request)
        except RuntimeError:
            raise
        except Exception as error:  # whatever the compiler makes of this machine
            raise RuntimeError(first_line(error)) from error

    def _steps(self, request: Tensor, sees: int, draft_sees: int = 0) -> list[Tensor]:
        beams, wide, deep = self.beams, self.width, self.gamma
        device = request.device
        space, draft_space, used, draft_used, origin, uniforms = self._parts_of(request)
        now = self._beams_now()
        _, outcome_size = self._sizes()
        outcome = torch.zeros(outcome_size, dtype=torch.float64, device=device)
        parent, node, token = torch.zeros((3, deep, wide), dtype=torch.long, device=device)
        forest = _Forest(parent, node, token, torch.zeros((deep, wide), dtype=torch.float64, device=device))
        later = torch.arange(deep * wide, device=device) // max(1, wide) + 1
        at = 0
        if self.draft is not None:
            table = self.draft.pool.masks.table
            slots, rows = draft_space[:, : 2 * beams]
            mask = law.catch_up_masks(table, now, slots, rows, beams)
            ids = torch.cat([now.above, now.token])
            where = now.position + torch.arange(-beams, beams, device=device).clamp(-1, 0)
            logits = forward(self.draft, Nodes(ids, where, slots, mask), draft_used, draft_sees)[beams:]
            scores, base = now.score.view(torch.float64), rows[beams:]
            for depth in range(deep):
                law.draft_layer(
                    self._packed(self.draft, logits), self.draft.top_n, scores, self._how.eos, forest,
                    depth, beams, outcome[at:],
                )  # fmt: skip
                at += 5 * wide + len(logits)
                scores = forest.weight[depth]
                if depth + 1 < deep:
                    begin = 2 * beams + depth * wide
                    slots, rows = draft_space[:, begin : begin + wide]
                    mask = law.forest_masks(table, base, forest.parent[depth], slots, rows, wide)
                    where = now.position + later[depth * wide : (depth + 1) * wide]
                    logits = forward(
                        self.draft, Nodes(forest.token[depth], where, slots, mask), draft_used, draft_sees
                    )
                    base = rows
        table = self.target.pool.masks.table
        slots, rows = space
        mask = law.forest_masks(table, now.row, None, slots[:beams], rows[:beams], beams)
        ids, where = now.token, now.position.expand(beams)
        if deep:
            below = law.forest_masks(table, rows, forest.parent, slots[beams:], rows[beams:], wide)
            mask = torch.cat([mask, below])
            ids, where = torch.cat([ids, forest.token.flatten()]), torch.cat([where, now.position + later])
        best = self._packed(self.target, forward(self.target, Nodes(ids, where, slots, mask), used, sees))
        law.verify(
            best, self.target.top_n, self._now, self._next, ids, rows, draft_space[1, beams:], forest,
            self._how.eos, uniforms, origin, outcome[at:], beams, self.processor, self._numbers, self.window,
        )  # fmt: skip
        return [outcome]

    def _packed(self, side: Side, logits: Tensor) -> Tensor:
        return law.pack_rows(logits, side.vocab, side.top_n)
