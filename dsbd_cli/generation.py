"""One prompt through one method, and what it takes to decode it: the part of decoding that a prompt owns."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from dsbd_cli.decoding import (
    Choice,
    Engines,
    Event,
    Finished,
    ForestShape,
    HfTreeModel,
    Iteration,
    Layer,
    Node,
    Notice,
    Prefilled,
    Run,
    Sampler,
    SeededSampler,
    Text,
    Trie,
    common_ancestor,
    decode,
    draft_processor,
    forest_shape,
    start,
    top_n_needed,
)
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.group import group_of
from dsbd_cli.loading import Pair
from dsbd_cli.prices import Prices
from dsbd_cli.prices.pair import PairPrices
from dsbd_cli.result import Beam, Result, Stats
from dsbd_cli.settings import Settings
from dsbd_cli.tally import NO_FOREST_PAYS, Tally, ratio
from dsbd_cli.text import ConfirmedText, Detokenizer, Endings, visible_text


class Host(Protocol):
    """What decodes: `decoder.Decoder`."""

    pair: Pair
    detokenize: Detokenizer
    engines: Engines
    prices: PairPrices
    target: HfTreeModel
    draft: HfTreeModel | None

    def choose(self, settings: Settings, target: Any, draft: Any, trie: Trie, sampler: Sampler) -> Choice:
        """The engine for one run on prefilled models."""

    def meter(self, with_draft: bool) -> EnergyMeter:
        """An energy meter over the devices that a run uses."""

    def models(self) -> dict[str, Any]:
        """Name, dtype and device of both models."""

    def describe(self) -> dict[str, str]:
        """What runs, and why no other."""

    def named(self, line: str) -> str:
        """A line about what was measured, with the preset that measures it anew."""


@dataclass(frozen=True)
class Planned:
    """A prompt that can be decoded.

    Attributes:
        ids: as the target sees it. budget: tokens that may be generated.
        drafts: whether a draft goes with the target.
        notes: what the user should know; a line each.
    """

    settings: Settings
    ids: list[int]
    budget: int
    drafts: bool
    notes: list[str]


class Generation:
    """One prompt through one method: owns the clocks, the counts and the confirmed text.

    Args:
        target, draft: what decodes it; `RequestModel`s where many prompts share a pair.
        reuse: as for `Decoder.stream`.

    Attributes:
        shape: how large its forests are, once that is decided; None where they are all full.
    """

    def __init__(self, decoder: Host, plan: Planned, target: Any, draft: Any, reuse: bool = False) -> None:
        self.reuse, self.target = reuse, target
        settings, ids, budget = plan.settings, plan.ids, plan.budget
        self.decoder, self.settings, self.draft, self.ids, self.budget = decoder, settings, draft, ids, budget
        seed = settings.seed
        self.seed = group_of(decoder.target.model).agreed(secrets.randbelow(2**31)) if seed is None else seed
        self.tally, self.stats = Tally(), Stats(prompt_tokens=len(ids))
        self.seconds = 0.0
        self.shape: ForestShape | None = None
        ends = Endings(decoder.detokenize, decoder.pair.eos_ids, settings.stop, budget)
        self.trie = Trie(ends, decoder.pair.eos_ids, budget)
        self.text = ConfirmedText(decoder.detokenize, settings.stop)

    def events(self, energy: bool) -> Iterator[Event]:
        begin = time.perf_counter()
        run = self._start()
        self.stats.prefill_s = time.perf_counter() - begin
        yield Prefilled(self.ids, self.stats.prefill_s)
        meter = self.decoder.meter(self.draft is not None) if energy else None
        if meter is not None:
            meter.start()
        if self.budget > 0:
            yield from self._decode(run)
        if meter is not None:
            used = meter.stop()
            self.stats.energy_j = used.joules
            self.stats.energy_source = used.source if used.joules is not None else used.reason
        result = self.result(run)
        left = self.text.finish(result.text)
        if left:
            yield Text(left)
        yield Finished(result)

    def _start(self) -> Run:
        target, settings, trie = self.target, self.settings, self.trie
        top_n = top_n_needed(settings, len(trie.eos_ids))
        # Both prompts are under way before either is waited for.
        behind = {"wait": False} if self.draft is not None else {}
        target.prefill(self.ids, trie.root, top_n=top_n, reuse=self.reuse, **behind)
        prices = self.prices()
        if self.draft is not None:
            later = self._decide_forests(self.draft.captured, prices)
            top_n = draft_processor(settings).top_n
            idle = not target.captured or target.device != self.draft.device
            self.draft.prefill(self.ids, trie.root, top_n=top_n, reuse=self.reuse, later=later, idle=idle)
            target.settle()
        samplers = SeededSampler(self.seed, 0), SeededSampler(self.seed, 1)
        choice = self.decoder.choose(settings, target, self.draft, trie, samplers[1])
        run = start(
            settings,
            target,
            self.draft,
            trie,
            *samplers,
            choice.engine,
            choice.proposer,
            prices,
            self.ids,
            shape=self.shape,
        )
        run.keep_answer = self.reuse
        return run

    def _decide_forests(self, captured: bool, prices: Prices | None, requests: int = 1) -> bool:
        """How large forests are to be (`shape`), before the draft reads the prompt; whether it does that later.

        Args:
            captured: the draft's forwards are, so its forests are full. requests: how many share each forward.
        """
        if not captured:
            self.shape = forest_shape(self.settings, prices, unread=len(self.ids))
        if self.shape is None:
            return False
        self.shape.requests = requests
        return not self.shape.begins(self.settings.gamma)

    def prices(self) -> Prices | None:
        """What this run's forests have to be worth; None where they are full."""
        return None if self.draft is None else self.decoder.prices.look_up(self.settings).prices

    def _decode(self, run: Run) -> Iterator[Event]:
        loop = decode(run, self.settings)
        warned = False
        end = time.perf_counter()
        while True:
            # Only the engine's own time counts: a consumer may take its time over an event. What a
            # device meanwhile does for the next iteration counts too.
            begin = time.perf_counter()
            if isinstance(self.target, HfTreeModel) and self.target.captured:
                self.seconds += self.target.clock.overlap(begin - end)
            event = next(loop, None)
            end = time.perf_counter()
            self.seconds += end - begin
            if event is None:
                return
            if isinstance(event, Layer):
                self.tally.add(event)
            if isinstance(event, Iteration):
                if run.proposer is not None and run.proposer.exhausted and not warned:
                    warned = True
                    yield Notice("the draft's context is full: going on without a draft, same law")
                if new := self._confirm(run):
                    yield Text(new)
            yield event

    def _confirm(self, run: Run) -> str:
        """Text on which all live beams and the best finished one agree."""
        if self.settings.num_return > 1 or not run.hypotheses.active:
            return ""
        rivals = list(run.hypotheses.active)
        best = run.hypotheses.best_finished()
        node = common_ancestor([*rivals, best] if best is not None else rivals)
        return self.text.advance(node) if node.finish is None else ""

    def result(self, run: Run) -> Result:
        """The answer, of a run that has ended."""
        settings, decoder, stats = self.settings, self.decoder, self.stats
        ranking = run.hypotheses.ranking()[: settings.num_return]
        best = ranking[0]
        stats.new_tokens = best.depth
        stats.target_calls = self.target.calls
        stats.draft_calls = self.draft.calls if self.draft is not None else 0
        self.tally.fill(stats)
        stats.decode_s = self.seconds
        stats.tokens_per_s = ratio(stats.new_tokens, self.seconds)
        stats.kv_slots_peak = self.target.slots_peak
        caches = [self.target, *([self.draft] if self.draft is not None else [])]
        stats.kv_bytes_peak = _sum_known([cache.bytes_peak for cache in caches])
        stats.kv_bytes_allocated = _sum_known([cache.bytes_allocated for cache in caches])
        if stats.energy_j is not None:
            stats.joules_per_token = ratio(stats.energy_j, stats.new_tokens)
        noted = [note for cache in caches for note in cache.notes] + decoder.engines.notes
        stats.notes = [decoder.named(note) for note in noted]
        if self._refused_all(run):
            stats.notes.append(NO_FOREST_PAYS)
        stats.paths = decoder.describe()
        if run.shape is not None and (prices := self.prices()) is not None:
            stats.paths["prices"] = decoder.named(prices.describe())
        if run.spare is not None and run.spare.forests:
            stats.paths["forests"] = (
                f"{run.spare.forests} without the draft, of what followed the last tokens before "
                "(by forest adaptive, whatever lookup is: that adds to the draft's)"
            )
        return Result(
            text=visible_text(best, decoder.detokenize, settings.stop),
            token_ids=best.tokens(),
            finish_reason=_reason(best, self.budget),
            method=settings.method,
            settings=settings,
            seed=self.seed,
            models=decoder.models(),
            beams=[self._beam(run, node) for node in ranking],
            stats=stats,
        )

    def _refused_all(self, run: Run) -> bool:
        """Whether prices alone are why nothing was drafted."""
        lost = run.proposer is None or run.proposer.exhausted
        return run.shape is not None and not lost and bool(self.tally.widths) and not self.tally.by_depth

    def _beam(self, run: Run, node: Node) -> Beam:
        reason = _reason(node, self.budget)
        return Beam(
            text=visible_text(node, self.decoder.detokenize, self.settings.stop),
            token_ids=node.tokens(),
            logprob=node.score,
            score=run.hypotheses.score(node),
            finished=reason in ("eos", "stop"),
            finish_reason=reason,
        )


def _sum_known(parts: list[int | None]) -> int | None:
    """The sum, or None where a part is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _reason(node: Node, budget: int) -> str:
    if node.finish is not None:
        return node.finish
    return "length" if budget == 0 else "early_stop"
