"""A proposer whose draft steps and target call run on the device in one go (`DraftIteration`).

It proposes what `DraftModelProposer` proposes; where the device has no place for an iteration (behind
the prompt, near the end of the budget or of the draft's context, too many nodes) it asks that one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch

from dsbd_cli.decoding.device.cover_host import layer_of
from dsbd_cli.decoding.device.draft_iteration import Answer, DraftIteration, DraftRequest, Launched
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory, TooLarge
from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.protocol import Compute
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, draft_room


class CapturedProposer:
    """Drafts on the device and computes the forest there; afterwards the target has the logits of all of it.

    Args:
        target, draft: captured, on one device.
        iteration: made for both.
        trie, sampler: of the request; the sampler is the draft's.
        stopped: told why nothing can be launched any more.
    """

    def __init__(
        self, target: HfTreeModel, draft: HfTreeModel, iteration: DraftIteration, trie: Trie,
        sampler: SeededSampler, stopped: Callable[[CannotCapture | OutOfMemory], None],
    ) -> None:  # fmt: skip
        self.exhausted = False
        self._target, self._draft, self._trie, self._sampler = target, draft, trie, sampler
        self._stopped = stopped
        self._host: Any = None
        self._launched: Launched | None = None
        self._iteration = iteration
        self._usable = True

    def falling_back_to(self, host: Any) -> CapturedProposer:
        """This one, with the proposer (`methods.proposers.Proposer`) to ask where the device has no place."""
        self._host = host
        return self

    @torch.inference_mode()
    def begin(self, beams: list[Node], depth: int) -> None:
        """Launch what `propose` will be asked for next, if the device has a place for it."""
        gamma = self._iteration.gamma
        if (
            not self._usable
            or depth < gamma
            or draft_room(self._draft.max_depth, beams) < depth
            or not beams[0].depth
            or len(beams) > self._iteration.width
        ):
            return
        request = self._request(beams)
        try:
            self._launched = self._iteration.launch(request)
        except TooLarge:
            self._roll_back()
        except (CannotCapture, OutOfMemory) as error:
            self._roll_back()
            self._usable = False
            self._stopped(error)

    def propose(
        self, beams: list[Node], depth: int, width: int | None = None
    ) -> Generator[Compute, None, Forest]:
        if self._launched is None:
            self.begin(beams, depth)
        launched, self._launched = self._launched, None
        if launched is None:
            forest: Forest = yield from self._host.propose(beams, depth, width)
            self.exhausted = self._host.exhausted
            return forest
        answer = self._iteration.wait(launched)
        self._draft.calls += self._iteration.gamma
        self._target.calls += 1
        forest = self._committed(beams, answer)
        if self._iteration.processor is not None:
            self._sampler.uniforms(self._iteration.gamma * self._iteration.draft_width)
        return forest

    def retain(self, leaves: list[Node]) -> None:
        self._host.retain(leaves)

    # Before and after the device's part.

    def _request(self, beams: list[Node]) -> DraftRequest:
        draft, target, iteration = self._draft.tree, self._target.tree, self._iteration
        spaces = self._spaces = iteration.reserve()
        drafted = draft.missing(beams)  # known beams too: their logits are needed there, anew
        missed = target.missing([node for node in beams if not self._target.has_logits(node)])
        self._missed, self._drafted = missed, drafted
        target_plan = target.plan(missed)
        place = {node: i for i, node in enumerate(drafted)}
        shape = iteration.gamma, iteration.draft_width
        return DraftRequest(
            draft.plan(drafted),
            [place[node] for node in beams],
            target_plan,
            [target.mask_row(node) for node in beams],
            [node.score for node in beams],
            target.position(beams[0]),
            *spaces,
            None if iteration.processor is None else self._sampler.peek(shape[0] * shape[1]).reshape(shape),
        )

    def _roll_back(self) -> None:
        """Give back what was reserved; the planned nodes were not computed, so they go too."""
        self._draft.tree.release(self._spaces[0])
        self._target.tree.release(self._spaces[1])
        self._draft.roll_back(self._drafted)
        self._target.roll_back(self._missed)

    def _committed(self, beams: list[Node], answer: Answer) -> Forest:
        """The forest that came back; both trees and the target's logits know its nodes."""
        width, gamma = self._iteration.draft_width, self._iteration.gamma
        layers: list[DraftLayer] = []
        found: dict[Node, int] = {}  # nodes that may be asked about, and their places in the reserved space
        parents: list[Node | None] = list(beams)
        for depth, drafted in enumerate(answer.layers):
            places = [i for i, parent in enumerate(parents) if parent is not None]
            nodes = [node for node in parents if node is not None]
            if not all(drafted.finite[i] for i in places):
                raise self._draft.logits.fail(nodes[0])
            layer, parents = layer_of(self._trie, places, nodes, drafted)
            layers.append(layer)
            found |= {node: depth * width + i for i, node in enumerate(parents) if node is not None}
            # A draw that a stop string finishes the device does not see: drafting ends above its children.
            stopped = any(node.finish == "stop" for node in layer.draws)
            if stopped or not any(node is not None for node in parents):
                break
        offset = len(self._missed)
        self._target.logits.put_best(self._missed, answer.rows, range(offset))
        self._target.logits.put_best(list(found), answer.rows, [offset + place for place in found.values()])
        self._target.tree.commit(self._spaces[1], found)
        small = (gamma - 1) * width  # the last layer is not computed by the draft
        forwarded = {node: place for node, place in found.items() if place < small}
        self._draft.tree.commit(self._spaces[0], forwarded)
        return Forest(layers, computed=True)
