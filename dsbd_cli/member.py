"""A request among many: what it has of the shared models, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from dsbd_cli.decoding import (
    Compute,
    HfTreeModel,
    Iteration,
    Layer,
    PathModel,
    Pipeline,
    RequestModel,
    Run,
    Seat,
    SeededSampler,
    SharedModel,
    Turn,
    forest_is_free,
    loop_of,
    start,
)
from dsbd_cli.generation import Generation, Host, Planned
from dsbd_cli.prompts import Prompt
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings
from dsbd_cli.sharing import Buffers, Kind
from dsbd_cli.steps import Steps

FULL = "the draft's context is full: going on without a draft, same law"
_SHARED_ENERGY = "several prompts share the forwards: measure the whole run"


class Sharing(Host, Protocol):
    """A host whose pair many prompts may share."""

    buffers: Buffers | None
    step: Steps

    def plan(self, prompt: Prompt, settings: Settings) -> Planned:
        """What there is to do for a prompt."""

    def ready(self, settings: Settings) -> HfTreeModel | PathModel:
        """What decodes with these settings."""

    def generate(self, prompt: Prompt, settings: Settings | None = None, *, energy: bool = True) -> Result:
        """Decode one prompt alone."""


class Member(Generation):
    """A request under way, or waiting for memory.

    Attributes:
        target, draft: the shared models as it sees them, once it is let in.
        need: what it waits for; None before it has begun.
        done: its result is there to be made.
        later: the draft reads the prompt when it is first asked, or never.
        size: slots that it may come to need. kind: with whom it may share iterations on a device.
        lacks_room: there was none for a draft when one was to be asked, since it was let in.
        begun: there is a run of it.
    """

    target: RequestModel
    draft: RequestModel | None
    run: Run
    _began: float

    def __init__(self, index: int, decoder: Sharing, plan: Planned, size: int) -> None:
        super().__init__(decoder, plan, None, None)
        self.index, self.plan, self.size, self.begun = index, plan, size, False
        self.kind, self.lacks_room = Kind.of(plan.settings, self.trie, plan.drafts), False
        self.notes = list(plan.notes)
        self.need: Compute | Turn | None = None
        self.done = False
        self.seat: Seat | None = None
        self.later = False

    def enter(self, shared: SharedModel) -> bool:
        """Whether the target has room for it; the time of its prompt counts from now on."""
        self._began = time.perf_counter()
        self.draft, self.lacks_room = None, False
        target = shared.admit(self.ids, self.trie.root, self.size, self.kind.top_n[0])
        if target is not None:
            self.target = target
        return target is not None

    def prepare(self, requests: Callable[[], int]) -> None:
        """Before the prompt is computed: how large forests are to be.

        Args:
            requests: how many are under way.
        """
        # Elsewhere the text depends on the forest, and must not depend on who shares it.
        self._requests = requests if forest_is_free(self.settings) else lambda: 1
        if self.draft is not None:
            under_way = max(1, self._requests())
            self.later = self._decide_forests(self.draft.model.captured, self.prices(), under_way)

    def begin(self, pipeline: Pipeline | None) -> None:
        """The prompt is computed: decode from now on."""
        now = time.perf_counter()
        self.stats.prefill_s, self._began = now - self._began, now
        samplers = SeededSampler(self.seed, 0), SeededSampler(self.seed, 1)
        if pipeline is not None:
            forests = bool(self.settings.stop)
            self.seat = Seat(pipeline, self.target, self._draft_of(pipeline), forests)
        self.run = start(
            self.settings,
            self.target,
            self.draft,
            self.trie,
            *samplers,
            self.seat,
            prices=self.prices(),
            prompt=self.ids,
            shape=self.shape,
        )
        self.begun = True
        self._loop = loop_of(self.run, self.settings) if self.budget > 0 else iter(())

    def move(self, pipeline: Pipeline) -> None:
        """Go on in another pipeline."""
        assert self.seat is not None
        self.seat.move(pipeline, self._draft_of(pipeline))

    def _draft_of(self, pipeline: Pipeline) -> RequestModel | None:
        return self.draft if pipeline.drafts else None

    def advance(self) -> None:
        """Go on to the next need, or to the end."""
        self.need = None
        if self.run.shape is not None:
            self.run.shape.requests = max(1, self._requests())
        for event in self._loop:
            if isinstance(event, (Compute, Turn)):
                self.need = event
                return
            if isinstance(event, Layer):
                self.tally.add(event)
            elif isinstance(event, Iteration) and self._lost_its_draft(self.run):
                self.notes.append(FULL)
        self.done = True
        self.seconds = time.perf_counter() - self._began
        self.stats.energy_source = _SHARED_ENERGY

    def _lost_its_draft(self, run: Run) -> bool:
        return run.proposer is not None and run.proposer.exhausted and FULL not in self.notes

    def leave(self, keep: bool = False) -> None:
        """Give back all that it has; keep: its prompt may stay (`RequestModel.leave`)."""
        if self.seat is not None:
            self.seat.leave()
        for model in (self.target, self.draft):
            if model is not None:
                model.leave(keep)
