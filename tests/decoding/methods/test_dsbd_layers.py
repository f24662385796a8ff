"""One drafted layer inside a run: dynamic widths, drafts in any order, dead parents, the one-cache mode."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import Support
from dsbd_cli.decoding.methods.dsbd import cover_layers, now, verify_layer
from dsbd_cli.decoding.methods.setup import decode
from dsbd_cli.decoding.tree.events import Iteration
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Hypotheses, Node
from tests.decoding.enumerating import Branching, law_of, total_variation
from tests.decoding.harness import DraftedLayer, State, Toy, find, layer_set, path_of, settings_for, state_of
from tests.decoding.reference import T, logprob, p_beam
from tests.decoding.table_model import Path
from tests.decoding.toys import DRAFTS, EOS, OFF, ON, OTHER, TARGET, TWO

GOOD = DRAFTS["good"][1]
THREE = State(active=((0,), (1,), (2,)))

Draws = tuple[Path, ...]


def product(law: dict[Path, float], width: int) -> dict[Draws, float]:
    """`width` iid draws, in order."""
    return {draws: math.prod(law[path] for path in draws) for draws in itertools.product(law, repeat=width)}


def conditional(law: dict[Any, float]) -> dict[Any, float]:
    total = sum(law.values())
    return {key: mass / total for key, mass in law.items()}


def hand_made(
    run: Any, parents: list[Path], q: dict[Path, float], draws: int, sampler: Branching
) -> DraftLayer:
    """A drafted layer from any q over any parents, recorded as it was drawn from."""
    paths = sorted(q, key=lambda path: (parents.index(path[:-1]), path[-1]))
    support = Support(
        np.array([parents.index(path[:-1]) for path in paths]),
        np.array([path[-1] for path in paths]),
        np.zeros(len(paths)),
        np.array([q[path] for path in paths]),
    )
    nodes = [find(run.trie, paths[i]) for i in sampler.sample(support.prob, draws)]
    return DraftLayer([find(run.trie, parent) for parent in parents], support, nodes)


def some_q(parents: list[Path], seed: int, zeros: float = 0.3) -> dict[Path, float]:
    rng = np.random.default_rng(seed)
    paths = [(*parent, token) for parent in parents for token in range(4)]
    shares = rng.dirichlet(np.full(len(paths), 0.6)) * (rng.random(len(paths)) >= zeros)
    return {path: float(share / shares.sum()) for path, share in zip(paths, shares, strict=True) if share > 0}


PARENTS: dict[str, list[Path]] = {
    "in order": [(0,), (1,), (2,)],
    "reversed": [(2,), (1,), (0,)],
    "some dead": [(4,), (2,), (5,), (0,)],
    "one of three": [(1,)],
    "all dead": [(5,), (4,)],
}


@pytest.mark.parametrize("threshold", [None, 0.3, 0.7])
@pytest.mark.parametrize("order", PARENTS)
@pytest.mark.parametrize(("t", "draws"), [(ON, 2), (TWO, 3), (OFF, 1)], ids=["T on", "two", "T off"])
def test_slots_are_iid_whatever_was_drafted(t: T, draws: int, order: str, threshold: float | None) -> None:
    """Three live beams, and a q over any parents in any order, dead ones among them."""
    settings = settings_for(
        t, method="dsbd", verify="paper", width=2, threshold=threshold, draft_width=draws, max_new_tokens=4
    )
    case, parents = Toy(TARGET, OTHER, settings, EOS), PARENTS[order]
    q = some_q(parents, seed=len(order))
    widths = set()

    def play(sampler: Branching) -> Draws:
        run = case.run(sampler, sampler, THREE)
        now(run.advance(Forest()))
        layer = verify_layer(run, hand_made(run, parents, q, draws, sampler), 0)
        widths.add(len(layer.draws))
        assert layer.examined == len(layer.verdicts) <= draws
        assert layer.accepted == sum(layer.verdicts) <= len(layer.draws)
        assert layer.distinct == len(set(layer.draws))
        assert layer.passed == (layer.accepted == len(layer.draws))
        return tuple(map(path_of, layer.draws))

    law = law_of(play)
    # One width for every outcome: it depends on p and q, never on the draws.
    (width,) = widths
    assert width == 2 or threshold is not None
    assert total_variation(law, product(p_beam(TARGET, THREE.active, t), width)) < 1e-9


def drafted_layers(case: Toy, state: State) -> Callable[[Branching], tuple[Any, Draws]]:
    """Play two layers of one forest; the outcome of the second, keyed by all that its p and q depend on."""

    def play(sampler: Branching) -> tuple[Any, Draws]:
        run = case.run(sampler, sampler, state)
        forest = now(run.propose())
        now(run.advance(forest))
        first = verify_layer(run, forest.layers[0], 0)
        if not first.passed or run.hypotheses.stopped() or len(forest.layers) < 2:
            return None, ()
        drafted = DraftedLayer.of(forest.layers[1])
        key = tuple(map(path_of, run.hypotheses.active)), drafted.parents, drafted.support
        second = verify_layer(run, forest.layers[1], 1)
        return key, tuple(map(path_of, second.draws))

    return play


@pytest.mark.parametrize("t", [TWO, T(0.9, 3, 0.8)], ids=["two", "head"])
@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize(("threshold", "least"), [(0.3, 1), (0.5, 1), (0.6, 2)])
def test_a_dynamic_width_is_exact_layer_by_layer(t: T, draft: str, threshold: float, least: int) -> None:
    """Given the layer's p and q: one width, every draw one of p, all jointly independent."""
    settings = settings_for(
        t, method="dsbd", verify="paper", gamma=2, width=3, draft_width=3, max_new_tokens=5,
        threshold=threshold, min_width=least,
    )  # fmt: skip
    case = Toy(TARGET, GOOD if draft == "good" else OTHER, settings, EOS)
    given: dict[Any, dict[Draws, float]] = defaultdict(dict)
    for (key, draws), mass in law_of(drafted_layers(case, State())).items():
        if key is not None:
            given[key][draws] = mass
    assert given
    widths = set()
    for (active, *_), law in given.items():
        (width,) = {len(draws) for draws in law}
        assert least <= width <= 3
        widths.add(width)
        assert total_variation(conditional(law), product(p_beam(TARGET, active, t), width)) < 1e-9
    if (draft, threshold) == ("good", 0.3):
        assert widths == {2, 3}, "p and q must make a difference to the width"


@pytest.mark.parametrize("t", [OFF, ON], ids=["T off", "T on"])
@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.6, 0.9])
def test_cover_with_a_threshold(t: T, threshold: float) -> None:
    """c = p's mass on the forest's layer and on what ends; W_L the largest K with c^K >= t."""
    settings = settings_for(
        t, method="dsbd", verify="cover", width=3, threshold=threshold, draft_width=2, max_new_tokens=4
    )
    case = Toy(TARGET, OTHER, settings, EOS)
    held: Draws = ((0, 1), (2, 2), (5, 1))

    def play(sampler: Branching) -> Draws:
        run = case.run(sampler, sampler, THREE)
        nodes = [find(run.trie, path) for path in held]
        parents = list(dict.fromkeys(node.parent for node in nodes if node.parent))
        empty = Support(*(np.array([]) for _ in range(4)))
        forest = Forest([DraftLayer(parents, empty, nodes)])
        now(run.advance(forest))
        layer = next(cover_layers(run, forest))
        draws = tuple(map(path_of, layer.draws))
        ended = [path[-1] in EOS for path in draws]
        # What ends and was not drafted lets a layer pass, and counts as nothing that was accepted.
        free = [end and path not in held for path, end in zip(draws, ended, strict=True)]
        assert layer.verdicts == tuple(path in held for path, one in zip(draws, free, strict=True) if not one)
        assert layer.ended == sum(free)
        assert layer.passed == all(layer.verdicts)
        return draws

    p = p_beam(TARGET, THREE.active, t)
    inside = sum(m for path, m in p.items() if path in held or path[-1] in EOS)
    width = max([1] + [k for k in (1, 2, 3) if inside**k >= threshold - 1e-12])
    law = law_of(play)
    assert {len(draws) for draws in law} == {width}
    assert total_variation(law, product(p, width)) < 1e-9


@pytest.mark.parametrize("verify", ["paper", "continue", "cover"])
def test_one_cache_keeps_the_best_active_of_every_iteration(verify: str) -> None:
    """`--kv one` is the full method, cut after each iteration to the unfinished output with the best l."""
    given: dict[str, Any] = {"method": "dsbd", "verify": verify, "gamma": 2, "draft_width": 2}
    given["early_stopping"] = "never"
    every = Toy(TARGET, GOOD, settings_for(TWO, max_new_tokens=5, **given), EOS)
    one = Toy(TARGET, GOOD, settings_for(TWO, max_new_tokens=5, kv="one", **given), EOS)
    for state in (State(), State(active=((1, 0),), pool=((3,),))):
        cut: dict[Any, float] = defaultdict(float)
        for (layers, after, stopped), mass in whole_iterations(every, state).items():
            best = max(after.active, key=lambda path: logprob(TARGET, path), default=None)
            cut[layers, State(() if best is None else (best,), after.pool), stopped] += mass
        assert total_variation(dict(cut), whole_iterations(one, state)) < 1e-12
        assert any(len(after.active) > 1 for _, after, _ in whole_iterations(every, state))


def whole_iterations(case: Toy, state: State) -> dict[Any, float]:
    """The law of (layers, state, stopped) right after an iteration was closed."""

    def play(sampler: Branching) -> Any:
        run = case.run(sampler, sampler, state)
        layers: list[frozenset[Path]] = []
        for event in decode(run, case.settings):
            if isinstance(event, Iteration):
                assert [path_of(node) for node in event.active] == list(state_of(run).active)
                assert [layer_set(layer) for layer in event.layers] == layers
                break
            layers.append(layer_set(event))
        return tuple(layers), state_of(run), run.hypotheses.stopped()

    return law_of(play)


def test_ties_of_l_keep_the_earlier_draw() -> None:
    root = Node(-1, None)
    hypotheses = Hypotheses(root, 3, "heuristic", 1.0)
    nodes = [Node(token, root) for token in (2, 0, 1)]
    for node, score in zip(nodes, (-2.0, -1.0, -1.0), strict=True):
        node.score = score
    hypotheses.commit(nodes)
    hypotheses.keep_best_active()
    assert hypotheses.active == [nodes[1]]
