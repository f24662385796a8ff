"""`dsbd tune` on a simulated machine whose truth is known: it finds the best within 5 %, prices off or not."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from dsbd_cli.decoding import Iteration, Layer, Node
from dsbd_cli.prices import Acceptance, Curve, Prices, distinct_beams
from dsbd_cli.settings import Settings
from dsbd_cli.tune.counts import Counts
from dsbd_cli.tune.search import Answer, Seen, Trial, candidates, predict, quicker, tune

CARD = Prices(Curve((1, 64, 128, 256), (4.1, 4.5, 4.8, 6.8)), Curve((1, 128), (0.35, 0.4)))
LAPTOP = Prices(Curve((1, 4, 8, 16, 32), (20.0, 24.0, 31.0, 46.0, 76.0)), Curve((1, 16), (2.5, 5.0)), 0.3)
DEAR = Prices(Curve((1, 4, 8, 16), (6.4, 21.6, 40.7, 77.0)), Curve((1, 16), (2.5, 9.0)))
MACHINES = {"card": CARD, "laptop": LAPTOP, "dear nodes": DEAR}


def pair(right: float, width: int = 4) -> Acceptance:
    """A draft that is right as often as the first belief says, to the power 1 / `right`."""
    first = Acceptance.assumed(distinct_beams(width), 8, 24)
    passes = tuple(tuple(one ** (1 / right) for one in layer) for layer in first.passes)
    return Acceptance(first.widths, passes, first.nodes, first.beams)


class Simulated:
    """A machine and pair by formula; what it measures is off by some percent, as on a real one."""

    prompts = 3

    def __init__(self, prices: Prices, accepts: Acceptance, seed: int, prefill: float = 30.0) -> None:
        self._truth, self._accepts, self._prefill = prices, accepts, prefill
        self._noise = random.Random(seed)
        self.asked: list[Settings] = []

    def _off(self, share: float) -> float:
        return 1 + share * (2 * self._noise.random() - 1)

    def prices(self) -> Prices:
        curves = [
            Curve.fitted({count: ms * self._off(0.1) for count, ms in zip(one.nodes, one.ms, strict=True)})
            for one in (self._truth.target, self._truth.draft)
            if one is not None
        ]
        return Prices(curves[0], curves[1], self._truth.layer_ms)

    def look(self, settings: Settings) -> Seen:
        off = tuple(tuple(min(1.0, one * self._off(0.05)) for one in layer) for layer in self._accepts.passes)
        rising = tuple(tuple(itertools.accumulate(layer, max)) for layer in off)
        known = Acceptance(self._accepts.widths, rising, self._accepts.nodes, self._accepts.beams)
        return Seen(known, 50.0 * self._off(0.1), self._prefill)

    def answer(self, settings: Settings, prompt: int) -> Answer:
        self.asked.append(settings)
        tokens = 30 + 20 * prompt
        seconds = tokens / self.rate(settings, tokens) * self._off(0.02)
        return Answer(tokens, seconds, -0.5 * tokens * (1 + 0.1 * (4 - settings.width)))

    def rate(self, settings: Settings, tokens: float = 50.0) -> float:
        return predict(settings, self._truth, Seen(self._accepts, tokens, self._prefill))


@pytest.mark.parametrize("right", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("quick", [False, True])
def test_the_best_is_found_within_five_percent(machine: str, right: float, quick: bool) -> None:
    for seed in range(3):
        bench = Simulated(MACHINES[machine], pair(right), seed)
        base = Settings()
        best = max(bench.rate(one) for one in [base, *candidates(base, 0.0)])
        found = tune(bench, base, quick=quick)
        assert bench.rate(found.best.settings) > 0.95 * best
        assert bench.rate(found.best.settings) > 0.97 * bench.rate(base.merged({"method": "beam"}))
        assert len(set(bench.asked)) <= (6 if quick else 10)


class Same(Simulated):
    """A machine on which nothing pays: every setting takes as long, up to noise, and writes the same text."""

    def look(self, settings: Settings) -> Seen:
        seen = super().look(settings)
        never = tuple((0.0,) * len(layer) for layer in seen.acceptance.passes)
        return seen._replace(acceptance=Acceptance(seen.acceptance.widths, never, seen.acceptance.nodes, 1.8))

    def answer(self, settings: Settings, prompt: int) -> Answer:
        return Answer(40, 2.0 * self._off(0.15), -20.0)


@pytest.mark.parametrize("quick", [False, True])
def test_noise_moves_nobody_from_the_settings_given(quick: bool) -> None:
    kept, ahead = 0, 0
    for seed in range(40):
        found = tune(Same(DEAR, pair(1.0), seed), Settings(), quick=quick)
        kept += found.best is found.base
        ahead += found.trials[0] is not found.base
    assert ahead > 20  # one of several is nearly always ahead
    assert kept == 40


def test_a_difference_is_shown_by_answers_and_not_by_promises_alone() -> None:
    def trial(predicted: float, *seconds: float) -> Trial:
        return Trial(Settings(), predicted, [Answer(10, one, -1.0) for one in seconds])

    base = trial(10.0, *[1.0] * 2)
    assert quicker(trial(12.0, 0.9, 0.8), base)
    assert not quicker(trial(12.0, 0.9, 1.1), base)
    assert not quicker(trial(10.1, 0.9, 0.8), base)  # promised nothing, and two answers are few
    base = trial(10.0, *[1.0] * 6)
    assert quicker(trial(12.0, 1.1, *[0.9] * 5), base)
    assert not quicker(trial(12.0, 1.1, 1.1, *[0.9] * 4), base)
    assert not quicker(trial(10.0, *[0.9] * 6), base)
    base = trial(10.0, *[1.0] * 8)
    assert quicker(trial(10.0, *[0.9] * 8), base)
    assert not quicker(trial(10.0, 1.1, *[0.9] * 7), base)
    assert not quicker(trial(12.0), trial(10.0))


def test_the_law_stays_where_nothing_may_be_lost() -> None:
    for given in ({}, {"verify": "paper"}, {"threshold": 0.9}, {"width": 6}, {"draws": "distinct"}):
        base = Settings(**given)  # type: ignore[arg-type]
        for one in candidates(base, 0.0):
            same = ("width", "draws", "threshold", "min_width", "temperature", "top_k", "top_p")
            assert all(getattr(one, name) == getattr(base, name) for name in same)
            assert one.method == "dsbd" or base.threshold is None
            assert one.verify == base.verify
            # What a dynamic width draws depends on the forest's width.
            assert base.threshold is None or one.draft_width == base.draft_width


def test_distinct_draws_are_as_many_beams_as_they_are() -> None:
    """Four of them hold four beams, independent ones 1.8: forests pass less often, whatever was seen before."""
    seen = Seen(pair(1.0), 50.0, 30.0)
    rates = {
        name: predict(Settings(forest="full", **given), CARD, seen)
        for name, given in (
            ("iid", {}),
            ("distinct", {"draws": "distinct"}),
            ("search", {"deterministic": True}),
        )
    }
    assert rates["distinct"] == rates["search"] < rates["iid"]


def test_narrower_layers_win_only_within_the_loss() -> None:
    base = Settings()
    widths = {
        loss: tune(Simulated(LAPTOP, pair(1.0), 0), base, loss=loss).best.settings.width
        for loss in (0.0, 0.06, 1.0)
    }
    assert widths[0.0] == 4
    assert widths[0.06] >= 3
    assert widths[1.0] < 4


def test_one_sequence_is_tuned_too() -> None:
    base = Settings(method="speculative")
    one = Acceptance.assumed(1.0, 8, 1)
    for prices, method in ((CARD, "speculative"), (Prices(CARD.target, Curve((1,), (9.0,))), "multinomial")):
        found = tune(Simulated(prices, one, 0), base)
        if method == "multinomial":  # nothing is drafted, by either name
            assert found.best.settings.method == "multinomial" or found.best.settings.forest == "adaptive"
        else:
            assert found.best.settings.method == "speculative"


def layer(*needed: int | None, width: int = 4) -> Iteration:
    """An iteration whose layers would have passed with `needed` nodes."""
    import numpy as np

    from dsbd_cli.decoding.law.distribution import Support
    from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest

    root = Node(-1, None)
    support = Support(*(np.zeros(width),) * 4)
    drafted: list[Any] = []
    layers = []
    for count in needed:
        nodes = [Node(token, root) for token in range(width)]
        drafted.append(DraftLayer([root], support, nodes))
        layers.append(Layer((nodes[count - 1],) if count else (Node(99, root),), 1, passed=count is not None))
    return Iteration((), Forest(drafted), tuple(layers))


def test_what_is_counted_is_how_often_each_width_would_have_passed() -> None:
    counts = Counts(Acceptance.assumed(1.0, 2, 4))
    for _ in range(600):
        counts.add(layer(1, 4))
        counts.add(layer(3, None))
        counts.add(layer(None))
    known = counts.acceptance()
    assert known.widths == (1, 2, 3, 4)
    assert known.passes[0] == pytest.approx((1 / 3, 1 / 3, 2 / 3, 2 / 3), abs=0.005)
    assert known.passes[1] == pytest.approx((0, 0, 0, 1 / 2), abs=0.005)
    assert known.nodes == (1, 2, 3, 4)
