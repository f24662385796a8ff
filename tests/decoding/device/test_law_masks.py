"""What the nodes of a forest see of each other, by each writing of the law."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.device.layout import CoverLayout


def test_masks_of_forests_are_those_of_their_ancestors(law):
    law, device = law
    parent = torch.tensor(
        [[[0, 2, 2, 1], [3, 0, 0, 2], [1, 1, 3, 0]], [[1, 1, 0, 0], [0, 1, 2, 3], [3, 3, 3, 0]]]
    )
    base = torch.tensor([[1, 2, 3], [4, 5, 6]])
    slots = (torch.randperm(80, generator=torch.Generator().manual_seed(0))[:24] + 10).view(2, 12)
    rows = torch.arange(20, 44).view(2, 12)
    masks = TreeMasks(50, 96, torch.float32, device)
    for row in range(1, 7):
        masks.see(row, torch.arange(row, 9, device=device))
    got = law.forest_masks(masks, *(part.to(device) for part in (base, parent, slots, rows))).cpu()
    table = masks.table.cpu()
    for r in range(2):
        for node in range(12):
            seen = set()
            depth, at = divmod(node, 4)
            while depth >= 0:
                seen.add(int(slots[r, depth * 4 + at]))
                at, depth = int(parent[r, depth, at]), depth - 1
            seen |= set(range(int(base[r, at]), 9))
            assert set(torch.nonzero(got[r * 12 + node] == 0)[:, 0].tolist()) == seen
            assert torch.equal(table[rows[r, node]], got[r * 12 + node])


@pytest.mark.parametrize("missing", [0, 1])
def test_masks_of_a_draft_that_catches_up(law, missing):
    law, device = law
    layout = CoverLayout.of(requests=2, width=3, draft_width=2, gamma=1)
    state = torch.zeros((2, layout.state_size), dtype=torch.long)
    fields = layout.state
    state[:, fields.above_row.at] = torch.tensor([[1, 2, 1], [3, 3, 2]])
    state[:, fields.draft_row.at] = torch.tensor([[4, 5, 4], [6, 6, 5]])
    state[:, fields.first.at] = torch.tensor([[0, 1, 0], [0, 0, 2]])
    state[:, fields.missing.at] = missing
    slots = (torch.randperm(40, generator=torch.Generator().manual_seed(0))[:12] + 10).view(2, 6)
    rows = torch.arange(20, 32).view(2, 6)
    masks = TreeMasks(40, 64, torch.float32, device)
    for row in range(1, 7):
        masks.see(row, torch.tensor([row], device=device))
    got = law.catch_up_masks(masks, state.to(device), layout, slots.to(device), rows.to(device)).cpu()
    for r in range(2):
        for i in range(3):
            above, own = int(state[r, fields.above_row.at][i]), int(state[r, fields.draft_row.at][i])
            first = int(state[r, fields.first.at][i])
            parent, beam = got[r * 6 + i], got[r * 6 + 3 + i]
            assert set(torch.nonzero(parent == 0)[:, 0].tolist()) == {above, int(slots[r, i])}
            wanted = {above, int(slots[r, first])} if missing else {own}
            assert set(torch.nonzero(beam == 0)[:, 0].tolist()) == wanted | {int(slots[r, 3 + i])}
            assert torch.equal(masks.table.cpu()[rows[r, 3 + i]], beam)
