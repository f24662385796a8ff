"""Beam search: torch and Triton beside numpy, on the same random cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.beam_search import best_candidates, candidates_kept
from tests.decoding.device.helpers import interpreted
from tests.decoding.device.law_cases import EOS, packed_rows, rows_of, words


@pytest.mark.parametrize("gamma", [0, 2])
def test_beam_search_is_that_of_numpy(law, gamma):
    """Candidates, next beams, and how many layers the forest serves; scores tie often."""
    law, device = law
    rng = np.random.default_rng(3 + gamma)
    width, draft_width = 3, 6 if gamma else 0
    kept = candidates_kept(width, len(EOS))
    layout = CoverLayout.of(2, width, draft_width, gamma, kept)
    eos, now, reached = torch.tensor(EOS, device=device), layout.state, set()
    for _ in range(4 if interpreted(law, device) else 30):
        packed = packed_rows(rng, 2 * layout.nodes, kept)
        scores = (rng.integers(-4, 0, (2, width)) / 3).astype(np.float32)
        scores[0, 2] = -np.inf
        state, request, outcome = (
            torch.zeros((2, size), dtype=torch.long)
            for size in (layout.state_size, layout.request_size, layout.outcome_size)
        )
        state[:, now.score.at], state[:, now.position.at] = words(scores), 40
        request[:, layout.request.target_rows.at] = torch.from_numpy(rng.permutation(500)[: layout.nodes])
        forests = []
        for r in range(2):
            rows = rows_of(packed[r * layout.nodes : (r + 1) * layout.nodes])
            parents, tokens = np.zeros((2, gamma, draft_width), dtype=np.int64)
            at, weights = list(range(width)), scores[r]
            for depth in range(gamma):
                # What beam search itself would go on with, and at random places something else.
                best = best_candidates(weights, [rows[i] for i in at], kept)
                going = [i for i in range(kept) if best.token[i] not in EOS and best.score[i] > -np.inf]
                parents[depth] = best.parent[going][:draft_width]
                tokens[depth] = best.token[going][:draft_width]
                if rng.random() < 0.4:
                    tokens[depth, rng.integers(0, width)] = 59
                at = [width + depth * draft_width + i for i in range(draft_width)]
                weights = best.score[going][:draft_width]
            forests.append((parents, tokens))
            if gamma:
                outcome[r, layout.forest.parent.at] = torch.from_numpy(parents.ravel())
                outcome[r, layout.forest.token.at] = torch.from_numpy(tokens.ravel())
        on = [part.to(device) for part in (packed, state, torch.zeros_like(state), request, outcome)]
        law.verify(*on, layout, eos, False, 0)
        after, outcome, verified = on[2].cpu(), on[4].cpu(), layout.verified
        for r in range(2):
            rows = rows_of(packed[r * layout.nodes : (r + 1) * layout.nodes])
            at, weights, layers, parents, tokens = list(range(width)), scores[r], 0, *forests[r]
            while True:
                places = [i for i, weight in enumerate(weights) if weight > -np.inf]
                best = best_candidates([weights[i] for i in places], [rows[at[i]] for i in places], kept)
                above = np.array(places)[best.parent]
                assert verified.parent.of(outcome)[r, layers].tolist() == above.tolist()
                assert verified.token.of(outcome)[r, layers].tolist() == best.token.tolist()
                got = verified.logp.of(outcome, torch.float64)[r, layers].numpy()
                assert np.array_equal(got, best.score.astype(np.float64))
                going = np.flatnonzero(~np.isin(best.token, EOS))[:width]
                nodes = [at[i] for i in above[going]]
                found, known = [], []
                for node, token in zip(nodes, best.token[going], strict=True):
                    start = 0 if layers == 0 else width + (layers - 1) * draft_width
                    here = [
                        width + layers * draft_width + i
                        for i in range(draft_width)
                        if layers < gamma
                        and parents[layers, i] + start == node
                        and tokens[layers, i] == token
                    ][:1]
                    found += here
                    known.append(here[0] + 1 if here else 0)
                layers += 1
                if len(found) < width:
                    break
                at, weights = found, best.score[going]
            reached.add(layers)
            assert int(verified.layers.of(outcome)[r]) == layers
            assert now.token.of(after)[r].tolist() == best.token[going].tolist()
            assert now.known.of(after)[r].tolist() == known
            assert np.array_equal(now.score.of(after, torch.float64)[r].numpy(), best.score[going])
            assert torch.equal(now.row.of(after)[r], request[r, layout.request.target_rows.at][nodes])
    assert reached == set(range(1, gamma + 2))
