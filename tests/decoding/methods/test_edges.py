"""The methods at their edges, on tables: ends inside a block, few candidates, greedy, counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.tree.events import Iteration, Layer
from tests.decoding.harness import Toy, path_of, settings_for
from tests.decoding.reference import T, logprob, p_beam
from tests.decoding.table_model import PathLaw, TableModel, by_last, by_path
from tests.decoding.toys import DRAFTS, EOS, OFF, ON, TARGET

METHODS: dict[str, dict[str, Any]] = {
    "multinomial": {"method": "multinomial"},
    "beam": {"method": "beam"},
    "speculative": {"method": "speculative", "gamma": 3},
    "specinfer": {"method": "specinfer", "tree": (2, 2, 1)},
    "spectr": {"method": "specinfer", "tree": (2, 2, 1), "tree_rule": "spectr"},
    "rsd": {"method": "specinfer", "tree": (2, 2, 1), "tree_rule": "rsd"},
    "dsbd paper": {"method": "dsbd", "verify": "paper", "gamma": 3, "draft_width": 4},
    "dsbd continue": {"method": "dsbd", "verify": "continue", "gamma": 3, "draft_width": 4},
    "dsbd cover": {"method": "dsbd", "verify": "cover", "gamma": 3, "draft_width": 4},
    "dsbd dynamic": {"method": "dsbd", "verify": "paper", "gamma": 3, "draft_width": 4, "threshold": 0.7},
    "dsbd cover dynamic": {
        "method": "dsbd", "verify": "cover", "gamma": 3, "draft_width": 4, "threshold": 0.7,
    },
    "beam distinct": {"method": "beam", "draws": "distinct"},
    "dsbd distinct": {"method": "dsbd", "verify": "cover", "gamma": 3, "draft_width": 4, "draws": "distinct"},
    "dsbd paper distinct": {
        "method": "dsbd", "verify": "paper", "gamma": 3, "draft_width": 4, "draws": "distinct",
    },
    "dsbd one cache": {"method": "dsbd", "verify": "continue", "gamma": 3, "draft_width": 4, "kv": "one"},
}  # fmt: skip
DSBD = [name for name in METHODS if name.startswith("dsbd")]


def toy(method: str, target: PathLaw, draft: PathLaw, t: T = OFF, budget: int = 20, **given: Any) -> Toy:
    settings = settings_for(t, **({"max_new_tokens": budget} | METHODS[method] | given))
    return Toy(target, None if method in ("multinomial", "beam") else draft, settings, EOS)


def play(case: Toy, seed: int) -> tuple[Run, list[Layer], list[Iteration]]:
    run, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
    layers: list[Layer] = []
    iterations: list[Iteration] = []
    for event in events:
        (layers if isinstance(event, Layer) else iterations).append(event)  # type: ignore[arg-type]
    return run, layers, iterations


def says(*tokens: int) -> PathLaw:
    """One possible text."""
    return lambda path: np.eye(4)[tokens[min(len(path), len(tokens) - 1)]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reply", [(3,), (0, 3), (0, 1, 3), (0, 1, 2, 3), (0, 1, 2, 0, 3)])
def test_an_end_in_the_middle_of_a_block(method: str, reply: tuple[int, ...]) -> None:
    """Draft equal to target, everything is accepted, EOS falls anywhere in a block of three."""
    run, layers, iterations = play(toy(method, says(*reply), says(*reply)), seed=0)
    assert path_of(run.hypotheses.ranking()[0]) == reply
    assert len(layers) == len(reply), "nothing is counted after the end"
    assert all(layer.distinct == 1 for layer in layers)
    assert [path_of(node) for node in run.hypotheses.pool] == [reply]
    assert run.hypotheses.active == []
    assert layers == [layer for iteration in iterations for layer in iteration.layers]


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith(("dsbd", "beam"))])
def test_a_beam_that_ended_stays_and_is_not_extended(method: str) -> None:
    """The pool only grows, and nothing is ever drawn below a finished sequence."""
    target = by_path(3, 4)
    seen_both = False
    for seed in range(40):
        case = toy(method, target, DRAFTS["bad"][1], ON, budget=8, width=4, early_stopping="never")
        run, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
        ended: list[Any] = []
        for event in events:
            assert run.hypotheses.pool[: len(ended)] == ended
            ended = list(run.hypotheses.pool)
            seen_both |= bool(ended) and bool(run.hypotheses.active)
            if isinstance(event, Layer):
                for node in event.draws:
                    assert not any(3 in path_of(node)[:-1] for node in event.draws)
                    assert (node.finish is None) == (node.token != 3 and node.depth < 8)
        assert len(set(map(path_of, run.hypotheses.pool))) == len(run.hypotheses.pool)
    assert seen_both


@pytest.mark.parametrize("method", METHODS)
def test_fewer_candidates_than_the_width(method: str) -> None:
    """One possible text, or one token of each row: no NaN and nothing invented to fill up."""
    wide: dict[str, Any] = {"width": 16, "min_width": 1} if method.startswith(("beam", "dsbd")) else {}
    run, layers, _ = play(toy(method, says(0, 1, 3), TARGET, **wide), seed=1)
    assert [path_of(node) for node in run.hypotheses.ranking()] == [(0, 1, 3)]
    case = toy(method, TARGET, DRAFTS["bad"][1], T(1.0, 1), budget=4, **wide)
    run, layers, _ = play(case, seed=1)
    assert all(layer.distinct == 1 for layer in layers)
    (only,) = run.hypotheses.ranking()
    assert np.isfinite(only.score)


@pytest.mark.parametrize("method", ["beam", *DSBD])
def test_the_width_returns_when_it_can(method: str) -> None:
    """Two forced steps, then four tokens to choose from: 16 draws of a 4-letter alphabet."""

    def narrow_then_wide(path: tuple[int, ...]) -> np.ndarray:
        return np.eye(4)[0] if len(path) < 2 else np.full(4, 0.25)

    case = toy(method, narrow_then_wide, narrow_then_wide, budget=5, width=16, early_stopping="never")
    case = Toy(case.target, case.draft, case.settings, eos=())
    run, layers, _ = play(case, seed=1)
    assert [layer.distinct for layer in layers[:2]] == [1, 1]
    assert layers[2].distinct == 4 or len(layers[2].draws) < 16
    if "distinct" in method:
        assert [len(layer.draws) for layer in layers] == [1, 1, 4, 16, 16]
    elif "dynamic" not in method:
        assert all(len(layer.draws) == 16 for layer in layers)
        assert layers[2].distinct > 1
    for layer in layers:
        assert layer.distinct == len(set(map(path_of, layer.draws)))
    assert np.isfinite([node.score for node in run.hypotheses.ranking()]).all()


def tied(path: tuple[int, ...]) -> np.ndarray:
    return np.array([[0.1, 0.4, 0.4, 0.1], [0.3, 0.1, 0.3, 0.3], [0.25] * 4, [0, 0, 0, 1.0]])[
        path[-1] if path else 0
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("t", [T(0.0), T(0.0, 5, 0.5), T(1.0, 1), T(1.0, 0, 0.0), T(1.0, 0, 1e-12)])
def test_greedy_is_one_sequence_whatever_the_seed(method: str, t: T) -> None:
    """The argmax of the joint, ties to the lowest id, for every method."""
    drafts = (tied, by_path(8, 4), says(2, 2, 2, 2))
    runs = [play(toy(method, tied, draft, t, budget=6), seed) for draft in drafts for seed in range(5)]
    assert {path_of(run.hypotheses.ranking()[0]) for run, *_ in runs} == {(1, 0, 1, 0, 1, 0)}
    assert all(layer.distinct == 1 for _, layers, _ in runs for layer in layers)


@pytest.mark.parametrize("method", METHODS)
def test_a_top_k_above_all_there_is_is_no_filter(method: str) -> None:
    """T acts on the joint: four drafted parents of four tokens are 16 entries."""
    for seed in range(20):
        ends = [
            play(toy(method, TARGET, DRAFTS["bad"][1], T(1.0, k), budget=4), seed)[0].hypotheses
            for k in (0, 16, 17, 1_000_000)
        ]
        assert len({tuple(map(path_of, end.ranking())) for end in ends}) == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draft", ["good", "bad", "disjoint", "holes"])
def test_scores_counts_and_calls(method: str, draft: str) -> None:
    """What a run reports of itself, over random seeds."""
    target, proposal = DRAFTS[draft]
    for seed in range(30):
        case = toy(method, target, proposal, ON, budget=7, early_stopping="never")
        run, layers, iterations = play(case, seed)
        for node in run.hypotheses.ranking():
            assert node.score == pytest.approx(logprob(target, path_of(node)), abs=1e-9)
        assert sum(len(iteration.layers) for iteration in iterations) == len(layers)
        assert all(iteration.layers for iteration in iterations), "every target call yields a layer"
        # The first iteration starts from the prefilled prompt: without a forest it needs no call.
        calls = run.target.calls
        assert len(iterations) - 1 <= calls <= len(iterations)
        assert [node.depth for layer in layers for node in layer.draws[:1]] == list(range(1, len(layers) + 1))
        for layer in layers:
            assert layer.accepted == sum(layer.verdicts)
            assert layer.examined == len(layer.verdicts)
            assert (layer.drafted is None) == (layer.examined + layer.ended == 0)
        for iteration in iterations:
            start = iteration.layers[0].draws[0].depth - 1
            assert len(iteration.forest.layers) == 0 or start + 1 < 7
            for drafted in iteration.forest.layers:
                assert all(node.depth < 7 for node in drafted.draws), "deeper than the budget less one"
            drafted_layers = [layer.drafted for layer in iteration.layers if layer.drafted is not None]
            assert drafted_layers == list(range(len(drafted_layers)))


@pytest.mark.parametrize("rule", ["paper", "continue", "cover"])
def test_where_an_iteration_ends(rule: str) -> None:
    """`paper` ends with the first filled layer; the others go on while every live draw is a known node."""
    on_after_filled = ended_known = 0
    for seed in range(100):
        case = toy(f"dsbd {rule}", TARGET, DRAFTS["good"][1], ON, budget=7, early_stopping="never")
        _, _, iterations = play(case, seed)
        for iteration in iterations:
            held = set(iteration.forest.unfinished())
            *inner, last = iteration.layers
            for layer in inner:
                assert all(node.finish is not None or node in held for node in layer.draws)
                assert layer.passed or rule == "continue"
                on_after_filled += not layer.passed
            if last.drafted is not None and any(node.finish is None for node in last.draws):
                known = all(node in held for node in last.draws if node.finish is None)
                assert not last.passed
                assert rule == "paper" or not known
                ended_known += known
    assert (on_after_filled > 0) == (rule == "continue")
    assert (ended_known > 0) == (rule == "paper")


def test_draws_beyond_the_width_are_not_looked_at() -> None:
    case = toy("dsbd paper", TARGET, TARGET, OFF, budget=3, width=2, draft_width=4)
    for seed in range(20):
        _, layers, _ = play(case, seed)
        first = layers[0]
        assert first.verdicts == (True, True)
        assert first.examined == 2
        assert first.passed


def test_an_exhausted_draft_is_said_and_decoding_goes_on() -> None:
    for method in ("speculative", "specinfer", *DSBD):
        base = toy(method, TARGET, DRAFTS["good"][1], ON, budget=7, early_stopping="never")
        case = Toy(base.target, base.draft, base.settings, EOS, draft_depth=2)
        ended = 0
        for seed in range(20):
            run, _, iterations = play(case, seed)
            deep = [i for i in iterations if i.forest.layers and i.forest.layers[0].parents[0].depth > 2]
            assert not deep
            assert run.proposer is not None
            ended += run.proposer.exhausted
        assert ended


def test_the_table_model_cuts_rows_like_a_real_one() -> None:
    """The ground the laws stand on: rows best first, ties to the lower id."""
    model = TableModel(by_last(np.array([[0.2, 0.4, 0.0, 0.4]])))
    run = toy("beam", TARGET, TARGET).run(SeededSampler(0, 0), SeededSampler(0, 1))
    row = model.row(run.trie.root, 0)
    assert row.tokens.tolist() == [1, 3, 0, 2]
    assert model.row(run.trie.root, 2).tokens.tolist() == [1, 3]
    assert p_beam(by_last(np.array([[0.2, 0.4, 0.0, 0.4]])), [()], OFF).keys() == {(0,), (1,), (3,)}
