"""Many prompts at a time: one forward of each model over the nodes of all that are under way.

A prompt joins when there is room for all that it can come to need, and leaves at its end. Its answer is
the one that it gets alone: what it draws and what it sees are its own (docs/design.md section 10). One
module, since joining, serving and leaving keep the same few lists in step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from operator import attrgetter
from typing import Any, TypeVar

from dsbd_cli.decoding import (
    Compute,
    PathModel,
    Pipeline,
    SharedModel,
    Turn,
    most_nodes,
    quiet,
)
from dsbd_cli.errors import UserError
from dsbd_cli.generation import Planned
from dsbd_cli.group import group_of
from dsbd_cli.loading.memory import free_memory
from dsbd_cli.member import FULL, Member, Sharing
from dsbd_cli.prompts import Prompt
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings
from dsbd_cli.sharing import Buffers, Iterations

# How many prompts at a time where nothing is said.
_ON_CPU, _ON_GPU = 8, 64
# Of the memory that is free, what keys and values may take.
_SHARE = 0.4
# Slots beyond what requests need, for prompts that ended: a dozen of a few hundred tokens.
_SPARE = 4096
# Mask rows for each, to start with.
_ROWS, _CAPTURED_ROWS = 64, 128
# On a GPU prompts join by this part of the batch at a time.
_GROUPS = 8

T = TypeVar("T")
Asked = tuple[Prompt, Settings]


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
        reading: of those under way, how many have not been read yet.
        tokens: what those under way have generated so far, in layers.
    """

    running: int
    waiting: int
    reading: int = 0
    tokens: int = 0


# Called often while prompts are under way; whoever wants to know how things stand calls what it is given.
Pulse = Callable[[Callable[[], Load]], None]


def in_order(answers: Iterable[T], place: Callable[[T], int] = attrgetter("index")) -> Iterator[T]:
    """The answers in the order of their prompts; those that come early wait.

    Args:
        place: which prompt's an answer is, from 0.
    """
    early: dict[int, T] = {}
    following = 0
    for answer in answers:
        early[place(answer)] = answer
        while following in early:
            yield early.pop(following)
            following += 1


class Batch:
    """Prompts under way on one pair; a context manager.

    Args:
        decoder: whose pair; its own caches are left alone.
        size: the most at a time; None: as many as this machine does well.
        slots: of keys and values in all, of each model; None: what memory has room for.
        tell: receives a line where prompts wait for memory, or for what is measured once a machine.
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
        # Where a prompt joins it is computed while the others wait: several at a time then.
        self._group = max(1, self.size // _GROUPS) if on_gpu else 1
        self._buffers = decoder.step(self._kept_buffers)
        self._iterations = Iterations(decoder, self._buffers, self._tell)
        self._served_as = (0, 0)  # places and load of the iterations that members are in
        self._members: list[Member] = []
        self._joined: list[Member] = []  # let in, not begun
        self._prefilling: deque[tuple[list[Member], Iterator[None]]] = deque()  # let in together
        self._coming: list[tuple[int, Planned]] = []  # taken in this round
        self._waiting: deque[Member] = deque()  # for memory
        self._told = False
        self._torn = self._closed = False

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept_buffers(self) -> Buffers:
        """Those of the last batch, where nobody has them and they are of this size; or new ones."""
        kept = self.decoder.buffers
        if kept is None or kept.taken or (kept.size, kept.slots) != (self.size, self._slots):
            return Buffers(self.size, self._slots)
        kept.taken = True
        return kept

    def close(self) -> None:
        """Leave off whatever is under way; what an interruption has torn is nobody's any more."""
        if self._closed:
            return
        self._closed = True
        if not self._torn:
            self._step(self._leave)
        else:
            quiet(self.decoder.target.device)  # buffers go that something in flight may write to
        self._joined, self._members, self._prefilling = [], [], deque()
        self._buffers = Buffers(self.size, self._slots)

    def _leave(self) -> None:
        joining = [member for members, _ in self._prefilling for member in members]
        for member in [*self._joined, *self._members, *joining]:
            member.leave()
        self._buffers.taken = False
        # Captures are dear; elsewhere memory is.
        self.decoder.buffers = self._buffers if self.decoder.target.device.type == "cuda" else None

    def _step(self, work: Callable[[], T]) -> T:
        """`Steps` for what uses the buffers, which go with what an interruption has torn."""
        self._torn = True
        done = self.decoder.step(work)
        self._torn = False
        return done

    def load(self) -> Load:
        """How things stand."""
        tokens = sum(len(member.tally.widths) for member in self._members)
        running = self._running()
        return Load(running, len(self._waiting), running - len(self._members), tokens)

    def answers(self, asked: Iterable[Asked | None], pulse: Pulse | None = None) -> Iterator[Answer]:
        """Decode prompts; answers as they come.

        Args:
            asked: prompts with their settings, taken as places become free; None for "none just now", which is
                asked again in the next round.
            pulse: called in every round.

        Raises:
            RunError: non-finite logits.
            UserError: what `asked` raised, once those before it are done; the batch was closed.
        """
        source, index, more = iter(asked), 0, True
        broken: UserError | None = None
        while more or self._members or self._prefilling or self._waiting:
            if self._closed:
                raise UserError("this batch was closed while its prompts were under way")
            pausing = False
            pulling = more and not self._waiting
            while more and pulling and self._running() < self.size:
                if not self._coming and self._running() > max(0, self.size - self._group):
                    break
                try:
                    one = next(source, False)
                except UserError as error:  # those before it are answered first
                    one, broken = False, error
                if one is False:
                    more = False
                elif one is None:
                    pausing = True
                    break
                else:
                    assert isinstance(one, tuple)
                    try:
                        plan = self.decoder.step(partial(self.decoder.plan, *one))
                    except UserError as error:
                        yield Answer(index, None, error)
                    else:
                        if (alone := self._alone(index, plan, one[0])) is not None:
                            yield alone
                        else:
                            self._coming.append((index, plan))
                    index += 1
            # Those that wait for memory come one by one as others leave.
            over = not more and (pulling or not self._waiting)
            self._iterations.follow(self._running(), more=more and pulling and not pausing, over=over)
            self._step(self._admit)
            yield from self._refused()
            if pulse is not None:
                pulse(self.load)
            yield from self._step(self._served)
        if broken is not None:
            raise broken

    # Coming and going.

    def _running(self) -> int:
        joining = sum(len(members) for members, _ in self._prefilling)
        return len(self._coming) + len(self._joined) + joining + len(self._members)

    def _alone(self, index: int, plan: Planned, prompt: Prompt) -> Answer | None:
        """The answer of a prompt that cannot share forwards, decoded at once; None where it can."""
        target = self.decoder.ready(plan.settings)
        if not isinstance(target, PathModel) and target.shares:
            return None
        result = self.decoder.generate(prompt, plan.settings, energy=False)
        return Answer(index, result, None, plan.notes)

    def _admit(self) -> None:
        """Let those that come and those that wait in, as far as memory allows."""
        self._waiting += [Member(index, self.decoder, plan, _slots(plan)) for index, plan in self._coming]
        self._coming = []
        while self._waiting and self._admitted(self._waiting[0]):
            self._joined.append(self._waiting.popleft())
            self._iterations.hold(self._running())

    def _admitted(self, member: Member) -> bool:
        """Whether there is room for it now."""
        decoder, drafts = self.decoder, member.plan.drafts
        if self._buffers.target is None:
            self._buffers.target = self._shared(decoder.target)
        if drafts and self._buffers.draft is None:
            assert decoder.draft is not None
            decoder.draft.require_tree()
            self._buffers.draft = self._shared(decoder.draft)
        if not member.enter(self._buffers.target):
            return False
        if drafts and self._iterations.pays(member.kind, member.settings):
            self._gets_draft(member)
        if member.lacks_room:
            member.target.leave()
        return not member.lacks_room

    def _refused(self) -> Iterator[Answer]:
        """A prompt that has to wait though nobody is under way would wait for ever."""
        if not self._waiting:
            return
        if self._running() == 0:
            member = self._waiting.popleft()
            yield Answer(member.index, None, UserError(
                f"the prompt may need {member.size} tokens of keys and values, and memory has room for "
                f"{self._room()}: give a smaller --width or --max-new-tokens"))  # fmt: skip
        elif not self._told:
            self._told = True
            self._tell(f"memory has room for {self._running()} of these prompts at a time: the others wait")

    def _room(self) -> int:
        return min(
            shared.slots for shared in (self._buffers.target, self._buffers.draft) if shared is not None
        )

    def _shared(self, model: Any) -> SharedModel:
        on_gpu = model.device.type == "cuda"
        size = self._waiting[0].size
        if on_gpu:  # larger buffers have to be captured anew: leave room for the longest, and for longer ones
            size = max(member.size for member in self._waiting)
            size = 1 << (size - 1).bit_length()
        shared = SharedModel(model, self.size * (_CAPTURED_ROWS if on_gpu else _ROWS), size)
        slots = self._slots
        if slots is None:
            slots = int(free_memory(model.device) * _SHARE / max(1, shared.bytes_per_slot))
            slots = group_of(self.decoder.target.model).least(slots)
        shared.slots = slots
        shared.spare = min(_SPARE, slots // 8) if shared.takes_over else 0
        # What is to be expected, at once: every growth is a copy.
        shared.room([size] * min(self.size, slots // size))
        return shared

    # A round.

    def _served(self) -> list[Answer]:
        """A round for all who are let in; answers of those who are done, and have left."""
        self._prefill()
        done = [(member, member.result(member.run)) for member in self._round()]
        for member, _ in done:
            member.leave(keep=True)
        return [Answer(member.index, result, None, member.notes) for member, result in done]

    def _prefill(self) -> None:
        """One forward over prompts, so that those that decode do not wait for all of them."""
        if self._joined:
            self._prefilling.append((self._joined, self._steps(self._joined)))
            self._joined = []
        while self._prefilling:
            members, steps = self._prefilling[0]
            if next(steps, self) is not self:
                return
            self._prefilling.popleft()
            self._begin(members)

    def _begin(self, members: list[Member]) -> None:
        """Their prompts are read: decode them from now on."""
        pipelines = [self._pipeline(member) for member in members]
        self._catch_up([
            member for member, pipeline in zip(members, pipelines, strict=True)
            if pipeline is not None and pipeline.drafts
        ])  # fmt: skip
        for member, pipeline in zip(members, pipelines, strict=True):
            member.begin(pipeline)
            member.advance()
        self._members += members

    def _steps(self, joined: list[Member]) -> Iterator[None]:
        assert self._buffers.target is not None
        for member in joined:
            member.prepare(self._running)
        forwards = [self._buffers.target.prefill([member.target for member in joined])]
        drafting = [member.draft for member in joined if member.draft is not None and not member.later]
        if drafting:
            assert self._buffers.draft is not None
            forwards.append(self._buffers.draft.prefill(drafting))
        for _ in zip_longest(*forwards):
            yield

    def _round(self) -> list[Member]:
        """Serve what all of them need, drafts first; those that are done."""
        done = [member for member in self._members if member.done]
        waiting = [member for member in self._members if not member.done]
        computes = [(member, member.need) for member in waiting if isinstance(member.need, Compute)]
        drafts = [pair for pair in computes if pair[0].draft is not None and pair[1].model is pair[0].draft]
        served = drafts or computes
        if served:
            shared = self._buffers.draft if drafts else self._buffers.target
            assert shared is not None
            shared.compute([need for _, need in served])
        turns = [member for member in waiting if isinstance(member.need, Turn)]
        moves = self._moves(waiting)
        left = {member.seat.pipeline for member in moves if member.seat is not None}
        for pipeline in dict.fromkeys(member.seat.pipeline for member in turns if member.seat is not None):
            pipeline.step(ahead=pipeline not in left)
        for member in [*(member for member, _ in served), *turns]:
            member.advance()
        self._move({member: pipeline for member, pipeline in moves.items() if not member.done})
        self._members = [member for member in self._members if member not in done]
        return done

    def _move(self, moves: Mapping[Member, Pipeline]) -> None:
        drafting = [member for member, pipeline in moves.items() if pipeline.drafts]
        for member in drafting:
            # A draft that was not asked in the last iterations reads what was said meanwhile.
            if member.draft is not None and member.seat is not None and member.seat.draft is None:
                member.draft.begin_above(member.run.hypotheses.active)
        self._catch_up(drafting)
        for member, pipeline in moves.items():
            member.move(pipeline)

    def _moves(self, members: Sequence[Member]) -> dict[Member, Pipeline]:
        """Where those that have a seat go on, if not where they are."""
        now, found = (self._iterations.places, self._iterations.load), {}
        everyone, self._served_as = now != self._served_as, now
        for member in members:
            # Else whoever has come since is where it should be, as long as its draft can be asked.
            if member.seat is not None and (
                everyone or (member.seat.draft is not None and self._outgrew(member))
            ):
                wanted = self._pipeline(member)
                if wanted is not None and wanted is not member.seat.pipeline:
                    found[member] = wanted
        return found

    def _pipeline(self, member: Member) -> Pipeline | None:
        """What runs whole iterations on the device for requests like this one; None: the host verifies."""
        found = self._iterations.pipeline(member.kind, member.settings, member.plan.drafts)
        if found is None or not found.drafts or self._gets_draft(member):
            return found
        return self._iterations.pipeline(member.kind, member.settings, False)

    def _gets_draft(self, member: Member) -> bool:
        """Whether it has a draft to ask, from now on if not before: there may be no context left, or no room."""
        draft, ids, root = self._buffers.draft, member.plan.ids, member.trie.root
        assert draft is not None
        if self._outgrew(member):
            if FULL not in member.notes:
                member.notes.append(FULL)
            return False
        if member.draft is None and not member.lacks_room:
            member.draft = draft.admit(ids, root, member.size, member.kind.top_n[1])
            member.lacks_room = member.draft is None
        return member.draft is not None

    def _outgrew(self, member: Member) -> bool:
        """Whether the draft's context has no room for an iteration on a device, and its text goes without."""
        if not self._iterations.priced(member.kind):
            return False
        assert self._buffers.draft is not None
        length = len(member.plan.ids)
        limit = self._buffers.draft.model.limit_for(length)
        depth = member.run.hypotheses.active[0].depth if member.begun else 0
        return limit is not None and length + depth + member.settings.gamma >= limit

    def _catch_up(self, members: Iterable[Member]) -> None:
        """Drafts that are asked from now on read what they have not: the prompt, and below it what beams share not."""
        needs = []
        for member in members:
            if (draft := member.draft) is not None:
                beams = member.run.hypotheses.active if member.begun else []
                above = dict.fromkeys(node.parent for node in beams if node.parent is not None)
                needs.append(Compute(draft, [node for node in above if node not in draft.tree]))
        if needs:
            assert self._buffers.draft is not None
            self._buffers.draft.compute(needs)


def _slots(plan: Planned) -> int:
    """Of keys and values, that it may come to need."""
    return most_nodes(plan.settings, len(plan.ids), plan.budget)
