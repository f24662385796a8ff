"""Runs of the real methods on table models: sampled, enumerated whole, or enumerated layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dsbd_cli.decoding.law.distribution import Sampler, SeededSampler, Support
from dsbd_cli.decoding.methods.dsbd import Run, layers_of, now
from dsbd_cli.decoding.methods.setup import decode, start
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie
from dsbd_cli.prices import Prices
from dsbd_cli.settings import Settings
from tests.decoding.enumerating import Asked, Branching, law_of
from tests.decoding.reference import Outcome, T
from tests.decoding.table_model import Path, PathLaw, TableModel


class State(NamedTuple):
    """What a run carries from one layer to the next, in order."""

    active: tuple[Path, ...] = ((),)
    pool: tuple[Path, ...] = ()


def path_of(node: Node) -> Path:
    return tuple(node.tokens())


def settings_for(t: T = T(), **given: Any) -> Settings:
    """Settings with T off and a fixed width, unless said otherwise."""
    base: dict[str, Any] = {"threshold": None, "min_width": 1, "width": 2, "max_new_tokens": 3}
    return Settings(**(base | {"temperature": t.tau, "top_k": t.k, "top_p": t.p} | given))


@dataclass
class Toy:
    """A pair of tables with their end tokens, and runs on it. Joints are computed once per toy."""

    target: PathLaw
    draft: PathLaw | None
    settings: Settings
    eos: Sequence[int] = ()
    draft_depth: int | None = None
    prices: Prices | None = None
    prompt: Sequence[int] = ()
    _models: list[TableModel] = field(default_factory=list)
    _scores: dict[Path, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._models = [TableModel(self.target)]
        if self.draft is not None:
            self._models.append(TableModel(self.draft, self.draft_depth))

    def ends(self, node: Node) -> str | None:
        if node.token in self.eos:
            return "eos"
        return "length" if node.depth >= self.settings.max_new_tokens else None

    def run(self, sampler: Sampler, draft_sampler: Sampler, state: State = State()) -> Run:
        """A run that stands at `state`."""
        trie = Trie(self.ends, self.eos, self.settings.max_new_tokens)
        for model in self._models:
            model.prefill([], trie.root)
        target, draft = self._models[0], self._models[1] if len(self._models) > 1 else None
        run = start(
            self.settings, target, draft, trie, sampler, draft_sampler, prices=self.prices, prompt=self.prompt
        )
        run.hypotheses.active = [self.node(trie, path) for path in state.active]
        run.hypotheses.pool = [self.node(trie, path) for path in state.pool]
        return run

    def at(self, state: State) -> Run:
        """A run to look at, not to go on with."""
        return self.run(_NO, _NO, state)

    def node(self, trie: Trie, path: Path) -> Node:
        """The node of `path`, scored as the engine scores it: one addition a token."""
        node = trie.root
        for token in path:
            parent, node = node, trie.child(node, token)
            key = path[: node.depth]
            if key not in self._scores:
                row = self._models[0].row(parent, 0)
                self._scores[key] = parent.score + float(row.logps[list(row.tokens).index(token)])
            node.score = self._scores[key]
        return node

    def events(self, sampler: Sampler, draft_sampler: Sampler) -> tuple[Run, Iterator[Layer | Iteration]]:
        run = self.run(sampler, draft_sampler)
        return run, decode(run, self.settings)

    def outcome(self, sampler: Sampler, draft_sampler: Sampler) -> Outcome:
        """One whole run."""
        run, events = self.events(sampler, draft_sampler)
        layers = [layer_set(event) for event in events if isinstance(event, Layer)]
        return outcome_of(run, tuple(layers))

    def seeded(self, seed: int) -> Outcome:
        """One whole run, target and draft drawing as a request with this seed has them draw."""
        return self.outcome(SeededSampler(seed, 0), SeededSampler(seed, 1))

    def law(self) -> dict[Outcome, float]:
        """The exact law of whole runs, every branch replayed from the first token to the last."""
        return law_of(lambda sampler: self.outcome(sampler, sampler))

    def sequences(self) -> dict[Path, float]:
        """The exact law of the answer, iterations enumerated one by one."""
        law: dict[Path, float] = defaultdict(float)
        for outcome, mass in self.law_by(self.iteration_law).items():
            law[outcome.answer] += mass
        return dict(law)

    def law_by(self, step: Callable[[State], dict[tuple[Any, State, bool], float]]) -> dict[Outcome, float]:
        """The exact law of whole runs, composed of steps from state to state, each enumerated once."""
        steps: dict[State, dict[tuple[Any, State, bool], float]] = {}
        open_: dict[tuple[tuple[frozenset[Path], ...], State], float] = {((), State()): 1.0}
        ends: dict[State, Outcome] = {}
        done: dict[Outcome, float] = defaultdict(float)
        while open_:
            (history, state), mass = open_.popitem()
            if state not in steps:
                steps[state] = step(state)
            for (layers, following, stopped), share in steps[state].items():
                longer = history + layers
                if stopped:
                    if following not in ends:
                        ends[following] = outcome_of(self.at(following), ())
                    done[ends[following]._replace(layers=longer)] += mass * share
                else:
                    key = (longer, following)
                    open_[key] = open_.get(key, 0.0) + mass * share
        return dict(done)

    def iteration_law(self, state: State) -> dict[tuple[Any, State, bool], float]:
        """One iteration of the method's own generator, from `state`: the law of what it leaves."""

        def play(sampler: Branching) -> tuple[Any, State, bool]:
            run = self.run(sampler, sampler, state)
            layers = []
            for event in decode(run, self.settings):
                if isinstance(event, Iteration):
                    break
                layers.append(layer_set(event))
            return tuple(layers), state_of(run), run.hypotheses.stopped()

        return law_of(play)

    # A forest of three layers of four draws has too many branches to replay each with each
    # verification. So: the forests are enumerated by the proposer itself, each layer's verification
    # by the generator itself, and both are composed here, as `dsbd` composes them.

    def forest_law(self, state: State) -> dict[tuple[DraftedLayer, ...], float]:
        """The law of the forest that `propose` draws at `state`."""

        def play(sampler: Branching) -> tuple[DraftedLayer, ...]:
            forest = now(self.run(_NO, sampler, state).propose())
            return tuple(DraftedLayer.of(layer) for layer in forest.layers)

        return law_of(play)

    def layer_law(
        self, state: State, layers: tuple[DraftedLayer, ...]
    ) -> dict[tuple[Any, State, bool, bool], float]:
        """What the generator makes of the first of `layers`: (layer, state, stopped, whether it goes on)."""

        def play(sampler: Branching) -> tuple[Any, State, bool, bool]:
            run = self.run(sampler, _NO, state)
            forest = Forest([layer.rebuild(run.trie) for layer in layers])
            now(run.advance(forest))
            events = layers_of(run, forest, self.settings.verify)
            layer = layer_set(next(events))
            following, stopped = state_of(run), run.hypotheses.stopped()
            sampler.closed = True
            try:
                next(events)
            except Asked:
                return layer, following, stopped, True
            except StopIteration:
                return layer, following, stopped, False
            raise AssertionError("a layer without a single draw")

        return law_of(play)

    def composed_iteration_law(self, state: State) -> dict[tuple[Any, State, bool], float]:
        """`iteration_law`, composed of `forest_law` and `layer_law`."""
        law: dict[tuple[Any, State, bool], float] = defaultdict(float)
        for forest, mass in self.forest_law(state).items():
            live = {((), state): mass}
            for depth in range(len(forest) + 1):
                passing: dict[tuple[Any, State], float] = defaultdict(float)
                for (history, at), share in live.items():
                    for (layer, following, stopped, on), sampler in self._layer(
                        at, forest[depth : depth + 1]
                    ).items():
                        longer = (*history, layer)
                        if on:
                            passing[longer, following] += share * sampler
                        else:
                            law[longer, following, stopped] += share * sampler
                live = passing
            assert not live
        return dict(law)

    def _layer(
        self, state: State, layers: tuple[DraftedLayer, ...]
    ) -> dict[tuple[Any, State, bool, bool], float]:
        memo = self.__dict__.setdefault("_memo", {})
        if (state, layers) not in memo:
            memo[state, layers] = self.layer_law(state, layers)
        return memo[state, layers]  # type: ignore[no-any-return]


class DraftedLayer(NamedTuple):
    """A `DraftLayer` by value."""

    parents: tuple[Path, ...]
    draws: tuple[Path, ...]
    support: tuple[tuple[int, int, float, float], ...]

    @classmethod
    def of(cls, layer: DraftLayer) -> DraftedLayer:
        rows = zip(*(column.tolist() for column in layer.support), strict=True)
        return cls(tuple(map(path_of, layer.parents)), tuple(map(path_of, layer.draws)), tuple(rows))

    def rebuild(self, trie: Trie) -> DraftLayer:
        columns = [np.array(column) for column in zip(*self.support, strict=True)]
        return DraftLayer(
            [find(trie, path) for path in self.parents],
            Support(*columns),
            [find(trie, path) for path in self.draws],
        )


def find(trie: Trie, path: Path) -> Node:
    node = trie.root
    for token in path:
        node = trie.child(node, token)
    return node


def layer_set(layer: Layer) -> frozenset[Path]:
    return frozenset(map(path_of, layer.draws))


def state_of(run: Run) -> State:
    hypotheses = run.hypotheses
    return State(tuple(map(path_of, hypotheses.active)), tuple(map(path_of, hypotheses.pool)))


def outcome_of(run: Run, layers: tuple[frozenset[Path], ...]) -> Outcome:
    hypotheses = run.hypotheses
    pool, active = map(path_of, hypotheses.pool), map(path_of, hypotheses.active)
    return Outcome(layers, frozenset(pool), frozenset(active), path_of(hypotheses.ranking()[0]))


class _Silent:
    """A sampler that must not be asked."""

    def accept(self, numerator: float, denominator: float) -> bool:
        raise Asked

    def sample(self, weights: Any, count: int) -> list[int]:
        raise Asked


_NO = _Silent()
