"""The Python API: a `Decoder` holds a loaded pair and turns prompts into `Result`s or streams of events.

One module, since loading, decoding and measuring a prompt share the one pair that a `Decoder` holds.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any

from dsbd_cli.again import naming
from dsbd_cli.counted import counted
from dsbd_cli.decoding import (
    Choice,
    Engines,
    Event,
    Finished,
    HfTreeModel,
    Notice,
    PathModel,
    Sampler,
    Trie,
    Verdict,
    demand_of,
)
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.errors import UserError
from dsbd_cli.generation import Generation, Planned
from dsbd_cli.group import group_of
from dsbd_cli.loading import LoadedModel, Pair, PairSpec, load_pair
from dsbd_cli.loading.hardware import NumberFormat
from dsbd_cli.loading.model import same_model
from dsbd_cli.loading.ready.packed import Place
from dsbd_cli.loading.vocabulary import narrowed
from dsbd_cli.many import Batch, in_order
from dsbd_cli.prices.pair import PairPrices
from dsbd_cli.prompts import Prompt, encode
from dsbd_cli.result import Result
from dsbd_cli.settings import DRAFTING, Settings, never_passes
from dsbd_cli.sharing import Buffers
from dsbd_cli.steps import Owner, Steps
from dsbd_cli.text import Detokenizer

# What changes the decoder's settings, or takes their place.
Given = Settings | Mapping[str, Any]


class Decoder:
    """A target/draft pair ready to decode.

    Attributes:
        pair: the loaded models and their tokenizer.
        settings: used where a call gives none.
        detokenize: ids -> text, as the results show it.
        step: whatever uses the models goes through it.
        preset: the one whose pair this is, by name or file, where that is known.
    """

    def __init__(self, pair: Pair, settings: Settings | None = None) -> None:
        self.pair = pair
        self.preset: str | None = None
        self.settings = settings or Settings()
        self.detokenize = Detokenizer(pair.tokenizer)
        self.target = _tree_model(pair.target, pair, "target")
        self.draft = _tree_model(pair.draft, pair, "draft") if pair.draft is not None else None
        self.step = Steps(self._models, self._let_go)
        self.prices = PairPrices(self.target, self.draft, self.step.take)
        self.buffers: Buffers | None = None  # of the last batch
        self._path: PathModel | None = None
        self.engines = Engines()
        self._choice: Choice | None = None

    @property
    def notes(self) -> list[str]:
        """What a user should know before anything is decoded: of the pair, and of a format asked for in vain."""
        asked = self.pair.target.int8_activations
        with self.step.lock:
            in_vain = asked and not self.target.int8_activations  # asks the self-test, which tells why
        return [self.named(line) for line in (*self.pair.notes, *(self.target.in_vain if in_vain else []))]

    def named(self, line: str) -> str:
        """A line about what was measured, with the preset that measures it anew."""
        return naming(line, self.preset)

    def describe(self) -> dict[str, str]:
        """Which forward serves each model and which engine ran last, and why no other: a sentence each."""
        found = {"target forward": self.target.describe()}
        if self.draft is not None:
            found["draft forward"] = self.draft.describe()
        if self._choice is not None:
            found["engine"] = self._choice.describe()
        return {name: self.named(line) for name, line in found.items()}

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

        What is loaded, and from where, is logged (`dsbd`, INFO).

        Raises:
            UserError: unknown preset, or a pair that cannot be loaded or cannot work together.
        """
        from dsbd_cli.presets import load_preset

        loaded = load_preset(str(preset))
        pair = loaded.pair.replace(**spec)
        decoder = cls(load_pair(pair), loaded.settings)
        decoder.preset = str(preset) if pair == loaded.pair else None
        return decoder

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

    def generate(self, prompt: Prompt, settings: Given | None = None, *, energy: bool = True) -> Result:
        """Decode one prompt to the end; `energy` as for `stream`. Calls of several threads wait for each other.

        Args:
            settings: a mapping is laid over the decoder's own (its preset's); `Settings` take their place, all of them.

        Raises:
            UserError: settings or prompt that cannot work with this pair.
            RunError: non-finite logits.
        """
        events = self._events(prompt, self.settings_of(settings), Owner(), False, energy)
        return self.step(partial(_result, events))

    def stream(
        self, prompt: Prompt, settings: Given | None = None, *, reuse: bool = False, energy: bool = True
    ) -> Iterator[Event]:
        """Decode one prompt, yielding events; the last one is `Finished`. Raises like `generate`.

        A prompt that is begun before this one has ended takes its caches: then this one raises a UserError.

        Args:
            settings: as for `generate`.
            reuse: keep what the last prompt and its answer share with this one (a chat's history) in
                the caches; off, because then a result does not depend on what was decoded before.
            energy: measure it; off where the caller does, for reading a card's counter takes a while.
        """
        mine = Owner()
        events = self._events(prompt, self.settings_of(settings), mine, reuse, energy)
        following = partial(next, events, None)
        while (event := self.step(following, mine)) is not None:
            yield event

    def _events(
        self, prompt: Prompt, settings: Settings, mine: Owner, reuse: bool, energy: bool
    ) -> Iterator[Event]:
        """What `stream` yields; `mine` stands for its run from when it takes the caches."""
        plan = self.plan(prompt, settings)
        for note in plan.notes:
            yield Notice(note)
        draft = self.draft if plan.drafts else None
        if draft is not None:
            if (line := self.prices.announcement(settings)) is not None:
                yield Notice(line)
            for note in self.prices.look_up(settings).notes:
                yield Notice(self.named(note))
        self.step.take(mine)
        yield from Generation(self, plan, self.ready(settings), draft, reuse).events(energy)

    def settings_of(self, given: Any) -> Settings:
        """What a call's `settings` are: see `generate`.

        Raises:
            UserError: settings that are none.
        """
        if given is None or isinstance(given, Settings):
            return given or self.settings
        if isinstance(given, Mapping):
            return self.settings.merged(given)
        raise UserError(f"settings are a mapping of names to values, or Settings, not {type(given).__name__}")

    def _models(self) -> list[HfTreeModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    def _let_go(self) -> None:
        """Keep nothing but the models."""
        self.engines.release()
        self._path = self.buffers = None

    def generate_many(
        self, prompts: Iterable[Prompt], settings: Given | Sequence[Given] | None = None, *,
        batch: int | None = None,
    ) -> Iterator[Result]:  # fmt: skip
        """Decode many prompts at a time; results in the order of the prompts, each as `generate` gives it.

        Args:
            prompts: taken as places become free.
            settings: for all of them, or one for each prompt; each as for `generate`.
            batch: how many at a time; None: as many as this machine does well.

        Raises:
            UserError: a prompt that cannot work with this pair, or one without settings, once those before it are
                done; a single text for `prompts`, or a `batch` below 1.
            RunError: non-finite logits.
        """
        if isinstance(prompts, (str, bytes)):
            raise UserError("generate_many takes a list of prompts, not one text")
        if batch is not None and (type(batch) is not int or batch < 1):
            raise UserError(f"batch must be a whole number of at least 1, not {batch!r}")
        several = isinstance(settings, Iterable) and not isinstance(settings, (Mapping, str, bytes))
        each: Iterable[Any] = settings if several else itertools.repeat(self.settings_of(settings))  # type: ignore[assignment]
        asked = ((prompt, self.settings_of(one)) for prompt, one in _paired(prompts, each))
        with Batch(self, batch) as running:
            for answer in in_order(running.answers(asked)):
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
            more = [*more, f"the prompt ({counted(len(ids), 'token')}) does not fit the draft's context of {limit}: "
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
                f"the prompt leaves no room: {counted(prompt_tokens, 'prompt token')}, "
                f"{counted(wanted, 'new token')} asked for, {limit} is {name}"
            )
        room = limit - prompt_tokens
        return room, [f"max-new-tokens clamped from {wanted} to {room}: {counted(prompt_tokens, 'prompt token')}, "
                      f"{limit} is {name}"]  # fmt: skip

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """What the self-test said of each model, as plain values; runs it where it was not run yet.

        Raises:
            UserError: an architecture that trees do not serve.
        """
        models = {"target": self.target} | ({"draft": self.draft} if self.draft is not None else {})
        with self.step.lock:
            return {role: model.verdict()._asdict() for role, model in models.items()}

    def keep_packed(self, places: Mapping[str, Place]) -> None:
        """Keep weights as forwards in C read them, by role, for the next start of the same pair."""
        for role, place in places.items():
            model = self.target if role == "target" else self.draft
            if model is not None:
                model.keep_packed(place)

    def meter(self, with_draft: bool) -> EnergyMeter:
        """An energy meter over the devices that a run uses."""
        models = [self.pair.target, *([self.pair.draft] if with_draft and self.pair.draft else [])]
        team = group_of(self.pair.target.model).cards
        return EnergyMeter.for_devices([model.device for model in models], team)

    def models(self) -> dict[str, Any]:
        """Name, number format, device of both models, for results; of a draft how many ids it proposes, if not all."""
        pair = {"target": (self.pair.target, self.target), "draft": (self.pair.draft, self.draft)}
        return {
            role: None
            if loaded is None or tree is None
            else {
                "name": loaded.name,
                "dtype": NumberFormat(loaded.dtype, tree.int8_activations).name,
                "device": str(loaded.device),
            }
            | ({"vocab": len(ids)} if role == "draft" and (ids := self.pair.draft_ids) is not None else {})
            for role, (loaded, tree) in pair.items()
        }


def _result(events: Iterator[Event]) -> Result:
    """The result of a run, which ends with it."""
    for event in events:
        if isinstance(event, Finished):
            return event.result
    raise AssertionError("a run ends with Finished")


def _paired(prompts: Iterable[Prompt], settings: Iterable[Any]) -> Iterator[tuple[Prompt, Any]]:
    """Prompts with their settings.

    Raises:
        UserError: more of one than of the other, once the pairs are taken; endless settings are no more.
    """
    each, taken = iter(settings), 0
    for prompt in prompts:
        one = next(each, None)
        if one is None:
            raise UserError(
                f"there are more prompts than settings ({taken}): give one for each, or one for all"
            )
        taken += 1
        yield prompt, one
    if isinstance(settings, Sized) and len(settings) > taken:
        raise UserError(f"there are more settings ({len(settings)}) than prompts ({taken})")


def _tree_model(loaded: LoadedModel, pair: Pair, role: str) -> HfTreeModel:
    # A draft may say anything, so on a CPU it multiplies in int8: half the bytes, and what it proposed
    # from is what is recorded. (The embedded draft's warped overlap with its target: 0.637 for 0.638.)
    on_cpu = loaded.device.type == "cpu"
    # It may compare all weights: only where the answer is needed.
    same = on_cpu and same_model(loaded, pair.target)
    ids = pair.draft_ids if role == "draft" else None
    return HfTreeModel(
        loaded if ids is None else dataclasses.replace(loaded, model=narrowed(loaded.model, ids)),
        vocab_size=pair.vocab_size,
        ids=ids,
        role=role,
        max_positions=loaded.max_positions,
        # Of the same model as the target every proposal is accepted: not in another arithmetic.
        int8=role == "draft" and on_cpu and not same,
        int8_activations=same and pair.target.int8_activations,
        tested=Verdict(**pair.verdicts[role]) if role in pair.verdicts else None,
    )
