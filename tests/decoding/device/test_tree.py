"""Token trees on the device: what the host would draw and accept, from the same random numbers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dsbd_cli.decoding.device import tree_iteration, tree_law
from dsbd_cli.decoding.device.tree_law import RULES, Conditionals, Drafted, drawn_distinct
from dsbd_cli.decoding.device.tree_layout import TreeShape, tree_nodes
from dsbd_cli.decoding.law.distribution import draw_distinct
from dsbd_cli.decoding.law.verification import accept_distinct_draws, accept_draws, accept_sequentially
from dsbd_cli.decoding.methods.setup import decode
from dsbd_cli.errors import RunError
from dsbd_cli.settings import Settings
from tests.decoding.device.helpers import begun, finished, is_drawn, said, told, trees

WAYS = {
    "default": {},
    "wide": {"tree": (4, 3), "temperature": 1.5},
    "narrow at first": {"tree": (1, 3, 1), "top_p": 1.0, "temperature": 2.0},
    "one level": {"tree": (5,)},
    "few tokens": {"tree": (3, 2, 1), "top_k": 4, "top_p": 0.8},
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 1e-307},
}


def settings_of(way: str, rule: str) -> Settings:
    base = {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
    return Settings(**({"method": "specinfer", "tree_rule": rule} | base | WAYS[way]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", WAYS)
def test_the_device_decides_what_the_host_decides(pair, way, rule):
    settings = settings_of(way, rule)
    device, host = trees(pair, True), trees(pair, None)
    for budget, seed in ((1, 0), (2, 1), (4, 2), (30, 3), (30, 4))[: 5 if is_drawn(settings) else 4]:
        got, wanted = (told(models, settings, seed, budget=budget) for models in (device, host))
        assert got[:3] == wanted[:3]
        assert all(mine <= theirs for mine, theirs in zip(got[3], wanted[3], strict=True))
        assert device.choice.engine is not None
    assert not device.notes


def test_an_equal_child_that_is_accepted_goes_on_where_the_first_one_does(pair, monkeypatch):
    """K-SEQ may refuse a draw and accept its equal; of few tokens many are equal."""
    monkeypatch.setattr(tree_law, "_GRID", 1 << 13)  # what is quick on a CPU
    options = {"tree": (4, 2), "tree_rule": "spectr", "top_k": 3, "top_p": 1.0, "temperature": 2.0}
    settings = Settings(method="specinfer", **options)
    device, host = trees(pair, True), trees(pair, None)
    for seed in range(3):
        got, wanted = (told(models, settings, seed, budget=60, eos=[]) for models in (device, host))
        assert got[:3] == wanted[:3]


@pytest.mark.parametrize("rule", RULES)
def test_events_show_the_tree_of_the_host(pair, rule):
    found = []
    for graphs in (True, None):
        run = begun(trees(pair, graphs), settings_of("few tokens", rule), 5, budget=24)
        layers = []
        for event in decode(run, settings_of("few tokens", rule)):
            for layer in event.forest.layers if hasattr(event, "forest") else ():
                texts = [node.tokens() for node in (*layer.parents, *layer.draws)]
                layers.append((texts, layer.support))
        found.append(layers)
    assert len(found[0]) > 20
    assert [texts for texts, _ in found[0]] == [texts for texts, _ in found[1]]
    for (_, mine), (_, theirs) in zip(*found, strict=True):
        assert np.array_equal(mine.token, theirs.token)
        assert np.allclose(mine.prob, theirs.prob, atol=1e-5)
        assert np.allclose(mine.logp, theirs.logp, atol=1e-4)


def test_a_stop_string_ends_the_text_and_leaves_nothing_behind(pair):
    settings, models = settings_of("default", "specinfer"), trees(pair, True)
    wanted = told(trees(pair, True), settings, 1)
    for seed in range(4):
        run = finished(models, settings, seed, stop=tuple(range(20, 60)))
        (text,) = said(run)
        assert not any(20 <= token < 60 for token in text[:-1])
        assert told(models, settings, 1) == wanted


@pytest.mark.parametrize("who", [0, 1])
def test_trees_end_before_a_context_does(pair, who):
    settings, texts = settings_of("default", "specinfer"), []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[who].max_positions = 5 + 20
        texts.append(said(finished(models, settings, 0, budget=20, eos=[])))
    assert texts[0] == texts[1]


class Given:
    """Uniforms in their order."""

    def __init__(self, uniforms: np.ndarray) -> None:
        self.left = list(uniforms)

    def accept(self, numerator: float, denominator: float) -> bool:
        return self.left.pop(0) * denominator < numerator

    def sample(self, weights: np.ndarray, count: int) -> list[int]:
        cumulative = np.cumsum(weights)
        return [
            int(np.searchsorted(cumulative, self.left.pop(0) * cumulative[-1], side="right"))
            for _ in range(count)
        ]


def accepted(rule: str, p: np.ndarray, q: np.ndarray, drafted: list[int], uniforms: np.ndarray):
    sampler = Given(uniforms)
    if rule == "rsd":
        return accept_distinct_draws(p, q, drafted, 1, sampler)
    if rule == "spectr":
        return accept_sequentially(p, q, drafted, sampler)
    return accept_draws(p, q, drafted, 1, sampler)


@pytest.mark.parametrize("rule", RULES)
def test_nodes_answer_as_the_law_does(rule):
    """Many nodes at a time: equal and disjoint distributions, one token, fewer draws than there is room for."""
    rng, tokens, most = np.random.default_rng(4), 7, 3
    p, q, drafted, there, uniforms, wanted = [], [], [], [], [], []
    for number in range(300):
        one, other = rng.dirichlet(np.full(tokens, 0.5), 2)
        one, other = (np.where(rng.random(tokens) < 0.7, each, 0.0) for each in (one, other))
        one[number % tokens] += 0.1
        other[(number if number % 4 else number + 1) % tokens] += 0.1
        one, other = one / one.sum(), other / other.sum()
        if number % 9 == 0:
            other = one.copy()
        count = int(rng.integers(0, most + 1))
        sampler, numbers = Given(rng.random(most)), rng.random(most + 1)
        draws = draw_distinct(sampler, other, count) if rule == "rsd" else sampler.sample(other, count)
        answer = accepted(rule, one, other, draws, numbers) if draws else None
        p.append(one)
        q.append(other)
        drafted.append(draws + [0] * (most - len(draws)))
        there.append([i < len(draws) for i in range(most)])
        uniforms.append(numbers)
        wanted.append((answer, len(draws)))
    row = torch.arange(tokens, dtype=torch.int32).expand(len(p), -1).contiguous()
    probs, others, numbers = (torch.tensor(np.array(part)) for part in (p, q, uniforms))
    children = Drafted(Conditionals(row, 3 * others), torch.tensor(drafted), torch.tensor(there))
    passes, rest = RULES[rule](Conditionals(row, probs / 2), children, numbers[:, :most])
    looked_at = 0
    for node, (answer, count) in enumerate(wanted):
        first = passes[node].tolist().index(True) if passes[node].any() else None
        if answer is not None and answer.passed:
            assert first == len(answer.verdicts) - 1
            assert drafted[node][first] == answer.draws[0]
            continue
        assert first is None
        (token,) = answer.draws if answer is not None else Given(uniforms[node]).sample(p[node], 1)
        cumulative = torch.cumsum(rest[node], 0)
        assert int((cumulative <= uniforms[node][count] * cumulative[-1]).sum()) == token
        looked_at += 1
    assert 50 < looked_at < 250


def test_distinct_draws_of_many_nodes_are_those_of_the_law():
    rng = np.random.default_rng(5)
    weights = np.where(rng.random((40, 5)) < 0.5, rng.random((40, 5)), 0.0)
    weights[:, 2] += 0.01
    uniforms = rng.random((40, 4))
    draws, there = drawn_distinct(torch.tensor(weights), torch.tensor(uniforms))
    for row in range(40):
        wanted = draw_distinct(Given(uniforms[row]), weights[row], 4)
        assert draws[row][there[row]].tolist() == wanted


def test_the_shape_of_a_tree():
    shape = TreeShape((2, 3))
    assert len(shape) == 1 + tree_nodes((2, 3)) == 9
    assert shape.first == [0, 1, 3, 9]
    assert shape.parent.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert shape.children[:3].tolist() == [[1, 2, 0], [3, 4, 5], [6, 7, 8]]
    assert np.flatnonzero(shape.above[7]).tolist() == [0, 2, 7]
    assert (shape.inner, shape.draws, shape.tests) == (3, 8, 8)


class Counting(TorchDispatchMode):
    """Operations outside the models' own forwards that are more than another look at the same memory."""

    LOOKS = frozenset(
        ("view", "slice", "select", "expand", "unsqueeze", "transpose", "numpy_T", "unflatten", "flatten",
         "view_as", "split", "detach", "alias", "permute", "reshape", "lift_fresh"),
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.silent = False

    def __torch_dispatch__(self, function, types, args=(), named=None):
        name = function.overloadpacket.__name__
        if not self.silent and name not in self.LOOKS:
            self.counts[name] += 1
        return function(*args, **(named or {}))

    def outside(self, function):
        """`function`, not counted."""

        def silent(*args, **named):
            self.silent = True
            try:
                return function(*args, **named)
            finally:
                self.silent = False

        return silent


@pytest.mark.parametrize(("rule", "most"), [("specinfer", 150), ("rsd", 190), ("spectr", 240)])
def test_an_iteration_of_the_default_tree_has_few_operations(pair, monkeypatch, rule, most):
    """Each costs some microseconds of a captured iteration, however small it is."""
    models = trees(pair, True)
    begun(models, settings_of("default", rule), 0)
    (iteration,) = models.engines._iterations.values()
    counting = Counting()
    monkeypatch.setattr(tree_iteration, "forward_many", counting.outside(tree_iteration.forward_many))
    monkeypatch.setattr(iteration.law, "pack", counting.outside(iteration.law.pack))
    with torch.inference_mode(), counting:
        iteration._steps(iteration._packed([None]), *iteration._key([]))
    assert 100 < sum(counting.counts.values()) <= most, counting.counts


@pytest.mark.parametrize("name", ["target", "draft"])
def test_logits_that_are_no_numbers_end_the_run(pair, name):
    models = trees(pair, True)
    events = decode(
        begun(models, settings_of("default", "specinfer"), 0), settings_of("default", "specinfer")
    )
    for _ in range(4):  # the first iteration is the host's
        next(events)
    (iteration,) = models.engines._iterations.values()
    side = getattr(iteration, name)
    object.__setattr__(side, "forward", Spoiled(side.forward))
    with pytest.raises(RunError, match=f"the {name} model .*not finite"):
        for _ in events:
            pass


class Spoiled:
    """A forward whose logits are NaN."""

    def __init__(self, forward) -> None:
        self._inner = forward

    def __call__(self, *args, **options):
        return self._inner(*args, **options) * float("nan")

    def __getattr__(self, name):
        return getattr(self._inner, name)
