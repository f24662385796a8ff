"""Forests of the most probable continuations: torch and Triton beside numpy, on the same random cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.cache.logits import unpack
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.distribution import LogitsProcessor, joint, most_probable
from tests.decoding.device.helpers import interpreted
from tests.decoding.device.law_cases import EOS, packed_rows, rows_of


@pytest.mark.parametrize("depth", [0, 1])
def test_a_drafted_layer_is_the_most_probable_of_the_joint(law, depth):
    law, device = law
    rng = np.random.default_rng(depth)
    layout = CoverLayout.of(requests=2, width=3, draft_width=5, gamma=2)
    parents, top_n = (3, 5)[depth], 6
    eos = torch.tensor(EOS, device=device)
    for _ in range(3 if interpreted(law, device) else 12):
        packed = packed_rows(rng, 2 * parents, top_n)
        scores = rng.integers(-4, 0, (2, parents)) / 2.0
        scores[1, -1] = -np.inf  # one beam fewer
        outcome = torch.zeros((2, layout.outcome_size), dtype=torch.long, device=device)
        law.draft(packed.to(device), torch.tensor(scores, device=device), depth, layout, outcome, eos)
        outcome, forest = outcome.cpu(), layout.forest
        for r in range(2):
            rows = rows_of(packed[r * parents : (r + 1) * parents])
            live = [i for i in range(parents) if scores[r, i] > -np.inf]
            exact = joint(
                [scores[r, i] for i in live],
                [rows[i] for i in live],
                LogitsProcessor(top_k=layout.draft_width),
            )
            order = most_probable(exact, layout.draft_width)
            weights = scores[r, exact.parent[order]] + exact.logp[order]
            weights[np.isin(exact.token[order], EOS)] = -np.inf
            assert forest.parent.of(outcome)[r, depth].tolist() == exact.parent[order].tolist()
            assert forest.token.of(outcome)[r, depth].tolist() == exact.token[order].tolist()
            chances = [(forest.logp, exact.logp[order]), (forest.prob, exact.prob[order])]
            for field, wanted in [*chances, (forest.weight, weights)]:
                assert np.allclose(field.of(outcome, torch.float64)[r, depth], wanted, rtol=1e-12)
            assert forest.finite.of(outcome)[r, depth, :parents].tolist() == [1] * parents


@pytest.mark.parametrize("of_target", [4, 9])
def test_below_nodes_of_the_last_iteration_the_target_speaks(law, of_target):
    """A node is known where its parent is, and the last forest held the same continuation, of finite logits."""
    law, device = law
    rng = np.random.default_rng(of_target)
    width, draft_width, gamma, top_n = 3, 5, 3, 6
    layout = CoverLayout.of(2, width, draft_width, gamma, recalled=of_target)
    forest, seen = layout.forest, set()

    def forests(block: torch.Tensor) -> None:
        """Distinct continuations of few tokens, so that two forests have many in common; some are dead."""
        for r, depth in np.ndindex(2, gamma):
            above = draft_width if depth else width
            flat = rng.permutation(2 * above)[:draft_width]
            forest.parent.of(block)[r, depth] = torch.from_numpy(flat // 2)
            forest.token.of(block)[r, depth] = torch.from_numpy(flat % 2)
            weights = np.where(rng.random(draft_width) < 0.8, -1.0, -np.inf)
            forest.weight.of(block, torch.float64)[r, depth] = torch.from_numpy(weights)

    for _ in range(6 if interpreted(law, device) else 15):
        outcome = torch.zeros((2, layout.outcome_size), dtype=torch.long)
        memory = torch.zeros((2, layout.memory_size + 3), dtype=torch.long)[:, 3:]  # part of a larger block
        rows = packed_rows(rng, 2 * layout.nodes, of_target).view(2, layout.nodes, -1)
        rows[:, rng.integers(layout.nodes), -1] = 0.0
        layout.rows.of(memory).view(torch.float32)[:, : layout.row_count] = rows.flatten(1)
        forests(memory)
        forests(outcome)
        children: list[dict[tuple[int, int], int]] = [{}, {}]
        for r, depth, i in np.ndindex(2, gamma, draft_width):
            begin = width + (depth - 1) * draft_width if depth else 0
            above = begin + int(forest.parent.of(memory)[r, depth, i])
            if forest.weight.of(memory, torch.float64)[r, depth, i] > -np.inf:
                node = width + depth * draft_width + i
                children[r][above, int(forest.token.of(memory)[r, depth, i])] = node
        beams = rng.integers(0, layout.nodes + 1, (2, width))
        known, wanted = torch.from_numpy(beams).to(device), beams - 1
        for depth in range(gamma):
            if depth:
                parent, token = (
                    field.of(outcome)[:, depth - 1].numpy() for field in (forest.parent, forest.token)
                )
                up = np.take_along_axis(wanted, parent, 1)
                wanted = np.array(
                    [
                        [children[r].get((u, t), -1) for u, t in zip(up[r], token[r], strict=True)]
                        for r in (0, 1)
                    ]
                )
            finite = np.take_along_axis(rows[:, :, -1].numpy(), np.maximum(wanted, 0), 1) > 0
            wanted = np.where(finite, wanted, -1)
            before = packed_rows(rng, wanted.size, top_n)
            after = before.to(device).clone()
            known = law.recall(after, known, depth, layout, outcome.to(device), memory.to(device))
            assert np.array_equal(known.cpu().numpy() - 1, wanted)
            got, draft = unpack(after.cpu().numpy()), unpack(before.numpy())
            assert np.array_equal(got.finite, draft.finite)
            for at, (r, i) in enumerate(np.ndindex(*wanted.shape)):
                node = wanted[r, i]
                if node < 0:
                    assert np.array_equal(got.tokens[at], draft.tokens[at])
                    assert np.array_equal(got.logps[at], draft.logps[at])
                    continue
                own, count = unpack(rows[r].numpy()), min(top_n, of_target)
                assert np.array_equal(got.tokens[at, :count], own.tokens[node, :count])
                assert np.array_equal(got.logps[at, :count], own.logps[node, :count])
                assert (got.logps[at, count:] == -np.inf).all()
                seen.add(depth)
    assert seen == set(range(gamma))
