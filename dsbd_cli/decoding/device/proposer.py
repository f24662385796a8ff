"""A proposer whose draft steps and target call run on the device in one go (`device_loop`).

It proposes what `DraftModelProposer` proposes; where the loop has no place for an iteration (behind
the prompt, near the end of the budget or of the draft's context) it is that proposer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from dsbd_cli.decoding.device.iteration import DeviceLoop
from dsbd_cli.decoding.device.layout import Answer, Layer, Request
from dsbd_cli.decoding.forward.graphs import Flight
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler, SeededSampler, Support
from dsbd_cli.decoding.methods.proposers import DraftModelProposer, draft_room
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie
from dsbd_cli.errors import first_line

if TYPE_CHECKING:
    from dsbd_cli.decoding.model.hf_model import HfTreeModel


class DeviceProposer:
    """Drafts and verifies on the device; afterwards the target has_logits the whole forest.

    Args:
        target, draft: recorded, on one device.
        trie, processor, width, sampler, distinct: as for `DraftModelProposer`.
        gamma: layers a full iteration drafts.
        beams: W, the most beams there can be.
    """

    def __init__(
        self, target: HfTreeModel, draft: HfTreeModel, trie: Trie, processor: LogitsProcessor, width: int,
        sampler: SeededSampler, distinct: bool, gamma: int, beams: int,
    ) -> None:  # fmt: skip
        self.exhausted = False
        self._host = DraftModelProposer(draft, trie, processor, width, sampler, distinct)
        self._target, self._draft, self._trie, self._sampler = target, draft, trie, sampler
        self._width, self._gamma, self._distinct = width, gamma, distinct
        self._flight: Flight | None = None
        self._loop: DeviceLoop | None = target.loop_with(
            draft, width, gamma, beams, None if distinct else processor, sorted(trie.eos_ids)
        )
        try:
            self._loop.prepare()
        except RuntimeError as error:
            self._stop(error)

    @torch.inference_mode()
    def begin(self, beams: list[Node], depth: int) -> None:
        """Set off what `propose` will be asked for next, if it can be recorded."""
        loop = self._loop
        if (
            loop is None
            or depth < self._gamma
            or draft_room(self._draft, beams) < depth
            or not beams[0].depth
        ):
            return
        request = self._request(beams)
        try:
            if not loop.takes(request):
                raise RuntimeError("more nodes than any recording has room for")
            self._flight = loop.launch(request)
        except RuntimeError as error:
            self._forget()
            self._stop(error)
        self._target.set_off(self._flight is not None)

    def propose(self, beams: list[Node], depth: int) -> Forest:
        if self._flight is None:
            self.begin(beams, depth)
        flight, self._flight = self._flight, None
        if flight is None:
            return self._by_steps(beams, depth)
        assert self._loop is not None
        answer = self._loop.land(flight)
        self._target.landed(flight.seconds)
        self._draft.calls += self._gamma
        self._target.calls += 1
        forest = self._entered(beams, answer)
        if not self._distinct:
            # What the host would have drawn with, had it stopped drafting there.
            self._sampler.uniforms(len(forest.layers) * self._width)
        return forest

    def _stop(self, error: RuntimeError) -> None:
        self._loop = None
        self._target.stop_loops(first_line(error))

    def _by_steps(self, beams: list[Node], depth: int) -> Forest:
        forest = self._host.propose(beams, depth)
        self.exhausted = self._host.exhausted
        return forest

    def retain(self, leaves: list[Node]) -> None:
        self._host.retain(leaves)

    # Before and after the device's part.

    def _request(self, beams: list[Node]) -> Request:
        draft, target = self._draft.pool, self._target.pool
        count = self._gamma * self._width
        spaces = self._spaces = draft.reserve(count - self._width), target.reserve(count)
        drafted = draft.missing(beams)  # known beams too: their rows are needed there, anew
        missed = target.missing([node for node in beams if not self._target.has_logits(node)])
        self._missed, self._drafted = missed, drafted
        target_plan = target.plan(missed)
        place = {node: i for i, node in enumerate(drafted)}
        if self._distinct:
            uniforms = np.zeros((self._gamma, self._width))
        else:
            uniforms = self._sampler.peek(self._gamma * self._width).reshape(self._gamma, self._width)
        return Request(
            draft.plan(drafted),
            [place[node] for node in beams],
            target_plan,
            [target.mask_row(node) for node in beams],
            [node.score for node in beams],
            target.position(beams[0]),
            *spaces,
            uniforms,
        )

    def _forget(self) -> None:
        """Give back what was reserved; the planned nodes were not computed, so they go too."""
        self._draft.pool.release(self._spaces[0])
        self._target.pool.release(self._spaces[1])
        self._draft.withdraw(self._drafted)
        self._target.withdraw(self._missed)

    def _entered(self, beams: list[Node], answer: Answer) -> Forest:
        """The forest that came back; both pools and the target's rows know its nodes."""
        layers: list[DraftLayer] = []
        found: dict[Node, int] = {}  # nodes that may be asked about, and their places in the reserved space
        parents: list[Node | None] = list(beams)
        for depth, drafted in enumerate(answer.layers):
            places = [i for i, parent in enumerate(parents) if parent is not None]
            nodes = [node for node in parents if node is not None]
            if not all(drafted.finite[i] for i in places):
                raise self._draft.rows.fail(nodes[0])
            layer, parents = layer_of(self._trie, places, nodes, drafted)
            layers.append(layer)
            found |= {node: depth * self._width + i for i, node in enumerate(parents) if node is not None}
            # A draw that a stop string finishes the device does not see: drafting ends above its children.
            stopped = any(node.finish == "stop" for node in layer.draws)
            if stopped or not any(node is not None for node in parents):
                break
        offset = len(self._missed)
        self._target.rows.put_best(self._missed, answer.rows, range(offset))
        self._target.rows.put_best(list(found), answer.rows, [offset + place for place in found.values()])
        self._target.pool.adopt(self._spaces[1], found)
        small = (self._gamma - 1) * self._width  # the last layer is not forwarded by the draft
        forwarded = {node: place for node, place in found.items() if place < small}
        self._draft.pool.adopt(self._spaces[0], forwarded)
        return Forest(layers, computed=True)


def layer_of(
    trie: Trie, places: list[int], parents: list[Node], drafted: Layer
) -> tuple[DraftLayer, list[Node | None]]:
    """A layer as the methods see it, and per draw the node that became a parent, or None.

    Args:
        places: which of the device's parents `parents` are.
    """
    parent, token, logp, prob = drafted.parent, drafted.token, drafted.logp, drafted.prob
    if places[-1] != len(places) - 1:  # some draws are no parents: those that are have other numbers
        number = np.full(places[-1] + 1, -1)
        number[places] = np.arange(len(places))
        # Entries of no mass may have no parent; they are not looked at.
        parent = number[np.minimum(parent, places[-1])]
    child, draws = trie.child, drafted.draws
    nodes = [child(parents[p], t) for p, t in zip(parent[draws].tolist(), token[draws].tolist(), strict=True)]
    inside = prob > 0
    if not inside.all():
        parent, token, logp, prob = parent[inside], token[inside], logp[inside], prob[inside]
    return DraftLayer(parents, Support(parent, token, logp, prob), nodes), living(nodes)


def living(nodes: list[Node]) -> list[Node | None]:
    """Draws with None for those below which nothing grows: finished ones, and the later of equal ones."""
    seen: set[Node] = set()
    new: list[Node | None] = []
    for node in nodes:
        new.append(None if node in seen or node.finish is not None else node)
        seen.add(node)
    return new


def device_proposer(
    target: HfTreeModel, draft: HfTreeModel, trie: Trie, processor: LogitsProcessor, width: int, sampler: Sampler,
    distinct: bool, gamma: int, beams: int,
) -> DeviceProposer | None:  # fmt: skip
    """A `DeviceProposer` where both models can be recorded together; else None."""
    if not isinstance(sampler, SeededSampler) or gamma < 1:
        return None
    if target.why_no_loop(draft, width if distinct else 1) is not None:
        return None
    return DeviceProposer(target, draft, trie, processor, width, sampler, distinct, gamma, beams)
