"""One law, three writings: numpy (`law/`), torch and Triton, on the same random cases.

Triton's kernels run on a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.cache.logits import finite_logits, log_probabilities, pack, unpack
from dsbd_cli.decoding.device import acceptance
from dsbd_cli.decoding.device.law_torch import TorchLaw, best_layer, draft_layer
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.law.beam_search import best_candidates, candidates_kept
from dsbd_cli.decoding.law.distribution import (
    LogitsProcessor,
    Row,
    SeededSampler,
    draw_distinct,
    draw_layer,
    joint,
    most_probable,
)
from dsbd_cli.decoding.law.verification import accept_distinct_draws, accept_draws, align, keys
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth
from dsbd_cli.decoding.model.protocol import Side
from tests.decoding.device.helpers import interpreted

PROCESSORS = [
    LogitsProcessor(0.7, 6, 0.8),
    LogitsProcessor(1.0, 3, 1.0),
    LogitsProcessor(0.0, 6, 1.0),
    LogitsProcessor(2.0, 9, 0.3),
    LogitsProcessor(1.0, 5, 0.0),
]
VOCAB, EOS = 60, [7, 11]
SEED = 1  # with which few cases reach all that has to be reached


def packed_rows(rng: np.random.Generator, count: int, top_n: int) -> torch.Tensor:
    """Best entries of `count` random nodes: one likely token each, and many ties among the others."""
    values = rng.integers(0, 12, (count, VOCAB)) / 3
    values[np.arange(count), rng.integers(0, VOCAB, count)] += 5
    logits = torch.tensor(values, dtype=torch.float32)
    logps = log_probabilities(logits, VOCAB)
    return pack(logps, finite_logits(logps), top_n)


def rows_of(packed: torch.Tensor) -> list[Row]:
    best = unpack(packed.numpy())
    return [Row(ids, logps.astype(np.float64)) for ids, logps in zip(best.tokens, best.logps, strict=True)]


def words(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64).view(np.int64))


@pytest.mark.parametrize(
    ("rows", "width", "vocab", "count"), [(1, 500, 500, 1), (5, 3100, 3000, 10), (3, 70, 64, 64)]
)
def test_best_entries(law, rows, width, vocab, count):
    law, device = law
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).half().to(device)  # ties
    logits[0, 7], logits[0, 3] = 0.0, -0.0
    side = Side(None, None, vocab, count)  # type: ignore[arg-type]
    got = unpack(law.pack(side, logits).cpu().numpy())
    logps = log_probabilities(logits.cpu(), vocab)
    order = np.argsort(-logps.numpy(), axis=1, kind="stable")[:, :count]
    assert np.array_equal(got.tokens, order)
    assert np.abs(got.logps - np.take_along_axis(logps.numpy(), order, 1)).max() < 1e-5
    assert got.finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_distribution_are_noticed(law, bad):
    law, device = law
    logits = torch.randn(4, 2500, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1, 1700] = bad
    logits[2] = -float("inf")
    side = Side(None, None, 2500, 4)  # type: ignore[arg-type]
    assert unpack(law.pack(side, logits).cpu().numpy()).finite.tolist() == [True, False, False, True]


def test_a_masked_token_has_probability_0_and_spoils_nothing(law):
    law, device = law
    logits = torch.randn(2, 2500, generator=torch.Generator().manual_seed(0)).to(device)
    masked = int(logits[1].argmax())
    logits[1, masked] = -float("inf")
    best = unpack(law.pack(Side(None, None, 2500, 4), logits).cpu().numpy())  # type: ignore[arg-type]
    assert best.finite.all()
    assert masked not in best.tokens[1]
    exact = torch.log_softmax(logits[1].double(), -1).cpu()
    assert np.allclose(best.logps[1], exact[best.tokens[1]], atol=1e-5)


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


class Given:
    """A sampler of given uniforms."""

    def __init__(self, uniforms):
        self.left = list(uniforms)

    def accept(self, numerator, denominator):
        return self.left.pop(0) * denominator < numerator

    def sample(self, weights, count):
        cumulative = np.cumsum(weights)
        taken = np.array([self.left.pop(0) for _ in range(count)])
        picks = np.searchsorted(cumulative, taken * cumulative[-1], side="right")
        return np.minimum(picks, np.searchsorted(cumulative, cumulative[-1], side="left")).tolist()


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


@pytest.mark.parametrize(("drawn", "distinct"), [(0, False), (0, True), (6, False), (6, True)])
def test_tensors_of_the_law_never_wait_for_the_host(drawn, distinct):
    """A CUDA graph cannot hold an operation whose shape or place depends on values: here there are none to look at."""
    layout = CoverLayout.of(2, 3, 4, 2, drawn=drawn)
    with FakeTensorMode():
        state, request, outcome = (
            torch.zeros((2, size), dtype=torch.long)
            for size in (layout.state_size, layout.request_size, layout.outcome_size)
        )
        eos, best = torch.tensor(EOS), torch.zeros((2 * layout.nodes, 13))
        parents, scores = best[: 2 * layout.width], torch.zeros((2, layout.width), dtype=torch.float64)
        if drawn:
            TorchLaw().draw(parents, scores, 0, layout, request, outcome, eos, False, 6, distinct)
        else:
            TorchLaw().draft(parents, scores, 0, layout, outcome, eos)
        TorchLaw().verify(
            best, state, torch.zeros_like(state), request, outcome, layout, eos, False, 6, distinct
        )
        with pytest.raises(DataDependentOutputException):
            state[0, 0].item()


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


@pytest.mark.parametrize("processor", PROCESSORS)
def test_draws_in_tensors_are_those_of_the_law(processor):
    rng = np.random.default_rng(0)
    size = max(1, processor.top_n)
    numbers = [
        torch.tensor([number], dtype=torch.float64) for number in (processor.temperature, processor.top_p)
    ]
    for trial in range(200):
        parents = int(rng.integers(1, 6))
        logps = torch.log_softmax(torch.tensor(3 * rng.normal(size=(parents, 50)), dtype=torch.float32), -1)
        values, ids = torch.topk(logps, size)
        scores = rng.normal(size=parents)
        rows = [Row(i.numpy(), v.double().numpy()) for i, v in zip(ids, values, strict=True)]
        law = joint(scores, rows, processor)
        distinct = trial % 2 == 1
        sample = draw_layer(SeededSampler(trial, 0), law.prob, 6, distinct)
        # One place more, as where there are fewer beams than there may be.
        wide = torch.tensor([*scores, -np.inf])
        more = [torch.cat([part, part[:1]]) for part in (ids, values)]
        uniforms = torch.tensor(SeededSampler(trial, 0).peek(6))
        got = draft_layer(wide, *more, processor.greedy, processor.top_n, *numbers, uniforms, distinct)
        inside = got.prob > 0
        assert np.allclose(got.prob[inside], law.prob, rtol=1e-12, atol=0)
        assert np.array_equal(got.parent[inside], law.parent)
        assert np.array_equal(got.token[inside], law.token)
        assert np.array_equal(got.token[got.draws[: len(sample)]], law.token[sample])
        assert got.there.tolist() == [i < len(sample) for i in range(6)]
        first = [sample.index(pick) == i for i, pick in enumerate(sample)]
        assert torch.isfinite(got.scores).tolist() == first + [False] * (6 - len(sample))
        best = best_layer(wide, *more, size)
        exact = joint(scores, rows, LogitsProcessor(top_k=size))
        assert np.array_equal(best.token, exact.token[most_probable(exact, size)])
