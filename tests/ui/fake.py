"""A decoder and a stream of events without weights: real nodes, forests and layers, words by chance."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from dsbd_cli.decoding.law.distribution import Support
from dsbd_cli.decoding.tree.events import Event, Finished, Iteration, Layer, Notice, Prefilled, Text
from dsbd_cli.decoding.tree.sequences import DraftLayer, Forest, Node, Trie, common_ancestor
from dsbd_cli.result import Beam, Result, Stats
from dsbd_cli.settings import Settings

_TEXT = (
    " the a river town of light and slow water stood where one could see [red] :smile: list[int] 한국 🙂 \x1b[31m"
    " morning.\n glass over every door; they had been told to wait"
)
WORDS = _TEXT.split(" ")


class FakeDecoder:
    """Token i is word i, with a blank before it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.target = SimpleNamespace(slots_peak=214, bytes_peak=9_860_000)
        self.draft = SimpleNamespace(slots_peak=220, bytes_peak=3_000_000)

    def detokenize(self, ids: Sequence[int]) -> str:
        return "".join(" " + WORDS[token % len(WORDS)] for token in ids)

    def models(self) -> dict[str, Any]:
        one = {"dtype": "float32", "device": "cpu"}
        return {"target": {"name": "org/Big-135M", **one}, "draft": {"name": "small-12M", **one}}


def stream(
    decoder: FakeDecoder, tokens: int = 40, seed: int = 0, delay: float = 0.0, fail: Exception | None = None
) -> Iterator[Event]:
    """Events of a dsbd run: up to W beams, forests of gamma layers, some drafts rejected."""
    chance, settings = random.Random(seed), decoder.settings
    trie = Trie(lambda node: "length" if node.depth >= tokens else None, [], tokens)
    yield Notice("the draft is small [bold]")
    yield Prefilled(list(range(30)), 0.01)
    active, printed = [trie.root], ""
    while active and active[0].depth < tokens:
        time.sleep(delay)
        base, layers = active, []
        drafted = _forest(trie, active, settings, chance)
        for depth in range(chance.randint(1, settings.gamma + 1)):
            if not active or active[0].depth >= tokens:
                break
            layer = _layer(trie, active, drafted, depth, settings, chance)
            layers.append(layer)
            yield layer
            active = [node for node in dict.fromkeys(layer.draws) if node.finish is None]
        if active:
            text = decoder.detokenize(common_ancestor(active).tokens())
            if text[len(printed) :]:
                yield Text(text[len(printed) :])
            printed = text
        yield Iteration(tuple(active), drafted, tuple(layers))
        if fail is not None and base[0].depth > tokens // 2:
            raise fail
    best = max(layers[-1].draws, key=lambda node: node.score)
    text = decoder.detokenize(best.tokens())
    yield Text(text[len(printed) :])
    yield Finished(_result(decoder, best, text))


def _forest(trie: Trie, active: list[Node], settings: Settings, chance: random.Random) -> Forest:
    layers, parents = [], active
    for _ in range(settings.gamma):
        support = _support(len(parents), chance)
        picks = [chance.randrange(len(support.prob)) for _ in range(settings.draft_width)]
        draws = [trie.child(parents[support.parent[i]], int(support.token[i])) for i in picks]
        layers.append(DraftLayer(parents, support, draws))
        parents = [node for node in dict.fromkeys(draws) if node.finish is None]
        if not parents:
            break
    return Forest(layers)


def _support(parents: int, chance: random.Random) -> Support:
    parent = np.repeat(np.arange(parents), 3)
    token = np.array([chance.randrange(len(WORDS)) for _ in parent])
    prob = np.array([chance.random() + 0.05 for _ in parent])
    prob /= prob.sum()
    return Support(parent, token, np.log(prob), prob)


def _layer(
    trie: Trie, active: list[Node], forest: Forest, depth: int, settings: Settings, chance: random.Random
) -> Layer:
    width = chance.randint(settings.min_width, settings.width)
    known = forest.layers[depth].draws if depth < len(forest.layers) else []
    fitting = [node for node in known if node.parent in active]
    draws: list[Node] = []
    verdicts = [bool(fitting) and chance.random() < 0.6 for _ in range(min(width, len(known)))]
    for accepted in verdicts:
        if accepted:
            draws.append(chance.choice(fitting))
    while len(draws) < width:
        draws.append(trie.child(chance.choice(active), chance.randrange(len(WORDS))))
    for node in draws:
        if math.isnan(node.score):
            assert node.parent is not None
            node.score = node.parent.score - chance.random()
    distinct = len(set(draws))
    where = depth if depth < len(forest.layers) else None
    return Layer(tuple(draws), distinct, len(verdicts), sum(verdicts), tuple(verdicts), where, all(verdicts))


def _result(decoder: FakeDecoder, best: Node, text: str) -> Result:
    beam = Beam(text, best.tokens(), best.score, best.score / best.depth, True, "eos")
    stats = Stats(prompt_tokens=30, new_tokens=best.depth, layers=best.depth, target_calls=best.depth // 2)
    stats.decode_s, stats.tokens_per_s = 2.0, best.depth / 2.0
    settings = decoder.settings
    return Result(
        text, best.tokens(), "length", settings.method, settings, 7, decoder.models(), [beam], stats
    )
