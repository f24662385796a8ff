"""`cover` of every width: torch and Triton beside numpy, on the same random cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.cache.logits import unpack
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.distribution import draw_layer, joint
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth
from tests.decoding.device.helpers import interpreted
from tests.decoding.device.law_cases import EOS, PROCESSORS, VOCAB, Given, packed_rows, rows_of, words

SEED = 1  # with which few cases reach all that has to be reached


def cover_by_numpy(
    rows, forest, uniforms, scores, processor, layout, distinct=False, rule=None, drafted=9, one_beam=False
):
    """Layers of one request by `law.distribution` and the rule `cover`; weights after.

    Of each draw: parent, token, logp, node above, and its own place in the forest from 1, 0 where it is not there.

    Args:
        drafted: how many layers of the forest the budget has room for.
    """
    width, draft_width = layout.width, layout.draft_width
    parents, tokens, alive = forest
    at, weights = list(range(width)), list(scores)
    layers, alone = [], False
    for depth in range(layout.gamma + 1):
        live = [i for i, weight in enumerate(weights) if weight > -np.inf]
        support = joint([weights[i] for i in live], [rows[at[i]] for i in live], processor)
        count = width
        if isinstance(rule, DistinctWidth):
            count = rule.of(support.prob)
        elif rule is not None and depth < min(drafted, layout.gamma) and not alone:
            mass = 0.0
            for parent, token, share in zip(support.parent, support.token, support.prob, strict=True):
                start = 0 if depth == 0 else width + (depth - 1) * draft_width
                inside = any(
                    parents[depth, i] + start == at[live[parent]]
                    and tokens[depth, i] == token
                    and alive[depth, i]
                    for i in range(draft_width)
                )
                mass += share if inside or token in EOS else 0.0
            count = rule.for_cover(mass)
        picks = draw_layer(Given(uniforms[depth]), support.prob, count, distinct)
        layer, new_at, new_weights, seen, holds = [], [], [], set(), []
        for pick in picks:
            parent, token = live[support.parent[pick]], int(support.token[pick])
            above, held = at[parent], False
            place = 0
            if depth < layout.gamma:
                start = 0 if depth == 0 else width + (depth - 1) * draft_width
                for i in range(draft_width):
                    same = parents[depth, i] + start == above and tokens[depth, i] == token
                    if same and alive[depth, i]:
                        held, place = True, width + depth * draft_width + i
                        break
            layer.append((parent, token, support.logp[pick], above, place + 1 if held else 0))
            holds.append(held)
            dead = token in EOS or (parent, token) in seen
            seen.add((parent, token))
            new_at.append(place)
            new_weights.append(-np.inf if dead else weights[parent] + support.logp[pick])
        layers.append((layer, new_weights))
        if not any(w > -np.inf for w in new_weights) or alone:
            break
        if not all(held for held, w in zip(holds, new_weights, strict=True) if w > -np.inf):
            best = int(np.argmax(new_weights))
            if not one_beam or not holds[best]:
                break
            alone, new_weights = True, [w if i == best else -np.inf for i, w in enumerate(new_weights)]
        at, weights = new_at, new_weights
    if one_beam:
        layer, new_weights = layers[-1]
        best = int(np.argmax(new_weights))
        layers[-1] = layer, [w if i == best else -np.inf for i, w in enumerate(new_weights)]
    return layers


OTHER_KINDS = [(0, True, None), (2, True, None), (2, True, (1, 0.6)), (2, False, (2, 0.9))]
# W_min and t of the paper's rule, and whether one beam is kept.
THRESHOLDS = [
    (0, (1, 0.9), False),
    (2, (1, 0.97), False),
    (2, (2, 0.99), False),
    (2, (1, 0.97), True),
    (2, None, True),
]


@pytest.mark.parametrize(
    ("gamma", "distinct", "rule", "processor"),
    # Without a forest there is the first layer alone, which those of a forest have too.
    [(2, False, None, processor) for processor in PROCESSORS]
    + [(0, False, None, PROCESSORS[0]), (0, False, None, PROCESSORS[2])]
    + [(*kind, PROCESSORS[0]) for kind in OTHER_KINDS]
    + [(2, True, None, PROCESSORS[2]), (2, True, (1, 0.6), PROCESSORS[3])],
)
def test_verification_is_cover_over_the_joint(law, gamma, distinct, rule, processor):
    compare_with_numpy(law, gamma, distinct, rule and DistinctWidth(3, *rule), processor, False)


@pytest.mark.parametrize(("gamma", "rule", "one_beam"), THRESHOLDS)
def test_the_paper_s_width_and_one_kept_beam(law, gamma, rule, one_beam):
    compare_with_numpy(law, gamma, False, rule and ThresholdWidth(3, *rule), PROCESSORS[0], one_beam)


def compare_with_numpy(law, gamma, distinct, rule, processor, one_beam):
    law, device = law
    rng = np.random.default_rng([gamma, SEED])
    layout = CoverLayout.of(requests=2, width=3, draft_width=6 if gamma else 0, gamma=gamma)
    top_n = max(1, processor.top_n)
    eos, deep = torch.tensor(EOS, device=device), 0
    widths = set()
    # Two requests a trial, every origin and budget in four; an interpreted kernel takes its time. (A width by the
    # forest, and one beam that goes on, differ in a few cases only.)
    fewest = 12 if isinstance(rule, ThresholdWidth) or one_beam else 4
    for trial in range(fewest if interpreted(law, device) else 30):
        packed = packed_rows(rng, 2 * layout.nodes, top_n)
        tokens_of = unpack(packed.numpy()).tokens
        state = torch.zeros((2, layout.state_size), dtype=torch.long)
        request = torch.zeros((2, layout.request_size), dtype=torch.long)
        outcome = torch.zeros((2, layout.outcome_size), dtype=torch.long)
        scores = rng.normal(size=(2, 3))
        scores[0, 2] = -np.inf
        uniforms = rng.random((2, layout.window, 3))
        state[:, layout.state.score.at] = words(scores)
        state[:, layout.state.token.at] = torch.from_numpy(rng.integers(0, VOCAB, (2, 3)))
        state[:, layout.state.position.at] = 40
        sent = layout.request
        for field in (sent.target_rows, sent.draft_rows):
            request[:, field.at] = torch.from_numpy(rng.permutation(500)[: field.shape[0]])
        request[:, sent.origin.at] = 40 - trial % 2
        request[:, sent.temperature.at] = words(np.full((2, 1), processor.temperature))
        request[:, sent.top_p.at] = words(np.full((2, 1), processor.top_p))
        distinct_width, threshold = isinstance(rule, DistinctWidth), isinstance(rule, ThresholdWidth)
        request[:, sent.mass.at] = words(np.full((2, 1), rule.enough if distinct_width else 1.0))
        request[:, sent.slack.at] = words(np.full((2, 1), rule.slack if threshold else -1.0))
        request[:, sent.min_width.at] = rule.min_width if rule else 3
        drafted = trial % 4  # layers that the budget has room for behind this one's first
        request[:, sent.last.at] = 40 + 1 + drafted
        request[:, sent.one_beam.at] = int(one_beam)
        request[:, sent.uniforms.at] = words(uniforms.reshape(2, -1))
        forests = []
        for r in range(2):
            parents = np.zeros((gamma, layout.draft_width), dtype=np.int64)
            tokens, alive = parents.copy(), np.ones(parents.shape, dtype=bool)
            for depth in range(gamma):
                # Mostly what a layer above is likely to be drawn to.
                base = r * layout.nodes + (0 if depth == 0 else 3 + (depth - 1) * layout.draft_width)
                for i in range(layout.draft_width):
                    parents[depth, i] = i % 3 if depth == 0 else i
                    tokens[depth, i] = tokens_of[base + parents[depth, i], min(i // 3, top_n - 1)]
                    if i >= 3 and depth == 1:
                        parents[depth, i], tokens[depth, i] = i, tokens_of[base + i, 0]
                alive[depth] = ~np.isin(tokens[depth], EOS)
            forests.append((parents, tokens, alive))
            if gamma:
                forest = layout.forest
                outcome[r, forest.parent.at] = torch.from_numpy(parents.ravel())
                outcome[r, forest.token.at] = torch.from_numpy(tokens.ravel())
                outcome[r, forest.weight.at] = words(np.where(alive, 0.0, -np.inf).ravel())
        on = [part.to(device) for part in (packed, state, torch.zeros_like(state), request, outcome)]
        law.verify(*on, layout, eos, processor.greedy, processor.top_n, distinct)
        after, outcome, verified = on[2].cpu(), on[4].cpu(), layout.verified
        for r in range(2):
            rows = rows_of(packed[r * layout.nodes : (r + 1) * layout.nodes])
            wanted = cover_by_numpy(
                rows, forests[r], uniforms[r, trial % 2 :], scores[r], processor, layout, distinct, rule, drafted,
                one_beam,
            )  # fmt: skip
            assert int(verified.layers.of(outcome)[r]) == len(wanted)
            deep = max(deep, len(wanted))
            weights = wanted[-1][1]
            for depth, (layer, _) in enumerate(wanted):
                parent, token, logp, above, known = zip(*layer, strict=True)
                n = len(parent)
                widths.add(n)
                assert verified.parent.of(outcome)[r, depth].tolist() == list(parent) + [-1] * (3 - n)
                assert verified.token.of(outcome)[r, depth, :n].tolist() == list(token)
                assert np.allclose(verified.logp.of(outcome, torch.float64)[r, depth, :n], logp)
            now = layout.state
            assert torch.equal(now.row.of(after)[r, :n], request[r, sent.target_rows.at][list(above)])
            assert now.token.of(after)[r, :n].tolist() == list(token)
            assert now.known.of(after)[r, :n].tolist() == list(known)
            assert np.allclose(now.score.of(after, torch.float64)[r], weights + [-np.inf] * (3 - n))
            assert int(now.position.of(after)[r]) == 40 + len(wanted)
            if gamma:
                assert int(now.missing.of(after)[r]) == (len(wanted) > gamma)
    assert deep == gamma + 1  # the cases reach the last layer
    if rule is None and not distinct:
        assert widths == {3}
    assert rule is None or not gamma or min(widths) < 3
