"""Many prompts at a time: one forward of each model over the nodes of all that are under way.

A prompt joins when there is room for all that it can come to need, and leaves at its end. Its answer is
the one that it gets alone: what it draws and what it sees are its own (docs/design.md section 10).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

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
    demand_of,
    draft_processor,
    loop_of,
    most_nodes,
    start,
    top_n_needed,
)
from dsbd_cli.errors import UserError
from dsbd_cli.generation import Generation, Host, Planned
from dsbd_cli.loading.memory import free_memory
from dsbd_cli.prompts import Prompt
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings

# How many prompts at a time where nothing is said.
_ON_CPU, _ON_GPU = 8, 32
# Of the memory that is free, what keys and values may take.
_SHARE = 0.4
# Mask rows for each, to start with.
_ROWS = 64
_FULL = "the draft's context is full: going on without a draft, same law"
_SHARED_ENERGY = "several prompts share the forwards: measure the whole run"

Asked = tuple[Prompt, Settings]


class Sharing(Host, Protocol):
    """A host whose pair many prompts may share."""

    def plan(self, prompt: Prompt, settings: Settings) -> Planned:
        """What there is to do for a prompt."""

    def ready(self, settings: Settings) -> HfTreeModel | PathModel:
        """What decodes with these settings."""

    def generate(self, prompt: Prompt, settings: Settings | None = None, *, energy: bool = True) -> Result:
        """Decode one prompt alone."""


@dataclass(frozen=True)
class Answer:
    """What became of the prompt asked `index`-th, from 0: a result, or why there is none.

    Attributes:
        notes: what the user should know about it; a line each.
    """

    index: int
    result: Result | None
    error: UserError | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Load:
    """How things stand, for panels.

    Attributes:
        running, waiting: requests under way, and prompts that wait for memory.
        free_slots, slots: of the target's buffers: those that no request has, and all.
    """

    running: int
    waiting: int
    free_slots: int
    slots: int


def in_order(answers: Iterable[Answer]) -> Iterator[Answer]:
    """The answers in the order of their prompts; those that come early wait."""
    early: dict[int, Answer] = {}
    following = 0
    for answer in answers:
        early[answer.index] = answer
        while following in early:
            yield early.pop(following)
            following += 1


class _Member(Generation):
    """A request under way.

    Attributes:
        need: what it waits for; None before it has begun.
        done: its result is there to be made.
    """

    target: RequestModel
    draft: RequestModel | None

    def __init__(
        self, index: int, decoder: Sharing, plan: Planned, target: RequestModel, draft: RequestModel | None
    ):
        super().__init__(decoder, plan, target, draft)
        self.index, self.plan = index, plan
        self.notes = list(plan.notes)
        self.need: Compute | Turn | None = None
        self.done = False
        self.seat: Seat | None = None
        self._began = time.perf_counter()

    def begin(self, pipeline: Pipeline | None, requests: Callable[[], int]) -> None:
        """The prompt is computed: decode from now on."""
        now = time.perf_counter()
        self.stats.prefill_s, self._began = now - self._began, now
        samplers = SeededSampler(self.seed, 0), SeededSampler(self.seed, 1)
        self.seat = None if pipeline is None else pipeline.seat(self.target, self.draft)
        self.run = start(
            self.settings, self.target, self.draft, self.trie, *samplers, self.seat, prices=self.prices()
        )
        self._loop = loop_of(self.run, self.settings) if self.budget > 0 else iter(())

    def advance(self) -> None:
        """Go on to the next need, or to the end."""
        self.need = None
        for event in self._loop:
            if isinstance(event, (Compute, Turn)):
                self.need = event
                return
            if isinstance(event, Layer):
                self.tally.add(event)
            elif isinstance(event, Iteration) and self._lost_its_draft(self.run):
                self.notes.append(_FULL)
        self.done = True
        self.seconds = time.perf_counter() - self._began
        self.stats.energy_source = _SHARED_ENERGY

    def _lost_its_draft(self, run: Run) -> bool:
        return run.proposer is not None and run.proposer.exhausted and _FULL not in self.notes

    def leave(self) -> None:
        """Give back all that it has."""
        if self.seat is not None:
            self.seat.leave()
        for model in (self.target, self.draft):
            if model is not None:
                model.leave()


class Batch:
    """Prompts under way on one pair; a context manager.

    Args:
        decoder: whose pair; its own caches are left alone.
        size: the most at a time; None: as many as this machine does well.
        slots: of keys and values in all, of each model; None: what memory has room for.
        tell: receives a line where prompts wait for memory.
    """

    def __init__(
        self,
        decoder: Sharing,
        size: int | None = None,
        slots: int | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.decoder = decoder
        on_gpu = decoder.target.device.type == "cuda"
        self.size = size or (_ON_GPU if on_gpu else _ON_CPU)
        self._slots, self._tell = slots, tell or (lambda line: None)
        self._target: SharedModel | None = None
        self._draft: SharedModel | None = None
        self._members: list[_Member] = []
        self._prefilling: tuple[list[_Member], Iterator[None]] | None = None
        self._waiting: tuple[int, Planned] | None = None
        self._told = False
        self._pipelines: dict[Any, Pipeline | None] = {}

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave off whatever is under way, and let go of all buffers."""
        joining = self._prefilling[0] if self._prefilling else []
        for member in [*self._members, *joining]:
            member.leave()
        self._members, self._prefilling = [], None
        self._target = self._draft = None
        self._pipelines.clear()

    def load(self) -> Load:
        """How things stand."""
        regions = None if self._target is None else self._target.regions
        joining = len(self._prefilling[0]) if self._prefilling else 0
        free, slots = (0, 0) if regions is None else (regions.free, regions.capacity)
        return Load(len(self._members) + joining, int(self._waiting is not None), free, slots)

    def answers(self, asked: Iterable[Asked | None]) -> Iterator[Answer]:
        """Decode prompts; answers as they come.

        Args:
            asked: prompts with their settings, taken as places become free; None for "none just now", which is
                asked again in the next round.

        Raises:
            RunError: non-finite logits.
        """
        source, index, more = iter(asked), 0, True
        while more or self._members or self._prefilling or self._waiting:
            joined: list[_Member] = []
            while more and not self._waiting and self._running() + len(joined) < self.size:
                one = next(source, False)
                if one is False:
                    more = False
                elif one is None:
                    break
                else:
                    assert isinstance(one, tuple)
                    try:
                        plan = self.decoder.plan(*one)
                    except UserError as error:
                        yield Answer(index, None, error)
                    else:
                        if (alone := self._alone(index, plan, one[0])) is not None:
                            yield alone
                        elif (member := self._admit(index, plan)) is not None:
                            joined.append(member)
                    index += 1
            if self._waiting is not None and (member := self._admit(*self._waiting)) is not None:
                joined.append(member)
            yield from self._refused()
            self._prefill(joined)
            for member in self._round():
                result = member.result(member.run)
                member.leave()
                yield Answer(member.index, result, None, member.notes)

    # Coming and going.

    def _running(self) -> int:
        return len(self._members) + (len(self._prefilling[0]) if self._prefilling else 0)

    def _alone(self, index: int, plan: Planned, prompt: Prompt) -> Answer | None:
        """The answer of a prompt that cannot share forwards, decoded at once; None where it can."""
        target = self.decoder.ready(plan.settings)
        if not isinstance(target, PathModel) and target.shares:
            return None
        result = self.decoder.generate(prompt, plan.settings, energy=False)
        return Answer(index, result, None, plan.notes)

    def _admit(self, index: int, plan: Planned) -> _Member | None:
        """A new member; None where it has to wait for memory."""
        self._waiting = None
        settings = plan.settings
        size = most_nodes(settings, len(plan.ids), plan.budget)
        decoder = self.decoder
        if self._target is None:
            self._target = self._shared(decoder.target, size)
        if plan.drafts and self._draft is None:
            assert decoder.draft is not None
            decoder.draft.require_tree()
            self._draft = self._shared(decoder.draft, size)
        probe = Generation(decoder, plan, None, None)
        root, top_n = probe.trie.root, top_n_needed(settings, len(probe.trie.eos_ids))
        target = self._target.admit(plan.ids, root, size, top_n)
        draft = None
        if target is not None and plan.drafts:
            assert self._draft is not None
            draft = self._draft.admit(plan.ids, root, size, draft_processor(settings).top_n)
            if draft is None:
                target.leave()
                target = None
        if target is None:
            self._waiting = index, plan
            return None
        member = _Member(index, decoder, plan, target, draft)
        member.trie, member.seed = probe.trie, probe.seed
        return member

    def _refused(self) -> Iterator[Answer]:
        """A prompt that has to wait though nobody is under way would wait for ever."""
        if self._waiting is None:
            return
        index, plan = self._waiting
        if self._running() == 0:
            self._waiting = None
            slots = most_nodes(plan.settings, len(plan.ids), plan.budget)
            yield Answer(index, None, UserError(
                f"the prompt may need {slots} tokens of keys and values, and memory has room for "
                f"{self._room()}: give a smaller --width or --max-new-tokens"))  # fmt: skip
        elif not self._told:
            self._told = True
            self._tell(f"memory has room for {self._running()} of these prompts at a time: the others wait")

    def _room(self) -> int:
        return min(shared.slots for shared in (self._target, self._draft) if shared is not None)

    def _shared(self, model: Any, size: int) -> SharedModel:
        shared = SharedModel(model, self.size * _ROWS, size)
        slots = self._slots
        if slots is None:
            slots = int(free_memory(model.device) * _SHARE / max(1, shared.bytes_per_slot))
        shared.slots = slots
        # What is to be expected, at once: every growth is a copy.
        shared.room([size] * min(self.size, slots // size))
        return shared

    # A round.

    def _prefill(self, joined: list[_Member]) -> None:
        """One forward over prompts, so that those that decode do not wait for all of them."""
        if joined:
            old, steps = self._prefilling or ([], iter(()))
            self._prefilling = [*old, *joined], _chained(steps, self._steps(joined))
        if self._prefilling is None:
            return
        members, steps = self._prefilling
        if next(steps, self) is not self:
            return
        self._prefilling = None
        for member in members:
            member.begin(self._pipeline(member), self._running)
            member.advance()
        self._members += members

    def _steps(self, joined: list[_Member]) -> Iterator[None]:
        assert self._target is not None
        yield from self._target.prefill([member.target for member in joined])
        drafting = [member.draft for member in joined if member.draft is not None]
        if drafting:
            assert self._draft is not None
            yield from self._draft.prefill(drafting)

    def _round(self) -> list[_Member]:
        """Serve what all of them need, drafts first; those that are done."""
        done = [member for member in self._members if member.done]
        waiting = [member for member in self._members if not member.done]
        computes = [(member, member.need) for member in waiting if isinstance(member.need, Compute)]
        drafts = [pair for pair in computes if pair[0].draft is not None and pair[1].model is pair[0].draft]
        served = drafts or computes
        if served:
            shared = self._draft if drafts else self._target
            assert shared is not None
            shared.compute([need for _, need in served])
        turns = [member for member in waiting if isinstance(member.need, Turn)]
        for pipeline in dict.fromkeys(member.seat.pipeline for member in turns if member.seat is not None):
            pipeline.step()
        for member in [*(member for member, _ in served), *turns]:
            member.advance()
        self._members = [member for member in self._members if member not in done]
        return done

    def _pipeline(self, member: _Member) -> Pipeline | None:
        """What runs whole iterations on the device for requests like this one; None: the host verifies."""
        assert self._target is not None
        demand = demand_of(member.settings, member.draft is not None)
        draft = self._draft if member.draft is not None else None
        eos = tuple(sorted(member.trie.eos_ids))
        top_n = member.target.rows.size, 0 if member.draft is None else member.draft.rows.size
        key = demand, top_n, draft is None
        if key not in self._pipelines:
            engines = self.decoder.engines
            self._pipelines[key] = engines.together(self._target, draft, demand, eos, top_n, self.size)
        return self._pipelines[key]


def _chained(*parts: Iterator[None]) -> Iterator[None]:
    for part in parts:
        yield from part
