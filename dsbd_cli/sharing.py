"""What the requests of a batch share: buffers, and iterations on a device for about as many as are under way.

An iteration on a device is captured for a number of places, and costs what they cost whether anybody has them.
So there are iterations with all places of a batch, with half of them, a quarter and so on, and requests move to where
they fit: at the end of a file, and where prompts come one at a time, larger forests pay (docs/design.md section 10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from dsbd_cli.decoding import (
    Demand,
    Engines,
    Pipeline,
    SharedModel,
    Trie,
    demand_of,
    distinct_of,
    draft_processor,
    forest_is_free,
    top_n_needed,
)
from dsbd_cli.prices import Acceptance, Prices, beams_of, best_iteration
from dsbd_cli.prices.captured import measure_captured
from dsbd_cli.prices.pair import ONCE, PairPrices
from dsbd_cli.settings import Settings

# To keep captured, of all kinds of requests and numbers of places.
_MOST_PIPELINES = 24
# Milliseconds of the host for a request's part of an iteration on the device, for its forest, for each layer and for
# each node of the forest, where that is not measured on this machine (`prices.host`): as whole batches beside an H100
# showed them.
_HOST_MS = (0.15, 0.0, 0.15, 0.06)


class Pair(Protocol):
    """Whose models a batch shares."""

    engines: Engines
    prices: PairPrices


@dataclass(eq=False)
class Buffers:
    """What requests of a pair share, and what was captured for it; kept from one batch to the next.

    Attributes:
        size, slots: of the batch that it was made for.
        target, draft: made when they are first needed.
        pipelines: what runs whole iterations on the device, by kind of request, places, gamma and W_S.
        fitting: demands with the forests that are worth their price, by what they follow from.
        taken: a batch has it.
    """

    size: int
    slots: int | None
    target: SharedModel | None = None
    draft: SharedModel | None = None
    pipelines: dict[Any, Pipeline | None] = field(default_factory=dict)
    fitting: dict[Any, Demand] = field(default_factory=dict)
    taken: bool = True


class Kind(NamedTuple):
    """Requests that may share iterations.

    Attributes:
        demand: with full forests.
        top_n: entries of each row of logits that the target and the draft keep.
        eos: ids that end a sequence.
        prices, forest: the settings.
        moves: the text depends neither on forests nor on where iterations end.
    """

    demand: Demand
    top_n: tuple[int, int]
    eos: tuple[int, ...]
    prices: str
    forest: str
    moves: bool

    @classmethod
    def of(cls, settings: Settings, trie: Trie, drafts: bool) -> Kind:
        """That of a request; `drafts`: it may ask a draft."""
        demand = demand_of(settings, drafts)
        top_n = top_n_needed(settings, len(trie.eos_ids)), draft_processor(settings).top_n if drafts else 0
        moves = not demand.gamma or forest_is_free(settings)
        return cls(demand, top_n, tuple(sorted(trie.eos_ids)), settings.prices, settings.forest, moves)


class Iterations:
    """Whole iterations on a device for the requests of one batch.

    Args:
        pair: whose models. buffers: what they have in a batch.
        tell: receives a line before something takes seconds, once a machine.

    Attributes:
        places: of an iteration, from now on.
        load: forests are worth their price for as many requests, or for fewer where none is.
    """

    def __init__(self, pair: Pair, buffers: Buffers, tell: Callable[[str], None]) -> None:
        self._pair, self._buffers, self._tell = pair, buffers, tell
        self._sizes = [buffers.size]
        while self._sizes[-1] > 1:
            self._sizes.append((self._sizes[-1] + 1) // 2)
        self.places = self.load = 1
        self._over = False

    def follow(self, running: int, *, more: bool, over: bool) -> None:
        """Have places for those that are under way.

        Args:
            running: how many.
            more: others take their places at once. over: none will.
        """
        wanted = self._sizes[0] if more else self._enough(running)
        # A move costs an iteration, so where prompts come and go three of four places have to be empty.
        if wanted > self.places or over or wanted <= self.places // 4:
            self.places = wanted
        # Every forest of another size is compiled once a machine, which takes seconds: the end of a file keeps to one.
        if not (over and self._over):
            self.load = self._load()
        self._over = over

    def hold(self, running: int) -> None:
        """Have places for so many: prompts that waited for memory were let in beside those that it followed."""
        if running > self.places:
            self.places = self._enough(running)
            self.load = self._load()

    def pays(self, kind: Kind, settings: Settings) -> bool:
        """Whether a draft is worth asking; else it need not see the prompt either, and the text is the same."""
        return not self.priced(kind) or self._fitted(kind, settings).gamma > 0

    def pipeline(self, kind: Kind, settings: Settings, drafts: bool) -> Pipeline | None:
        """What runs such requests' iterations; None: the host verifies.

        Args:
            settings: of one of them. drafts: a draft can be asked.
        """
        places = self.places if kind.moves else self._sizes[0]
        demand, pipelines = kind.demand, self._buffers.pipelines
        if not drafts:
            demand = replace(demand, gamma=0, draft_width=0)
        elif self.priced(kind):
            demand = self._fitted(kind, settings)
        key = kind, places, demand.gamma, demand.draft_width
        if key not in pipelines:
            self._make_room()
            draft = self._buffers.draft if demand.gamma else None
            top_n = kind.top_n[0], kind.top_n[1] if draft is not None else 0
            assert self._buffers.target is not None
            pipelines[key] = self._pair.engines.together(
                self._buffers.target, draft, demand, kind.eos, top_n, places
            )
        pipelines[key] = pipelines.pop(key)  # asked for last: let go of last
        return pipelines[key]

    def _make_room(self) -> None:
        """Let go of those asked for longest ago that nobody is in: each holds memory of the device."""
        pipelines = self._buffers.pipelines
        for key, old in list(pipelines.items()):
            if len(pipelines) < _MOST_PIPELINES:
                return
            if old is None or old.empty:
                del pipelines[key]
                if old is not None:
                    old.release()

    def priced(self, kind: Kind) -> bool:
        """Whether the forests of such requests follow prices."""
        draft = self._buffers.draft
        drafts = kind.moves and kind.demand.gamma > 0 and not kind.demand.why_not_pipelined
        return drafts and draft is not None and draft.model.captured

    def _fitted(self, kind: Kind, settings: Settings) -> Demand:
        """The demand with a forest that is worth its price."""
        load, least = self.load, self._load()
        while not (found := self._fit_for(kind, settings, load)).gamma and load > least:
            load = max(least, load // 4)
        return found

    def _fit_for(self, kind: Kind, settings: Settings, requests: int) -> Demand:
        key = kind, requests
        if (known := self._buffers.fitting.get(key)) is None:
            known = self._buffers.fitting[key] = self._fit(kind, settings, requests)
        return known

    def _fit(self, kind: Kind, settings: Settings, requests: int) -> Demand:
        target, draft, demand = self._buffers.target, self._buffers.draft, kind.demand
        assert target is not None

        def measured() -> Prices:
            self._tell(ONCE)
            return measure_captured(target, draft, kind.top_n)

        prices = self._pair.prices.captured(settings, measured)
        if prices is None:
            return demand
        host = self._pair.prices.host(settings)
        # A layer of fewer nodes than there are distinct beams never holds them all.
        least = max(1, distinct_of(settings))
        known = Acceptance.assumed(beams_of(settings), demand.gamma, demand.draft_width, least=least)
        shape = best_iteration(
            prices, known, requests=requests, width=demand.width, max_gamma=demand.gamma,
            max_draft_width=demand.draft_width, host_ms=_HOST_MS if host is None else host.ms,
        )  # fmt: skip
        return replace(demand, gamma=shape.gamma, draft_width=shape.draft_width if shape.gamma else 0)

    def _enough(self, running: int) -> int:
        return min(size for size in self._sizes if size >= running)

    def _load(self) -> int:
        """For how many requests forests are fitted that so many places share: 2, 8, 32, ..., or all."""
        return min(self._sizes[0], 1 << ((self.places - 1).bit_length() | 1))
