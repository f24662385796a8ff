"""The Python API: a `Decoder` holds a loaded pair and turns prompts into `Result`s or streams of events.

One module, since loading, decoding and measuring a prompt share the one pair that a `Decoder` holds.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.decoding import (
    Choice,
    Engines,
    Event,
    Finished,
    HfTreeModel,
    Iteration,
    Layer,
    Node,
    Notice,
    PathModel,
    Prefilled,
    Run,
    Sampler,
    SeededSampler,
    Text,
    Trie,
    common_ancestor,
    decode,
    demand_of,
    draft_processor,
    start,
    top_n_needed,
)
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.errors import UserError
from dsbd_cli.loading import LoadedModel, Pair, PairSpec, load_pair
from dsbd_cli.loading.model import same_model
from dsbd_cli.prices import Prices
from dsbd_cli.prices.pair import PairPrices
from dsbd_cli.prompts import Prompt, encode
from dsbd_cli.result import Beam, Result, Stats
from dsbd_cli.settings import DRAFTING, Settings, never_passes
from dsbd_cli.tally import Tally, ratio
from dsbd_cli.text import ConfirmedText, Detokenizer, Endings, visible_text


class Decoder:
    """A target/draft pair ready to decode.

    Attributes:
        pair: the loaded models and their tokenizer.
        settings: used where a call gives none.
        detokenize: ids -> text, as the results show it.
    """

    def __init__(self, pair: Pair, settings: Settings | None = None) -> None:
        self.pair = pair
        self.settings = settings or Settings()
        self.detokenize = Detokenizer(pair.tokenizer)
        self.target = _tree_model(pair.target, pair, "target")
        self.draft = _tree_model(pair.draft, pair, "draft") if pair.draft is not None else None
        self.prices = PairPrices(self.target, self.draft)
        self._path: PathModel | None = None
        self.engines = Engines()
        self._choice: Choice | None = None

    def describe(self) -> dict[str, str]:
        """Which forward serves each model and which engine ran last, and why no other: a sentence each."""
        found = {"target forward": self.target.describe()}
        if self.draft is not None:
            found["draft forward"] = self.draft.describe()
        if self._choice is not None:
            found["engine"] = self._choice.describe()
        return found

    def choose(
        self,
        settings: Settings,
        target: HfTreeModel | PathModel,
        draft: HfTreeModel | None,
        trie: Trie,
        sampler: Sampler,
    ) -> Choice:
        """The engine for one run on the prefilled models; `sampler` is the draft's."""
        if isinstance(target, PathModel):
            self._choice = Choice(why_no_engine="one path", why_no_proposer="nothing is drafted")
            return self._choice
        demand = demand_of(settings, draft is not None)
        self._choice = self.engines.choose(target, draft, demand, trie, sampler)
        return self._choice

    @classmethod
    def from_preset(cls, preset: str | Path, **spec: Any) -> Decoder:
        """Load the pair that a preset names; `spec` overrides `PairSpec` fields (devices, dtypes).

        Raises:
            UserError: unknown preset, or a pair that cannot be loaded or cannot work together.
        """
        from dsbd_cli.presets import load_preset

        loaded = load_preset(str(preset))
        return cls(load_pair(loaded.pair.replace(**spec)), loaded.settings)

    @classmethod
    def from_pair(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        settings: Settings | None = None,
        **spec: Any,
    ) -> Decoder:
        """Load a pair from folders, hub ids or GGUF files; without a draft only beam and multinomial run."""
        names = {"target_device": device, "draft_device": device, "target_dtype": dtype, "draft_dtype": dtype}
        pair = PairSpec(str(target), None if draft is None else str(draft), **(names | spec))
        return cls(load_pair(pair, need_draft=draft is not None), settings)

    def generate(self, prompt: Prompt, settings: Settings | None = None, *, energy: bool = True) -> Result:
        """Decode one prompt to the end; `energy` as for `stream`.

        Raises:
            UserError: settings or prompt that cannot work with this pair.
            RunError: non-finite logits.
        """
        for event in self.stream(prompt, settings, energy=energy):
            if isinstance(event, Finished):
                return event.result
        raise AssertionError("a stream ends with Finished")

    def stream(
        self, prompt: Prompt, settings: Settings | None = None, *, reuse: bool = False, energy: bool = True
    ) -> Iterator[Event]:
        """Decode one prompt, yielding events; the last one is `Finished`. Raises like `generate`.

        Args:
            reuse: keep what the last prompt and its answer share with this one (a chat's history) in
                the caches; off, because then a result does not depend on what was decoded before.
            energy: measure it; off where the caller does, for reading a card's counter takes a while.
        """
        settings = settings or self.settings
        plan = self.plan(prompt, settings)
        for note in plan.notes:
            yield Notice(note)
        draft = self.draft if plan.drafts else None
        if draft is not None:
            if (line := self.prices.announcement(settings)) is not None:
                yield Notice(line)
            for note in self.prices.look_up(settings).notes:
                yield Notice(note)
        yield from Generation(self, plan, self.ready(settings), draft, reuse).events(energy)

    def generate_many(
        self, prompts: Iterable[Prompt], settings: Settings | Sequence[Settings] | None = None, *,
        batch: int | None = None,
    ) -> Iterator[Result]:  # fmt: skip
        """Decode many prompts at a time; results in the order of the prompts, each as `generate` gives it.

        Args:
            prompts: taken as places become free.
            settings: for all of them, or as many as there are prompts.
            batch: how many at a time; None: as many as this machine does well.

        Raises:
            UserError: a prompt that cannot work with this pair, once those before it are done.
            RunError: non-finite logits.
        """
        from dsbd_cli.many import Batch, in_order

        own = settings or self.settings
        each = itertools.repeat(own) if isinstance(own, Settings) else own
        with Batch(self, batch) as running:
            for answer in in_order(running.answers(zip(prompts, each, strict=False))):
                if answer.error is not None:
                    raise answer.error
                assert answer.result is not None
                yield answer.result

    def plan(self, prompt: Prompt, settings: Settings) -> Planned:
        """What there is to do for a prompt.

        Raises:
            UserError: settings or prompt that cannot work with this pair.
        """
        ids, notes = encode(prompt, self.pair.tokenizer, settings, self.pair.vocab_size)
        budget, more = self._budget(len(ids), settings.max_new_tokens)
        drafting = settings.method in DRAFTING
        if drafting and self.draft is None:
            raise UserError(f"method {settings.method} needs a draft model: give --draft, or --method beam")
        self.ready(settings)
        draft = self.draft if drafting else None
        limit = draft.max_positions if draft is not None else None
        if limit is not None and len(ids) > limit:
            draft = None
            more = [*more, f"the prompt ({len(ids)} tokens) does not fit the draft's context of {limit}: "
                           "decoding without a draft, same law"]  # fmt: skip
        if draft is not None and not draft.reads_ids(ids):
            draft = None
            more = [*more, "the prompt has tokens that the draft lacks: decoding without a draft, same law"]
        if (doubt := never_passes(settings)) is not None and draft is not None:
            more = [*more, doubt]
        return Planned(settings, ids, budget, draft is not None, [*notes, *more])

    def ready(self, settings: Settings) -> HfTreeModel | PathModel:
        """What decodes with these settings: a tree, or for `multinomial` a path where no tree is possible.

        Raises:
            UserError: the architecture does not serve this method.
        """
        try:
            self.target.require_tree()
            return self.target
        except UserError:
            if settings.method != "multinomial" or self.pair.target.model.config.is_encoder_decoder:
                raise
        if self._path is None:
            loaded = self.pair.target
            self._path = PathModel(
                loaded.model,
                vocab_size=self.pair.vocab_size,
                role="target",
                name=loaded.name,
                device=loaded.device,
                max_positions=loaded.max_positions,
            )
        self._path.require_tree()
        return self._path

    def _budget(self, prompt_tokens: int, wanted: int) -> tuple[int, list[str]]:
        """Tokens that may be generated, and a note if the context limit cut them down."""
        limit = self.target.limit_for(prompt_tokens)
        if limit is None or prompt_tokens + wanted <= limit:
            return wanted, []
        if limit == self.target.max_positions:
            name = "the target's context limit"
        else:
            name = "where the target's rope factors change (longrope)"
        if prompt_tokens >= limit:
            raise UserError(
                f"the prompt leaves no room: {prompt_tokens} prompt tokens, {wanted} new tokens asked for, "
                f"{limit} is {name}"
            )
        room = limit - prompt_tokens
        return room, [f"max-new-tokens clamped from {wanted} to {room}: {prompt_tokens} prompt tokens, "
                      f"{limit} is {name}"]  # fmt: skip

    def meter(self, with_draft: bool) -> EnergyMeter:
        """An energy meter over the devices that a run uses."""
        models = [self.pair.target, *([self.pair.draft] if with_draft and self.pair.draft else [])]
        return EnergyMeter.for_devices([model.device for model in models])

    def models(self) -> dict[str, Any]:
        """Name, dtype and device of both models, for results."""
        pair = {"target": self.pair.target, "draft": self.pair.draft}
        return {
            role: None
            if model is None
            else {"name": model.name, "dtype": str(model.dtype).split(".")[-1], "device": str(model.device)}
            for role, model in pair.items()
        }


def _tree_model(loaded: LoadedModel, pair: Pair, role: str) -> HfTreeModel:
    # A draft may say anything, so on a CPU it multiplies in int8: half the bytes, and what it proposed
    # from is what is recorded. (The embedded draft's warped overlap with its target: 0.637 for 0.638.)
    return HfTreeModel(
        loaded.model,
        vocab_size=pair.vocab_size,
        role=role,
        max_positions=loaded.max_positions,
        # Of the same model as the target every proposal is accepted: not in another arithmetic.
        int8=role == "draft" and loaded.device.type == "cpu" and not same_model(loaded, pair.target),
    )


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
    """

    def __init__(self, decoder: Decoder, plan: Planned, target: Any, draft: Any, reuse: bool = False) -> None:
        self.reuse, self.target = reuse, target
        settings, ids, budget = plan.settings, plan.ids, plan.budget
        self.decoder, self.settings, self.draft, self.ids, self.budget = decoder, settings, draft, ids, budget
        self.seed = secrets.randbelow(2**31) if settings.seed is None else settings.seed
        self.tally, self.stats = Tally(), Stats(prompt_tokens=len(ids))
        self.seconds = 0.0
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
        target.prefill(self.ids, trie.root, top_n=top_n_needed(settings, len(trie.eos_ids)), reuse=self.reuse)
        if self.draft is not None:
            self.draft.prefill(self.ids, trie.root, top_n=draft_processor(settings).top_n, reuse=self.reuse)
        samplers = SeededSampler(self.seed, 0), SeededSampler(self.seed, 1)
        choice = self.decoder.choose(settings, target, self.draft, trie, samplers[1])
        run = start(
            settings, target, self.draft, trie, *samplers, choice.engine, choice.proposer, self.prices()
        )
        run.keep_answer = self.reuse
        return run

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
        stats.notes = [note for cache in caches for note in cache.notes] + decoder.engines.notes
        stats.paths = decoder.describe()
        if run.shape is not None and (prices := self.prices()) is not None:
            stats.paths["prices"] = prices.describe()
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

    def _beam(self, run: Run, node: Node) -> Beam:
        return Beam(
            text=visible_text(node, self.decoder.detokenize, self.settings.stop),
            token_ids=node.tokens(),
            logprob=node.score,
            score=run.hypotheses.score(node),
            finished=node.finish is not None,
        )


def _sum_known(parts: list[int | None]) -> int | None:
    """The sum, or None where a part is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _reason(node: Node, budget: int) -> str:
    if node.finish is not None:
        return node.finish
    return "length" if budget == 0 else "early_stop"
