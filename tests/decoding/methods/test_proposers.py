"""Sparing forests: exact whatever is drafted, deep and wide where that pays, none where plain beams are quicker."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.law.distribution import SeededSampler, Support
from dsbd_cli.decoding.methods.proposers import ForestShape
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node
from dsbd_cli.prices import Acceptance, Curve, Prices, Shape, best_forest
from tests.decoding.enumerating import total_variation
from tests.decoding.harness import Toy, settings_for
from tests.decoding.reference import T
from tests.decoding.table_model import by_path
from tests.decoding.toys import DRAFTS, EOS, OFF, ON

# A draft step is a tenth of a target call, a node a twentieth: shapes change as an answer goes on.
SPARE = Prices.assumed(0.1, 0.05)
DEAR = Prices.assumed(2.0, 0.05)
_DETERMINISTIC = T(1.0, 10, 0.8)  # no sampling: the settings at their defaults
METHODS = [
    {"method": "dsbd", "verify": "cover"},
    {"method": "dsbd", "verify": "paper"},
    {"method": "dsbd", "verify": "continue"},
]


def toy(draft: str, t: T, prices: Prices | None = SPARE, **given: Any) -> Toy:
    options: dict[str, Any] = {"draft_width": 2, "gamma": 3, "early_stopping": "first"}
    return Toy(*DRAFTS[draft], settings_for(t, **(options | given)), EOS, prices=prices)


# Whatever is drafted, the law is that of beam sampling.


@pytest.mark.parametrize("prices", [SPARE, DEAR])
@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("method", METHODS)
def test_the_law_of_whole_runs_is_that_of_beam_sampling(method, draft, prices):
    t = T(0.9, 2, 0.9)
    plain = Toy(DRAFTS[draft][0], None, settings_for(t, method="beam", early_stopping="first"), EOS)
    case = toy(draft, t, prices, gamma=2, **method)
    assert case.run(SeededSampler(0, 0), SeededSampler(0, 1)).shape is not None
    assert total_variation(case.law(), plain.law()) < 1e-9


@pytest.mark.parametrize("prices", [SPARE, DEAR])
@pytest.mark.parametrize("t", [OFF, ON, T(0.7, 3, 0.8)])
@pytest.mark.parametrize("draft", DRAFTS)
def test_cover_says_what_beam_says_token_for_token(draft, t, prices):
    case = toy(draft, t, prices, method="dsbd", verify="cover", draft_width=4, max_new_tokens=12)
    plain = Toy(DRAFTS[draft][0], None, settings_for(t, method="beam", max_new_tokens=12), EOS)
    plain.settings = plain.settings.merged({"early_stopping": "first"})
    for seed in range(25):
        said = [one.seeded(seed) for one in (case, plain)]
        assert said[0] == said[1]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_deterministic_mode_says_what_beam_search_says(draft):
    given = {"width": 3, "deterministic": True, "max_new_tokens": 12, "early_stopping": "never"}
    cases = [
        Toy(
            *DRAFTS[draft],
            settings_for(_DETERMINISTIC, method="dsbd", draft_width=6, gamma=3, **given),
            EOS,
            prices=prices,
        )
        for prices in (SPARE, DEAR, None)
    ]
    plain = Toy(DRAFTS[draft][0], None, settings_for(_DETERMINISTIC, method="beam", **given), EOS)
    said = [one.seeded(0) for one in (*cases, plain)]
    assert said[0] == said[1] == said[2] == said[3]


def calls(case: Toy, seed: int = 0) -> tuple[int, int]:
    """Target and draft forwards of a run."""
    case.seeded(seed)
    target, draft = case._models
    return target.calls, draft.calls


@pytest.mark.parametrize(
    "given",
    [
        *METHODS,
        {"method": "dsbd", "deterministic": True},
        {"method": "dsbd", "verify": "cover", "threshold": 0.9},
        {"method": "dsbd", "verify": "paper", "threshold": 0.9},
        {"method": "speculative"},
    ],
)
def test_a_draft_that_can_never_pay_is_never_asked(given):
    t = _DETERMINISTIC if given.get("deterministic") else T(0.7, 3, 0.8)
    assert calls(toy("good", t, DEAR, max_new_tokens=30, **given))[1] == 0
    # Cheap enough to pay beside what is proposed without it.
    assert calls(toy("good", t, Prices.assumed(0.02, 0.01), max_new_tokens=30, **given))[1] > 0


def test_a_draft_that_is_never_right_is_soon_left_alone():
    t, law = T(0.7, 3, 0.8), by_path(1, 40)
    for given in (*METHODS, {"method": "speculative"}):
        # It proposes tokens that the target never says.
        wrong = toy("good", t, SPARE, max_new_tokens=200, early_stopping="never", **given)
        case = Toy(by_path(2, 5), lambda path: np.concatenate([np.zeros(5), law(path)[5:] / law(path)[5:].sum()]),
                   wrong.settings, prices=SPARE)  # fmt: skip
        target, draft = calls(case)
        assert draft < 0.15 * target


def test_one_seed_gives_one_text():
    t = T(0.9, 3, 0.9)
    for given in ({"verify": "paper"}, {"verify": "continue"}, {"verify": "cover", "threshold": 0.8}):
        case = toy("good", t, max_new_tokens=30, method="dsbd", **given)
        said = [case.seeded(7) for _ in range(3)]
        assert said[0] == said[1] == said[2]


@pytest.mark.parametrize("verify", ["cover", "paper", "continue"])
def test_a_dynamic_width_is_given_layers_of_the_whole_width(verify):
    """Its law depends on the layer; where the width is fixed, layers may be narrower."""

    def sizes(**given: Any) -> set[int]:
        case = toy("good", T(), Prices.assumed(0.01, 0.1), method="dsbd", verify=verify, draft_width=8,
                   max_new_tokens=60, early_stopping="never", **given)  # fmt: skip
        _, events = case.events(SeededSampler(0, 0), SeededSampler(0, 1))
        forests = [event.forest for event in events if isinstance(event, Iteration)]
        # A support of fewer continuations than that is drafted whole.
        return {
            len(one.draws)
            for forest in forests
            for one in forest.layers
            if verify != "cover" or len(one.support.token) >= 8
        }

    assert sizes(threshold=0.5) == {8}
    assert min(sizes()) < 8


# What it believes. A forest of one or more layers whose needed width is known.

WIDTHS = (1, 2, 4, 8)


def seen(*needed: int | None, width: int = 8) -> tuple[Forest, list[Layer]]:
    """A forest, and layers that would have passed with `needed` nodes (None: not with `width` either)."""
    root = Node(-1, None)
    support = Support(*(np.zeros(width),) * 4)
    forest, layers = [], []
    for count in needed:
        nodes = [Node(token, root) for token in range(width)]
        forest.append(DraftLayer([root], support, nodes))
        drawn = Node(99, root) if count is None else nodes[count - 1]
        layers.append(Layer((nodes[0], drawn), 2, passed=count is not None))
    return Forest(forest), layers


def rule(prices: Prices, first: float = 0.65, depth: int = 6, **given: Any) -> ForestShape:
    passes = tuple(first * share for share in (0.6, 0.8, 0.9, 1.0))
    known = Acceptance(WIDTHS, (passes,) * depth, tuple(map(float, WIDTHS)))
    return ForestShape(prices, known, **given)


def learn(one: ForestShape, *needed: int | None, most: int = 6) -> Shape:
    """One iteration in which the layers of the forest come out as `needed` says, as far as they were drafted."""
    shape = one.choose(most)
    if shape.gamma:
        tried: list[int | None] = []
        for count in (*needed, *needed[-1:] * 10)[: shape.gamma]:
            tried.append(count if count is not None and count <= shape.draft_width else None)
            if tried[-1] is None:
                break
        one.learn(*seen(*tried, width=shape.draft_width))
    return shape


def test_depth_follows_what_passes():
    shape = rule(Prices.assumed(0.2, 0.001))
    assert shape.choose(6).gamma > 1
    for _ in range(20):
        learn(shape, 1)
    assert shape.choose(6).gamma == 6
    for _ in range(30):
        learn(shape, None)
    assert shape.choose(6).gamma == 0
    for _ in range(200):  # it finds its way back from nothing
        learn(shape, 1)
    assert shape.choose(6).gamma == 6


def test_width_follows_what_is_needed():
    for needed in WIDTHS:
        shape = rule(Prices.assumed(0.1, 0.02))
        for _ in range(40):
            last = learn(shape, needed)
        assert last.draft_width == needed


def test_a_wide_layer_that_is_needed_again_is_found_again():
    shape = rule(Prices.assumed(0.1, 0.02))
    for _ in range(40):
        learn(shape, 1)
    assert shape.choose(6).draft_width == 1
    for _ in range(200):
        last = learn(shape, 8)
    assert last.draft_width == 8


def test_nothing_is_drafted_where_nothing_passes_but_now_and_then_it_is_tried():
    shape = rule(Prices.assumed(0.2, 0.02))
    drafted = [learn(shape, None).gamma for _ in range(1000)]
    tries = [place for place, gamma in enumerate(drafted) if gamma]
    assert max(drafted[20:]) == 1
    assert len(tries) < 40
    gaps = np.diff(tries[-6:])
    assert set(gaps) == {65}


def test_a_layer_that_is_given_whole_is_never_narrower():
    shape = rule(Prices.assumed(0.1, 0.01), narrow=False)
    shapes = [learn(shape, needed) for needed in (1, 2, None, 1, 1, None)]
    assert {one.draft_width for one in shapes if one.gamma} == {8}


@pytest.mark.parametrize(
    ("sampler", "cost", "depth"), [(0.9, 0.01, 8), (0.5, 0.2, 2), (0.3, 0.25, 1), (0.2, 0.5, 0)]
)
def test_depth_is_the_best_bargain(sampler, cost, depth):
    shape = rule(Prices(Curve((1,), (1.0,)), Curve((1,), (cost,))), depth=8)
    rng = np.random.default_rng(0)
    chosen = []
    for _ in range(400):
        tried = rng.random(8) < sampler
        chosen.append(learn(shape, *(1 if good else None for good in tried), most=8).gamma)
    worth = [sum(sampler**i for i in range(d + 1)) / (1 + cost * d) for d in range(9)]
    assert worth[depth] == max(worth)
    assert abs(np.median(chosen) - depth) <= 1


def test_a_forest_never_looked_at_teaches_nothing():
    shape = rule(Prices.assumed(0.2, 0.01))
    before = shape.choose(4)
    shape.learn(seen(1, 1)[0], [])
    assert shape.choose(4) == before


def after(rate: float, count: int, start: float, end: float) -> float:
    """`count` steps from `start`, each of which goes `rate` of what is left of the way to `end`."""
    return end + (start - end) * (1 - rate) ** count


def beliefs(past: Sequence[Sequence[bool]]) -> list[float]:
    """What is believed of two layers after `past`, at any width."""
    shape = rule(Prices.assumed(0.01, 0.0), depth=2)
    for passed in past:
        assert shape.choose(2).gamma == 2
        shape._limit = 8
        shape.learn(*seen(*(1 if good else None for good in passed)))
    return [row[-1] for row in shape._passes]


@pytest.mark.parametrize("count", [0, 1, 3, 10])
def test_a_fifth_of_a_belief_is_what_was_seen_last(count):
    up, down = after(0.2, count, 0.65, 1), after(0.2, count, 0.65, 0)
    assert np.allclose(beliefs([[True, True]] * count), [up, up], atol=1e-12)
    assert np.allclose(beliefs([[True, False]] * count), [up, down], atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 10])
def test_a_layer_that_is_not_tried_drifts_to_the_one_above_it_by_a_twentieth(count):
    first = second = 0.65
    for _ in range(count):
        first = after(0.2, 1, first, 0)
        second = after(0.05, 1, second, first)
    shape = rule(Prices.assumed(0.01, 0.0), depth=2)
    for _ in range(count):
        shape.choose(2)
        shape._limit = 8
        shape.learn(*seen(None))
    assert np.allclose([row[-1] for row in shape._passes], [first, second], atol=1e-12)


def test_of_a_wider_layer_only_what_a_failure_tells_is_learned():
    """Eight of eight widths needed with equal probability, layers of four drafted: the odds of eight stay."""
    rng = np.random.default_rng(0)
    known = Acceptance(WIDTHS, ((0.25, 0.5, 0.6, 0.8),), tuple(map(float, WIDTHS)))
    shape = ForestShape(Prices.assumed(0.1, 0.02), known)
    shape._limit = 4
    rows = []
    for _ in range(4000):
        u = rng.random()
        needed = next(
            (width for width, chance in zip(WIDTHS, known.passes[0], strict=True) if u < chance), None
        )
        shape.learn(*seen(needed if needed is not None and needed <= 4 else None, width=4))
        rows.append(list(shape._passes[0]))
    mean = np.mean(rows[100:], axis=0)
    assert np.allclose(mean[:3], known.passes[0][:3], atol=0.04)
    # Beyond what is drafted only the first belief speaks: half of the failures would have passed.
    assert mean[2] < mean[3] < 1
    assert all(row == sorted(row) for row in rows)


def test_the_choice_is_that_of_best_forest():
    shape = rule(Prices.assumed(0.1, 0.03))
    for _ in range(10):
        learn(shape, 2, 4, None)
    known = shape._acceptance()
    best = best_forest(Prices.assumed(0.1, 0.03), known, max_gamma=6, max_draft_width=8)
    assert shape.choose(6) == best.shape


def test_the_first_forest_has_to_promise_more_for_the_draft_must_read_the_prompt():
    prices = Prices(Curve((1,), (1.0,)), Curve((1,), (0.15,)))
    known = Acceptance((1,), ((0.2,),), (1.0,))  # 1.2 layers for 1.15
    best = best_forest(prices, known, max_gamma=1, max_draft_width=1)
    assert best.shape == Shape(1, 1)
    assert 1 < best.gain < 1.1
    assert ForestShape(prices, known).choose(1) == Shape(1, 1)
    assert ForestShape(prices, known, unread=9).choose(1) == Shape(0, 1)


@pytest.mark.parametrize(
    ("unread", "layers", "begins"),
    [
        (1100, 48, True),
        (1200, 48, False),
        (1200, 1000, False),
        (440, 20, True),
        (460, 20, False),
        (9000, 48, False),
    ],
)
def test_the_first_forest_earns_within_an_answer_that_the_draft_reads_the_prompt(unread, layers, begins):
    """Two layers for 1.5 ms instead of 2, and a hundredth of a millisecond a token of the prompt."""
    prices = Prices(Curve((1,), (1.0,)), Curve((1, 51), (0.5, 1.0)))
    shape = ForestShape(prices, Acceptance((1,), ((1.0,),), (1.0,)), unread=unread, layers=layers)
    # 0.25 ms a layer is saved, by the price of all the prompt's tokens at once.
    assert begins == (prices.draft(unread) <= 0.25 * min(layers, 48))
    assert shape.begins(1) == begins


def test_a_draft_that_reads_the_prompt_at_once_has_it_read() -> None:
    known = Acceptance((1,), ((0.2,),), (1.0,))
    for draft_ms, begins in ((0.15, False), (0.02, True)):
        shape = ForestShape(Prices(Curve((1,), (1.0,)), Curve((1,), (draft_ms,))), known, unread=9)
        assert [shape.begins(1), shape.begins(1)] == [begins, begins]
        assert shape._unread == (0 if begins else 9)
        assert shape.choose(1).gamma == int(begins)


@pytest.mark.parametrize(("unread", "first"), [(0, 5), (100, 13), (1000, 113)])
def test_a_try_costs_a_tenth_of_what_was_decoded_since_the_last_one(unread, first):
    """Whatever the draft has not read it reads first, for a hundredth of a target's call a token here."""
    prices = Prices(Curve((1,), (10.0,)), Curve((1, 2), (1.0, 1.1)))
    shape = rule(prices, first=0.0, unread=unread)
    tries = [place for place in range(1, 2000) if learn(shape, None).gamma]
    assert tries[0] == first
    assert tries[1] - tries[0] == 9  # the prompt is read once


def test_of_many_requests_each_gets_less():
    sizes = []
    for requests in (1, 4, 16, 64):
        shape = rule(Prices(Curve((1, 32, 512), (4.0, 4.3, 12.0)), Curve((1, 512), (0.3, 0.6))))
        shape.requests = requests
        sizes.append(math.prod(shape.choose(6)))
    assert sizes[0] > sizes[-1]
    assert sizes == sorted(sizes, reverse=True)
