"""Prompt lookup and best-first forests: exact whatever they propose, and what they propose is what they should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.best_first import most_probable_nodes
from dsbd_cli.decoding.methods.dsbd import now
from dsbd_cli.decoding.methods.lookup import NOTHING, continuations
from dsbd_cli.decoding.methods.setup import demand_of
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Trie
from dsbd_cli.errors import UserError
from dsbd_cli.prices import Prices
from dsbd_cli.settings import Settings
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, path_of, settings_for
from tests.decoding.reference import T
from tests.decoding.toys import DRAFTS, EOS, OFF, ON

SPARE = Prices.assumed(0.1, 0.05)
# Every two tokens that may follow each other, so that anything has a continuation.
PROMPT = (3, 0, 2, 1, 0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)
ON_HOST: list[dict[str, Any]] = [{"lookup": 3}, {"forest_nodes": 2}, {"lookup": 2, "forest_nodes": 3}, {}]


def found(tokens: Sequence[int], length: int = 8, most: int = 2) -> list[list[int]]:
    return continuations(np.array(tokens, dtype=np.int64), length, most)


# The index.


def test_what_followed_the_last_tokens_is_found_the_latest_place_first():
    assert found([1, 2, 7, 1, 2, 8, 1, 2]) == [[8, 1, 2], [7, 1, 2, 8, 1, 2]]
    assert found([1, 2, 7, 1, 2, 8, 1, 2], most=1) == [[8, 1, 2]]
    assert found([1, 2, 7, 1, 2, 8, 1, 2], length=1) == [[8], [7]]


def test_the_longest_agreement_decides():
    text = [5, 1, 2, 3, 9, 9, 6, 2, 3, 4, 5, 1, 2, 3]
    assert found(text) == [[9, 9, 6, 2, 3, 4, 5, 1]]  # 5 1 2 3; 2 3 stands before 4 as well


def test_a_continuation_that_begins_another_is_left_out():
    assert found([1, 2, 7, 3, 4, 1, 2, 7, 3, 4, 1, 2], length=2) == [[7, 3]]


def test_one_token_alone_says_nothing():
    assert found([1, 7, 1]) == []
    assert found([1, 2, 3, 4]) == []
    assert found([1]) == found([]) == []


def test_a_text_that_repeats_itself_goes_on():
    assert found([4, 4, 4, 4]) == [[4]]


# Forests.


def test_the_most_probable_nodes_stay_with_what_costs_nothing():
    trie = Trie(lambda node: "eos" if node.token == 0 else None, [0], 9)
    a, b, end = (trie.child(trie.root, token) for token in (1, 2, 0))
    aa, ab, ba, aend = trie.child(a, 1), trie.child(a, 2), trie.child(b, 1), trie.child(a, 0)
    scores = {a: -0.1, b: -2.0, aa: -0.1, ab: -0.5, ba: -2.1}
    layers = [
        DraftLayer([trie.root], NOTHING, [a, b, end]),
        DraftLayer([a, b], NOTHING, [aa, ab, aend, ba]),
    ]

    def kept(count: int, free: Sequence[Any] = ()) -> list[list[Any]]:
        chosen = most_probable_nodes(layers, scores, count, lambda node: node in free)
        return [layer.draws for layer in chosen]

    assert kept(5) == [[a, b, end], [aa, ab, aend, ba]]
    assert kept(4) == [[a, b, end], [aa, ab, aend]]
    assert kept(3) == [[a, end], [aa, ab, aend]]
    assert kept(1) == [[a, end], [aend]]
    assert kept(3, free=[a]) == [[a, b, end], [aa, ab, aend]]


def toy(draft: str, t: T, prices: Prices | None = None, **given: Any) -> Toy:
    options: dict[str, Any] = {"draft_width": 4, "gamma": 3, "early_stopping": "first", "method": "dsbd"}
    return Toy(*DRAFTS[draft], settings_for(t, **(options | given)), EOS, prices=prices, prompt=PROMPT)


def plain(draft: str, t: T, **given: Any) -> Toy:
    given = {key: value for key, value in given.items() if key not in ("lookup", "forest_nodes")}
    return Toy(DRAFTS[draft][0], None, settings_for(t, method="beam", early_stopping="first", **given), EOS)


@pytest.mark.parametrize("draws", ["iid", "distinct"])
@pytest.mark.parametrize("given", ON_HOST)
def test_the_law_of_whole_runs_is_that_of_beam_sampling(given, draws):
    t = T(0.9, 2, 0.9)
    case = toy("bad", t, draft_width=2, gamma=2, draws=draws, **given)
    if given.get("lookup"):
        # What is looked up lies beside what the draft would propose.
        forest = now(case.run(SeededSampler(0, 0), SeededSampler(0, 1)).propose())
        assert any(len(layer.draws) > 2 for layer in forest.layers)
    assert total_variation(case.law(), plain("bad", t, draws=draws).law()) < 1e-9


@pytest.mark.parametrize("prices", [None, SPARE])
@pytest.mark.parametrize("given", ON_HOST)
@pytest.mark.parametrize("t", [OFF, ON])
@pytest.mark.parametrize("draft", DRAFTS)
def test_cover_says_what_beam_says_token_for_token(draft, t, given, prices):
    for draws in ("iid", "distinct"):
        case = toy(draft, t, prices, max_new_tokens=12, width=3, draws=draws, **given)
        other = plain(draft, t, max_new_tokens=12, width=3, draws=draws)
        for seed in range(8):
            said = [one.seeded(seed) for one in (case, other)]
            assert said[0] == said[1]


@pytest.mark.parametrize("given", ON_HOST)
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_deterministic_mode_says_what_beam_search_says(draft, given):
    t = T(1.0, 10, 0.8)  # no sampling: the settings at their defaults
    both = {"width": 3, "deterministic": True, "max_new_tokens": 12}
    case, other = toy(draft, t, **both, **given), plain(draft, t, **both)
    said = [one.seeded(0) for one in (case, other)]
    assert said[0] == said[1]


def iterations(case: Toy, seed: int = 0) -> list[tuple[Iteration, int]]:
    """Iterations with the layers that each committed."""
    _, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
    layers, done = 0, []
    for event in events:
        if isinstance(event, Layer):
            layers += 1
        else:
            done.append((event, layers))
            layers = 0
    return done


def test_a_forest_has_as_many_nodes_as_it_may_have():
    case = toy("good", OFF, max_new_tokens=12, draft_width=8, forest_nodes=5)
    target = case._models[0]
    done = iterations(case)
    assert any(event.forest.layers for event, _ in done)
    # Beams that were not known, and the nodes that are paid for.
    assert max(target.forwarded) <= case.settings.width + 5
    wide = toy("good", OFF, max_new_tokens=12, draft_width=8)
    iterations(wide)
    assert max(wide._models[0].forwarded) > case.settings.width + 5


def test_below_beams_that_the_target_has_computed_its_own_conditionals_propose():
    """A draft that is always wrong still has the right layer below beams that lay in the last forest."""
    greedy = T(1.0, 1, 1.0)
    case = toy("disjoint", greedy, width=1, max_new_tokens=12, draft_width=1)
    run = case.run(SeededSampler(0, 0), SeededSampler(0, 1))
    wrong = now(run.propose()).layers[0].draws
    assert run.target.has_logits(run.trie.root)
    (right,) = run.p_beam().token
    # The root is known to the target from the prefill: what is proposed below it is the target's own.
    assert [path_of(node) for node in wrong] == [(int(right),)]


def test_what_stands_below_live_beams_is_not_computed_again():
    case = toy("good", OFF, max_new_tokens=16, draft_width=8, width=3)
    run, events = case.events(SeededSampler(3, 0), SeededSampler(3, 1))
    again = 0
    for event in events:
        if isinstance(event, Iteration):
            kept = event.forest.below(run.hypotheses.active)
            assert all(run.target.has_logits(node) for node in kept)
            again += len(kept)
    assert again > 0


def test_a_chain_lies_in_the_forest_and_ends_with_its_budget():
    given = {"lookup": 4, "width": 1, "draft_width": 4, "gamma": 1, "max_new_tokens": 30}
    case = Toy(*DRAFTS["bad"], settings_for(OFF, method="dsbd", **given))
    deepest = 0
    for event, _ in iterations(case):
        deepest = max(deepest, len(event.forest.layers))
        for place, layer in enumerate(event.forest.layers):
            assert all(node.parent in layer.parents for node in layer.draws)
            assert len({node.depth for node in layer.draws}) == 1
            assert layer.draws[0].depth < 30
            if place:
                above = event.forest.layers[place - 1]
                assert {node.parent for node in layer.draws} <= set(above.draws)
    assert deepest == 4


# Settings.


@pytest.mark.parametrize("name", ["lookup", "forest_nodes"])
def test_rules_that_verify_draws_refuse_what_is_none(name):
    for given in (
        {"verify": "paper"},
        {"verify": "continue"},
        {"method": "speculative"},
        {"method": "specinfer"},
    ):
        with pytest.raises(UserError, match=f"{name.replace('_', '-')} proposes what is no draw"):
            Settings().merged(given | {name: 4})
        # What a preset says yields quietly.
        assert getattr(Settings(**{name: 4}).merged(given), name) == 0
    for given in ({}, {"deterministic": True}, {"method": "beam"}, {"draws": "distinct"}):
        assert getattr(Settings().merged(given | {name: 4}), name) == 4


def test_an_engine_is_told_by_name_what_the_host_proposes():
    for given, word in (({"lookup": 4}, "lookup"), ({"forest_nodes": 9}, "forest-nodes")):
        demand = demand_of(Settings(**given), drafts=True)
        assert word in demand.why_not_pipelined
        assert demand.why_not_captured == demand.why_not_pipelined
        assert word not in demand_of(Settings(method="beam", **given), drafts=False).why_not_pipelined
    assert not demand_of(Settings(), drafts=True).why_not_pipelined
