"""One forward as one replay: CUDA graphs over static buffers, unmodified modelling code inside.

Launching a model's kernels one by one from Python costs several times what they compute (docs/speed.md:
27.4 ms against 9.5 for an 8B on an H100). A forward is therefore padded to the next bucket of node
counts and of slots, and captured once per bucket, from the copied inputs to the best entries of each
row of logits. In go seven integers a node, out comes one small block.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import SPARE, Span
from dsbd_cli.decoding.cache.logits import Best, finite_logits, log_probabilities, pack, unpack
from dsbd_cli.decoding.cache.tree_cache import Plan, TreeCache
from dsbd_cli.decoding.forward.attention import without_planning
from dsbd_cli.decoding.forward.capture import Captures, InFlight, OverlapClock, Steps, slots_to_see
from dsbd_cli.decoding.forward.outcomes import TooLarge

NODE_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
# Prompts are padded to these; longer ones keep a device busy without being captured. (By what lengths take on an
# H200, docs/speed.md: 448 tokens take longer than 512.)
PROMPT_BUCKETS = (32, 64, 96, 128, 160, 192, 256, 272, 304, 320, 384, 512, 640, 768, 896, 1024)
PLAN_ROWS = 7  # ids, positions, slots, mask rows, base rows, who sees whom as 64 bits, slots in use


def node_bucket(count: int, buckets: tuple[int, ...] = NODE_BUCKETS) -> int:
    """The smallest bucket that holds `count` nodes.

    Raises:
        TooLarge: none does.
    """
    for bucket in buckets:
        if bucket >= count:
            return bucket
    raise TooLarge(f"{count} nodes, and captures have room for {buckets[-1]}")


def pad(plan: Plan, size: int) -> np.ndarray:
    """A plan as int64 [7, size]: padded nodes write to the spare slot, which only they see.

    Their token is one that is there, since a model may have others that nobody trained.
    """
    count = len(plan)
    packed = np.zeros((PLAN_ROWS, size), dtype=np.int64)
    packed[0] = plan.ids[-1:] or [0]
    packed[2, count:] = SPARE
    packed[:5, :count] = plan.ids, plan.positions, plan.slots, plan.mask_rows, plan.base
    seen = np.zeros((size, 64), dtype=bool)
    seen[:count, :count] = plan.inside
    # A padded row hidden from everything would be NaN, and NaN in the spare slot would spread.
    seen[count:, count:size] = True
    packed[5] = np.packbits(seen, axis=1, bitorder="little").view(np.int64)[:, 0]
    packed[6] = plan.used
    return packed


def _padded_prompt(plan: Plan, size: int) -> Tensor:
    """A whole prompt as int64 [5, size]: ids, positions, slots to write, slots that its mask row sees; mask row, last
    token's place. Padded tokens write to the free slots behind it, so that what they see is all of this forward."""
    count = len(plan)
    packed = np.zeros((5, size), dtype=np.int64)
    packed[0], packed[2] = plan.ids[-1], np.arange(1, size + 1)
    packed[:3, :count] = plan.ids, plan.positions, plan.slots
    packed[3] = plan.slots[-1]
    packed[3, :count] = plan.slots
    packed[4, :2] = plan.mask_rows[0], count - 1
    return torch.from_numpy(packed)


def seen_inside(bits: Tensor) -> Tensor:
    """bool [N, N] from N words of 64 bits."""
    return ((bits[:, None] >> torch.arange(len(bits), device=bits.device)) & 1).bool()


class GraphForward:
    """Runs plans over `tree` with `forward`, captured.

    Args:
        forward: `hf.HfForward` or `llama.LlamaForward`.
        tree: whose buffers the captures point to; when they grow, everything is captured anew.
        vocab: columns of the head that count.
        device: where to run.
        clock: the model's.

    Attributes:
        captures: by (nodes, slots to see, entries of each row of logits); of prompts by (`prompt`, tokens, entries).
        prompts: whether whole prompts are captured as well; taken back where that failed.
    """

    def __init__(
        self, forward: Any, tree: TreeCache, vocab: int, device: torch.device, clock: OverlapClock
    ) -> None:
        self.forward, self.tree, self.vocab = forward, tree, vocab
        self.captures = Captures(device, clock, breaks=(forward,))
        self.prompts = True

    def launch(self, plan: Plan, count: int) -> InFlight:
        """Launch the forward of `plan` for the `count` best entries of every node's row; waits for nothing.

        Raises:
            TooLarge, CannotCapture, OutOfMemory: nothing was computed.
        """
        key = self._key(plan, min(count, self.vocab))
        return self.captures.launch(key, self._packed(plan, key[0]), lambda inputs: self._steps(inputs, *key))

    def wait(self, flight: InFlight, count: int) -> Best:
        """Wait for the one forward in flight; the rows of its `count` nodes."""
        return unpack(flight.wait()[:count])

    def logits(self, plan: Plan) -> Tensor:
        """Forward `plan`; logits [N, V'], valid until the next forward. Raises like `launch`."""
        key = self._key(plan, 0)
        outputs = self.captures.run(key, self._packed(plan, key[0]), lambda inputs: self._steps(inputs, *key))
        return outputs[1][: len(plan)]

    def takes_prompt(self, count: int) -> bool:
        """Whether a whole prompt of `count` tokens, in slots 1, 2, ..., is one capture too.

        Its tokens are then padded behind, where no token of the prompt looks.
        """
        if not self.prompts or not self.forward.takes_spans or not self.forward.needs_no_mask(0):
            return False
        return count <= PROMPT_BUCKETS[-1] and node_bucket(count, PROMPT_BUCKETS) < self.tree.cache.capacity

    def launch_prompt(self, plan: Plan, count: int) -> InFlight:
        """Launch a whole prompt for the `count` best entries of its last token's row; waits for nothing.

        A length that comes for the first time runs uncaptured, padded all the same: one prompt, one result.

        Raises:
            CannotCapture, OutOfMemory: nothing was computed.
        """
        return self.captures.launch(*self._prompt(plan, min(count, self.vocab)), rare=True)

    def prompt_logits(self, plan: Plan) -> Tensor:
        """Forward a whole prompt; the logits [1, V'] of its last token. Raises like `launch_prompt`."""
        return self.captures.run(*self._prompt(plan, 0), rare=True)[1]

    def _prompt(self, plan: Plan, size: int) -> tuple[tuple[str, int, int], Tensor, Steps]:
        """Key, request and steps of a whole prompt."""
        self.captures.valid_for(self.tree.stores.pointers())
        tokens = node_bucket(len(plan), PROMPT_BUCKETS)
        return (
            ("prompt", tokens, size),
            _padded_prompt(plan, tokens),
            lambda inputs: self._prompt_steps(inputs, size),
        )

    def _prompt_steps(self, inputs: Tensor, size: int) -> list[Tensor]:
        """A whole prompt, on tensors of fixed shapes: best entries, logits."""
        ids, positions, where, seen, (row, last) = *inputs[:4], inputs[4, :2].split(1)
        cache, masks, count = self.tree.cache, self.tree.masks, len(ids)
        cache.slots, cache.used, cache.spans = where, count + 1, (Span(0, count, 0, count + 1),)
        with without_planning() if inputs.is_cuda else nullcontext():
            logits = self.forward(cache, ids, positions, None, last)
        masks.table.index_put_((row.expand(count), seen), masks.table.new_zeros(()))
        return self._told(logits, size)

    def _key(self, plan: Plan, size: int) -> tuple[int, int, int]:
        self.captures.valid_for(self.tree.stores.pointers())
        return node_bucket(len(plan)), slots_to_see(self.forward, plan.used, self.tree.cache.capacity), size

    def _packed(self, plan: Plan, nodes: int) -> Tensor:
        return torch.from_numpy(pad(plan, nodes))

    def _steps(self, inputs: Tensor, nodes: int, slots: int, size: int) -> list[Tensor]:
        """The forward itself, on tensors of fixed shapes: best entries, logits."""
        ids, positions, where, rows, base, bits, used = inputs
        mask = self.tree.masks.extend(base, rows, where, seen_inside(bits))
        cache = self.tree.cache
        cache.slots, cache.used, cache.spans = where, slots, (Span(0, nodes, 0, slots),)
        cache.begins, cache.length = torch.zeros_like(used[:1]), used[:1]
        return self._told(self.forward(cache, ids, positions, mask[:, :slots], 0), size)

    def _told(self, logits: Tensor, size: int) -> list[Tensor]:
        """The `size` best entries of each row (`pack`), and the rows."""
        if not size:
            return [logits[:0], logits]
        logps = log_probabilities(logits, self.vocab)
        return [pack(logps, finite_logits(logps), size), logits]


def why_not(model: Any) -> str | None:
    """What keeps a model from being captured; None where nothing is known to."""
    devices = {weight.device for weight in model.parameters()}
    if len(devices) > 1:
        return "its weights are spread over several devices"
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        return "its weights are moved by hooks"
    return why_not_shared(model)


def why_not_shared(model: Any) -> str | None:
    """What keeps a forward from serving sequences of several lengths; None where nothing is known to."""
    scaling = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(part.get("rope_type")) for part in scaling.values() if isinstance(part, dict)}
    if {str(scaling.get("rope_type")), *kinds} & {"dynamic", "longrope"}:
        return "its positions depend on the length so far"
    return None
