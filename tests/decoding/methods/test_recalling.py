"""Forests that hold what the target said of the last one: a dynamic width stays exact, and gets further."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from dsbd_cli.decoding.methods.recalling import RecallingProposer
from dsbd_cli.decoding.methods.setup import demand_of
from dsbd_cli.decoding.tree.events import Layer
from dsbd_cli.settings import Settings
from tests.decoding.enumerating import Branching, law_of, total_variation
from tests.decoding.harness import Toy, path_of, settings_for
from tests.decoding.methods.test_dsbd_layers import Draws, conditional, product
from tests.decoding.reference import p_beam
from tests.decoding.toys import DRAFTS, EOS, TWO


def toy(draft: str, threshold: float = 0.5) -> Toy:
    settings = settings_for(
        TWO, method="dsbd", verify="cover", forest="full", gamma=2, width=3, draft_width=2, max_new_tokens=4,
        threshold=threshold, min_width=2, early_stopping="never",
    )  # fmt: skip
    return Toy(*DRAFTS[draft], settings, EOS)


def whole(case: Toy, sampler: Branching) -> tuple[tuple[Draws, ...], int]:
    """All layers of a run, and how many target calls they took."""
    run, events = case.events(sampler, sampler)
    assert isinstance(run.proposer, RecallingProposer)
    assert not run.survivors
    before = run.target.calls
    layers = [tuple(map(path_of, event.draws)) for event in events if isinstance(event, Layer)]
    return tuple(layers), run.target.calls - before


@pytest.mark.parametrize("draft", ["good", "holes"])
@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_every_layer_of_a_run_is_exact_for_its_width(draft: str, threshold: float) -> None:
    """Given all that came before: one width, every draw one of p, all jointly independent."""
    case = toy(draft, threshold)
    given: dict[Any, dict[Draws, float]] = defaultdict(lambda: defaultdict(float))
    for (layers, _), mass in law_of(lambda sampler: whole(case, sampler)).items():
        for i, layer in enumerate(layers):
            given[layers[:i]][layer] += mass
    widths = set()
    for before, law in given.items():
        active = [path for path in dict.fromkeys(before[-1]) if path[-1] not in EOS] if before else [()]
        (width,) = {len(draws) for draws in law}
        widths.add(width)
        wanted = product(p_beam(case.target, active, TWO), width)
        assert total_variation(conditional(law), wanted) < 1e-9
    assert widths == {2, 3}


def test_what_the_target_said_saves_target_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def calls() -> float:
        case = toy("holes")
        law = law_of(lambda sampler: whole(case, sampler))
        return sum(mass * calls for (_, calls), mass in law.items())

    recalled = calls()
    monkeypatch.setattr(RecallingProposer, "_knows", lambda self, node: False)
    assert recalled < calls() - 0.05


@pytest.mark.parametrize(
    ("given", "recalls"),
    [
        ({}, True),
        ({"threshold": 0.9}, True),
        ({"threshold": 0.9, "width_rule": "distinct"}, True),
        ({"deterministic": True}, True),
        ({"kv": "one"}, False),
        ({"verify": "paper", "threshold": 0.9}, False),
        ({"method": "speculative"}, False),
        ({"method": "beam"}, False),
    ],
)
def test_a_pipeline_recalls_where_nothing_is_verified_with_q(given: dict[str, Any], recalls: bool) -> None:
    assert demand_of(Settings(**given), True).recalls is recalls
