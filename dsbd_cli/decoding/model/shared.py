"""One model that serves many requests: a region of its buffers each, and one forward for the nodes of all.

A request's tree, its logits and its counts are its own (`RequestModel` is a `TreeModel` like any other);
what it shares are weights, buffers and forwards. docs/design.md section 10. One module, since a request's
view and what serves it are two sides of one thing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import LogitStore, Span, Stores, Told
from dsbd_cli.decoding.cache.logits import Best, unpack
from dsbd_cli.decoding.cache.prefixes import Prefixes
from dsbd_cli.decoding.cache.regions import Regions
from dsbd_cli.decoding.cache.transfer import Landing, to_device
from dsbd_cli.decoding.cache.tree_cache import Plan, TreeCache
from dsbd_cli.decoding.forward.attention import without_planning
from dsbd_cli.decoding.forward.kernels import keep_logits, landing_logits, top_logits
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.protocol import Compute, Side
from dsbd_cli.decoding.tree.sequences import Node, common_ancestor

# Prompt tokens a forward: what decodes meanwhile waits no longer than that.
_CHUNK = 2048


class RequestModel(Told):
    """A shared model as one request sees it (`model.protocol.TreeModel`).

    Attributes:
        calls: forwards that served this request, prefill left out.
        read: how many tokens of its prompt are computed.
        tree, logits: its tree, and the logits of its nodes.
    """

    def __init__(
        self, shared: SharedModel, tree: TreeCache, ids: Sequence[int], root: Node, top_n: int
    ) -> None:
        self.shared, self.tree = shared, tree
        self.model = shared.model
        self.calls = 0
        logits = self.model.logits
        self.logits = LogitStore(logits.name, self.model.dtype, logits.vocab, logits.ids)
        self.logits.start(top_n)
        self.start(ids, root)

    def start(self, ids: Sequence[int], root: Node) -> None:
        """Nothing is computed yet of the prompt `ids`, which `root` stands for (`TreeCache.start`)."""
        self.root, self.ids, self.read = root, list(ids), 0
        self.logits.keep(())
        self.tree.start(ids, root)

    def begin_above(self, nodes: Iterable[Node]) -> None:
        """Start anew behind what all `nodes` have above them: that is read like a prompt."""
        trunk = common_ancestor([node.parent or node for node in nodes])
        prompt = self.ids[: len(self.ids) - self.root.depth]
        self.start([*prompt, *trunk.tokens()], trunk)

    @property
    def max_depth(self) -> int | None:
        limit = self.model.limit_for(self.tree.prompt_length)
        return None if limit is None else limit - self.tree.prompt_length

    @property
    def slots_peak(self) -> int:
        """Most slots in use at a time."""
        return self.tree.slots.peak

    @property
    def unread(self) -> bool:
        """Whether its prompt is not all computed: the first forward that is asked for does that."""
        return self.read < len(self.ids)

    def reads(self, node: Node) -> bool:
        return self.model.reads(node)

    def prefill(self, ids: Sequence[int], root: Node) -> None:
        """Compute the prompt that it was admitted with."""
        for _ in self.shared.prefill([self]):
            pass

    def forward(self, nodes: Iterable[Node]) -> None:
        self.shared.compute([Compute(self, list(nodes))])

    def begin(self, nodes: Iterable[Node]) -> None:
        """Nothing: whoever serves the requests decides when a forward runs."""

    def retain(self, leaves: Iterable[Node]) -> None:
        self.logits.keep(self.tree.retain(leaves))

    @property
    def bytes_peak(self) -> int:
        return self.slots_peak * self.bytes_per_slot

    @property
    def bytes_per_slot(self) -> int:
        return self.tree.cache.bytes_per_slot

    @property
    def bytes_allocated(self) -> int:
        """Of its region."""
        return self.tree.slots.capacity * self.bytes_per_slot

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the model was run."""
        return self.model.notes

    def leave(self, keep: bool = False) -> None:
        """The request is over: its region is free; keep: its prompt stays while nobody needs the room."""
        self.tree.close()
        self.shared.prefixes.end(self.tree.begin, keep)


class _Part(NamedTuple):
    """A request's share of a forward: which of the planned nodes' logits are kept."""

    request: RequestModel
    plan: Plan
    nodes: list[Node]
    keep: list[int]


class SharedModel:
    """Weights and buffers of one model, for many requests at a time.

    Args:
        model: whose weights and forward; its own tree is left alone.
        rows, columns: mask rows and slots of a request to start with.

    Attributes:
        slots: how many the buffers may come to hold.
        spare: how many of these they have beyond what requests need, where that much is allowed.
        stores, regions: the buffers, and who has which part of them.
        prefixes: which prompts lie where, for those that begin alike.
    """

    def __init__(self, model: HfTreeModel, rows: int, columns: int) -> None:
        self.model, self.slots, self.spare = model, 1 << 62, 0
        self._forward = model.tree_forward
        self.stores = Stores(0, rows, columns, self._forward.dtype, model.device)
        self.regions = Regions(0, self._forward.slot_unit)
        self._landing: list[tuple[Landing, Sequence[RequestModel], Sequence[list[Node]]]] = []
        self.prefixes = Prefixes(self.stores.cache, self.regions)
        # Buffers show their shape in the first forward.
        probe = self.admit([0], Node(-1, None), 3, 1)
        assert probe is not None
        probe.prefill([], probe.root)
        probe.leave()

    def like(self, slots: int, rows: int, columns: int) -> SharedModel:
        """The same weights with other buffers, of so many slots."""
        other = SharedModel(self.model, rows, columns)
        other.room([slots])
        other.stores.cache.grow(slots)
        return other

    @property
    def takes_over(self) -> bool:
        """Whether a prompt takes over what others have computed of its beginning.

        Beside a GPU many prompts are read in one forward instead, and what ended may be in flight.
        """
        return self.model.device.type == "cpu" and self.model.graphs is None

    @property
    def free(self) -> int:
        """Slots that no request has."""
        return self.regions.free + self.prefixes.slots

    @property
    def bytes_per_slot(self) -> int:
        """Keys and values of one token."""
        return self.stores.cache.bytes_per_slot

    @torch.inference_mode()
    def room(self, sizes: Sequence[int]) -> bool:
        """Make room for requests of these sizes, in slots, if memory allows; otherwise they wait.

        Larger buffers are new ones: what is known to come is asked for at once.
        """
        wanted = self.regions.used + sum(map(self.regions.rounded, sizes))
        if wanted > self.slots:
            return False
        if wanted > self.regions.capacity:
            self.regions.grow(min(wanted + self.spare, self.slots))
            self.stores.cache.grow(self.regions.capacity)
        self.stores.masks.grow(max(sizes, default=0))
        return True

    @torch.inference_mode()
    def admit(self, ids: Sequence[int], root: Node, size: int, top_n: int) -> RequestModel | None:
        """Let a request in; None where there is no room for it now.

        Args:
            ids: its prompt. root: stands for it.
            size: slots that it may come to need.
            top_n: how many best entries of a node's logits will be asked for; 0 keeps full logits.
        """
        begin = self.regions.take(size)
        while begin is None and self.prefixes.give_way():
            begin = self.regions.take(size)
        if begin is None:
            if not self.room([size]):
                return None
            begin = self.regions.take(size)
            assert begin is not None
        return RequestModel(self, TreeCache(self.stores, begin, size), ids, root, top_n)

    def side(self, top_n: int) -> Side:
        """What captured iterations need of this model."""
        vocab = self.model.vocab_size
        return Side(self._forward, self.stores, vocab, min(top_n, vocab))

    @torch.inference_mode()
    def prefill(self, requests: Sequence[RequestModel]) -> Iterator[None]:
        """Compute the prompts of new requests; yields after every forward, which may still be under way then.

        One after the other, each what none before it has computed; or (`takes_over`) whole ones together.
        """
        packed: list[RequestModel] = []
        for request in requests:
            count, together = len(request.ids), self._forward.takes_spans and not self.takes_over
            if count > _CHUNK or not together or not self._forward.needs_no_mask(0):
                yield from self._by_chunks(request)
                continue
            if sum(len(one.ids) for one in packed) + count > _CHUNK:
                self._whole(packed)
                yield
                packed = []
            packed.append(request)
        if packed:
            self._whole(packed)
            yield
        self._land()

    def _whole(self, requests: list[RequestModel]) -> None:
        """Whole prompts in one forward."""
        plans = [request.tree.prompt_plan(0, len(request.ids)) for request in requests]
        spans, slots = self._spans(plans), self._slots(plans)
        for plan in plans:
            self.stores.masks.see(plan.mask_rows[0], to_device(plan.slots, self.model.device))
        head = to_device([span.last - 1 for span in spans], self.model.device)
        logits = self._run(plans, spans, slots, None, head)
        self._keep(requests, [[request.root] for request in requests], logits, late=True)
        for request in requests:
            request.read = len(request.ids)

    def _by_chunks(self, request: RequestModel) -> Iterator[None]:
        self._begin(request)
        count = len(request.ids)
        for begin in range(request.read, count, _CHUNK):
            with torch.inference_mode():
                plan = request.tree.prompt_plan(begin, min(begin + _CHUNK, count))
                own = to_device(plan.slots, self.model.device)
                mask = None
                if self._forward.takes_spans and self._forward.needs_no_mask(begin):
                    self.stores.masks.see(plan.mask_rows[0], own)
                else:
                    mask = self.stores.masks.causal(plan.mask_rows[0], own)
                logits = self._run([plan], self._spans([plan]), self._slots([plan]), mask, 1)
                if begin + len(plan) == count:
                    self._keep([request], [[request.root]], logits, late=True)
                self._know(request, begin + len(plan))
            yield

    @torch.inference_mode()
    def _begin(self, request: RequestModel) -> None:
        """Take over what others have computed of its prompt."""
        known = self.prefixes.take_over(request.ids, request.tree.begin) if self.takes_over else 0
        if known:
            plan = request.tree.prompt_plan(0, known)
            self.stores.masks.see(plan.mask_rows[0], to_device(plan.slots, self.model.device))
            self._know(request, known)

    def _know(self, request: RequestModel, count: int) -> None:
        request.read = count
        if self.takes_over:
            self.prefixes.computed(request.tree.begin, request.ids, count)

    @torch.inference_mode()
    def compute(self, needs: Sequence[Compute]) -> None:
        """One forward over the nodes that these requests lack; each need's model is one of this model's.

        Prompts that were left for later come before it.
        """
        late = dict.fromkeys(cast(RequestModel, need.model) for need in needs)
        for _ in self.prefill([request for request in late if request.unread]):
            pass
        parts = []
        for need in needs:
            request = need.model
            assert isinstance(request, RequestModel)
            wanted = dict.fromkeys(node for node in need.nodes if node not in request.logits)
            if wanted:
                batch = request.tree.missing(wanted)
                keep = [i for i, node in enumerate(batch) if node in wanted]
                parts.append(_Part(request, request.tree.plan(batch), [batch[i] for i in keep], keep))
        if not parts:
            return
        masks = [self._mask(part.plan) for part in parts]
        logits = self._logits([part.plan for part in parts], masks, [part.keep for part in parts])
        for part in parts:
            part.request.calls += 1
        self._keep([part.request for part in parts], [part.nodes for part in parts], logits)

    def _keep(
        self,
        requests: Sequence[RequestModel],
        nodes: Sequence[list[Node]],
        logits: Tensor,
        late: bool = False,
    ) -> None:
        """Cache what will be asked of these requests' nodes, whose logits come in order; one copy to the host.

        Args:
            late: where forwards are captured, wait for it in `_land`.
        """
        sizes = [request.logits.size for request in requests]
        if not all(sizes):
            at = 0
            for request, own in zip(requests, nodes, strict=True):
                keep_logits(request.logits, own, logits[at : at + len(own)])
                at += len(own)
        elif late and self.model.captured:
            self._landing.append((landing_logits(logits, self.model.vocab_size, max(sizes)), requests, nodes))
        else:
            self._put(requests, nodes, top_logits(logits, self.model.vocab_size, max(sizes)))

    def _put(self, requests: Sequence[RequestModel], nodes: Sequence[list[Node]], best: Best) -> None:
        at = 0
        for request, own in zip(requests, nodes, strict=True):
            request.logits.put_best(own, best, range(at, at + len(own)))
            at += len(own)

    def _land(self) -> None:
        """Wait for what the logits of prompts say."""
        landing, self._landing = self._landing, []
        for copy, requests, nodes in landing:
            self._put(requests, nodes, unpack(copy.wait()))

    def _mask(self, plan: Plan) -> Tensor:
        device = self.model.device
        base, rows, slots = to_device([plan.base, plan.mask_rows, plan.slots], device)
        return self.stores.masks.extend(base, rows, slots, torch.from_numpy(plan.inside).to(device))

    def _logits(self, plans: list[Plan], masks: list[Tensor], keep: list[list[int]]) -> Tensor:
        """Logits of the nodes to keep, in order."""
        if self._forward.reads_length:
            most = max(map(len, plans))
            padded = [_padded(plan, most) for plan in plans]
            # Padded nodes see the spare slot of the request, where they write.
            hidden = self.stores.masks.hidden
            masks = [
                torch.nn.functional.pad(mask, (0, 0, 0, most - len(mask)), value=hidden) for mask in masks
            ]
            for plan, mask in zip(plans, masks, strict=True):
                mask[len(plan) :, 0] = 0
            plans = padded
        spans, slots = self._spans(plans), self._slots(plans)
        head = [span.first + i for span, own in zip(spans, keep, strict=True) for i in own]
        return self._run(plans, spans, slots, torch.cat(masks), to_device(head, self.model.device))

    def _spans(self, plans: Sequence[Plan]) -> tuple[Span, ...]:
        spans, first = [], 0
        for plan in plans:
            spans.append(Span(first, first + len(plan), plan.begin, plan.used))
            first += len(plan)
        return tuple(spans)

    def _slots(self, plans: Sequence[Plan]) -> Tensor:
        slots = [plan.begin + slot for plan in plans for slot in plan.slots]
        return to_device(slots, self.model.device)

    def _run(
        self, plans: Sequence[Plan], spans: tuple[Span, ...], slots: Tensor, mask: Tensor | None,
        head: Tensor | int,
    ) -> Tensor:  # fmt: skip
        cache, device = self.stores.cache, self.model.device
        cache.slots, cache.spans = slots, spans
        cache.used = max(span.begin + span.used for span in spans)
        if self._forward.reads_length:
            both = [[span.begin for span in spans], [span.used for span in spans]]
            cache.begins, cache.length = to_device(both, device)
        ids = to_device([token for plan in plans for token in plan.ids], device)
        positions = to_device([place for plan in plans for place in plan.positions], device)
        if mask is not None and not self._forward.takes_spans:
            mask = self._flat(mask, spans, cache.used)
        with without_planning() if device.type == "cuda" else torch.no_grad():
            return self._forward(cache, ids, positions, mask, head)

    def _flat(self, mask: Tensor, spans: Sequence[Span], used: int) -> Tensor:
        """[N, used]: each request's columns where its region is, for attention that knows no regions."""
        flat = mask.new_full((len(mask), used), self.stores.masks.hidden)
        for first, last, begin, own in spans:
            flat[first:last, begin : begin + own] = mask[first:last, :own]
        return flat


def _padded(plan: Plan, count: int) -> Plan:
    """`plan` with nodes that nobody asks for, in the spare slot."""
    more = [0] * (count - len(plan))
    return Plan(
        plan.ids + more, plan.positions + more, plan.slots + more, plan.mask_rows, plan.base, plan.sight,
        plan.used, plan.begin,
    )  # fmt: skip
