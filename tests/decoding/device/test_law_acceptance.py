"""`paper`, `continue` and speculative sampling: torch and Triton beside numpy, on the same random cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.device import acceptance
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.distribution import SeededSampler, draw_distinct, joint
from dsbd_cli.decoding.law.verification import accept_distinct_draws, accept_draws, align, keys
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth
from tests.decoding.device.helpers import interpreted
from tests.decoding.device.law_cases import EOS, PROCESSORS, Given, packed_rows, rows_of, words


def forest_by_numpy(rows, weights, uniforms, processor, alive_at):
    """Draws of q and what they were drawn from: parents and tokens of both, shares, weights of the draws as parents.

    Args:
        rows, weights: of each parent. alive_at: tokens below which nothing grows.
    """
    live = [i for i, weight in enumerate(weights) if weight > -np.inf]
    support = joint([weights[i] for i in live], [rows[i] for i in live], processor)
    picks = Given(uniforms).sample(support.prob, len(uniforms))
    parent = np.array(live)[support.parent]
    after = [
        -np.inf
        if pick in picks[:i] or support.token[pick] in alive_at
        else weights[parent[pick]] + support.logp[pick]
        for i, pick in enumerate(picks)
    ]
    return parent, support.token, support.prob, picks, after


def accepts_by_numpy(rows, forest, uniforms, scores, processor, layout, rule, drafted):
    """Layers of one request by `law.verification.accept_draws`: what `cover_by_numpy` gives, and verdicts.

    Args:
        forest: by layer, of `forest_by_numpy`. drafted: how many layers of it the budget has room for.
    """
    width, draft_width = layout.width, layout.draft_width
    at, weights, layers = list(range(width)), list(scores), []
    for depth in range(layout.gamma + 1):
        live = [i for i, weight in enumerate(weights) if weight > -np.inf]
        p = joint([weights[i] for i in live], [rows[at[i]] for i in live], processor)
        wide = rule.of(p.prob) if isinstance(rule, DistinctWidth) else width
        tested = depth < min(layout.gamma, drafted)
        start = width + (depth - 1) * draft_width if depth else 0
        verdicts, passed = (), True
        if tested:
            number = {at[i] - start: n for n, i in enumerate(live)}
            parent, token, share, picks, _ = forest[depth]
            new = np.array([number.get(int(place), -1) for place in parent])
            inside = new >= 0
            union, wide_p, wide_q = align(
                keys(p.parent, p.token), p.prob, keys(new[inside], token[inside]), share[inside]
            )
            draws = [
                int(np.searchsorted(union, new[i] << 32 | token[i])) if new[i] >= 0 else -1 for i in picks
            ]
            if isinstance(rule, ThresholdWidth):
                wide = rule.for_draws(wide_p, wide_q, draft_width)
            given = Given(uniforms[depth])
            got = accept_draws(wide_p, wide_q, draws, wide, given)
            assert (
                len(given.left) == width - wide
            )  # a number for each test and each draw, whatever is accepted
            verdicts, passed = got.verdicts, got.passed
            drawn = np.searchsorted(keys(p.parent, p.token), union[list(got.draws)])
        else:
            drawn = Given(uniforms[depth, draft_width:]).sample(p.prob, wide)
        layer, new_at, new_weights, seen = [], [], [], set()
        for pick in drawn:
            parent, token = live[p.parent[pick]], int(p.token[pick])
            place = 0
            if depth < layout.gamma:
                above, tokens, _, picks, alive = forest[depth]
                for i, pick_of_q in enumerate(picks):
                    same = above[pick_of_q] + start == at[parent] and tokens[pick_of_q] == token
                    if same and alive[i] > -np.inf:
                        place = width + depth * draft_width + i
                        break
            layer.append((parent, token, p.logp[pick], at[parent], place and place + 1))
            dead = token in EOS or (parent, token) in seen
            seen.add((parent, token))
            new_at.append(place)
            new_weights.append(-np.inf if dead else weights[parent] + p.logp[pick])
        layers.append((layer, new_weights, verdicts))
        on = [place for place, weight in zip(new_at, new_weights, strict=True) if weight > -np.inf]
        if not on or not all(on) or not (passed or layout.continues):
            break
        at, weights = new_at, new_weights
    return layers


# Of all that follows, what an interpreted kernel has time for.
INTERPRETED = [
    (1, 1, False, None, PROCESSORS[0]),
    (1, 1, False, None, PROCESSORS[2]),
    (3, 4, False, None, PROCESSORS[0]),
]


@pytest.mark.parametrize(
    ("width", "draft_width", "continues", "rule", "processor"),
    [(1, 1, False, None, processor) for processor in PROCESSORS]
    + [(3, 4, continues, None, processor) for continues in (False, True) for processor in PROCESSORS]
    + [(4, 2, True, None, PROCESSORS[0]), (1, 3, False, None, PROCESSORS[1])]
    + [
        (3, 6, False, ThresholdWidth(3, 1, 0.6), PROCESSORS[0]),
        (4, 3, True, ThresholdWidth(4, 2, 0.8), PROCESSORS[3]),
    ]
    + [(3, 4, False, DistinctWidth(3, 1, 0.5), PROCESSORS[0])],
)
def test_draws_are_tested_as_the_law_tests_them(law, width, draft_width, continues, rule, processor):
    """`paper`, `continue` and speculative sampling: drafted draws of q, then draws of p, a layer at a time."""
    law, device = law
    rng = np.random.default_rng([11, width])
    top_n, gamma = max(1, processor.top_n), 2
    drawn = min(top_n, max(width, draft_width) * top_n)
    layout = CoverLayout.of(2, width, draft_width, gamma, drawn=drawn, continues=continues)
    if interpreted(law, device) and (width, draft_width, continues, rule, processor) not in INTERPRETED:
        pytest.skip("compared with tensors instead (test_acceptance_triton.py)")
    assert law.takes(layout, top_n, top_n)
    sent, forest, now, verified = layout.request, layout.forest, layout.state, layout.verified
    eos, reached, seen, widths = torch.tensor(EOS, device=device), set(), set(), set()
    for trial in range(4 if interpreted(law, device) else 16):
        # A draft that mostly agrees: rows by the nodes that they are of.
        drafts, packed = packed_rows(rng, 2 * layout.nodes, top_n), packed_rows(rng, 2 * layout.nodes, top_n)
        agrees = torch.from_numpy(rng.random(len(packed)) < 0.7)
        packed[agrees] = drafts[agrees]
        state, request, outcome = (
            torch.zeros((2, size), dtype=torch.long)
            for size in (layout.state_size, layout.request_size, layout.outcome_size)
        )
        uniforms = rng.random((2, layout.window, layout.numbers))
        drafting = rng.random((2, gamma, draft_width))
        scores = rng.normal(size=(2, width))
        scores[0, 1:2] = -np.inf  # one beam fewer
        state[:, now.score.at], state[:, now.position.at] = words(scores), 40
        request[:, sent.origin.at] = 40 - trial % 2
        request[:, sent.temperature.at] = words(np.full((2, 1), processor.temperature))
        request[:, sent.top_p.at] = words(np.full((2, 1), processor.top_p))
        request[:, sent.mass.at] = words(
            np.full((2, 1), rule.enough if isinstance(rule, DistinctWidth) else 1.0)
        )
        request[:, sent.slack.at] = words(
            np.full((2, 1), rule.slack if isinstance(rule, ThresholdWidth) else -1.0)
        )
        request[:, sent.min_width.at] = rule.min_width if rule else width
        tested = trial % 4
        request[:, sent.last.at] = 40 + 1 + tested
        request[:, sent.uniforms.at] = words(uniforms.reshape(2, -1))
        request[:, sent.draft_uniforms.at] = words(drafting.reshape(2, -1))
        for r in range(2):
            request[r, sent.target_rows.at] = torch.from_numpy(rng.permutation(500)[: layout.nodes])
        state, request, outcome = (part.to(device) for part in (state, request, outcome))
        weights = torch.tensor(scores, device=device)
        by_node, begin = drafts.view(2, layout.nodes, -1), 0
        forests = [[], []]
        for depth in range(gamma):
            parents = weights.shape[1]
            best = by_node[:, begin : begin + parents].flatten(0, 1).contiguous()
            args = (
                best.to(device),
                weights,
                depth,
                layout,
                request,
                outcome,
                eos,
                processor.greedy,
                processor.top_n,
            )
            law.draw(*args)
            begin += parents
            block = outcome.cpu()
            for r in range(2):
                above = scores[r] if depth == 0 else forests[r][-1][-1]
                if max(above) == -np.inf:
                    continue
                rows = rows_of(best[r * parents : (r + 1) * parents])
                parent, token, share, picks, after = forest_by_numpy(
                    rows, above, drafting[r, depth], processor, EOS
                )
                forests[r].append((parent, token, share, picks, after))
                assert forest.parent.of(block)[r, depth].tolist() == parent[picks].tolist()
                assert forest.token.of(block)[r, depth].tolist() == token[picks].tolist()
                inside = forest.prob.of(block, torch.float64)[r, depth].numpy() > 0
                assert forest.support_parent.of(block)[r, depth].numpy()[inside].tolist() == parent.tolist()
                assert forest.support_token.of(block)[r, depth].numpy()[inside].tolist() == token.tolist()
                assert np.allclose(forest.prob.of(block, torch.float64)[r, depth].numpy()[inside], share)
                assert np.allclose(forest.weight.of(block, torch.float64)[r, depth], after)
                at_draw = forest.draws.of(block)[r, depth]
                assert forest.support_token.of(block)[r, depth, at_draw].tolist() == token[picks].tolist()
            weights = forest.weight.of(outcome, torch.float64)[:, depth]
        after = torch.zeros_like(state)
        law.verify(
            packed.to(device), state, after, request, outcome, layout, eos, processor.greedy, processor.top_n
        )
        outcome, after, request = outcome.cpu(), after.cpu(), request.cpu()
        for r in range(2):
            rows = rows_of(packed[r * layout.nodes : (r + 1) * layout.nodes])
            wanted = accepts_by_numpy(
                rows, forests[r], uniforms[r, trial % 2 :], scores[r], processor, layout, rule, tested
            )
            reached.add(len(wanted))
            assert int(verified.layers.of(outcome)[r]) == len(wanted)
            for depth, (layer, _, verdicts) in enumerate(wanted):
                parent, token, logp, above, known = zip(*layer, strict=True)
                n = len(parent)
                widths.add(n)
                seen.update(verdicts)
                assert verified.parent.of(outcome)[r, depth].tolist() == list(parent) + [-1] * (width - n)
                assert verified.token.of(outcome)[r, depth, :n].tolist() == list(token)
                assert np.allclose(verified.logp.of(outcome, torch.float64)[r, depth, :n], logp)
                told = verified.verdicts.of(outcome)[r, depth].tolist()
                assert told == [int(one) for one in verdicts] + [-1] * (draft_width - len(verdicts))
            assert now.token.of(after)[r, :n].tolist() == list(token)
            assert torch.equal(now.row.of(after)[r, :n], request[r, sent.target_rows.at][list(above)])
            assert now.known.of(after)[r, :n].tolist() == list(known)
            assert np.allclose(now.score.of(after, torch.float64)[r], wanted[-1][1] + [-np.inf] * (width - n))
            assert int(now.missing.of(after)[r]) == (len(wanted) > gamma)
    assert reached == {1, 2, 3}
    assert processor.greedy or seen == {True, False}
    assert rule is None or len(widths) > 1


def test_random_draws_are_accepted_and_layers_as_wide_as_by_the_law():
    """Overlapping p and q, with draws below a dead parent."""
    rng, seen, widths = np.random.default_rng(6), set(), set()
    for trial in range(200):
        size, draft_width, width = 6, int(rng.integers(1, 7)), int(rng.integers(1, 6))
        p, q = (rng.random(size) * (rng.random(size) < 0.8) for _ in range(2))
        p[0], q[1], p[-1] = 0.3, 0.2, 0.0  # the last is below a dead parent
        p, q = p / p.sum(), q / q.sum()
        drafted = SeededSampler(trial, 1).sample(q, draft_width)
        live = np.where(np.arange(size) < size - 1, q, 0.0)
        rule = ThresholdWidth(width, 1, float(rng.uniform(0.05, 1)))
        wide, uniforms = rule.for_draws(p, live, draft_width), rng.random(draft_width + width)
        given = Given(uniforms)
        wanted = accept_draws(p, live, [i if i < size - 1 else -1 for i in drafted], wide, given)
        assert len(given.left) == width - wide
        inside = np.flatnonzero(p)
        same = torch.tensor(inside[:, None] == np.arange(size))
        tests = acceptance.tests_of(torch.tensor(p[inside]), same, torch.tensor(q), torch.tensor(drafted))
        slack, least = torch.tensor([rule.slack]), torch.tensor([1])
        count = acceptance.draws_accepted(tests, slack, least, width)
        assert int(count) == wide
        got = acceptance.accept_draws(tests, count, torch.tensor([True]), torch.tensor(uniforms), width)
        assert inside[got.draws[:wide].numpy()].tolist() == list(wanted.draws)
        looked_at = [int(one) for one in wanted.verdicts]
        assert got.verdicts.tolist() == looked_at + [-1] * (draft_width - len(looked_at))
        assert bool(got.whole) == wanted.passed
        seen.update(wanted.verdicts)
        widths.add(wide)
    assert seen == {True, False}
    assert len(widths) > 3


def test_distinct_draws_are_tested_as_the_law_tests_them():
    """Recursive rejection: dead parents in q, fewer continuations than draws, widths of every kind."""
    rng, seen, narrow = np.random.default_rng(5), set(), 0
    for trial in range(150):
        size, draft_width, width = 6, int(rng.integers(1, 6)), int(rng.integers(1, 5))
        p, q = (rng.random(size) * (rng.random(size) < 0.7) for _ in range(2))
        p[0], q[1], p[-1] = 0.3, 0.2, 0.0  # the last is below a dead parent
        p, q = p / p.sum(), q / q.sum()
        drafted = draw_distinct(SeededSampler(trial, 1), q, draft_width)
        wide = int(rng.integers(1, width + 1))
        uniforms = rng.random(draft_width + width)
        given = Given(uniforms)
        wanted = accept_distinct_draws(p, q, drafted, wide, given)
        assert len(given.left) == draft_width - len(drafted) + width - wide
        inside = np.flatnonzero(p)
        absent = [-1] * (draft_width - len(drafted))
        got, count = acceptance.accept_distinct_draws(
            torch.tensor(p[inside]), torch.tensor(inside[:, None] == np.arange(size)), torch.tensor(q),
            torch.tensor(drafted + absent), torch.tensor([wide]), torch.tensor([True]), torch.tensor(uniforms), width,
        )  # fmt: skip
        assert int(count) == len(wanted.draws)
        assert inside[got.draws[: int(count)].numpy()].tolist() == list(wanted.draws)
        looked_at = [int(one) for one in wanted.verdicts]
        assert got.verdicts.tolist() == looked_at + [-1] * (draft_width - len(looked_at))
        assert bool(got.whole) == wanted.passed
        seen.update(wanted.verdicts)
        narrow += len(wanted.draws) < wide
    assert seen == {True, False}
    assert narrow
