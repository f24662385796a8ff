"""The kernels that draw forests and test their draws, beside the same law in tensors, on the same random blocks.

On a GPU, or anywhere under Triton's interpreter (TRITON_INTERPRET=1), which takes its time: small sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.logits import finite_logits, log_probabilities, pack
from dsbd_cli.decoding.device.law import DeviceLaw
from dsbd_cli.decoding.device.law_torch import TorchLaw
from dsbd_cli.decoding.device.layout import CoverLayout, Field
from tests.decoding.device.law_cases import EOS, words

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from dsbd_cli.decoding.device.law_triton import TritonLaw

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REQUESTS = 2
VOCAB = 16  # few: two beams often go on with the same token


class Case(NamedTuple):
    """One layout, and the rules of its requests.

    Attributes:
        apart: how far the target's logits are from the draft's.
        top_n: entries of a row; 0: as many as T looks at.
    """

    width: int = 3
    draft_width: int = 5
    gamma: int = 2
    top_k: int = 6
    temperature: float = 1.0
    top_p: float = 0.9
    continues: bool = False
    mass: float = 1.0
    slack: float = -1.0
    min_width: int = 0  # W
    one_beam: int = 0
    apart: float = 1.0
    top_n: int = 0


IID = {
    "paper": Case(width=4, draft_width=6),
    "continue": Case(width=4, draft_width=6, continues=True),
    "many draws": Case(width=6, draft_width=12, gamma=1, top_k=9, apart=0.6),
    "by what is accepted": Case(draft_width=5, slack=0.1, min_width=1, continues=True),
    "surely accepted": Case(draft_width=4, slack=1e-12, min_width=1, apart=0.0, top_k=3, top_p=0.3),
    "as wide as may be": Case(width=3, draft_width=2, slack=0.9, min_width=1, continues=True),
    "by mass": Case(mass=0.7, min_width=1, continues=True),
    "one beam of two draws": Case(width=1, draft_width=2),
    "one beam kept": Case(draft_width=3, one_beam=1, continues=True),
    "nothing alike": Case(apart=20.0, continues=True),
    "all alike": Case(apart=0.0),
    "few entries": Case(top_k=9, top_n=2),  # more than one live parent has
    "greedy": Case(temperature=0.0),
}
DISTINCT = {
    "paper": Case(width=4, draft_width=6),
    "continue": Case(continues=True, apart=0.3),
    "many draws": Case(width=5, draft_width=8, gamma=1, top_k=12, temperature=1.5, apart=0.6),
    "fewer than W_S": Case(width=2, draft_width=6, top_k=5, continues=True),
    "fewer than W": Case(width=4, draft_width=6, top_k=3, top_p=0.5, continues=True),
    "by mass": Case(mass=0.7, min_width=1, draft_width=7, continues=True),
    "nothing alike": Case(apart=20.0, continues=True),
    "all alike": Case(apart=0.0),
    "one of one": Case(width=1, draft_width=1, apart=0.0),
    "few entries": Case(top_k=9, top_n=2, draft_width=4),
    "greedy": Case(temperature=0.0),
}


class Blocks(NamedTuple):
    """What both laws are given: blocks of `CoverLayout`, packed logits [R x nodes, 2 k + 1], weights [R, W]."""

    state: Tensor
    request: Tensor
    drafts: Tensor
    packed: Tensor
    scores: Tensor


def rows(case: Case, rng: np.random.Generator, nodes: int, count: int) -> list[Tensor]:
    """Packed logits of the draft, and of a target that is more or less of its opinion; ties in both."""
    values = rng.integers(0, 12, (nodes, VOCAB)) / 3
    values[np.arange(nodes), rng.integers(0, VOCAB, nodes)] += 3
    both = values, values + case.apart * rng.integers(-3, 4, values.shape) / 3
    packed = []
    for own in both:
        logps = log_probabilities(torch.tensor(own, dtype=torch.float32), VOCAB)
        packed.append(pack(logps, finite_logits(logps), count))
    return packed


def blocks(case: Case, layout: CoverLayout, rng: np.random.Generator) -> Blocks:
    """Two requests of this case, one with fewer beams than W where there may be."""
    sent, now, count = layout.request, layout.state, case.top_n or case.top_k
    drafts, packed = rows(case, rng, REQUESTS * layout.nodes, count)
    state, request = (
        torch.zeros((REQUESTS, size), dtype=torch.long) for size in (layout.state_size, layout.request_size)
    )
    scores = rng.normal(size=(REQUESTS, case.width))
    scores[0, 1 : rng.integers(1, case.width + 1)] = -np.inf
    state[:, now.score.at], state[:, now.position.at] = words(scores), 40
    state[:, now.token.at] = torch.from_numpy(rng.integers(0, VOCAB, (REQUESTS, case.width)))
    for field, value in (
        (sent.temperature, case.temperature), (sent.top_p, case.top_p), (sent.mass, case.mass), (sent.slack, case.slack)
    ):  # fmt: skip
        request[:, field.at] = words(np.full((REQUESTS, 1), value))
    request[:, sent.min_width.at] = case.min_width or case.width
    request[:, sent.one_beam.at] = case.one_beam
    request[:, sent.origin.at] = 40 - int(rng.integers(0, 2))
    # Layers that the budget has room for: of some no draw is tested.
    request[:, sent.last.at] = torch.from_numpy(41 + rng.integers(0, layout.gamma + 2, (REQUESTS, 1)))
    for field in (sent.uniforms, sent.draft_uniforms):
        request[:, field.at] = words(rng.random((REQUESTS, field.at.stop - field.at.start)))
    for r in range(REQUESTS):
        for field in (sent.target_rows, sent.draft_rows):
            request[r, field.at] = torch.from_numpy(rng.permutation(500)[: field.shape[0]])
    return Blocks(state, request, drafts, packed, torch.tensor(scores))


def decided(
    law: DeviceLaw, device: str, case: Case, layout: CoverLayout, given: Blocks, distinct: bool
) -> Any:
    """The forest that a law draws, the layers it verifies, and the state behind them, on the host."""
    state, request, drafts, packed, weights = (part.clone().to(device) for part in given)
    count = case.top_n or case.top_k
    assert law.takes(layout, count, count)
    outcome, after = torch.zeros((REQUESTS, layout.outcome_size), dtype=torch.long), torch.zeros_like(state)
    outcome, eos, begin = outcome.to(device), torch.tensor(EOS, device=device), 0
    nodes, how = drafts.view(REQUESTS, layout.nodes, -1), (case.temperature == 0, case.top_k, distinct)
    for depth in range(layout.gamma):
        parents = weights.shape[1]
        best = nodes[:, begin : begin + parents].flatten(0, 1).contiguous()
        law.draw(best, weights, depth, layout, request, outcome, eos, *how)
        weights, begin = layout.forest.weight.of(outcome, torch.float64)[:, depth], begin + parents
    law.verify(packed, state, after, request, outcome, layout, eos, *how)
    return outcome.cpu(), after.cpu()


def told(layout: CoverLayout, outcome: Tensor, after: Tensor, r: int) -> Iterator[tuple[str, list[Any]]]:
    """All that was decided for a request and that anybody reads, by name; numbers rounded."""
    forest, verified, now = layout.forest, layout.verified, layout.state

    def real(field: Field, block: Tensor) -> Tensor:
        return field.of(block, torch.float64)[r].numpy().round(9)

    above = np.zeros(1)
    for depth in range(layout.gamma):
        if not (above > -np.inf).any():
            break  # the host cuts the forest here
        above, prob = real(forest.weight, outcome)[depth], real(forest.prob, outcome)[depth]
        draws = forest.draws.of(outcome)[r, depth]
        there = draws[draws >= 0]
        yield f"draws {depth}", draws.clamp(max=0).tolist()
        for name in ("parent", "token"):
            own = getattr(forest, name).of(outcome)[r, depth]
            yield f"{name} {depth}", own[draws >= 0].tolist()
            support = getattr(forest, f"support_{name}").of(outcome)[r, depth]
            yield f"support's {name} {depth}", support[prob > 0].tolist()
            assert support[there].tolist() == own[draws >= 0].tolist()
        yield f"weights {depth}", above.tolist()
        yield f"shares {depth}", prob[prob > 0].tolist()
        yield f"log-probabilities {depth}", real(forest.logp, outcome)[depth][prob > 0].tolist()
    layers = int(verified.layers.of(outcome)[r])
    yield "layers", [layers]
    for depth in range(layers):
        parent = verified.parent.of(outcome)[r, depth]
        shown = parent >= 0
        yield f"verified parent {depth}", parent.tolist()
        yield f"verified token {depth}", verified.token.of(outcome)[r, depth][shown].tolist()
        yield f"verified log-probability {depth}", real(verified.logp, outcome)[depth][shown.numpy()].tolist()
        yield f"verdicts {depth}", verified.verdicts.of(outcome)[r, depth].tolist()
        yield f"finite {depth}", verified.finite.of(outcome)[r, depth].tolist()
    yield "scores", real(now.score, after).tolist()
    yield "position", now.position.of(after)[r].tolist()
    missing = now.missing.of(after)[r]
    yield "missing", missing.tolist()
    rows = ("above", "above_row") if missing else ("draft_row",)  # of the others nothing is read
    for name in ("token", "row", "first", "known", *rows):
        yield name, getattr(now, name).of(after)[r][shown].tolist()


@pytest.mark.parametrize("distinct", [False, True])
def test_kernels_draw_and_accept_what_tensors_do(distinct):
    rng, seen, widths, layers, absent, turns = np.random.default_rng(13), set(), {}, set(), 0, 0
    for name, case in (DISTINCT if distinct else IID).items():
        sizes = REQUESTS, case.width, case.draft_width, case.gamma
        entries = max(case.width, case.draft_width) * (case.top_n or case.top_k)
        layout = CoverLayout.of(*sizes, drawn=min(case.top_k, entries), continues=case.continues)
        for trial in range(1 if DEVICE == "cpu" else 20):
            given = blocks(case, layout, rng)
            wanted, got = (
                decided(law, device, case, layout, given, distinct)
                for law, device in ((TorchLaw(), "cpu"), (TritonLaw(), DEVICE))
            )
            for r in range(REQUESTS):
                for (what, ours), (_, theirs) in zip(
                    told(layout, *got, r), told(layout, *wanted, r), strict=True
                ):
                    assert ours == theirs, (name, trial, r, what)
                    if what.startswith("verdicts"):
                        seen.update(theirs)
                        told_of = [one for one in theirs if one >= 0]
                        turns = max(turns, sum(a != b for a, b in pairwise(told_of)))
                    elif what.startswith("verified parent"):
                        widths.setdefault(name, set()).add(sum(one >= 0 for one in theirs) - case.width)
                    elif what.startswith("draws"):
                        absent += theirs.count(-1)
                    elif what == "layers":
                        layers.update(theirs)
    assert seen == {-1, 0, 1}
    assert turns >= 3  # behind an accepted draw that came behind rejected ones others are rejected
    assert layers == {1, 2, 3}
    assert len(widths["by mass"]) > 1
    assert (absent > 0) == distinct
    if distinct:
        assert min(widths["fewer than W"]) < 0
    else:
        assert widths["paper"] == widths["continue"] == {0}
        assert len(widths["by what is accepted"]) > 1
        assert min(widths["as wide as may be"]) < 0
