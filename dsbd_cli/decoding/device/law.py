"""What an iteration on the device asks of a law: the few operations between its forwards."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dsbd_cli.decoding.cache.buffers import TreeMasks
from dsbd_cli.decoding.device.layout import CoverLayout, DraftLayout
from dsbd_cli.decoding.model.protocol import Side


class DeviceLaw(Protocol):
    """`law/` in operations of fixed shapes on the device (docs/design.md sections 1 to 3), R requests at a time.

    `TorchLaw` and `TritonLaw` are the implementations; both decide what the host would decide.
    """

    def takes(self, layout: CoverLayout, target_top_n: int, draft_top_n: int) -> bool:
        """Whether there is room for these sizes."""

    def pack(self, side: Side, logits: Tensor) -> Tensor:
        """`logits.pack` of the log-probabilities of logits [N, >= vocab]: float32 [N, 2 top_n + 1]."""

    def draft(
        self, best: Tensor, scores: Tensor, depth: int, layout: CoverLayout | DraftLayout, outcome: Tensor,
        eos: Tensor,
    ) -> None:  # fmt: skip
        """Draft one layer: the W_S most probable distinct continuations, into the forest in `outcome`.

        Args:
            best: float32 [R x P, 2 k + 1], packed draft logits of the P parents of each request.
            scores: float64 [R, P], their log weights; -inf for what is none.
            depth: 0 below the beams.
            outcome: int64 [R, size].
            eos: int64 [E]; draws of these are finished, hence no parents.
        """

    def draw(
        self, best: Tensor, scores: Tensor, depth: int, layout: CoverLayout | DraftLayout, request: Tensor,
        outcome: Tensor, eos: Tensor, greedy: bool, support: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        """Draft one layer by W_S draws of q, into the forest in `outcome` with all that they were drawn from.

        Args:
            request: int64 [R, size], T and the uniforms; the others as for `draft` and `verify`.
            distinct: W_S distinct draws, as far as there are continuations; else iid.
        """

    def recall(
        self, best: Tensor, known: Tensor, depth: int, layout: CoverLayout, outcome: Tensor, memory: Tensor
    ) -> Tensor:
        """Below nodes that the target computed in the iteration before, its own best entries for the draft's.

        Args:
            best: float32 [R x P, 2 k + 1], packed draft logits of the P parents of layer `depth`; written to.
            known: int64 [R, P'], of the parents of the layer above what this returned; of depth 0 `state.known`.
            outcome: int64 [R, size], with the forest's layers above.
            memory: int64 [R, memory size], of the iteration before.

        Returns:
            int64 [R, P]: the parents' places among the nodes of the iteration before, counted from 1; 0 for none.
        """

    def forest_masks(
        self, masks: TreeMasks, base: Tensor, parent: Tensor | None, slots: Tensor, rows: Tensor
    ) -> Tensor:
        """Mask rows of forests, entered into the table.

        Args:
            base: int64 [R, P], mask rows of the nodes above the first layer.
            parent: int64 [R, L, w], places in the layer above (first layer: in `base`); None: one layer
                of P nodes, each below its own base.
            slots, rows: int64 [R, L x w], by layers.

        Returns:
            [R x L x w, table width].
        """

    def catch_up_masks(
        self, masks: TreeMasks, state: Tensor, layout: CoverLayout, slots: Tensor, rows: Tensor
    ) -> Tensor:
        """Mask rows of the beams' parents and of the beams in the draft's tree, entered into the table.

        Beams stand below their parent where the draft lacks it (`missing`), else below its own row.

        Args:
            state: int64 [R, size].
            slots, rows: int64 [R, 2 W], of the parents, then of the beams.

        Returns:
            [R x 2 W, table width]: of each request the parents, then the beams.
        """

    def verify(
        self, best: Tensor, state: Tensor, after: Tensor, request: Tensor, outcome: Tensor, layout: CoverLayout,
        eos: Tensor, greedy: bool, support: int, distinct: bool = False,
    ) -> None:  # fmt: skip
        """Layers of the target's joint for as long as the forest holds what they go on with.

        `layout` says which: draws (`cover`), the best candidates (beam search), or draws of q that are accepted as
        draws of p (`paper`, `continue`, speculative sampling).

        Args:
            best: float32 [R x nodes, 2 k + 1], packed target logits of the beams, then of the forest.
            state, request: int64 [R, size].
            after: int64 [R, size], written: the state of the next iteration.
            outcome: its forest is read, its verified layers are written.
            greedy: temperature 0 and its like: the one most probable continuation.
            support: entries of the joint that T looks at (top-k).
            distinct: a layer's draws are distinct, as far as there are continuations; else iid.
        """
