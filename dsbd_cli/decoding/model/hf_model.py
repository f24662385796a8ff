"""A Hugging Face causal LM as a `TreeModel`: one tree, one key/value pool, one forward a call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.tree_cache import Plan, TreeCache
from dsbd_cli.decoding.device.chain_iteration import DeviceChain
from dsbd_cli.decoding.device.iteration import DeviceLoop
from dsbd_cli.decoding.device.layout import Side
from dsbd_cli.decoding.device.pipeline import Chain, chain_for
from dsbd_cli.decoding.device.proposer import DeviceProposer, device_proposer
from dsbd_cli.decoding.forward import backends
from dsbd_cli.decoding.forward.backends import Forward
from dsbd_cli.decoding.forward.graphs import Flight, GraphForward, why_not
from dsbd_cli.decoding.forward.hf import context_limit
from dsbd_cli.decoding.forward.logits import LogitStore
from dsbd_cli.decoding.forward.selftest import check_tree, refusal, refuse_unserved
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Support
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import first_line

# Prompt tokens a forward: keeps the mask and the activations of a long prompt small.
_CHUNK = 2048
# Slots and mask rows to start with; both double when they run out.
_SIZES = 512, 64
_RECORDED_SIZES = 2048, 512
# Recorded iterations to keep, one for each way of decoding: a sweep goes through many in turns.
_MOST_ITERATIONS = 32
# Nodes of a layer of an adaptive forest, on average.
_LAYER_NODES = 4


class HfTreeModel:
    """One model over one tree (`decoding.model.TreeModel`).

    Args:
        model: causal LM, in eval mode on its device.
        vocab_size: the tokenizer's; columns beyond it are padding and have probability 0.
        role: what errors call it, `target` or `draft`.
        max_positions: context limit; None takes the config's.
        fast: use `lean` where it serves the model and agrees with it.
        int8: with `fast`, on a CPU: multiply in int8 (a draft's proposals may be anything).
        graphs: record forwards as CUDA graphs; None: on a CUDA device, if the model can be recorded.

    Attributes:
        calls: forwards since the last `prefill`, that one left out.
        notes: what a user should know about how this model was run.
        pool, rows: the tree it has computed, and what it said about its nodes.
    """

    pool: TreeCache

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        role: str = "target",
        max_positions: int | None = None,
        fast: bool = True,
        int8: bool = False,
        graphs: bool | None = None,
    ) -> None:
        # A `LoadedModel` names itself; a bare module is named by its config.
        module: Any = model if isinstance(model, torch.nn.Module) else model.model
        self.model = module
        self.name = str(module.config.name_or_path or module.config.model_type)
        if module is not model:
            self.name = model.name
        self.role, self.vocab_size = role, vocab_size
        self.device, self.dtype = module.device, module.dtype
        self.max_positions = max_positions or getattr(model, "max_positions", None) or context_limit(module)
        self.calls = 0
        self._root = Node(-1, None)
        self.notes: list[str] = []
        self.rows = LogitStore(f"the {role} model ({self.name})", self.dtype, vocab_size)
        self._graphs: GraphForward | None = None
        self._loops: dict[tuple[Any, ...], DeviceLoop] = {}
        self._no_loops: str | None = None
        self._chains: dict[tuple[Any, ...], DeviceChain] = {}
        self._no_chains = False
        self._underway: tuple[list[Node], Flight, list[int]] | None = None
        self._flying, self._ahead_s, self._left_s = False, 0.0, 0.0
        self._record = self.device.type == "cuda" if graphs is None else graphs
        if self._record and (reason := why_not(module)):
            self._no_graphs(reason)
        self._ways = backends.candidates(module, int8=int8, fused=fast)
        self._use(next(self._ways))
        self._served = False

    def require_tree(self) -> None:
        """Make sure, once, that the tree mask serves this model.

        Raises:
            UserError: the architecture is not served.
        """
        if self._served:
            return
        refuse_unserved(self.model)
        self._served = True  # the check itself runs forwards
        while wrong := check_tree(self, self.model, self.vocab_size):
            way = next(self._ways, None)
            if way is None:
                self._served = False
                raise refusal(self.model, wrong)
            name = type(self._forward).__name__
            self.notes.append(
                f"{self.role}: {name} is not used, it disagrees with the model's own forward ({wrong})"
            )
            self._use(way)
        self._ways = iter(())  # lets go of what was tried

    def _use(self, forward: Forward) -> None:
        """Compute with `forward` from now on, in a new pool."""
        self._forward = forward
        # Buffers that grow cost a recording its pointers: start large where forwards are recorded.
        slots, rows = _RECORDED_SIZES if self._record else _SIZES
        self.pool = TreeCache(slots, rows, forward.dtype, self.device)
        if self._record:
            self._graphs = GraphForward(forward, self.pool, self.vocab_size, self.device)

    def _no_graphs(self, reason: str) -> None:
        self._record, self._graphs = False, None
        self.notes.append(f"{self.role}: no CUDA graphs, {reason}")

    # What the run reports.

    @property
    def max_depth(self) -> int | None:
        """Depth of the deepest node that the context limit leaves room for."""
        return (
            None if self.max_positions is None else self.max_positions - self.pool.prompt_length(self._root)
        )

    @property
    def slots_peak(self) -> int:
        """Most slots in use at a time since the last `prefill` began."""
        return self.pool.slots.peak

    @property
    def bytes_per_slot(self) -> int:
        return self.pool.cache.bytes_per_slot

    @property
    def bytes_peak(self) -> int:
        return self.slots_peak * self.bytes_per_slot

    @property
    def bytes_allocated(self) -> int:
        return self.pool.cache.capacity * self.bytes_per_slot

    def relative_cost(self, draft: Any) -> float | None:
        """What one more drafted layer costs, in calls of this target (`draft_length`).

        None where a forward costs about the same whatever is in it.
        From the bytes that the forwards read and the nodes of an average layer, not from a clock.
        """
        if self.device.type != "cpu" or not isinstance(draft, HfTreeModel):
            return None
        return draft._bytes_read() / self._bytes_read() + _LAYER_NODES * self._forward.relative_node_cost

    def _bytes_read(self) -> float:
        int8 = self._forward.int8
        return sum(one.numel() * (1 if int8 else one.element_size()) for one in self.model.parameters())

    # TreeModel.

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], root: Node, *, top_n: int = 0, reuse: bool = True) -> None:
        """Start a new tree behind the prompt `ids` (at least one), in one pass.

        Args:
            ids: prompt tokens.
            root: the node that stands for them; known afterwards.
            top_n: how many best entries of each row will be asked for; 0 keeps whole rows.
            reuse: take over the prefix that the last prompt or its answer shares with this one.
        """
        self.require_tree()
        if self._graphs is not None and self.device.type == "cuda":
            # A run that was left may have work under way.
            torch.cuda.current_stream(self.device).synchronize()
        self._underway, self._flying = None, False
        if self.rows.tainted:
            # Masked keys and values have weight 0, but 0 x NaN is NaN: leave nothing of a broken run.
            self.pool.cache.clear()
        kept = self.pool.shared_prefix(ids) if reuse and not self.rows.tainted else []
        self._root = root
        self.pool.start(ids, root, kept)
        self.rows.start(top_n)
        self.calls = 0
        logits = torch.zeros(0)
        for begin in range(len(kept), len(ids), _CHUNK):
            plan = self.pool.prompt_plan(root, begin, min(begin + _CHUNK, len(ids)))
            slots = torch.tensor(plan.slots, device=self.device)
            end = begin + len(plan)
            if self._forward.needs_no_mask(begin) and self.pool.straight(root, end):
                mask = None
                self.pool.masks.see(plan.mask_rows[0], slots)
            else:
                mask = self.pool.masks.causal(plan.mask_rows[0], slots)
            logits = self._compute(plan, slots, mask, 1)
        self.rows.put([root], logits)

    @torch.inference_mode()
    def forward(self, nodes: Iterable[Node]) -> None:
        self._land()
        self._set_off(nodes)
        self._land()

    @torch.inference_mode()
    def begin(self, nodes: Iterable[Node]) -> None:
        """Set off what `forward` will be asked for next, if it is recorded: then nothing is waited for."""
        if self._graphs is not None and self.rows.size:
            self._set_off(nodes)

    def _set_off(self, nodes: Iterable[Node]) -> None:
        # In order, not as a set: slots follow it, and sums over slots round by their order.
        wanted = dict.fromkeys(node for node in nodes if node not in self.rows)
        if not wanted:
            return
        batch = self.pool.missing(wanted)
        keep = [i for i, node in enumerate(batch) if node in wanted]
        plan = self.pool.plan(batch)
        if not self._replay(plan, batch, keep):
            base, rows, slots = torch.tensor([plan.base, plan.mask_rows, plan.slots], device=self.device)
            inside = torch.from_numpy(plan.inside).to(self.device)
            mask = self.pool.masks.extend(base, rows, slots, inside)
            head = 0 if len(keep) == len(batch) else torch.tensor(keep, device=self.device)
            self.rows.put([batch[i] for i in keep], self._compute(plan, slots, mask, head))
        self.calls += 1

    def meanwhile(self, seconds: float) -> float:
        """How much of `seconds` that passed elsewhere the device worked, by the last time that was seen."""
        worked = min(seconds, self._left_s) if self._flying else 0.0
        self._left_s -= worked
        return worked

    def set_off(self, flying: bool) -> None:
        """Whether work of this model is under way."""
        if flying and not self._flying:
            self._left_s = self._ahead_s
        self._flying = flying

    def landed(self, seconds: float | None) -> None:
        """It has come back, after so many seconds; None where that is not known."""
        self._flying = False
        self._ahead_s = seconds or self._ahead_s

    def has_logits(self, node: Node) -> bool:
        return node in self.rows

    def joint(self, parents: Sequence[Node], scores: Sequence[float], processor: LogitsProcessor) -> Support:
        return self.rows.joint(parents, scores, processor)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.rows.best(node, count)

    def log_row(self, node: Node) -> Tensor:
        """A known node's whole row, float32 [V] on the device (`top_n` 0 only)."""
        return self.rows.whole(node)

    def retain(self, leaves: Iterable[Node]) -> None:
        self.rows.keep(self.pool.retain(leaves))

    # Drafting and verifying on the device (`device_draft`).

    def device_proposer(self, draft: Any, *how: Any) -> DeviceProposer | None:
        """A proposer that drafts and verifies in one recording, or None (`device_draft.device_proposer`)."""
        if not isinstance(draft, HfTreeModel):
            return None
        return device_proposer(self, draft, *how)

    def why_no_loop(self, draft: HfTreeModel, least: int) -> str | None:
        """What keeps this target and `draft` from being recorded as one; None where nothing does.

        Args:
            least: entries of a draft row that drafting needs.
        """
        if self._no_loops is not None:
            return self._no_loops
        if self._graphs is None or draft._graphs is None:
            return "one of the models is not recorded"
        if self.device != draft.device:
            return "the models are on different devices"
        if not self.rows.size or min(draft.rows.size, draft.vocab_size) < least:
            return "whole rows are needed"
        return None

    def loop_with(
        self,
        draft: HfTreeModel,
        width: int,
        gamma: int,
        beams: int,
        processor: LogitsProcessor | None,
        eos_ids: list[int],
    ) -> DeviceLoop:
        """The recorded iteration of this target with `draft`; kept, for recordings are dear."""
        ours, theirs = self._side(), draft._side()
        key = (ours, theirs, width, gamma, beams, processor, *eos_ids)
        return _kept(
            self._loops,
            key,
            lambda: DeviceLoop(ours, theirs, width, gamma, beams, processor, eos_ids, self.device),
        )

    def device_chain(self, draft: Any, *how: Any) -> Chain | None:
        """What drafts and verifies on the device, or None (`chain.chain_for`)."""
        if draft is not None and not isinstance(draft, HfTreeModel):
            return None
        return chain_for(self, draft, *how)

    def why_no_chain(self, draft: HfTreeModel | None, draft_width: int) -> str | None:
        """What keeps iterations from following each other on the device; None where nothing does."""
        if self._no_chains or self._graphs is None or not self.rows.size:
            return "this model is not recorded, or whole rows are needed"
        if draft is None:
            return None
        return self.why_no_loop(draft, draft_width)

    def chain_with(
        self,
        draft: HfTreeModel | None,
        width: int,
        processor: LogitsProcessor,
        draft_width: int,
        gamma: int,
        eos_ids: list[int],
    ) -> DeviceChain:
        """The recorded iteration that verifies too; kept, for recordings are dear."""
        ours, theirs = self._side(), None if draft is None else draft._side()
        key = (ours, theirs, width, processor, draft_width, gamma, *eos_ids)
        sizes = ours, theirs, width, processor, draft_width, gamma, eos_ids, self.device
        chains = (kind(*sizes) for kind in _kinds_of_chain(self.device))
        return _kept(self._chains, key, lambda: next(chain for chain in chains if chain.takes()))

    def stop_chains(self, reason: str) -> None:
        """From now on the host verifies."""
        self._no_chains, self._chains = True, {}
        self.notes.append(f"{self.role}: the host verifies, iterations cannot be chained ({reason})")

    def stop_loops(self, reason: str) -> None:
        """From now on the host drafts step by step."""
        self._no_loops, self._loops = reason, {}
        self.notes.append(f"{self.role}: drafting step by step, an iteration cannot be recorded ({reason})")

    def _side(self) -> Side:
        return Side(self._forward, self.pool, self.vocab_size, min(self.rows.size, self.vocab_size))

    def withdraw(self, nodes: Sequence[Node]) -> None:
        """Undo the planning of `nodes` that were not computed after all."""
        self.pool.withdraw(nodes)
        self.rows.forget(nodes)

    # Inside.

    def _replay(self, plan: Plan, batch: list[Node], keep: list[int]) -> bool:
        """Forward by a recording, if there is one or can be."""
        if self._graphs is None or not self._graphs.takes(plan):
            return False
        try:
            nodes = [batch[i] for i in keep]
            if self.rows.size:
                flight = self._graphs.launch(plan, self.rows.size)
                self._underway = nodes, flight, keep
                self.set_off(True)
            else:
                self.rows.put(nodes, self._graphs.logits(plan)[keep])
        except RuntimeError as error:
            self._no_graphs(f"recording failed ({first_line(error)})")
            return False
        return True

    def _land(self) -> None:
        """Wait for a recorded forward under way, and keep its rows."""
        if self._underway is None or self._graphs is None:
            return
        nodes, flight, keep = self._underway
        self._underway = None
        self.rows.put_best(nodes, self._graphs.land(flight), keep)
        self.landed(flight.seconds)

    def _compute(self, plan: Plan, slots: Tensor, mask: Tensor | None, head: Tensor | int) -> Tensor:
        """Logits [K, V'] of the nodes that `head` names."""
        cache = self.pool.cache
        cache.slots, cache.used = slots, plan.used
        if self._forward.reads_length:
            cache.length = torch.tensor([plan.used], device=self.device)
        ids, positions = torch.tensor([plan.ids, plan.positions], device=self.device)
        seen: Any = None if mask is None else mask[:, : plan.used]
        return self._forward(cache, ids, positions, seen, head)


_Kept = TypeVar("_Kept")


def _kept(recorded: dict[tuple[Any, ...], _Kept], key: tuple[Any, ...], make: Callable[[], _Kept]) -> _Kept:
    """The iteration recorded under `key` (which begins with both sides), or a new one.

    Every one holds memory: let go are those of pools that are no more, then those used longest ago.
    """
    pools = [side and side.pool for side in key[:2]]
    for old in list(recorded):
        others = (side and side.pool for side in old[:2])
        if any(mine and other and mine is not other for mine, other in zip(pools, others, strict=True)):
            del recorded[old]
    found = recorded.pop(key, None) or make()
    while len(recorded) >= _MOST_ITERATIONS:
        del recorded[next(iter(recorded))]
    recorded[key] = found  # the last one used comes last
    return found


def _kinds_of_chain(device: torch.device) -> Iterator[type[DeviceChain]]:
    """The quickest first. (Triton's interpreter runs its kernels on a CPU, for tests.)"""
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    compiled = interpreted or (device.type == "cuda" and backends.on_current_device(device))
    if compiled and os.environ.get("DSBD_NATIVE") != "0":
        try:
            from dsbd_cli.decoding.device.triton_chain import TritonChain
        except ImportError:
            pass
        else:
            yield TritonChain
    yield DeviceChain
