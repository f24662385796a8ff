"""A Hugging Face causal LM as a `TreeModel`: one tree, its keys and values, one forward a call.

One module, since prompts, forwards and what is kept of them work on the same cache and the same logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import LogitStore, Span, Told
from dsbd_cli.decoding.cache.tree_cache import Plan, TreeCache
from dsbd_cli.decoding.forward import backends
from dsbd_cli.decoding.forward.attention import without_planning
from dsbd_cli.decoding.forward.backends import Forward
from dsbd_cli.decoding.forward.capture import InFlight, OverlapClock, quiet
from dsbd_cli.decoding.forward.graphs import GraphForward, why_not, why_not_shared
from dsbd_cli.decoding.forward.hf import context_limit
from dsbd_cli.decoding.forward.kernels import keep_logits
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory, TooLarge
from dsbd_cli.decoding.forward.plain import why_not_captured
from dsbd_cli.decoding.forward.selftest import Verdict, check_tree, refusal, refuse_unserved
from dsbd_cli.decoding.forward.ways import Ways
from dsbd_cli.decoding.forward.whole import WholeForward
from dsbd_cli.decoding.model.protocol import Side
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import UserError
from dsbd_cli.loading.architecture import device_of, head_rows, input_rows, rope_border
from dsbd_cli.loading.ready.packed import Place
from dsbd_cli.prices import Prices

# Prompt tokens a forward: keeps the mask and the activations of a long prompt small.
_CHUNK = 2048
# Slots and mask rows to start with; both double when they run out.
_SIZES = 512, 64
_NO_GPU = "there are none on this device"
_CAPTURED_SIZES = 2048, 512


class HfTreeModel(Told):
    """One model over one tree (`model.protocol.TreeModel`).

    Args:
        model: causal LM, in eval mode on its device.
        vocab_size: the tokenizer's; columns beyond it are padding and have probability 0.
        ids: the tokens of the head's columns, int64 ascending; None: a column is its token.
        role: what errors call it, `target` or `draft`.
        max_positions: context limit; None takes the config's.
        fast: use a fused forward where one serves the model and agrees with it (`forward.backends`).
        int8: with `fast`, on a CPU: multiply in int8 (a draft's proposals may be anything).
        int8_activations: with `fast`, on a CPU: round activations to 8 bits where they meet 4-bit blocks.
        graphs: capture forwards as CUDA graphs; None: on a CUDA device, if the model can be captured.
        tested: what the self-test said of this model before: it is not run again.
        test: False takes the first forward as it is: for timing alone.

    Attributes:
        calls: forwards since the last `prefill`, that one left out.
        notes: what a user should know about how this model was run.
        in_vain: those of them that say why a number format that was asked for is not computed in.
        tree, logits: the tree it has computed, and the logits of its nodes.
        whole: off while all of it is worked on, here or by who measures: left off, somebody was interrupted.
        undone: what interrupted a forward of which nothing is left; see `_launch`.
        clock: how much of the consumer's time the device works.
    """

    tree: TreeCache
    _forward: Forward

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        ids: np.ndarray | None = None,
        role: str = "target",
        max_positions: int | None = None,
        fast: bool = True,
        int8: bool = False,
        int8_activations: bool = False,
        graphs: bool | None = None,
        tested: Verdict | None = None,
        test: bool = True,
    ) -> None:
        # A `LoadedModel` names itself; a bare module is named by its config.
        module: Any = model if isinstance(model, torch.nn.Module) else model.model
        self.model = module
        self.name = str(module.config.name_or_path or module.config.model_type)
        if module is not model:
            self.name = model.name
        self.role = role
        self.device, self.dtype = device_of(module), module.dtype
        readable = input_rows(module)
        # Rows that the head lacks have probability 0; a draft proposes nothing that it could not read.
        known = [head_rows(module), readable if role == "draft" else None]
        self.vocab_size = min([vocab_size, *(rows for rows in known if rows is not None)])
        self._readable = readable if readable is not None and readable < vocab_size else None
        self._border = rope_border(module.config)
        self._long = False
        self.max_positions = max_positions or getattr(model, "max_positions", None) or context_limit(module)
        self.calls = 0
        self.notes: list[str] = []
        self.logits = LogitStore(f"the {role} model ({self.name})", self.dtype, self.vocab_size, ids)
        self.clock = OverlapClock()
        self.graphs: GraphForward | None = None
        self._short_of_memory = False
        # Nodes, which of the planned ones they are, how many were planned.
        self._in_flight: tuple[InFlight, list[Node], list[int], int] | None = None
        # A prompt that is not read to its end: how much of it is computed, its ids, its node.
        self._unread: tuple[int, Sequence[int], Node] | None = None
        self.whole, self.undone = True, cast(BaseException | None, None)
        self._capture = self.device.type == "cuda" if graphs is None else graphs
        self._why_no_graphs = "" if self._capture else "it was not asked for"
        if graphs is None and not self._capture:
            self._why_no_graphs = _NO_GPU
        if self._capture and (reason := why_not(module) or why_not_captured(module)):
            self._no_graphs(reason)
        self._fused = backends.why_not_fused(module)
        self._ways = Ways(
            module, role, self.notes, tested=tested, test=test, fast=fast, int8=int8, int8_activations=int8_activations
        )  # fmt: skip
        self.in_vain = self._ways.in_vain
        self._use(self._ways.forward)
        if self.device.type == "cpu" and (reason := backends.why_no_code()) is not None:
            self.notes.append(f"{role}: slower, for there is no code in C: {reason}")

    def require_tree(self) -> None:
        """Make sure, once, that the tree mask serves this model.

        Raises:
            UserError: the architecture is not served.
        """
        if self._ways.served:
            return
        refuse_unserved(self.model, self.name)
        if not self.whole:
            self.renew()
        self.whole = False
        while wrong := check_tree(self, self.model, self.vocab_size):
            if not self._ways.refuse(wrong):
                self.whole = True
                raise refusal(self.model, self.name, wrong)
            self._use(self._ways.forward)
        self._ways.agreed()
        self.whole = True

    def renew(self) -> None:
        """Start from nothing, whatever was interrupted where: a new tree, new captures, the self-test anew."""
        quiet(self.device)  # buffers go that something in flight may write to
        self._ways.renew()
        self._in_flight = self._unread = None
        self.clock.idle()
        self.logits.start(0)
        self.tree.cache.let_go()  # a traceback may hold the tree
        self._use(self._ways.forward)
        self.whole, self.undone = True, None

    def verdict(self) -> Verdict:
        """What the self-test said, for the next load of the same model; runs it if it was not run yet.

        Raises:
            UserError: the architecture is not served.
        """
        self.require_tree()
        return self._ways.verdict()

    def keep_packed(self, place: Place) -> None:
        """Keep the weights as the chosen forward reads them, where it is one that packs them in C."""
        self.require_tree()
        if isinstance(self._forward, WholeForward):
            self._forward.keep(place)

    def _use(self, forward: Forward) -> None:
        """Compute with `forward` from now on, in a new tree."""
        self._forward = self._ways.forward = forward
        # Buffers that grow cost a capture its pointers: start large where forwards are captured.
        slots, rows = _CAPTURED_SIZES if self._capture else _SIZES
        self.tree = TreeCache.alone(slots, rows, forward.dtype, self.device)
        if self._capture:
            self.graphs = GraphForward(forward, self.tree, self.vocab_size, self.device, self.clock)

    def _no_graphs(self, reason: str) -> None:
        self._capture, self.graphs, self._why_no_graphs = False, None, reason
        self.notes.append(f"{self.role}: no CUDA graphs, {reason}")

    @property
    def int8_activations(self) -> bool:
        """Whether it does round activations to 8 bits: it was asked to, and it can."""
        if self._forward.int8_activations:
            with contextlib.suppress(UserError):  # said when a tree is asked for
                self.require_tree()
        return self._forward.int8_activations

    @property
    def captured(self) -> bool:
        """Whether forwards are captured as CUDA graphs (not while memory is short)."""
        return self.graphs is not None and not self._short_of_memory

    @property
    def tree_forward(self) -> Forward:
        """The forward that serves this model's trees; `require_tree` has chosen it."""
        self.require_tree()
        return self._forward

    @property
    def shares(self) -> bool:
        """Whether several requests can share a forward: not where positions depend on a length."""
        return self._border is None and why_not_shared(self.model) is None

    def describe(self) -> str:
        """Which forward serves this model, and beside a GPU whether it is captured: one sentence."""
        own = "" if self._fused is None else f" (no fused forward: {self._fused})"
        told = f"{self._forward.describe()}{own}"
        if self._why_no_graphs == _NO_GPU:
            return told
        captured = "captured as CUDA graphs" if self._capture else f"no CUDA graphs ({self._why_no_graphs})"
        return f"{told}; {captured}"

    def side(self) -> Side:
        """What captured iterations need of this model."""
        top_n = min(self.logits.size, self.vocab_size)
        return Side(self._forward, self.tree.stores, self.vocab_size, top_n, self.tree)

    # What the run reports.

    @property
    def max_depth(self) -> int | None:
        """Depth of the deepest node that the context limit leaves room for."""
        length = self.tree.prompt_length
        limit = self.limit_for(length)
        return None if limit is None else limit - length

    def limit_for(self, prompt_tokens: int) -> int | None:
        """Most tokens of prompt and answer together, or None.

        Where rope factors change at a length, a run stays on the side that its prompt is on: keys computed
        with the one kind do not go with queries of the other.
        """
        limits = [self.max_positions, self._border if self._below(prompt_tokens) else None]
        return min((limit for limit in limits if limit is not None), default=None)

    def _below(self, tokens: int) -> bool:
        return self._border is not None and tokens <= self._border

    @property
    def lacks_ids(self) -> bool:
        """Whether there are tokens that this model has no embedding for."""
        return self._readable is not None

    def reads(self, node: Node) -> bool:
        """Whether it has an embedding for every generated token of `node`."""
        return self.reads_ids(node.tokens()) if self.lacks_ids else True

    def reads_ids(self, ids: Sequence[int]) -> bool:
        """Whether it has an embedding for all of `ids`."""
        return self._readable is None or all(token < self._readable for token in ids)

    @property
    def slots_peak(self) -> int:
        """Most slots in use at a time since the last `prefill` began."""
        return self.tree.slots.peak

    @property
    def bytes_per_slot(self) -> int:
        return self.tree.cache.bytes_per_slot

    @property
    def bytes_peak(self) -> int:
        return self.slots_peak * self.bytes_per_slot

    @property
    def bytes_allocated(self) -> int:
        return self.tree.cache.capacity * self.bytes_per_slot

    def assumed_prices(self, draft: HfTreeModel) -> Prices | None:
        """Prices where none are measured: from the bytes that the forwards read and the kind of forward.

        None where a forward costs about the same whatever is in it.
        """
        if self.device.type != "cpu":
            return None
        return Prices.assumed(draft._bytes_read() / self._bytes_read(), self._forward.relative_node_cost)

    def _bytes_read(self) -> float:
        int8 = self._forward.int8
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        stored = getattr(table, "weight", None)
        looked_up = None if getattr(head, "weight", None) is stored else stored
        return sum(
            one.numel() * (1 if int8 else one.element_size())
            for one in self.model.parameters()
            if one is not looked_up
        )

    # TreeModel.

    @torch.inference_mode()
    def prefill(
        self, ids: Sequence[int], root: Node, *, top_n: int = 0, reuse: bool = True, later: bool = False,
        idle: bool = True, wait: bool = True,
    ) -> None:  # fmt: skip
        """Start a new tree behind the prompt `ids` (at least one), in one pass.

        Args:
            ids: prompt tokens.
            root: the node that stands for them; known afterwards.
            top_n: how many best entries of each node's logits will be asked for; 0 keeps full logits.
            reuse: take over the prefix that the last prompt or its answer shares with this one.
            later: read the prompt when the first forward needs it: a draft that is never asked never does.
            idle: wait first for what a run that was left may have in flight; off behind a target that has.
            wait: for what a captured prompt gives; off, `settle` does.
        """
        self.require_tree()
        self.start(ids, root, top_n, reuse, later, idle)
        if wait:
            self._wait()

    @torch.inference_mode()
    def start(
        self, ids: Sequence[int], root: Node, top_n: int, reuse: bool, later: bool = False, idle: bool = True
    ) -> None:
        """`prefill` by the forward as it is, tested or not."""
        if idle and self.graphs is not None and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._in_flight, self._short_of_memory = None, False
        self.clock.idle()
        if self.logits.tainted:
            # Masked keys and values have weight 0, but 0 x NaN is NaN: leave nothing of a broken run.
            self.tree.cache.clear()
        long, before = self._border is not None and not self._below(len(ids)), self._long
        self._long = long
        sound = not self.logits.tainted and long == before
        kept = self.tree.shared_prefix(ids) if reuse and sound else []
        if self._unread is not None:  # of the last prompt no more was computed
            kept = kept[: self._unread[0]]
        self.tree.start(ids, root, kept)
        self.logits.start(top_n)
        self.calls = 0
        self._unread = len(kept), ids, root
        if not later:
            self._read_prompt()

    @torch.inference_mode()
    def settle(self) -> None:
        """Wait for the prompt, where `prefill` did not."""
        self._wait()

    @torch.inference_mode()
    def _read_prompt(self) -> None:
        """Compute what of the prompt was left for later; what a capture gives may be in flight."""
        if self._unread is None:
            return
        known, ids, root = self._unread
        logits = torch.zeros(0)
        # Beyond a border of rope factors every part of the prompt has to see its whole length.
        chunk = len(ids) if self._long else _CHUNK
        for begin in range(known, len(ids), chunk):
            plan = self.tree.prompt_plan(begin, min(begin + chunk, len(ids)))
            end = begin + len(plan)
            if len(plan) == len(ids) and self.tree.straight(end) and self._replay_prompt(plan, root):
                self._unread = None
                return
            slots = torch.tensor(plan.slots, device=self.device)
            if self._forward.needs_no_mask(begin) and self.tree.straight(end):
                mask = None
                self.tree.masks.see(plan.mask_rows[0], slots)
            else:
                mask = self.tree.masks.causal(plan.mask_rows[0], slots)
            logits = self._compute(plan, slots, mask, 1)
            self._unread = end, ids, root  # if the rest is interrupted
        keep_logits(self.logits, [root], logits)
        self._unread = None

    def forward(self, nodes: Iterable[Node]) -> None:
        if self.graphs is None:
            self._launch(nodes)
            return
        with torch.inference_mode():
            self._wait()
            self._launch(nodes)
            self._wait()

    def begin(self, nodes: Iterable[Node]) -> None:
        """Launch what `forward` will be asked for next, if it is captured: then nothing is waited for."""
        if self.captured and self.logits.size:
            with torch.inference_mode():
                self._launch(nodes)

    def _launch(self, nodes: Iterable[Node]) -> None:
        # In order, not as a set: slots follow it, and sums over slots round by their order.
        wanted = dict.fromkeys(node for node in nodes if node not in self.logits)
        if not wanted:
            return
        if self._unread is not None:
            self._read_prompt()
            self._wait()
        batch = self.tree.missing(wanted)
        keep = [i for i, node in enumerate(batch) if node in wanted]
        plan = self.tree.plan(batch)
        try:
            self._run(plan, batch, keep)
        except BaseException as error:  # Ctrl-C too: a chat goes on from what was computed
            self.roll_back(batch)
            if self.graphs is None:  # what captures stand for is known no more
                self.undone = error
            raise
        self.calls += 1

    def log_row(self, node: Node) -> Tensor:
        """A known node's whole row, float32 [V] on the device (`top_n` 0 only)."""
        return self.logits.whole(node)

    def retain(self, leaves: Iterable[Node]) -> None:
        self.logits.keep(self.tree.retain(leaves))

    def roll_back(self, nodes: Sequence[Node]) -> None:
        """Undo the planning of `nodes` that were not computed after all."""
        self.tree.roll_back(nodes)
        self.logits.forget(nodes)

    # Inside.

    def _run(self, plan: Plan, batch: list[Node], keep: list[int]) -> None:
        """Compute planned nodes; launched only, where that is captured."""
        if self._replay(plan, batch, keep):
            return
        forward, store = self._forward, self.logits
        if store.size and isinstance(forward, WholeForward) and forward.takes_plans:
            best = forward.best(self.tree.stores, plan, keep, store.vocab, store.size)
            store.put_best([batch[i] for i in keep], best, range(len(keep)))
        else:
            self._run_by_tensors(plan, batch, keep)

    @torch.inference_mode()
    def _run_by_tensors(self, plan: Plan, batch: list[Node], keep: list[int]) -> None:
        base, rows, slots = torch.tensor([plan.base, plan.mask_rows, plan.slots], device=self.device)
        inside = torch.from_numpy(plan.inside).to(self.device)
        mask = self.tree.masks.extend(base, rows, slots, inside)
        head = 0 if len(keep) == len(batch) else torch.tensor(keep, device=self.device)
        keep_logits(self.logits, [batch[i] for i in keep], self._compute(plan, slots, mask, head))

    def _replay(self, plan: Plan, batch: list[Node], keep: list[int]) -> bool:
        """Forward by a captured graph, if there is one or can be."""
        if self.graphs is None or not self.captured:
            return False
        nodes = [batch[i] for i in keep]
        try:
            if self.logits.size:
                self._in_flight = self.graphs.launch(plan, self.logits.size), nodes, keep, len(plan)
            else:
                keep_logits(self.logits, nodes, self.graphs.logits(plan)[keep])
        except TooLarge:
            return False
        except CannotCapture as error:
            self._no_graphs(f"capturing failed ({error})")
            return False
        except OutOfMemory as error:
            self._run_short(error)
            return False
        return True

    def _replay_prompt(self, plan: Plan, root: Node) -> bool:
        """Read the whole prompt by a captured graph, if there is one or can be."""
        if self.graphs is None or not self.captured or self._long or not self.graphs.takes_prompt(len(plan)):
            return False
        try:
            if self.logits.size:
                self._in_flight = self.graphs.launch_prompt(plan, self.logits.size), [root], [0], 1
            else:
                keep_logits(self.logits, [root], self.graphs.prompt_logits(plan))
        except CannotCapture as error:
            self.graphs.prompts = False
            self.notes.append(
                f"{self.role}: prompts are read without CUDA graphs, capturing failed ({error})"
            )
            return False
        except OutOfMemory as error:
            self._run_short(error)
            return False
        return True

    def _run_short(self, error: OutOfMemory) -> None:
        self._short_of_memory = True  # until the next prompt
        note = f"{self.role}: no CUDA graphs for now, no memory is left for them ({error})"
        if note not in self.notes:
            self.notes.append(note)

    def _wait(self) -> None:
        """Wait for a captured forward in flight, and keep its logits."""
        if self._in_flight is None or self.graphs is None:
            return
        flight, nodes, keep, count = self._in_flight
        self._in_flight = None
        self.logits.put_best(nodes, self.graphs.wait(flight, count), keep)

    def _compute(self, plan: Plan, slots: Tensor, mask: Tensor | None, head: Tensor | int) -> Tensor:
        """Logits [K, V'] of the nodes that `head` names."""
        cache = self.tree.cache
        cache.slots, cache.used, cache.spans = slots, plan.used, (Span(0, len(plan), 0, plan.used),)
        if self._forward.reads_length:
            cache.begins, cache.length = torch.tensor([[0], [plan.used]], device=self.device)
        ids, positions = torch.tensor([plan.ids, plan.positions], device=self.device)
        seen: Any = None if mask is None else mask[:, : plan.used]
        if self.device.type != "cuda":
            return self._forward(cache, ids, positions, seen, head)
        with without_planning():
            return self._forward(cache, ids, positions, seen, head)
