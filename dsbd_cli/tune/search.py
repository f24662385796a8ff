"""From prices and acceptance to a short list, and from real answers, taken in turns, to the best of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dsbd_cli.prices import Acceptance, Prices, Shape, beams_of, best_forest, layers_per_ms
from dsbd_cli.settings import ONE_BEAM_METHODS, Settings

NAMED = ("method", "width", "threshold", "gamma", "draft_width", "forest")  # what `Trial.name` tells
GAMMAS = (1, 2, 3, 4, 5, 6, 8)
DRAFT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
THRESHOLDS = (0.7, 0.8, 0.9)
# A prediction below this many times another one is the same.
_PROMISE = 1.02
_SOME, _MANY = 6, 8  # ratios of answers


class Seen(NamedTuple):
    """What whole runs with wide forests showed of the pair on these prompts.

    Attributes:
        acceptance: for the width given.
        tokens, prefill_ms: of an answer, on average.
    """

    acceptance: Acceptance
    tokens: float
    prefill_ms: float


class Answer(NamedTuple):
    """One answer: tokens, seconds of prefill and decoding, log-probability under the target."""

    tokens: int
    seconds: float
    logprob: float


class Bench(Protocol):
    """A machine with a pair, and prompts."""

    prompts: int

    def prices(self) -> Prices:
        """What forwards cost on it."""

    def look(self, settings: Settings) -> Seen:
        """Whole runs with full forests of these settings."""

    def answer(self, settings: Settings, prompt: int) -> Answer:
        """One answer, timed."""


@dataclass
class Trial:
    """Settings under test.

    Attributes:
        settings: what is run.
        predicted: whole-answer tokens a second by prices and acceptance; 0 where nothing can be predicted.
        answers: by round and prompt, in the order of running.
    """

    settings: Settings
    predicted: float
    answers: list[Answer] = field(default_factory=list)

    @property
    def measured(self) -> float:
        """Tokens a second of whole answers."""
        seconds = sum(one.seconds for one in self.answers)
        return sum(one.tokens for one in self.answers) / seconds if seconds else 0.0

    @property
    def logprob(self) -> float:
        """Mean log-probability a token over the answers."""
        tokens = sum(one.tokens for one in self.answers)
        return sum(one.logprob for one in self.answers) / tokens if tokens else 0.0

    def name(self) -> str:
        """In short, for people."""
        one = self.settings
        parts = [one.method]
        if one.method not in ONE_BEAM_METHODS:
            parts.append(f"width {one.width}")
        if one.method == "dsbd" and one.threshold is not None:
            parts.append(f"threshold {one.threshold:g}")
        if one.method in ("dsbd", "speculative"):
            parts.append(f"gamma {one.gamma}")
        if one.method == "dsbd":
            parts.append(f"draft-width {one.draft_width}")
        if one.method in ("dsbd", "speculative") and one.forest == "full":
            parts.append("full forests")
        return ", ".join(parts)


class Outcome(NamedTuple):
    """The winner, and every trial that was run for real, best first; the first settings, `base`, are among them.

    `best` is `base` where no other is shown to be quicker.
    """

    best: Trial
    trials: list[Trial]
    base: Trial


def drafting(settings: Settings) -> bool:
    """Whether these settings have forests to choose (specinfer has a tree of its own)."""
    return settings.method in ("dsbd", "speculative")


def candidates(settings: Settings, loss: float) -> list[Settings]:
    """What may be as good as `settings`: forests of every size and none; with `loss` narrower layers too."""
    variants = [settings]
    if loss > 0 and settings.method == "dsbd" and not settings.deterministic:
        variants += [settings.merged({"width": width}) for width in (2, 3, 4, 6, 8) if width < settings.width]
        variants += [
            settings.merged({"threshold": threshold})
            for threshold in THRESHOLDS
            if settings.min_width < settings.width and settings.threshold is None
        ]
    found: list[Settings] = []
    for one in variants:
        if one.threshold is None:
            # The same law without a draft.
            found.append(one.merged({"method": "beam" if one.method == "dsbd" else "multinomial"}))
        widths: Sequence[int] = DRAFT_WIDTHS
        if one.method == "speculative":
            widths = (one.draft_width,)
        elif one.threshold is not None and settings.threshold is not None:
            widths = (one.draft_width,)  # the width's law depends on the forest's
        elif one.verify == "paper":
            widths = [width for width in DRAFT_WIDTHS if width >= one.width]
        for gamma in GAMMAS:
            for width in widths:
                for forest in ("adaptive", "full"):
                    found.append(one.merged({"gamma": gamma, "draft_width": width, "forest": forest}))
    return list(dict.fromkeys(found))


def predict(settings: Settings, prices: Prices, seen: Seen) -> float:
    """Whole-answer tokens a second: a layer adds a token, after the prefill.

    An adaptive forest is predicted at its best size within its limits.
    """
    known = seen.acceptance.for_beams(beams_of(settings))
    shape = Shape(0, 1)
    if drafting(settings):
        shape = Shape(min(settings.gamma, len(known.passes)), settings.draft_width)
        if settings.forest == "adaptive":
            shape = best_forest(prices, known, max_gamma=shape.gamma, max_draft_width=shape.draft_width).shape
    rate = layers_per_ms(prices, known, shape)
    return 1e3 * seen.tokens / (seen.prefill_ms + seen.tokens / rate)


def short_list(trials: Sequence[Trial], base: Settings, size: int) -> list[Trial]:
    """The `size` most promising, no two of which differ in a limit only, and always `base` and its plain form."""
    ranked = sorted(trials, key=lambda one: -one.predicted)
    plain = "beam" if base.method == "dsbd" else "multinomial"
    kept: list[Trial] = []
    kinds: set[tuple[object, ...]] = set()
    for one in ranked:
        settings = one.settings
        # Two that are predicted alike are one guess; the other places are for other guesses.
        kind = settings.method, settings.width, settings.threshold, settings.forest, round(one.predicted, 1)
        if kind not in kinds and len(kept) < size:
            kinds.add(kind)
            kept.append(one)
    for wanted in ranked:
        same_law = wanted.settings.width == base.width and wanted.settings.threshold == base.threshold
        due = wanted.settings == base or (wanted.settings.method == plain and same_law)
        if due and wanted not in kept:
            kept.append(wanted)
    return kept


def tune(
    bench: Bench,
    base: Settings,
    *,
    quick: bool = False,
    loss: float = 0.0,
    tell: Callable[[str], None] = lambda line: None,
    step: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Find the quickest settings that are as good as `base`.

    Args:
        quick: fewer trials and one round.
        loss: log-probability a token that may be given up for speed; 0 keeps the law.
        tell: a line about each stage.
        step: answers done, of how many.
    """
    tell("measuring what forwards cost")
    prices = bench.prices()
    tell("measuring what the target accepts of the draft")
    seen = bench.look(base)
    found = [base, *(one for one in candidates(base, loss) if one != base)]
    trials = short_list([Trial(one, predict(one, prices, seen)) for one in found], base, 4 if quick else 8)
    rounds = 1 if quick else 2
    tell(f"{len(found)} settings compared by prediction, {len(trials)} of them now for real")
    total = (rounds * bench.prompts + 1) * len(trials)
    done = 0
    step(done, total)
    for one in trials:  # buffers grow, products are planned
        bench.answer(one.settings, 0)
        done += 1
        step(done, total)
    for turn in range(rounds * bench.prompts):
        place = turn % len(trials)
        for one in (*trials[place:], *trials[:place]):
            one.answers.append(bench.answer(one.settings, turn % bench.prompts))
            done += 1
            step(done, total)
    first = next(one for one in trials if one.settings == base)
    good = [one for one in trials if loss == 0 or one.logprob >= first.logprob - loss]
    speeds = {id(one): speed(one, first) for one in trials}
    ranked = sorted(trials, key=lambda one: -speeds[id(one)])
    # Of many arms that cost the same one is always ahead: what is not shown leaves the settings as they were given.
    shown = [one for one in good if one is not first and quicker(one, first)]
    best = max(shown, key=lambda one: speeds[id(one)], default=first)
    return Outcome(best, ranked, first)


def quicker(one: Trial, base: Trial) -> bool:
    """Whether answers show that a trial is quicker than `base`, rather than ahead of it by chance.

    Where prices and acceptance promised it, all of a few ratios are above 1, or all but the least of six or more
    (by chance once in 9 trials of six, in 28 of eight). Where they promised nothing, all of eight or more: by chance
    once in 256.
    """
    ratios = sorted(_ratios(one, base))
    if one.predicted > _PROMISE * base.predicted:
        return bool(ratios) and ratios[1 if len(ratios) >= _SOME else 0] > 1
    return len(ratios) >= _MANY and ratios[0] > 1


def speed(one: Trial, base: Trial) -> float:
    """Speed in that of `base`: the median over answers of the ratio of their tokens a second, in turns."""
    ratios = _ratios(one, base)
    return statistics.median(ratios) if ratios else 0.0


def _ratios(one: Trial, base: Trial) -> list[float]:
    pairs = zip(one.answers, base.answers, strict=True)
    return [(a.tokens / a.seconds) / (b.tokens / b.seconds) for a, b in pairs if a.tokens and b.tokens]
