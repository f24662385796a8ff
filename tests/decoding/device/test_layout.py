"""What goes out and comes back: ranges that neither overlap nor leave holes, seen alike by numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.device.layout import CoverLayout, DraftLayout

SIZES = [(1, 1, 0, 0), (2, 4, 0, 0), (1, 4, 8, 4), (3, 6, 2, 1), (2, 1, 1, 3)]


def covered(fields, size):
    """Whether the fields are all of a row of `size`, each column once (fields of the same range count once)."""
    parts = {(field.at.start, field.at.stop) for group in fields for field in group}
    ranges = sorted((start, stop) for start, stop in parts if stop > start)
    ends = [0, *(stop for _, stop in ranges)]
    return [start for start, _ in ranges] == ends[:-1] and ends[-1] == size


@pytest.mark.parametrize("sizes", SIZES)
def test_fields_of_an_iteration_fill_their_blocks(sizes):
    layout = CoverLayout.of(*sizes)
    assert covered([layout.state], layout.state_size)
    assert covered([layout.request], layout.request_size)
    assert covered([layout.forest, layout.verified], layout.outcome_size)
    # The most probable are their own support.
    assert layout.forest.support_parent == layout.forest.parent


@pytest.mark.parametrize("more", [{"kept": 9}, {"drawn": 7}])
def test_fields_of_beam_search_and_of_drawn_forests_fill_their_blocks(more):
    layout = CoverLayout.of(2, 1 if "drawn" in more else 3, 1 if "drawn" in more else 4, 2, **more)
    assert covered([layout.state], layout.state_size)
    assert covered([layout.request], layout.request_size)
    assert covered([layout.forest, layout.verified], layout.outcome_size)
    assert (layout.forest.support_parent == layout.forest.parent) == ("kept" in more)


@pytest.mark.parametrize(("gamma", "support", "target_size"), [(1, 4, 8), (3, 10, 16), (2, 3, 1)])
def test_fields_of_an_iteration_that_the_host_verifies_fill_their_blocks(gamma, support, target_size):
    layout = DraftLayout.of(4, 5, gamma, support, 7, 8, target_size)
    assert covered([layout.request], layout.request_size)
    assert covered([layout.forest, [layout.rows]], layout.outcome_size)
    assert layout.row_count == (target_size + gamma * 5) * 15
    assert layout.rows.shape[0] * 2 - layout.row_count in (0, 1)


def test_numpy_and_torch_see_the_same_numbers():
    layout = CoverLayout.of(2, 3, 2, 2)
    block = torch.zeros((2, layout.request_size), dtype=torch.long)
    field = layout.request.uniforms
    values = np.random.default_rng(0).random((2, *field.shape))
    for r in range(2):
        block.numpy()[r, field.at].view(np.float64)[:] = values[r].ravel()
    assert np.array_equal(field.of(block, torch.float64).numpy(), values)
    assert field.start == field.at.start
