"""Forests without a draft model: what is guessed, what a node has to be worth, and that no text depends on it."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods import ngrams
from dsbd_cli.decoding.methods.ngrams import NgramForests, Ngrams, assumed_gain
from dsbd_cli.decoding.methods.setup import start
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import Forest, Node, Trie
from dsbd_cli.errors import RunError
from dsbd_cli.prices import Acceptance, Curve, Prices, best_forest, distinct_beams
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, path_of, settings_for
from tests.decoding.reference import T
from tests.decoding.table_model import TableModel
from tests.decoding.toys import DRAFTS, EOS, OFF, ON

# A draft that never pays, beside nodes that cost next to nothing, little, and as much as a call.
FREE, CHEAP, DEAR = (Prices.assumed(2.0, share) for share in (1e-6, 0.05, 1.0))
_DETERMINISTIC = T(1.0, 10, 0.8)
# Every two tokens that may follow each other.
PROMPT = (3, 0, 2, 1, 0, 0, 1, 0, 2, 0, 3, 1, 1, 2, 1, 3, 2, 2, 3, 3, 0)


def guess(text: list[int], context: tuple[int, ...] | None = None, **said: Any) -> dict[int, float]:
    one = Ngrams(text)
    for token, row in said.items():
        probs = np.array(list(row.values()))
        one.said(int(token[1:]), np.array(list(row)), np.log(probs))
    return dict(one.guess(one.tail() if context is None else context))


# The guess.


def test_what_followed_longer_agreements_weighs_more():
    found = guess([1, 2, 3, 4, 7, 9, 4, 8, 1, 2, 3, 4])
    assert max(found, key=found.get) == 7  # behind 1 2 3 4; 8 stood behind 4 alone
    assert found[7] > ngrams._TRUST[4] * ngrams._SHARES[0] > found[8] > 0


def test_the_latest_place_weighs_more_than_earlier_ones():
    found = guess([5, 1, 5, 2, 5, 3, 5])
    assert found[3] > found[2] > found[1] > 0
    assert guess([5, 1, 5, 2, 5, 3, 5, 4, 5]).get(1) is None  # three are remembered
    again = guess([5, 1, 5, 2, 5, 3, 6, 5, 1, 6, 5])  # 6 5 was followed by 1
    assert again[1] > again[3] > again[2] > 0


def test_a_row_of_the_target_fills_what_the_text_leaves_open():
    row = {8: 0.5, 9: 0.25}
    alone = guess([1, 2, 3], t3=row)
    assert alone == {8: pytest.approx(0.5), 9: pytest.approx(0.25)}
    beside = guess([3, 9, 4, 3], t3=row)
    share = ngrams._TRUST[1]
    assert beside[9] == pytest.approx(share * ngrams._SHARES[0] + (1 - share) * 0.25)
    assert beside[8] == pytest.approx((1 - share) * 0.5)


def test_nothing_is_guessed_of_what_was_never_met():
    assert guess([1, 2, 3]) == {}
    assert guess([]) == {}


@pytest.mark.parametrize("seed", range(20))
def test_a_guess_is_a_part_of_a_distribution(seed):
    rng = np.random.default_rng(seed)
    one = Ngrams(rng.integers(0, 4, 60).tolist())
    for token in range(3):
        one.said(token, np.arange(4), np.log(rng.dirichlet(np.ones(4))))
    for _ in range(20):
        found = one.guess(tuple(rng.integers(0, 5, rng.integers(1, 5)).tolist()))
        assert len({token for token, _ in found}) == len(found)
        assert all(prob >= 0 for _, prob in found)
        assert sum(prob for _, prob in found) <= 1 + 1e-12


def test_a_text_that_grows_is_that_of_one_piece():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 5, 80).tolist()
    whole, grown = Ngrams(text), Ngrams(text[:11])
    for begin in range(11, 80, 7):
        grown.grow(text[begin : begin + 7])
    assert len(whole) == len(grown) == 80
    for size in range(1, 5):
        for place in range(len(text) - size):
            context = tuple(text[place : place + size])
            assert whole.guess(context) == grown.guess(context)


def test_of_a_row_nothing_more_is_kept_than_its_best_entries():
    """Rows are views of all that a forward said, for all of its nodes: a long run would keep them all."""
    one, forward = Ngrams([1, 2, 3]), np.zeros((64, 50))
    kept = weakref.ref(forward)
    one.said(3, np.arange(4), forward[0][:4])
    del forward
    assert kept() is None
    assert dict(one.guess((3,))) == {token: 1.0 for token in range(4)}


def test_of_what_followed_nothing_more_is_kept_than_what_is_proposed():
    """Behind a comma stands half of the vocabulary, in a long text."""
    one = Ngrams([token for other in range(1000) for token in (5, 10 + other)])
    assert sum(map(len, one._followed[1].values())) <= 3 + 1000
    assert [token for token, _ in one.guess((5,))] == [1009, 1008, 1007]


# Forests.


def forests(prices: Prices, most: int = 24, prompt: tuple[int, ...] = PROMPT) -> tuple[NgramForests, Trie]:
    trie = Trie(lambda node: None, EOS, 64)
    target = TableModel(DRAFTS["good"][0])
    target.prefill([], trie.root)
    return NgramForests(target, trie, prompt, prices, 1.0, most), trie


def beam_of(trie: Trie, *tokens: int, score: float = 0.0) -> Node:
    node = trie.root
    for token in tokens:
        node = trie.child(node, token)
        node.score = score
    return node


def nodes_of(forest: Forest) -> list[Node]:
    return [node for layer in forest.layers for node in layer.draws]


def test_a_node_stands_where_its_parent_does_and_ends_are_left_out():
    one, trie = forests(FREE)
    forest = one.propose([beam_of(trie, 1)], 5)
    found = set(nodes_of(forest))
    assert found
    for depth, layer in enumerate(forest.layers):
        assert len(set(layer.draws)) == len(layer.draws)
        assert list(dict.fromkeys(node.parent for node in layer.draws)) == layer.parents
        for node in layer.draws:
            assert node.depth == 2 + depth
            assert node.token not in EOS
            assert node.parent in found or depth == 0


def test_dearer_nodes_are_fewer_and_the_likeliest_stay():
    counts, before = [], None
    for share in (1e-6, 0.02, 0.05, 0.1, 0.3, 1.0):
        one, trie = forests(Prices.assumed(2.0, share), most=40)
        beams = [beam_of(trie, 1, 2, score=-0.1), beam_of(trie, 1, 3, score=-1.5)]
        paths = {path_of(node) for node in nodes_of(one.propose(beams, 6))}
        assert before is None or paths <= before
        counts.append(len(paths))
        before = paths
    assert counts[0] > counts[2] > counts[-1] == 0


def test_a_forest_keeps_its_limits():
    one, trie = forests(FREE)
    assert len(nodes_of(one.propose([beam_of(trie, 2)], 9))) > 2
    assert len(one.propose([beam_of(trie, 2)], 2).layers) == 2
    one, trie = forests(FREE, most=2)
    assert len(nodes_of(one.propose([beam_of(trie, 2)], 9))) == 2


@pytest.mark.parametrize("most", [1, 2, 5, 12, 24])
def test_layers_chosen_whole_hold_no_more_nodes_than_a_forest_may(most):
    """A batch reserves as many places as `setup.most_nodes` says: one more and it ends."""
    trie = Trie(lambda node: None, EOS, 64)
    target = TableModel(DRAFTS["good"][0])
    target.prefill([], trie.root)
    one = NgramForests(target, trie, PROMPT, FREE, 1.0, most, distinct=1)
    sizes = []
    for _ in range(40):
        forest = one.propose([beam_of(trie, 2)], 6)
        sizes.append(len(nodes_of(forest)))
        one.learn(layers(1 + len(forest.layers)))
    assert 0 < max(sizes) <= most


def test_a_row_that_no_beam_comes_to_may_be_anything():
    """A forest's node is computed where plain beams compute none: what is not finite there is no error."""

    class Broken(TableModel):
        def best(self, node, count):
            if node.token == 3:
                raise RunError("not finite")
            return super().best(node, count)

    trie = Trie(lambda node: None, EOS, 64)
    target = Broken(DRAFTS["good"][0])
    target.prefill([], trie.root)
    one = NgramForests(target, trie, PROMPT, FREE, 1.0, 24)
    beam, dead = beam_of(trie, 1), beam_of(trie, 1, 3)
    target.forward([beam, dead])
    one.see([beam, dead], [beam])
    one.propose([beam, dead], 3)
    assert set(one._ngrams._said) == {1}


@pytest.mark.parametrize("distinct", [0, 2])
def test_only_what_is_proposed_becomes_a_node(distinct):
    """Whether a sequence ends with a stop string is found out from its text: dear, where nobody proposes it."""
    asked: list[Node] = []
    trie = Trie(asked.append, EOS, 64)
    target = TableModel(DRAFTS["good"][0])
    target.prefill([], trie.root)
    one = NgramForests(target, trie, PROMPT, CHEAP, 2.0, 24, distinct=distinct)
    beams = [beam_of(trie, 2, score=-0.1), beam_of(trie, 0, score=-1.0)]
    asked.clear()
    forest = one.propose(beams, 6)
    assert set(asked) == set(nodes_of(forest)) != set()


def test_many_requests_pay_for_their_nodes_together():
    """Where four nodes cost what one does, four requests have none to spare."""
    stairs = Prices(Curve((1, 4, 8), (1.0, 1.0, 9.0)), Curve((1,), (1.0,)))
    alone, trie = forests(stairs)
    assert len(nodes_of(alone.propose([beam_of(trie, 1)], 6))) == 3
    crowd, trie = forests(stairs)
    crowd.requests = 4
    assert not nodes_of(crowd.propose([beam_of(trie, 1)], 6))


def layers(count: int) -> list[Layer]:
    return [Layer((), 1)] * count


def test_forests_that_never_pass_shrink_to_nothing_and_are_tried_again():
    one, trie = forests(CHEAP)
    beams, sizes = [beam_of(trie, 1)], []
    for _ in range(400):
        sizes.append(len(nodes_of(one.propose(beams, 6))))
        one.learn(layers(1))
    assert sizes[0] > 0
    assert one.gain < 1.05
    late = sizes[100:]
    assert 0 < sum(size > 0 for size in late) < len(late) / 3  # tried again, and seldom


def test_forests_that_pass_grow_and_gain():
    one, trie = forests(CHEAP)
    beams = [beam_of(trie, 1)]
    first = len(nodes_of(one.propose(beams, 6)))
    for _ in range(60):
        forest = one.propose(beams, 6)
        one.learn(layers(1 + len(forest.layers)))
    assert len(nodes_of(one.propose(beams, 6))) >= first
    assert one.gain > 2


def test_where_beams_are_distinct_layers_are_chosen_whole():
    """Two beams go on from every layer: one node of it is worth nothing, however likely it is."""
    trie = Trie(lambda node: None, EOS, 64)
    target = TableModel(DRAFTS["good"][0])
    target.prefill([], trie.root)
    wide = NgramForests(target, trie, PROMPT, CHEAP, 2.0, 24, distinct=2)
    beams = [beam_of(trie, 2, score=-0.1), beam_of(trie, 0, score=-3.0)]
    forest = wide.propose(beams, 6)
    assert forest.layers
    assert all(len(layer.draws) >= 2 for layer in forest.layers[:1])
    # Best first: what a narrower layer would have held is seen by the place.
    assert len(wide.propose(beams, 1).layers) <= 1
    for _ in range(60):
        wide.propose(beams, 6)
        wide.learn(layers(1))
    assert not wide.propose(beams, 6).layers  # and nothing is tried again: that would cost a layer of nodes


def test_rows_of_the_target_are_recycled():
    trie = Trie(lambda node: None, EOS, 64)
    target = TableModel(DRAFTS["good"][0])
    target.prefill([], trie.root)
    one = NgramForests(target, trie, (), FREE, 1.0, 24)
    start_ = beam_of(trie, 1)
    target.forward([start_])
    assert not nodes_of(one.propose([beam_of(trie, 2, 1)], 1))  # nothing was ever met
    one.see([start_], [start_])
    said = target.best(start_, 4)[0].tolist()
    found = {node.token for node in nodes_of(one.propose([beam_of(trie, 2, 1)], 1))}
    assert found == set(said) - set(EOS)


def test_what_is_believed_at_first_is_never_less_than_plain_beams():
    for share in (1e-6, 0.01, 0.1, 1.0):
        for beams in (1.0, 1.8, 4.0):
            assert assumed_gain(Prices.assumed(0.1, share), beams) >= 1 - 1e-12
    assert assumed_gain(FREE, 1.0) > assumed_gain(CHEAP, 1.0) > assumed_gain(DEAR, 1.0)


# No text depends on them.


def toy(draft: str, t: T, prices: Prices, **given: Any) -> Toy:
    options: dict[str, Any] = {"draft_width": 4, "gamma": 3, "early_stopping": "first", "method": "dsbd"}
    return Toy(*DRAFTS[draft], settings_for(t, **(options | given)), EOS, prices=prices, prompt=PROMPT)


def plain(draft: str, t: T, **given: Any) -> Toy:
    options: dict[str, Any] = {"method": "beam", "early_stopping": "first"}
    return Toy(DRAFTS[draft][0], None, settings_for(t, **(options | given)), EOS)


def proposed(case: Toy, seed: int = 0) -> int:
    """Nodes that were proposed in a run, by whomever."""
    _, events = case.events(SeededSampler(seed, 0), SeededSampler(seed, 1))
    return sum(len(nodes_of(event.forest)) for event in events if isinstance(event, Iteration))


@pytest.mark.parametrize("draws", ["iid", "distinct"])
@pytest.mark.parametrize("prices", [FREE, CHEAP])
def test_the_law_of_whole_runs_is_that_of_beam_sampling(prices, draws):
    t = T(0.9, 2, 0.9)
    case = toy("bad", t, prices, draft_width=2, gamma=2, draws=draws)
    assert proposed(case) > 0
    assert case._models[1].calls == 0  # no draft was asked
    assert total_variation(case.law(), plain("bad", t, draws=draws).law()) < 1e-9


@pytest.mark.parametrize("prices", [FREE, CHEAP])
@pytest.mark.parametrize("t", [OFF, ON, T(0.7, 3, 0.8)])
@pytest.mark.parametrize("draft", DRAFTS)
def test_cover_says_what_beam_says_token_for_token(draft, t, prices):
    for draws in ("iid", "distinct"):
        case = toy(draft, t, prices, max_new_tokens=24, width=3, draws=draws)
        other = plain(draft, t, max_new_tokens=24, width=3, draws=draws)
        for seed in range(12):
            said = [one.seeded(seed) for one in (case, other)]
            assert said[0] == said[1]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_deterministic_mode_says_what_beam_search_says(draft):
    both = {"width": 3, "deterministic": True, "max_new_tokens": 24, "early_stopping": "never"}
    case, other = toy(draft, _DETERMINISTIC, FREE, **both), plain(draft, _DETERMINISTIC, **both)
    said = [one.seeded(0) for one in (case, other)]
    assert said[0] == said[1]
    assert proposed(case) > 0


def test_fewer_calls_are_made_than_without():
    t = T(0.3, 3, 0.8)
    calls = []
    for case in (toy("good", t, FREE, max_new_tokens=40), plain("good", t, max_new_tokens=40)):
        for seed in range(8):
            case.seeded(seed)
        calls.append(case._models[0].calls)
    assert calls[0] < 0.8 * calls[1]


@pytest.mark.parametrize("both", [{}, {"draws": "distinct"}, {"deterministic": True}])
def test_forest_nodes_limits_these_forests_too(both):
    t = _DETERMINISTIC if "deterministic" in both else T(0.7, 3, 0.8)
    case = toy("good", t, FREE, max_new_tokens=24, forest_nodes=3, **both)
    _, events = case.events(SeededSampler(0, 0), SeededSampler(0, 1))
    sizes = [len(nodes_of(event.forest)) for event in events if isinstance(event, Iteration)]
    assert 0 < max(sizes) <= 3


@pytest.mark.parametrize(
    "given",
    [
        {"verify": "paper"},
        {"verify": "continue"},
        {"threshold": 0.9},
        {"kv": "one"},
        {"forest": "full"},
        {"method": "speculative"},
    ],
)
def test_where_the_text_depends_on_the_forest_there_are_none(given):
    settings = settings_for(T(0.7, 3, 0.8), **({"method": "dsbd", "draft_width": 4, "gamma": 3} | given))
    trie = Trie(lambda node: None, EOS, 8)
    target, draft = (TableModel(law) for law in DRAFTS["good"])
    for model in (target, draft):
        model.prefill([], trie.root)
    samplers = SeededSampler(0, 0), SeededSampler(0, 1)
    prices = None if settings.forest == "full" else FREE
    assert start(settings, target, draft, trie, *samplers, prices=prices, prompt=PROMPT).spare is None


# Beside a draft.

_ASKED = Prices(Curve((1, 16), (300.0, 310.0)), Curve((1, 16), (5.0, 5.5)))


@pytest.mark.parametrize(
    ("prices", "asked"),
    [
        # A large target that is bound by reading its weights, and a draft of a sixtieth of it.
        (_ASKED, True),
        # Processors that multiply no faster than they read, and a draft of a third.
        (Prices(Curve((1, 4, 16), (5.7, 6.2, 18.4)), Curve((1, 16), (1.7, 3.9))), False),
    ],
)
def test_a_draft_is_asked_where_it_promises_more(prices, asked):
    beams = distinct_beams(4)
    known = Acceptance.assumed(beams, 6, 8, pruned=True)
    promise = best_forest(prices, known, max_gamma=6, max_draft_width=8).gain
    assert (promise > 1.1 * assumed_gain(prices, beams)) == asked
    case = toy("good", T(0.7, 3, 0.8), prices, max_new_tokens=24, width=4, draft_width=8, gamma=6)
    case.seeded(0)
    assert (case._models[1].calls > 0) == asked


def test_a_draft_in_the_cache_of_which_nothing_is_asked_reads_no_prompt():
    case = toy("good", T(0.7, 3, 0.8), CHEAP, max_new_tokens=24, width=4)
    run = case.run(SeededSampler(0, 0), SeededSampler(0, 1))
    assert run.shape is not None
    assert run.spare is not None
    assert not run.shape.begins(3)
    assert math.isfinite(run.spare.gain)


class _Blind(TableModel):
    """Its vocabulary lacks the last tokens of all beams."""

    def reads(self, node: Node) -> bool:
        return node.parent is None


def test_where_the_draft_has_nothing_to_propose_forests_are_made_without_it():
    t, both = T(0.7, 3, 0.8), {"max_new_tokens": 24, "width": 4}
    case = toy("good", t, _ASKED, draft_width=8, gamma=6, **both)
    case._models[1] = _Blind(DRAFTS["good"][1])
    assert proposed(case) > 0
    assert case._models[1].calls == 0
    said = [one.seeded(0) for one in (case, plain("good", t, **both))]
    assert said[0] == said[1]
