"""A Hugging Face causal LM as a `TreeModel`: one tree, one key/value pool, one forward a call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding import lean
from dsbd_cli.decoding.cuda_graph import GraphForward, why_not
from dsbd_cli.decoding.dense_joint import dense_joint
from dsbd_cli.decoding.hf import TreeForward, context_limit
from dsbd_cli.decoding.law import Row, Support, Warp, joint
from dsbd_cli.decoding.rows import Best, best_of, best_rows, finite_rows, log_probabilities
from dsbd_cli.decoding.selftest import check_tree, refusal, refuse_unserved
from dsbd_cli.decoding.tree import Node
from dsbd_cli.decoding.tree_pool import Plan, TreePool
from dsbd_cli.errors import RunError

# Prompt tokens a forward: keeps the mask and the activations of a long prompt small.
_CHUNK = 2048
# Slots and mask rows to start with; both double when they run out.
_SIZES = 512, 64
_RECORDED_SIZES = 2048, 512


class _Dense(NamedTuple):
    """A whole row, left where the forward put it: float32 [V], and whether it is finite."""

    logps: Tensor
    finite: bool


class _Sparse(NamedTuple):
    """A node's best entries on the host: row `place` of `block`."""

    block: Best
    place: int


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
    """

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
        self.notes: list[str] = []
        self._graphs: GraphForward | None = None
        self._record = self.device.type == "cuda" if graphs is None else graphs
        if self._record and (reason := why_not(module)):
            self._no_graphs(reason)
        self._use(
            lean.LeanForward(module, int8=int8) if fast and lean.serves(module) else TreeForward(module)
        )
        self._rows: dict[Node, _Dense | _Sparse] = {}
        self._row_size = 0
        self._tainted = False
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
        wrong = check_tree(self, self.model, self.vocab_size)
        if wrong and not isinstance(self._forward, TreeForward):
            self.notes.append(
                f"{self.role}: the fast forward is not used, it disagrees with the model's own ({wrong})"
            )
            self._use(TreeForward(self.model))
            wrong = check_tree(self, self.model, self.vocab_size)
        if wrong:
            self._served = False
            raise refusal(self.model, wrong)

    def _use(self, forward: TreeForward | lean.LeanForward) -> None:
        """Compute with `forward` from now on, in a new pool."""
        self._forward = forward
        # Buffers that grow cost a recording its pointers: start large where forwards are recorded.
        slots, rows = _RECORDED_SIZES if self._record else _SIZES
        self._pool = TreePool(slots, rows, getattr(forward, "dtype", self.dtype), self.device)
        if self._record:
            self._graphs = GraphForward(forward, self._pool, self.vocab_size, self.device)

    def _no_graphs(self, reason: str) -> None:
        self._record, self._graphs = False, None
        self.notes.append(f"{self.role}: no CUDA graphs, {reason}")

    # What the run reports.

    @property
    def max_depth(self) -> int | None:
        """Depth of the deepest node that the context limit leaves room for."""
        return None if self.max_positions is None else self.max_positions - len(self._pool.prompt)

    @property
    def slots_peak(self) -> int:
        """Most slots in use at a time since the last `prefill` began."""
        return self._pool.slots.peak

    @property
    def bytes_per_slot(self) -> int:
        return self._pool.cache.bytes_per_slot

    @property
    def bytes_peak(self) -> int:
        return self.slots_peak * self.bytes_per_slot

    @property
    def bytes_allocated(self) -> int:
        return self._pool.cache.capacity * self.bytes_per_slot

    # TreeModel.

    @torch.inference_mode()
    def prefill(
        self, ids: Sequence[int], root: Node, *, row_size: int = 0, reuse: bool = True, room: int = 0
    ) -> None:
        """Start a new tree behind the prompt `ids` (at least one), in one pass.

        Args:
            ids: prompt tokens.
            root: the node that stands for them; known afterwards.
            row_size: how many best entries of each row will be asked for; 0 keeps whole rows.
            reuse: take over the prefix that the last prompt or its answer shares with this one.
            room: slots to have ready beyond the prompt, so that buffers need not grow later.
        """
        self.require_tree()
        if self._tainted:
            # Masked keys and values have weight 0, but 0 x NaN is NaN: leave nothing of a broken run.
            self._pool.cache.clear()
        kept = self._pool.shared_prefix(ids) if reuse and not self._tainted else []
        self._pool.start(ids, root, kept, room)
        self._tainted, self._row_size, self.calls = False, row_size, 0
        logits = torch.zeros(0)
        for begin in range(len(kept), len(ids), _CHUNK):
            plan = self._pool.prompt_plan(begin, min(begin + _CHUNK, len(ids)))
            slots = torch.tensor(plan.slots, device=self.device)
            end = begin + len(plan)
            unmasked = getattr(self._forward, "needs_no_mask", None)
            if unmasked is not None and unmasked(begin) and self._pool.straight(end):
                mask = None
                self._pool.masks.see(plan.mask_rows[0], slots)
            else:
                mask = self._pool.masks.causal(plan.mask_rows[0], slots)
            logits = self._compute(plan, slots, mask, 1)
        self._rows = {}
        self._store([root], logits)

    @torch.inference_mode()
    def forward(self, nodes: Iterable[Node]) -> None:
        # In order, not as a set: slots follow it, and sums over slots round by their order.
        wanted = dict.fromkeys(node for node in nodes if node not in self._rows)
        if not wanted:
            return
        batch = self._pool.missing(wanted)
        keep = [i for i, node in enumerate(batch) if node in wanted]
        plan = self._pool.plan(batch)
        if not self._replay(plan, batch, keep):
            base, rows, slots = torch.tensor([plan.base, plan.mask_rows, plan.slots], device=self.device)
            inside = torch.from_numpy(plan.inside).to(self.device)
            mask = self._pool.masks.extend(base, rows, slots, inside)
            head = 0 if len(keep) == len(batch) else torch.tensor(keep, device=self.device)
            self._store([batch[i] for i in keep], self._compute(plan, slots, mask, head))
        self.calls += 1

    def knows(self, node: Node) -> bool:
        return node in self._rows

    def joint(self, parents: Sequence[Node], scores: Sequence[float], warp: Warp) -> Support:
        if not warp.row_size and self.device.type == "cuda":
            for node in parents:
                self._checked(node)
            return dense_joint(scores, torch.stack([self.log_row(node) for node in parents]), warp)
        return joint(scores, [self._row(node, warp.row_size) for node in parents], warp)

    def best(self, node: Node, count: int) -> tuple[np.ndarray, np.ndarray]:
        row = self._checked(node)
        if isinstance(row, _Dense):
            best = best_of(row.logps[None], torch.ones(1, device=row.logps.device), count)
            return best.tokens[0], best.logps[0]
        tokens, logps = row.block.tokens[row.place], row.block.logps[row.place]
        if count > len(tokens) < self.vocab_size:
            raise ValueError(f"{count} entries of a row asked for, {len(tokens)} were prepared")
        return tokens[:count], logps[:count]

    def log_row(self, node: Node) -> Tensor:
        """A known node's whole row, float32 [V] on the device (`row_size` 0 only)."""
        row = self._rows[node]
        if isinstance(row, _Sparse):
            raise ValueError("whole rows asked for, only the best entries were prepared")
        return row.logps

    def retain(self, leaves: Iterable[Node]) -> None:
        keep = self._pool.retain(leaves)
        self._rows = {node: row for node, row in self._rows.items() if node in keep}

    # Inside.

    def _replay(self, plan: Plan, batch: list[Node], keep: list[int]) -> bool:
        """Forward by a recording, if there is one or can be."""
        if self._graphs is None or not self._graphs.takes(plan):
            return False
        try:
            if self._row_size:
                block = self._graphs.best(plan, self._row_size)
                self._rows.update((batch[i], _Sparse(block, i)) for i in keep)
            else:
                self._store([batch[i] for i in keep], self._graphs.logits(plan)[keep])
        except RuntimeError as error:
            self._no_graphs(f"recording failed ({str(error).splitlines()[0]})")
            return False
        return True

    def _compute(self, plan: Plan, slots: Tensor, mask: Tensor | None, head: Tensor | int) -> Tensor:
        """Logits [K, V'] of the nodes that `head` names."""
        cache = self._pool.cache
        cache.slots, cache.used = slots, plan.used
        if getattr(self._forward, "reads_length", False):
            cache.length = torch.tensor([plan.used], device=self.device)
        ids, positions = torch.tensor([plan.ids, plan.positions], device=self.device)
        seen: Any = None if mask is None else mask[:, : plan.used]
        return self._forward(cache, ids, positions, seen, head)

    def _store(self, nodes: list[Node], logits: Tensor) -> None:
        """Keep what the law will ask of these nodes' rows [N, V']."""
        if self._row_size:
            block = best_rows(logits, self.vocab_size, self._row_size)
            self._rows.update((node, _Sparse(block, i)) for i, node in enumerate(nodes))
        else:
            logps = log_probabilities(logits, self.vocab_size)
            finite = finite_rows(logps).tolist()
            self._rows.update((node, _Dense(logps[i], finite[i])) for i, node in enumerate(nodes))

    def _checked(self, node: Node) -> _Dense | _Sparse:
        row = self._rows[node]
        if not (row.finite if isinstance(row, _Dense) else row.block.finite[row.place]):
            self._tainted = True
            dtype = str(self.dtype).removeprefix("torch.")
            raise RunError(
                f"the {self.role} model ({self.name}) gave logits that are not finite at step {node.depth} "
                f"in {dtype}: try --dtype float32 or bfloat16, or check its weights"
            )
        return row

    def _row(self, node: Node, size: int) -> Row:
        if size:
            tokens, logps = self.best(node, size)
            return Row(tokens, logps.astype(np.float64))
        self._checked(node)
        return Row(np.arange(self.vocab_size), self.log_row(node).cpu().numpy().astype(np.float64))
