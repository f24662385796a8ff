"""The law where the logits lie, in tensor operations of fixed shapes that a CUDA graph can hold.

The same distribution as `law.distribution.joint` and `Sampler.sample`, and the rule `cover`; the rules that test the
forest's draws are in `acceptance` (docs/design.md sections 1 to 3). What comes out is what was drawn from: that keeps
the output exact. One module, since drafting and verifying are the same few steps over other tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.cache.logits import finite_logits, log_probabilities, pack
from dsbd_cli.decoding.device.acceptance import (
    accept_distinct_draws,
    accept_draws,
    draws_accepted,
    draws_of,
    tests_of,
)
from dsbd_cli.decoding.device.layout import CoverLayout, DraftLayout, ForestFields
from dsbd_cli.decoding.model.protocol import Side


class Drafted(NamedTuple):
    """One layer, on the device. M entries of support in canonical order, W draws.

    Attributes:
        parent, token: int64 [M]; logp, prob: float64 [M]; prob 0: outside the support.
        draws: int64 [W], indices into the support.
        scores: float64 [W], log weight of each draw as a parent; -inf where it has been drawn before.
        there: bool [W], False behind the last draw of a layer that has fewer.
    """

    parent: Tensor
    token: Tensor
    logp: Tensor
    prob: Tensor
    draws: Tensor
    scores: Tensor
    there: Tensor


class Best(NamedTuple):
    """Packed logits taken apart: float32 and int64 [N, k], and float32 [N], 1 where all logits are numbers."""

    logps: Tensor
    ids: Tensor
    finite: Tensor


def unpacked(packed: Tensor) -> Best:
    """What `logits.pack` put together, float32 [N, 2 k + 1], on the device."""
    count = packed.shape[1] // 2
    return Best(packed[:, :count], packed[:, count:-1].contiguous().view(torch.int32).long(), packed[:, -1])


class Joint(NamedTuple):
    """The processed joint on its support, heaviest first: int64 and float64 [M]; prob 0: outside.

    `weight` is the log weight before T.
    """

    parent: Tensor
    token: Tensor
    logp: Tensor
    prob: Tensor
    weight: Tensor


def draft_layer(
    scores: Tensor, tokens: Tensor, logps: Tensor, greedy: bool, support: int, temperature: Tensor,
    top_p: Tensor, uniforms: Tensor, distinct: bool = False,
) -> Drafted:  # fmt: skip
    """W draws of the processed joint, one per uniform.

    Args:
        scores: float64 [I], log weights of the parents; -inf for what is none.
        tokens, logps: int64 and float32 [I, k], the best entries of each parent's logits.
        greedy: the most probable only. support: entries that T looks at (top-k).
        temperature, top_p: float64 [1].
        uniforms: float64 [W].
        distinct: draws without replacement, as far as there are continuations; else iid.
    """
    joint = joint_of(scores, tokens, logps, greedy, support, temperature, top_p)
    return drawn_from(joint, uniforms, distinct, torch.full((1,), len(uniforms), device=scores.device))


def joint_of(
    scores: Tensor, tokens: Tensor, logps: Tensor, greedy: bool, support: int, temperature: Tensor, top_p: Tensor
) -> Joint:  # fmt: skip
    """T on the parents' joint; arguments as in `draft_layer`."""
    size = 1 if greedy else min(support, tokens.numel())
    parent, token, logp, weight = _head(scores, tokens, logps, size)
    if greedy:
        prob = torch.ones_like(weight)
    else:
        prob = torch.softmax((weight - weight[0]) / temperature, 0)
        # Cut where the mass before an entry has reached top-p; the first always stays, at 1 all do.
        reached = (torch.cumsum(prob, 0)[:-1] >= top_p) & (top_p < 1)
        prob = torch.cat([prob[:1], prob[1:].masked_fill(reached, 0.0)])
        prob = prob / prob.sum()
    return Joint(parent, token, logp, prob, weight)


def drawn_from(joint: Joint, uniforms: Tensor, distinct: bool, count: Tensor) -> Drafted:
    """A layer of at most `count` draws, int64 [1], the others not `there`."""
    joint = canonical(joint)
    there = torch.arange(len(uniforms), device=count.device) < count
    if distinct:
        left, drawn = joint.prob, []
        for i in range(len(uniforms)):
            drawn.append(draws_of(left, uniforms[i : i + 1]))
            there[i] &= left.sum() > 0
            left = left.scatter(0, drawn[i], 0.0)
        draws = torch.cat(drawn)
    else:
        draws = draws_of(joint.prob, uniforms)
    return layer_of_draws(joint, draws, there)


def canonical(joint: Joint) -> Joint:
    """The joint in the order that draws go by: parent, then token."""
    order = torch.argsort((joint.parent << 32) | joint.token)
    return Joint(*(part[order] for part in joint))


def layer_of_draws(joint: Joint, draws: Tensor, there: Tensor) -> Drafted:
    """The layer of these entries of a joint in canonical order."""
    parent, token, logp, prob, weight = joint
    again = (draws[:, None] == draws[None, :]).tril(-1).any(1)
    return Drafted(
        parent, token, logp, prob, draws, weight[draws].masked_fill(again | ~there, -torch.inf), there
    )


def draws_holding(joint: Joint, mass: Tensor, min_width: Tensor, width: int) -> Tensor:
    """`law.width.DistinctWidth`: int64 [1], how many continuations hold `mass` of p together."""
    # What is before them has not reached it.
    before = torch.cumsum(joint.prob, 0) - joint.prob
    needed = ((before < mass) & (joint.prob > 0)).sum(0, keepdim=True)
    return torch.maximum(needed, min_width).clamp(max=width)


def draws_inside(joint: Joint, inside: Tensor, slack: Tensor, min_width: Tensor, width: int) -> Tensor:
    """`law.width.ThresholdWidth.for_cover`: int64 [1], the most draws that probably need no further target call.

    Args:
        inside: bool [M], the continuation lies in the forest's layer, or ends.
        slack: float64 [1], the probability that may be missed.
    """
    mass = torch.where(inside, joint.prob, 0.0).sum(0, keepdim=True)
    powers = mass ** torch.arange(1, width + 1, device=mass.device)
    return torch.maximum((1 - powers <= slack).sum(0, keepdim=True), min_width)


class Searched(NamedTuple):
    """One layer of beam search on the device: `kept` candidates, best first, and the W next beams among them.

    Attributes:
        parent, token, score: int64 and float64 [kept]; the score is a float32 sum, -inf where there is none.
        beams: int64 [W], which candidates go on. weight: float64 [W], their scores; -inf where there is none.
    """

    parent: Tensor
    token: Tensor
    score: Tensor
    beams: Tensor
    weight: Tensor


def search_layer(
    scores: Tensor, tokens: Tensor, logps: Tensor, kept: int, width: int, eos: Tensor
) -> Searched:  # fmt: skip
    """`law.beam_search.best_candidates`, and the first W of them that do not end; arguments as in `draft_layer`."""
    # Sums tie where their parts do not: by beam and token first.
    tokens, order = torch.sort(tokens, dim=1)
    sums = scores.float()[:, None] + logps.gather(1, order)
    score, flat = torch.sort(sums.flatten(), descending=True, stable=True)
    score, flat = score[:kept].double(), flat[:kept]
    token = tokens.flatten()[flat]
    goes_on = (score > -torch.inf) & ~torch.isin(token, eos)
    beams = torch.argsort((~goes_on).byte(), stable=True)[:width]
    weight = score[beams].masked_fill(~goes_on[beams], -torch.inf)
    return Searched(flat // tokens.shape[1], token, score, beams, weight)


def best_layer(scores: Tensor, tokens: Tensor, logps: Tensor, width: int) -> Drafted:
    """The `width` most probable distinct continuations of the joint; arguments as in `draft_layer`."""
    width = min(width, tokens.numel())
    parent, token, logp, weight = _head(scores, tokens, logps, width)
    prob = torch.softmax(weight, 0)
    everyone = torch.arange(width, device=scores.device)
    return Drafted(parent, token, logp, prob, everyone, weight, torch.ones_like(everyone, dtype=torch.bool))


def _head(scores: Tensor, tokens: Tensor, logps: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Parent, token, log-probability and log weight of the `size` heaviest entries, heaviest first."""
    wide = logps.double()
    # Not topk, which keeps no order among ties: they go to the earlier parent, then to the lower token.
    weight, flat = torch.sort((scores[:, None] + wide).flatten(), descending=True, stable=True)
    weight, flat = weight[:size], flat[:size]
    return flat // tokens.shape[1], tokens.flatten()[flat], wide.flatten()[flat], weight


def _only_best(weight: Tensor) -> Tensor:
    """`weight` of the heaviest, the first of equals, -inf of the others."""
    return weight.masked_fill(torch.arange(len(weight), device=weight.device) != weight.argmax(), -torch.inf)


class TorchLaw:
    """See `device.law.DeviceLaw`; serves every size."""

    def takes(self, layout: CoverLayout, target_top_n: int, draft_top_n: int) -> bool:
        return True

    def pack(self, side: Side, logits: Tensor) -> Tensor:
        logps = log_probabilities(logits, side.vocab)
        return pack(logps, finite_logits(logps), side.top_n)

    def draft(
        self, best: Tensor, scores: Tensor, depth: int, layout: CoverLayout | DraftLayout, outcome: Tensor,
        eos: Tensor,
    ) -> None:  # fmt: skip
        entries, parents = unpacked(best), scores.shape[1]
        for r in range(len(scores)):
            own = slice(r * parents, (r + 1) * parents)
            layer = best_layer(scores[r], entries.ids[own], entries.logps[own], layout.draft_width)
            self._enter(layer, entries.finite[own], depth, layout.forest, outcome[r : r + 1], eos)

    def draw(
        self, best: Tensor, scores: Tensor, depth: int, layout: CoverLayout | DraftLayout, request: Tensor,
        outcome: Tensor, eos: Tensor, greedy: bool, support: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        entries, fields, parents = unpacked(best), layout.request, scores.shape[1]
        for r in range(len(scores)):
            own = slice(r * parents, (r + 1) * parents)
            layer = draft_layer(
                scores[r], entries.ids[own], entries.logps[own], greedy, support,
                fields.temperature.of(request, torch.float64)[r], fields.top_p.of(request, torch.float64)[r],
                fields.draft_uniforms.of(request, torch.float64)[r, depth], distinct,
            )  # fmt: skip
            self._enter(layer, entries.finite[own], depth, layout.forest, outcome[r : r + 1], eos)

    def _enter(
        self, layer: Drafted, finite: Tensor, depth: int, fields: ForestFields, outcome: Tensor, eos: Tensor
    ) -> None:
        """Write one layer of one request into `outcome`, [1, size]."""
        token = layer.token[layer.draws]
        fields.parent.of(outcome)[0, depth] = layer.parent[layer.draws]
        fields.token.of(outcome)[0, depth] = token
        ended = torch.isin(token, eos)
        fields.weight.of(outcome, torch.float64)[0, depth] = layer.scores.masked_fill(ended, -torch.inf)
        size = len(layer.prob)
        fields.logp.of(outcome, torch.float64)[0, depth, :size] = layer.logp
        fields.prob.of(outcome, torch.float64)[0, depth, :size] = layer.prob
        if fields.draws.shape[0]:
            fields.support_parent.of(outcome)[0, depth, :size] = layer.parent
            fields.support_token.of(outcome)[0, depth, :size] = layer.token
            fields.draws.of(outcome)[0, depth] = torch.where(layer.there, layer.draws, -1)
        fields.finite.of(outcome)[0, depth, : len(finite)] = finite.long()

    def recall(
        self, best: Tensor, known: Tensor, depth: int, layout: CoverLayout, outcome: Tensor, memory: Tensor
    ) -> Tensor:
        forest, width, draft_width = layout.forest, layout.width, layout.draft_width
        count, most = best.shape[1] // 2, layout.recalled
        if depth:
            layer = torch.arange(layout.gamma, device=best.device)[:, None]
            before = torch.where(layer > 0, width + (layer - 1) * draft_width, 0)
            above = (forest.parent.of(memory) + before + 1).flatten(1)
            there = torch.isfinite(forest.weight.of(memory, torch.float64)).flatten(1)
            up = known.gather(1, forest.parent.of(outcome)[:, depth - 1])[:, :, None]
            token = forest.token.of(outcome)[:, depth - 1, :, None]
            same = (up > 0) & (up == above[:, None]) & (token == forest.token.of(memory).flatten(1)[:, None])
            same &= there[:, None]
            known = torch.where(same.any(2), width + 1 + same.int().argmax(2), 0)
        rows = layout.rows.of(memory).view(torch.float32)[:, : layout.row_count]
        rows = rows.unflatten(1, (layout.nodes, -1))
        own = rows.gather(1, (known - 1).clamp(min=0)[:, :, None].expand(-1, -1, rows.shape[2])).flatten(0, 1)
        known = torch.where(own[:, -1].view(known.shape) > 0, known, 0)
        there, few = known.flatten()[:, None] > 0, min(count, most)
        logps = torch.nn.functional.pad(own[:, :few], (0, count - few), value=-torch.inf)
        ids = torch.nn.functional.pad(own[:, most : most + few], (0, count - few))
        best[:, :-1] = torch.where(there, torch.cat([logps, ids], 1), best[:, :-1])
        return known

    def forest_masks(
        self, masks: TreeMasks, base: Tensor, parent: Tensor | None, slots: Tensor, rows: Tensor
    ) -> Tensor:
        # One by one: the slots of two requests may be the same numbers.
        parts = []
        for r in range(len(slots)):
            inside = torch.eye(slots.shape[1], dtype=torch.bool, device=slots.device)
            bases = [base[r]]
            if parent is not None:
                bases = []
                _, layers, width = parent.shape
                for depth in range(layers):
                    above, begin = parent[r, depth], depth * width
                    if depth:
                        # What the parent sees of the forest, and itself.
                        here, up = slice(begin, begin + width), slice(begin - width, begin)
                        inside[here] |= inside[up][above]
                    bases.append((bases[-1] if depth else base[r])[above])
            parts.append(masks.extend(torch.cat(bases), rows[r], slots[r], inside))
        return torch.cat(parts)

    def catch_up_masks(
        self, masks: TreeMasks, state: Tensor, layout: CoverLayout, slots: Tensor, rows: Tensor
    ) -> Tensor:
        fields, width = layout.state, layout.width
        parts = []
        for r in range(len(slots)):
            missing = fields.missing.of(state)[r].bool().expand(width)
            above_row, first = fields.above_row.of(state)[r], fields.first.of(state)[r]
            inside = torch.eye(2 * width, dtype=torch.bool, device=slots.device)
            which = torch.arange(width, device=slots.device)
            inside[width:, :width] = (which[None] == first[:, None]) & missing[:, None]
            base = torch.cat([above_row, torch.where(missing, above_row, fields.draft_row.of(state)[r])])
            parts.append(masks.extend(base, rows[r], slots[r], inside))
        return torch.cat(parts)

    def verify(
        self, best: Tensor, state: Tensor, after: Tensor, request: Tensor, outcome: Tensor, layout: CoverLayout,
        eos: Tensor, greedy: bool, support: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        entries = unpacked(best)
        for r in range(layout.requests):
            own = slice(r * layout.nodes, (r + 1) * layout.nodes)
            one = slice(r, r + 1)
            self._verify(
                Best(*(part[own] for part in entries)), state[one], after[one], request[one], outcome[one],
                layout, eos, greedy, support, distinct,
            )  # fmt: skip

    def _verify(
        self, best: Best, state: Tensor, after: Tensor, request: Tensor, outcome: Tensor, layout: CoverLayout,
        eos: Tensor, greedy: bool, support: int, distinct: bool,
    ) -> None:  # fmt: skip
        width, draft_width, gamma, device = layout.width, layout.draft_width, layout.gamma, state.device
        now, sent, forest, verified = layout.state, layout.request, layout.forest, layout.verified
        position = now.position.of(state)[0]
        offset = (position - sent.origin.of(request)[0]) + torch.arange(gamma + 1, device=device)
        uniforms = sent.uniforms.of(request, torch.float64)[0][offset.clamp(0, layout.window - 1)]
        temperature, top_p, mass, slack = (
            x.of(request, torch.float64)[0] for x in (sent.temperature, sent.top_p, sent.mass, sent.slack)
        )
        min_width, last = sent.min_width.of(request)[0], sent.last.of(request)[0]
        parents, tokens = forest.parent.of(outcome)[0], forest.token.of(outcome)[0]
        weights = forest.weight.of(outcome, torch.float64)[0]
        # Of each node of the forest, its parent's place among all nodes.
        layer = torch.arange(gamma, device=device)
        first = torch.where(layer > 0, width + (layer - 1) * draft_width, 0)
        above = parents + first[:, None]
        here = torch.arange(width, device=device)
        at = here  # nodes whose logits the next layer is drawn from
        score = now.score.of(state, torch.float64)[0]
        going = torch.ones(1, dtype=torch.bool, device=device)
        # Where one beam is kept, and the forest holds it: one more layer, from it alone.
        one_beam, more = sent.one_beam.of(request)[0] > 0, torch.zeros_like(going)
        goes_on = going  # whatever of it the forest holds
        count = torch.zeros(1, dtype=torch.long, device=device)
        token, node, weight_after = now.token.of(state)[0], at, score
        known = torch.zeros_like(at)
        for depth in range(gamma + 1):

            def found(node: Tensor, token: Tensor, depth: int = depth) -> Tensor:
                """Which draws of the forest's layer these continuations of nodes are: bool [N, W_S]."""
                alive = torch.isfinite(weights[depth])
                return (node[:, None] == above[depth]) & (token[:, None] == tokens[depth]) & alive

            ids, logps = best.ids[at], best.logps[at]
            if layout.kept:
                search = search_layer(score, ids, logps, layout.kept, width, eos)
                parent, new, weight = search.parent[search.beams], search.token[search.beams], search.weight
                shown = torch.where(search.score > -torch.inf, search.parent, -1), search.token, search.score
            elif layout.drawn:
                joint = joint_of(score, ids, logps, greedy, support, temperature, top_p)
                wide = draws_holding(joint, mass, min_width, width)
                joint = canonical(joint)
                tested = position + depth + 1 < last if depth < gamma else torch.zeros_like(going)
                drafted = min(depth, gamma - 1)
                q_node = forest.support_parent.of(outcome)[0, drafted] + first[drafted]
                q_token = forest.support_token.of(outcome)[0, drafted]
                same = (at[joint.parent][:, None] == q_node) & (joint.token[:, None] == q_token)
                q = forest.prob.of(outcome, torch.float64)[0, drafted]
                draws = forest.draws.of(outcome)[0, drafted]
                if distinct:
                    accepted, wide = accept_distinct_draws(
                        joint.prob, same, q, draws, wide, tested, uniforms[depth], width
                    )
                else:
                    tests = tests_of(joint.prob, same, q, draws)
                    by_forest = torch.where(tested, draws_accepted(tests, slack, min_width, width), width)
                    wide = torch.where(slack >= 0, by_forest, wide)
                    accepted = accept_draws(tests, wide, tested, uniforms[depth], width)
                verified.verdicts.of(outcome)[0, depth] = accepted.verdicts
                drawn = layer_of_draws(joint, accepted.draws, here < wide)
                parent, new = drawn.parent[drawn.draws], drawn.token[drawn.draws]
                weight = drawn.scores.masked_fill(torch.isin(new, eos), -torch.inf)
                shown = torch.where(drawn.there, parent, -1), new, drawn.logp[drawn.draws]
                goes_on = accepted.whole | ~tested | layout.continues
            else:
                joint = joint_of(score, ids, logps, greedy, support, temperature, top_p)
                wide = draws_holding(joint, mass, min_width, width)
                by_forest = torch.full_like(wide, width)
                if depth < gamma:
                    inside = torch.isin(joint.token, eos) | found(at[joint.parent], joint.token).any(1)
                    by_forest = torch.where(
                        (position + depth + 1 < last) & ~more,
                        draws_inside(joint, inside, slack, min_width, width),
                        by_forest,
                    )
                wide = torch.where(slack >= 0, by_forest, wide)
                drawn = drawn_from(joint, uniforms[depth], distinct, wide)
                parent, new = drawn.parent[drawn.draws], drawn.token[drawn.draws]
                weight = drawn.scores.masked_fill(torch.isin(new, eos), -torch.inf)
                shown = torch.where(drawn.there, parent, -1), new, drawn.logp[drawn.draws]
            from_node = at[parent]
            held = torch.zeros(width, dtype=torch.bool, device=device)
            place = at
            if depth < gamma:
                same = found(from_node, new)
                held = same.any(1)
                place = torch.where(held, width + depth * draft_width + same.int().argmax(1), 0)
            verified.parent.of(outcome)[0, depth], verified.token.of(outcome)[0, depth] = shown[:2]
            verified.logp.of(outcome, torch.float64)[0, depth] = shown[2]
            verified.finite.of(outcome)[0, depth] = best.finite[at].long()
            count = count + going
            token, node, weight_after, known = (
                torch.where(going, one, other)
                for one, other in (
                    (new, token), (from_node, node), (weight, weight_after), (torch.where(held, place + 1, 0), known),
                )
            )  # fmt: skip
            live = torch.isfinite(weight)
            passed, alone = (held | ~live).all(), _only_best(weight)
            again = one_beam & going & ~more & ~passed & (held & torch.isfinite(alone)).any()
            if layout.drawn:
                again = torch.zeros_like(again)
            going = (going & ~more & passed & goes_on & live.any()) | again
            at, score, more = place, torch.where(again, alone, weight), again
        weight_after = torch.where(one_beam, _only_best(weight_after), weight_after)
        verified.layers.of(outcome)[0] = count
        now.token.of(after)[0] = token
        now.score.of(after, torch.float64)[0] = weight_after
        now.row.of(after)[0] = sent.target_rows.of(request)[0][node]
        now.first.of(after)[0] = (node[:, None] == node).int().argmax(1)
        now.known.of(after)[0] = known
        now.position.of(after)[0] = position + count
        if not gamma:
            return
        # Rows of what the draft has computed: the beams, then the forest without its last layer.
        draft_rows = sent.draft_rows.of(request)[0][width:]
        end = len(draft_rows) - 1
        now.draft_row.of(after)[0] = draft_rows[node.clamp(max=end)]
        now.above.of(after)[0] = torch.cat([now.token.of(state)[0], tokens.flatten()])[node]
        grand = torch.cat([torch.zeros_like(at), above.flatten()])[node]
        now.above_row.of(after)[0] = draft_rows[grand.clamp(max=end)]
        now.missing.of(after)[0] = (count > gamma).long()
