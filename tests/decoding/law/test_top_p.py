"""Where top-p cuts when some head has exactly that mass: behind it, and in every writing of the rule alike.

All numbers here are powers of two or equal, so that sums are exact and no rounding decides.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.cache.logits import dense_joint
from dsbd_cli.decoding.device.law_torch import draft_layer
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, joint

Kept = list[tuple[int, int]]
Rule = Callable[[np.ndarray, float], Kept]


def on_the_host(weights: np.ndarray, top_p: float, top_k: int = 0) -> Kept:
    """`law.joint`; without top-k over whole rows."""
    rows = []
    for row in np.log(weights):
        order = np.argsort(-row, kind="stable")
        rows.append(Row(order, row[order]))
    support = joint([0.0] * len(rows), rows, LogitsProcessor(top_k=top_k, top_p=top_p))
    return list(zip(support.parent.tolist(), support.token.tolist(), strict=True))


def on_the_host_behind_top_k(weights: np.ndarray, top_p: float) -> Kept:
    return on_the_host(weights, top_p, weights.size)


def on_whole_rows(weights: np.ndarray, top_p: float) -> Kept:
    """`dense_joint`, where whole rows lie on a device."""
    logps = torch.from_numpy(np.log(weights)).float()
    support = dense_joint([0.0] * len(weights), logps, LogitsProcessor(top_p=top_p))
    return list(zip(support.parent.tolist(), support.token.tolist(), strict=True))


def on_the_device(weights: np.ndarray, top_p: float) -> Kept:
    """`law_torch.draft_layer`, over each row's best entries."""
    logps, tokens = torch.from_numpy(np.log(weights)).float().sort(descending=True, stable=True)
    scores, uniforms = (
        torch.zeros(len(weights), dtype=torch.double),
        torch.full((1,), 0.5, dtype=torch.double),
    )
    enough = LogitsProcessor(top_p=top_p).enough
    warp = torch.ones(1, dtype=torch.double), torch.tensor([enough], dtype=torch.double)
    drafted = draft_layer(scores, tokens, logps, False, weights.size, *warp, uniforms)
    kept = drafted.prob > 0
    return list(zip(drafted.parent[kept].tolist(), drafted.token[kept].tolist(), strict=True))


@pytest.fixture(params=[on_the_host, on_the_host_behind_top_k, on_whole_rows, on_the_device])
def rule(request: pytest.FixtureRequest) -> Rule:
    return request.param


EQUAL = np.full((2, 4), 0.125)


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.625, 0.875])
def test_a_head_of_exactly_that_mass_is_all_that_stays(rule: Rule, top_p: float) -> None:
    """Eight equal entries: heads of 1/8, 2/8, ...; the entry behind one that reaches p is cut."""
    everything = [(parent, token) for parent in range(2) for token in range(4)]
    assert rule(EQUAL, top_p) == everything[: int(8 * top_p)]


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.625, 0.875])
def test_a_hair_more_takes_one_entry_more_and_a_hair_less_none_fewer(rule: Rule, top_p: float) -> None:
    assert len(rule(EQUAL, top_p + 1e-9)) == 8 * top_p + 1
    assert len(rule(EQUAL, top_p - 1e-9)) == 8 * top_p


@pytest.mark.parametrize(
    ("count", "top_p", "stay"), [(10, 0.9, 9), (10, 0.3, 3), (20, 0.85, 17), (40, 0.7, 28)]
)
def test_tenths_whose_sums_round(rule: Rule, count: int, top_p: float, stay: int) -> None:
    """Sums of tenths are off by a last bit, which keeps no tenth of ten equal tokens at top-p 0.9."""
    assert len(rule(np.full((1, count), 1 / count), top_p)) == stay


@pytest.mark.parametrize("tau", [1e-6, 1e-307, 5e-324])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_tiny_temperature_leaves_whole_rows_their_best(tau: float, top_p: float) -> None:
    logps = torch.tensor([[-50.0, -1.0, -3.0, -torch.inf], [-1.5, -700.0, -2.0, -1.2]])
    support = dense_joint([-500.0, -500.3], logps, LogitsProcessor(tau, top_p=top_p))
    assert (support.parent.tolist(), support.token.tolist(), support.prob.tolist()) == ([0], [1], [1.0])


def test_more_equal_entries_than_are_sorted_first() -> None:
    """2,048 entries, of which a head of exactly the 1,024 that the host sorts at first, and of one more."""
    flat = np.full((2, 1024), 1 / 2048)
    for count in (1023, 1024, 1025, 1536):
        kept = on_the_host(flat, count / 2048)
        assert kept == on_whole_rows(flat, count / 2048)
        assert len(kept) == count
        assert kept[-1] == divmod(count - 1, 1024)
