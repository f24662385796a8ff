"""What the host's share of an iteration on a device costs this machine, for many requests: measured once, like prices.

The host's code is the same whatever the models are, so it is timed on tiny ones, whose steps run here and are
taken off: requests share a pipeline (`decoding/device/pipeline.py`) as in a batch, and forests of some sizes tell
what a request, having a forest, a layer and a node of a forest cost apart.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dsbd_cli.decoding import (
    Engines,
    HfTreeModel,
    Layer,
    Seat,
    SeededSampler,
    SharedModel,
    Trie,
    Turn,
    demand_of,
    draft_processor,
    loop_of,
    most_nodes,
    start,
    top_n_needed,
)
from dsbd_cli.loading import processor
from dsbd_cli.loading.ready import key
from dsbd_cli.others import Window
from dsbd_cli.prices import store
from dsbd_cli.prices.probe import measured_now
from dsbd_cli.settings import Settings
from dsbd_cli.version import __version__

FORMAT = 2
# What is timed, gamma and W_S and whether the draft agrees with its target: plain beams, a small forest, and one of
# which most layers are committed, or few.
FORESTS = ((0, 1, True), (2, 2, False), (4, 16, True), (4, 16, False))
# What an iteration costs whoever is in it is shared by many where the host's part counts.
_REQUESTS, _WIDTH = 24, 4
_WARM_UP, _ROUNDS = 2, 8
_PROMPT = 8
_TOKENS = 64  # of the tiny models
_MOST_MS = 1e5


@dataclass(frozen=True)
class HostPrices:
    """Milliseconds of the host.

    Attributes:
        request: for a request's part of an iteration. forest: for the same, where it has a forest.
        layer: for each layer that it commits.
        node: for each node of its forest.
        origin: where the numbers come from, in words.
        busy: as in `table.Prices`.
    """

    request: float
    forest: float
    layer: float
    node: float
    origin: str = "assumed"
    busy: str = ""

    def __post_init__(self) -> None:
        if not all(type(one) in (int, float) and 0 <= one <= _MOST_MS for one in self.ms):
            raise ValueError("the host's times are numbers of milliseconds")

    @property
    def ms(self) -> tuple[float, float, float, float]:
        """For a request, its having a forest, a layer and a node."""
        return self.request, self.forest, self.layer, self.node

    def describe(self) -> str:
        """One line for people."""
        request, forest, layer, node = (f"{one:.3g}" for one in self.ms)
        return f"{self.origin}; ms of the host: {request} a request, {forest} a forest, {layer} a layer, {node} a node"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "format": FORMAT,
            "request": self.request,
            "forest": self.forest,
            "layer": self.layer,
            "node": self.node,
            "origin": self.origin,
            "busy": self.busy,
        }

    @classmethod
    def from_dict(cls, values: Any) -> HostPrices:
        """What `to_dict` wrote.

        Raises:
            ValueError: anything else.
        """
        try:
            if values["format"] != FORMAT:
                raise ValueError("it is of another version")
            ms = values["request"], values["forest"], values["layer"], values["node"]
            return cls(*ms, str(values["origin"]), str(values.get("busy", "")))
        except (KeyError, TypeError) as error:
            raise ValueError(f"no times of the host ({type(error).__name__}: {error})") from None


KIND: store.Kind[HostPrices] = store.Kind("host", "the host's times", HostPrices.from_dict)


def facts() -> dict[str, Any]:
    """What they depend on: this machine, and versions; no model."""
    return {
        "host": "many requests",
        "dsbd": __version__,
        "code": key.code_sum(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "flags": hashlib.sha256(processor.description().encode()).hexdigest()[:16],
    }


class Sample(NamedTuple):
    """What iterations with one forest took: milliseconds of the host for a request's part, on average."""

    layers: float
    nodes: int
    ms: float


def fitted(samples: Sequence[Sample], origin: str, busy: str = "") -> HostPrices:
    """The prices, none below 0, that explain the samples best (least squares of relative errors).

    Raises:
        ValueError: no samples.
    """
    if not samples:
        raise ValueError("no samples")
    rows = np.array([[1.0, one.nodes > 0, one.layers, one.nodes] for one in samples])
    ms = np.array([one.ms for one in samples])
    rows, goal = rows / ms[:, None], np.ones(len(ms))
    best: tuple[float, np.ndarray] = math.inf, np.zeros(4)
    # Which of four are not 0: the least squares over each choice, where they come out positive.
    for chosen in itertools.product((False, True), repeat=4):
        values = np.zeros(4)
        if any(chosen):
            values[list(chosen)] = np.linalg.lstsq(rows[:, chosen], goal, rcond=None)[0]
        error = float(((rows @ values - goal) ** 2).sum())
        if (values >= 0).all() and error < best[0] - 1e-12:
            best = error, values
    request, forest, layer, node = (float(one) for one in best[1])
    return HostPrices(request, forest, layer, node, origin, busy)


def measure(
    forests: Sequence[tuple[int, int, bool]] = FORESTS,
    *,
    rounds: int = _ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
) -> HostPrices:
    """The host's prices on this machine; some seconds."""
    watched = Window()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        one, other = _tiny(), _tiny()
    target, same, another = (
        HfTreeModel(module, vocab_size=_TOKENS, role=role, fast=False, graphs=True, test=False)
        for module, role in ((one, "target"), (one, "draft"), (other, "draft"))
    )
    samples = [
        _sample(target, same if agrees else another, gamma, width, rounds, clock)
        for gamma, width, agrees in forests
    ]
    return fitted(samples, *measured_now(watched.share()))


def _tiny() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    # Spread like a language model's: several draws leave about two beams.
    config = LlamaConfig(vocab_size=_TOKENS, initializer_range=0.5, max_position_embeddings=4096, **sizes)
    return LlamaForCausalLM(config).eval()


def _sample(
    target: HfTreeModel, draft: HfTreeModel, gamma: int, width: int, rounds: int, clock: Callable[[], float]
) -> Sample:
    """Iterations of some requests with this forest, in one pipeline."""
    settings = Settings(
        method="dsbd" if gamma else "beam", width=_WIDTH, gamma=gamma, draft_width=width, threshold=None,
        max_new_tokens=(gamma + 1) * (rounds + _WARM_UP + 2),
    )  # fmt: skip
    demand = demand_of(settings, drafts=gamma > 0)
    size = most_nodes(settings, _PROMPT, settings.max_new_tokens)
    top_n = top_n_needed(settings, 0), draft_processor(settings).top_n
    shared = [SharedModel(model, 64 * _REQUESTS, size) for model in (target, draft)[: 2 if gamma else 1]]
    tries = [Trie(lambda node: None, (), settings.max_new_tokens) for _ in range(_REQUESTS)]
    admitted = []
    for model, count in zip(shared, top_n, strict=False):
        model.room([size] * _REQUESTS)
        requests = [model.admit(list(range(_PROMPT)), trie.root, size, count) for trie in tries]
        for _ in model.prefill([one for one in requests if one is not None]):
            pass
        admitted.append(requests)
    pipeline = Engines().together(shared[0], shared[1] if gamma else None, demand, (), top_n, _REQUESTS)
    assert pipeline is not None
    loops = []
    for place, trie in enumerate(tries):
        mine = [requests[place] for requests in admitted]
        theirs = mine[1] if gamma else None
        seat = Seat(pipeline, mine[0], theirs, forests=False)
        samplers = SeededSampler(place, 0), SeededSampler(place, 1)
        loops.append(loop_of(start(settings, mine[0], theirs, trie, *samplers, seat), settings))  # type: ignore[arg-type]
    layers: list[int] = []
    times: list[float] = []
    for _ in range(rounds + _WARM_UP + 1):
        before, begin, seen = pipeline.steps_s, clock(), 0
        for loop in loops:
            for event in loop:
                if isinstance(event, Turn):
                    break
                seen += isinstance(event, Layer)
        layers.append(seen)
        pipeline.step()
        times.append((clock() - begin - (pipeline.steps_s - before)) * 1e3 / _REQUESTS)
    # A step commits the layers that the next round sees.
    both = sorted(zip(times[_WARM_UP:], layers[_WARM_UP + 1 :], strict=False))
    calm = both[: (len(both) + 1) // 2]
    ms, committed = (statistics.fmean(one) for one in zip(*calm, strict=True))
    return Sample(committed / _REQUESTS, gamma * width, max(ms, 1e-6))
