"""The one place that decides whether a device runs whole iterations, and by which law.

One `Engines` belongs to a `Decoder`: it keeps the captured iterations from prompt to prompt (they are
dear) and remembers what could not be captured. Environment read here: DSBD_NATIVE=0 keeps Triton out,
TRITON_INTERPRET=1 lets its interpreter run the kernels on a CPU (tests).
One module, since what is chosen, why nothing else is, and what is kept of it are one answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from dsbd_cli.decoding.device.cover_host import CoverHost
from dsbd_cli.decoding.device.draft_iteration import DraftIteration
from dsbd_cli.decoding.device.iteration import CoverIteration
from dsbd_cli.decoding.device.law import DeviceLaw
from dsbd_cli.decoding.device.law_torch import TorchLaw
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.device.pipeline import Pipeline
from dsbd_cli.decoding.device.proposer import CapturedProposer
from dsbd_cli.decoding.device.seat import Seat
from dsbd_cli.decoding.device.tree_host import TreeHost
from dsbd_cli.decoding.device.tree_iteration import TreeIteration
from dsbd_cli.decoding.device.tree_layout import TreeLayout, tree_nodes
from dsbd_cli.decoding.forward.backends import on_current_device
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from dsbd_cli.decoding.law.beam_search import candidates_kept
from dsbd_cli.decoding.law.distribution import Sampler, SeededSampler
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.protocol import Demand, Side
from dsbd_cli.decoding.model.shared import SharedModel
from dsbd_cli.decoding.tree.sequences import Trie

# Captured iterations to keep, one for each way of decoding: a sweep goes through many in turns.
_MOST_ITERATIONS = 32

# Some hundred small kernels a layer: on an H200 10 ms a call where the host's way took less (docs/speed.md). Where
# Triton's law does not take a layout, or is not there, the host has it.
_ACCEPTS_SLOWLY = "several drafted draws a layer are accepted quicker by the host than by tensor operations"

# Places of a token tree, all computed in every iteration, whatever is drawn there.
_MOST_TREE_NODES = 64

_Iteration = TypeVar("_Iteration", CoverIteration, DraftIteration, TreeIteration)


@dataclass(frozen=True)
class Choice:
    """What runs the iterations of one run; at most one of both.

    Attributes:
        engine: pipelined iterations, the device verifies.
        proposer: captured iterations, the host verifies.
        law: the name of the law that the engine runs.
        why_no_engine, why_no_proposer: why not, in words; empty where there is one, or where there is an
            engine and no proposer is needed.
    """

    engine: Seat | None = None
    proposer: CapturedProposer | None = None
    law: str = ""
    why_no_engine: str = ""
    why_no_proposer: str = ""

    def describe(self) -> str:
        """Which engine runs, and why no other: one sentence."""
        if self.engine is not None:
            return f"pipelined iterations, the device verifies ({self.law})"
        if self.proposer is not None:
            return f"captured iterations, the host verifies (not pipelined: {self.why_no_engine})"
        if self.why_no_engine == self.why_no_proposer:
            return f"step by step on the host (nothing is pipelined or captured: {self.why_no_engine})"
        return f"step by step on the host (not pipelined: {self.why_no_engine}; not captured: {self.why_no_proposer})"


class Engines:
    """Chooses engines, and keeps what they capture.

    Attributes:
        notes: what a user should know about engines that are not used.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._iterations: dict[tuple[Any, ...], CoverIteration | DraftIteration | TreeIteration] = {}
        # (kind, target, draft) of what cannot be captured, and why.
        self._refused: dict[tuple[Any, ...], str] = {}

    def choose(
        self, target: HfTreeModel, draft: HfTreeModel | None, demand: Demand, trie: Trie, draft_sampler: Sampler
    ) -> Choice:  # fmt: skip
        """The engine, or the proposer, for one run on prefilled models; both may be None.

        Args:
            draft: None without one.
            demand: what the method asks of an engine.
            trie, draft_sampler: of the request.
        """
        eos = tuple(sorted(trie.eos_ids))
        draft = draft if demand.gamma else None
        engine, why_no_engine = self._pipeline(target, draft, demand, eos)
        if isinstance(engine, Pipeline):
            return Choice(engine=Seat(engine, target, draft), law=why_no_engine)
        proposer, why_no_proposer = self._proposer(target, draft, demand, eos, trie, draft_sampler)
        return Choice(None, proposer, "", why_no_engine, why_no_proposer)

    def _pipeline(
        self, target: HfTreeModel, draft: HfTreeModel | None, demand: Demand, eos: tuple[int, ...]
    ) -> tuple[Pipeline | None, str]:
        """The pipeline and the name of its law, or None and why not."""
        draft_width, gamma = demand.draft_width, demand.gamma
        key = "pipelined", target, draft
        if reason := demand.why_not_pipelined or self._refused.get(key) or _why_not(target, draft, demand):
            return None, reason
        limits = [
            model.max_positions for model in (target, draft) if model is not None and model.max_positions
        ]
        if min(limits, default=gamma + 2) < gamma + 2:
            return None, "a context is shorter than the positions that a capture runs through"
        if demand.tree:
            return self._tree_pipeline(target, draft, demand, eos)
        ours, theirs = target.side(), None if draft is None else draft.side()
        greedy, support, distinct = demand.processor.greedy, demand.processor.top_n, demand.distinct
        sizes = 1, demand.width, draft_width, gamma, *_layers(demand, eos, ours, theirs)
        layout = CoverLayout.of(*sizes)
        law = _law(target.device, layout, ours, theirs)
        if law is None:
            return None, _ACCEPTS_SLOWLY

        def make() -> CoverIteration:
            return CoverIteration(
                ours, theirs, law, layout, greedy, support, eos, target.device, target.clock, distinct
            )

        iteration = self._kept(("pipelined", ours, theirs, *sizes, greedy, support, eos, distinct), make)
        if reason := self._prepared(iteration, key):
            return None, reason
        pipeline = Pipeline(iteration, CoverHost(layout), target.clock, self._stopped(key))
        return pipeline, type(iteration.law).__name__

    def _tree_pipeline(
        self, target: HfTreeModel, draft: HfTreeModel | None, demand: Demand, eos: tuple[int, ...]
    ) -> tuple[Pipeline | None, str]:
        """`_pipeline` for token trees."""
        if draft is None:
            return None, "nothing is drafted"
        if tree_nodes(demand.tree) > _MOST_TREE_NODES:
            return None, f"the host drafts token trees of more than {_MOST_TREE_NODES} nodes"
        key = "pipelined", target, draft
        ours, theirs, law = target.side(), draft.side(), quickest_law(target.device)
        layout = TreeLayout.of(demand.tree, ours.top_n, theirs.top_n, demand.processor.top_n)
        sizes = demand.tree, demand.tree_rule, layout.support, layout.draft_support, eos
        iteration = self._kept(
            ("pipelined", ours, theirs, *sizes),
            lambda: TreeIteration(
                ours, theirs, law, layout, demand.tree_rule, eos, target.device, target.clock
            ),
        )
        if reason := self._prepared(iteration, key):
            return None, reason
        name = f"{type(law).__name__}, token trees by tensor operations"
        return Pipeline(iteration, TreeHost(layout), target.clock, self._stopped(key)), name

    def together(
        self, target: SharedModel, draft: SharedModel | None, demand: Demand, eos: tuple[int, ...],
        top_n: tuple[int, int], lanes: int,
    ) -> Pipeline | None:  # fmt: skip
        """The pipeline for requests of this demand that share both models, or None: the host verifies.

        Args:
            top_n: entries of each row of logits that the target and the draft keep.
            lanes: how many requests at a time.
        """
        draft = draft if demand.gamma else None
        models = target.model, None if draft is None else draft.model
        key = "pipelined", *models
        if demand.why_not_pipelined or self._refused.get(key) or not all(top_n[: 1 if draft is None else 2]):
            return None
        if demand.tree:
            return None  # a tree is drawn and verified for one request at a time
        if any(model is not None and not model.captured for model in models):
            return None
        if draft is not None and (draft.model.lacks_ids or draft.model.device != target.model.device):
            return None
        ours, theirs = target.side(top_n[0]), None if draft is None else draft.side(top_n[1])
        if theirs is not None and theirs.top_n < _least(demand):
            return None
        limits = [model.max_positions for model in models if model is not None and model.max_positions]
        if min(limits, default=demand.gamma + 2) < demand.gamma + 2:
            return None
        sizes = lanes, demand.width, demand.draft_width, demand.gamma, *_layers(demand, eos, ours, theirs)
        layout = CoverLayout.of(*sizes)
        law = _law(target.model.device, layout, ours, theirs)
        if law is None:
            return None
        greedy, support, clock = demand.processor.greedy, demand.processor.top_n, target.model.clock
        iteration = CoverIteration(
            ours, theirs, law, layout, greedy, support, eos, target.model.device, clock, demand.distinct
        )
        if self._prepared(iteration, key):
            return None
        return Pipeline(iteration, CoverHost(layout), clock, self._stopped(key))

    def _proposer(
        self, target: HfTreeModel, draft: HfTreeModel | None, demand: Demand, eos: tuple[int, ...], trie: Trie,
        sampler: Sampler,
    ) -> tuple[CapturedProposer | None, str]:  # fmt: skip
        """The proposer, or None and why not."""
        if draft is None or demand.gamma < 1:
            return None, "nothing is drafted"
        key = "captured", target, draft
        reason = demand.why_not_captured or self._refused.get(key) or _why_not(target, draft, demand)
        if reason:
            return None, reason
        if not isinstance(sampler, SeededSampler):
            return None, "the draft's sampler has no seed"
        ours, theirs, processor = target.side(), draft.side(), demand.draft_processor
        sizes = demand.draft_width, demand.gamma, demand.width, processor, eos
        iteration = self._kept(
            ("captured", ours, theirs, *sizes),
            lambda: DraftIteration(ours, theirs, *sizes, target.device, target.clock),
        )
        if reason := self._prepared(iteration, key):
            return None, reason
        return CapturedProposer(target, draft, iteration, trie, sampler, self._stopped(key)), ""

    def _prepared(
        self, iteration: CoverIteration | DraftIteration | TreeIteration, key: tuple[Any, ...]
    ) -> str:
        """Capture `iteration` now; why that is not possible, or nothing."""
        try:
            iteration.prepare()
        except (CannotCapture, OutOfMemory) as error:
            self._stopped(key)(error)
            return str(error)
        return ""

    def _stopped(self, key: tuple[Any, ...]) -> Callable[[CannotCapture | OutOfMemory], None]:
        """What to do when `key` (kind, target, draft) cannot be launched: only "cannot" is remembered."""
        kind, target, _ = key
        effect = "the host verifies" if kind == "pipelined" else "drafting step by step"

        def stopped(error: CannotCapture | OutOfMemory) -> None:
            if isinstance(error, CannotCapture):
                self._refused[key] = str(error)
                self._note(f"{target.role}: {effect}, an iteration cannot be captured ({error})")
                self._let_go(kind)
            else:
                self._note(f"{target.role}: {effect} for now, no memory is left for captures ({error})")
                self.release()

        return stopped

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _let_go(self, kind: str) -> None:
        """Forget the iterations of a kind; what is in flight of them still comes back."""
        self._iterations = {key: kept for key, kept in self._iterations.items() if key[0] != kind}

    def release(self) -> None:
        """Let go of every capture: their memory is free for something else."""
        for iteration in self._iterations.values():
            iteration.captures.release()
        self._iterations.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _kept(self, key: tuple[Any, ...], make: Callable[[], _Iteration]) -> _Iteration:
        """The iteration of `key` (kind, target's side, draft's side, ...), or a new one.

        Every one holds memory: let go are those of trees that are no more, then those used longest ago.
        """
        trees = [side and side.tree for side in key[1:3]]
        for old in list(self._iterations):
            others = (side and side.tree for side in old[1:3])
            if any(mine and other and mine is not other for mine, other in zip(trees, others, strict=True)):
                del self._iterations[old]
        found: Any = self._iterations.pop(key, None) or make()
        while len(self._iterations) >= _MOST_ITERATIONS:
            del self._iterations[next(iter(self._iterations))]
        self._iterations[key] = found  # the last one used comes last
        return found  # type: ignore[no-any-return]


def _layers(
    demand: Demand, eos: tuple[int, ...], target: Side, draft: Side | None
) -> tuple[int, int, int, bool]:
    """What layers are made of: `kept`, `drawn`, `recalled` and `continues` of `CoverLayout`."""
    recalled = target.top_n if demand.recalls and demand.gamma else 0
    return _kept(demand, eos, target.top_n), _drawn(demand, draft), recalled, demand.continues


def _kept(demand: Demand, eos: tuple[int, ...], top_n: int) -> int:
    """Candidates of a layer of beam search, of which there are at most W x top_n; 0 where layers are drawn."""
    if not demand.search:
        return 0
    return min(candidates_kept(demand.width, len(eos)), demand.width * top_n)


def _drawn(demand: Demand, draft: Side | None) -> int:
    """Entries of q that a drafted layer is drawn from; 0 where it is the most probable continuations."""
    if demand.draft_processor is None or draft is None:
        return 0
    return min(demand.draft_processor.top_n, max(demand.width, demand.draft_width) * draft.top_n)


def _least(demand: Demand) -> int:
    """The fewest entries of a row of the draft's logits from which a layer can be made."""
    return demand.draft_width if demand.draft_processor is None else 1


def _why_not(target: HfTreeModel, draft: HfTreeModel | None, demand: Demand) -> str | None:
    """What keeps these models' forwards from being captured as one; None where nothing does."""
    if not target.captured or (draft is not None and not draft.captured):
        if target.device.type != "cuda":
            return "that is for GPUs"
        return "one of the models is not captured" if draft is not None else "the model is not captured"
    if not target.logits.size:
        return "full logits are needed"
    if draft is None:
        return None
    if draft.lacks_ids:
        return "the draft lacks tokens of the target"
    if target.device != draft.device:
        return "the models are on different devices"
    if min(draft.logits.size, draft.vocab_size) < _least(demand):
        return "full logits are needed"
    return None


def quickest_law(device: torch.device) -> DeviceLaw:
    """The quickest law that there is on this device."""
    return next(_laws(device))


def _law(device: torch.device, layout: CoverLayout, ours: Side, theirs: Side | None) -> DeviceLaw | None:
    """The quickest law that takes iterations of this layout; None where the host is quicker."""
    best = (ours.top_n, theirs.top_n if theirs else 0)
    law = next(law for law in _laws(device) if law.takes(layout, *best))
    slow = layout.drawn and layout.draft_width > 1 and isinstance(law, TorchLaw)
    return None if slow and device.type == "cuda" else law


def _laws(device: torch.device) -> Iterator[DeviceLaw]:
    """The quickest first."""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    compiled = interpreted or (device.type == "cuda" and on_current_device(device))
    if compiled and os.environ.get("DSBD_NATIVE") != "0":
        try:
            from dsbd_cli.decoding.device.law_triton import TritonLaw  # Triton comes with CUDA wheels only
        except ImportError:
            pass
        else:
            yield TritonLaw(device)
    yield TorchLaw()
