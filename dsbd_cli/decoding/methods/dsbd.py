"""Dynamic-width speculative beam decoding: draft a forest, verify it layer by layer (docs/design.md section 3).

One iteration is: the proposer drafts up to gamma layers on the live beams; ONE target call computes
the conditionals of every node; then layers are committed for as long as their law is known. Beam
sampling is this loop without a forest, speculative sampling is it with one beam and one draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from dsbd_cli.decoding.law.distribution import Support
from dsbd_cli.decoding.law.verification import align, verify_draws
from dsbd_cli.decoding.methods.chained import chained
from dsbd_cli.decoding.methods.run import Run
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest


def dsbd(run: Run, verify: str) -> Iterator[Layer | Iteration]:
    """Decode until the stop rules hold; `verify` is `paper`, `continue` or `cover`."""
    rule = cover_layers if verify == "cover" else draw_layers
    chain = run.chain
    while not run.hypotheses.stopped():
        if chain is not None and (chain.flying or chain.begin(run.hypotheses.active)):
            yield from chained(run, chain)
            continue
        # Slots that come straight from p need no forest where p is known already (behind the prompt).
        forest = Forest() if verify == "cover" and run.known() else run.propose()
        run.advance(forest)
        yield from rule(run, forest, verify)
        yield from run.finish_iteration(forest, verify)


def draw_layers(run: Run, forest: Forest, verify: str) -> Iterator[Layer]:
    """`paper` and `continue`: accept or reject the forest's draws, layer by layer."""
    for depth, drafted in enumerate(forest.layers):
        layer = verify_layer(run, drafted, depth)
        yield layer
        # A filled slot ends the iteration under `paper`; under `continue` it may be a known node too.
        if run.hypotheses.stopped() or not run.known() or not (layer.passed or verify == "continue"):
            return
    yield run.draw_layer(run.width)


def verify_layer(run: Run, drafted: DraftLayer, depth: int) -> Layer:
    """Commit W_L slots by testing the draws of one drafted layer against the target's joint."""
    support = run.p_beam()
    keys, p, q, draws = _aligned(run, support, drafted)
    width = run.widths.for_draws(p, q, len(drafted.draws))
    result = verify_draws(p, q, draws, width, run.sampler)
    # A slot has mass under p, so its key is one of the support's own (ascending) keys.
    own = np.searchsorted(_keys(support.parent, support.token), keys[list(result.draws)])
    slots = [run.node(support, int(i)) for i in own]
    return run.commit(
        slots,
        examined=len(result.verdicts),
        accepted=result.accepted,
        verdicts=result.verdicts,
        drafted=depth,
        passed=result.passed,
    )


def _keys(parent: np.ndarray, token: np.ndarray) -> np.ndarray:
    """One int64 a continuation, ascending in (parent, token); token ids fit in 32 bits."""
    return (parent.astype(np.int64) << 32) | token.astype(np.int64)


def _aligned(
    run: Run, support: Support, drafted: DraftLayer
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Keys, p and q on their joint support, and the draws as indices into it (-1: dead parent)."""
    place = {node: i for i, node in enumerate(run.hypotheses.active)}
    # Where each parent of the draft stands among the accepted ones; -1 for the dead.
    new = np.array([place.get(node, -1) for node in drafted.parents], dtype=np.int64)
    parent = new[drafted.support.parent]
    alive = parent >= 0
    keys, p, q = align(
        _keys(support.parent, support.token),
        support.prob,
        _keys(parent[alive], drafted.support.token[alive]),
        drafted.support.prob[alive],
    )
    draws = []
    for node in drafted.draws:
        where = place.get(node.parent, -1) if node.parent is not None else -1
        key = (where << 32) | node.token
        draws.append(int(np.searchsorted(keys, key)) if where >= 0 else -1)
    return keys, p, q, draws


def cover_layers(run: Run, forest: Forest, verify: str = "cover") -> Iterator[Layer]:
    """`cover`: draw the slots straight from p, and go on while every live one lies in the forest.

    Without a forest this is one layer of beam sampling, from the same random numbers.
    """
    for depth, drafted in enumerate(forest.layers):
        support = run.p_beam()
        width = run.widths.for_cover(partial(_mass_inside, run, support, drafted))
        slots = [run.node(support, i) for i in run.sampler.sample(support.prob, width)]
        # A finished sequence needs no node of the forest.
        verdicts = tuple(node.finish is not None or run.target.has_logits(node) for node in slots)
        yield run.commit_covered(slots, verdicts, depth)
        if run.hypotheses.stopped() or not run.known():
            return
    yield run.draw_layer(run.width)


def _mass_inside(run: Run, support: Support, drafted: DraftLayer) -> float:
    """p's mass on the continuations in the drafted layer, and on those that finish by EOS.

    One that a stop string would finish counts only if drafted: finding it costs a text each. None
    finishes by length, for the last layer of the budget is never drafted (`Run.propose`).
    """
    place = {node: i for i, node in enumerate(run.hypotheses.active)}
    held = [(place[node.parent] << 32) | node.token for node in drafted.draws if node.parent in place]
    ends = np.isin(support.token, list(run.trie.eos_ids))
    inside = ends | np.isin(_keys(support.parent, support.token), held)
    return float(support.prob[inside].sum())
