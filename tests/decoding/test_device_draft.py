"""An iteration on the device is the iteration of the host: same draws, same tokens, nothing leaks.

On a CPU nothing is recorded, but every step is the recorded one.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.device.chain_iteration import DeviceChain
from dsbd_cli.decoding.device.law_torch import best_layer, draft_layer
from dsbd_cli.decoding.device.proposer import DeviceProposer
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Row, SeededSampler, joint, most_probable
from dsbd_cli.decoding.methods.setup import decode, draft_processor, start, top_n_needed
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node, Trie
from dsbd_cli.errors import RunError
from dsbd_cli.settings import Settings
from tests.builders import VOCAB, rand

PROMPT = [3, 4, 9, 10, 11]
EOS = [5, 6, 7, 8]
WAYS = {
    "cover": {"verify": "cover", "threshold": None},
    "cover-dynamic": {"verify": "cover", "threshold": 0.9},
    "paper": {"verify": "paper"},
    "continue": {"verify": "continue", "threshold": None},
    "kv-one": {"verify": "cover", "kv": "one"},
    "greedy": {"temperature": 0.0},
    "speculative": {"method": "speculative"},
    "deterministic": {"deterministic": True},
}
# What the device verifies too (`chain`).
CHAINED = {
    "cover": WAYS["cover"],
    "greedy": WAYS["greedy"],
    "cold": {"threshold": None, "temperature": 1e-307},
    "one layer": {"threshold": None, "gamma": 1},
    "wide": {"threshold": None, "width": 6, "draft_width": 9, "gamma": 5, "temperature": 1.5},
    "one beam": {"threshold": None, "width": 1, "min_width": 1},
    "beam": {"method": "beam"},
    "multinomial": {"method": "multinomial"},
}


def settings_of(way: str, **more: object) -> Settings:
    options = (WAYS | CHAINED)[way]
    base = {} if "deterministic" in options else {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
    # A device drafts full forests; on a CPU the host alone would spare some of them.
    sizes = {"width": 4, "draft_width": 5, "gamma": 3, "forest": "full"}
    return Settings(**(base | sizes | options | more))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return related(tmp_path_factory.mktemp("target"))


def related(folder):
    """A target, and a draft that mostly agrees with it."""
    target = rand(folder, initializer_range=0.3, num_key_value_heads=2)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    return target, draft


def trees(pair, graphs):
    return [
        HfTreeModel(model, vocab_size=VOCAB, role=role, graphs=graphs)
        for model, role in zip(pair, ("target", "draft"), strict=True)
    ]


def ends(budget, stop, eos):
    def why(node: Node) -> str | None:
        if node.token in eos:
            return "eos"
        if node.token in stop:
            return "stop"
        return "length" if node.depth >= budget else None

    return why


def begun(models, settings, seed, budget=30, stop=(), eos=EOS):
    target, draft = (*models, None)[:2]
    trie = Trie(ends(budget, stop, eos), eos, budget)
    target.prefill(PROMPT, trie.root, top_n=top_n_needed(settings, len(eos)))
    if draft is not None:
        draft.prefill(PROMPT, trie.root, top_n=draft_processor(settings).top_n)
    return start(settings, target, draft, trie, SeededSampler(seed, 0), SeededSampler(seed, 1))


def told(models, settings, seed, **more):
    """Everything that was decided, event by event, and the live slots at the end."""
    run = begun(models, settings, seed, **more)
    events = []
    for event in decode(run, settings):
        draws = getattr(event, "draws", None)
        events.append([node.tokens() for node in (event.active if draws is None else draws)])
        events.append(getattr(event, "verdicts", None))
    live = [model.pool.slots.live for model in models]
    return events, [node.tokens() for node in run.hypotheses.ranking()], models[0].calls, live


@pytest.mark.parametrize("way", CHAINED)
@pytest.mark.parametrize("stop", [(), tuple(range(20, 60))])
@pytest.mark.parametrize("budget", [1, 2, 5, 40])
def test_chained_iterations_decide_what_the_host_decides(pair, way, stop, budget):
    settings = settings_of(way)
    device, host = trees(pair, True), trees(pair, None)
    for seed in range(6):
        got, wanted = (told(models, settings, seed, stop=stop, budget=budget) for models in (device, host))
        if stop and settings.method == "dsbd":
            # A drafted stop string ends the forest that the events show.
            assert got[1] == wanted[1]
        else:
            assert got[:3] == wanted[:3]
        # The host may know the rows of some last beams, which the device would compute anew.
        assert all(mine <= theirs for mine, theirs in zip(got[3], wanted[3], strict=True))
    assert not device[0].notes
    assert device[0]._chains
    assert not device[0]._loops


@pytest.fixture
def _verified_by_the_host(monkeypatch):
    """The device drafts and computes, the host verifies."""
    monkeypatch.setattr(HfTreeModel, "why_no_chain", lambda *_: "not asked for")


@pytest.mark.usefixtures("_verified_by_the_host")
@pytest.mark.parametrize("stop", [(), tuple(range(20, 120))])
@pytest.mark.parametrize("way", WAYS)
def test_the_device_decides_what_the_host_decides(pair, way, stop):
    settings = settings_of(way)
    device, host = trees(pair, True), trees(pair, None)
    for seed in range(8):
        got, wanted = (told(models, settings, seed, stop=stop) for models in (device, host))
        if not stop:
            assert got == wanted
        elif way in ("cover", "deterministic"):
            # Past a stop string the device drafts no further, where the host goes on from other
            # parents: other forests, the same law, and here the same text.
            assert got[1] == wanted[1]
    assert not device[0].notes
    loops = device[0]._loops.values()
    assert loops
    assert all(loop._buckets for loop in loops)


@pytest.mark.parametrize("way", ["cover", "paper"])
def test_recordings_are_kept_from_prompt_to_prompt(pair, way):
    models, settings = trees(pair, True), settings_of(way)
    for seed in range(6):
        told(models, settings, seed)
    (loop,) = (*models[0]._loops.values(), *models[0]._chains.values())
    # Sizes: 4, 8 or 16 nodes of the draft and of the target, one number of slots; chained: one size.
    assert len(loop._buckets) <= (1 if way == "cover" else 9)


@pytest.mark.parametrize("stop", [(), tuple(range(20, 40))])
@pytest.mark.parametrize("way", ["paper", "cover", "beam"])
def test_nothing_leaks_from_what_was_reserved(pair, way, stop):
    models, settings = trees(pair, True), settings_of(way)
    if way == "beam":
        models = models[:1]
    run = begun(models, settings, 4 if stop else 3, budget=60, stop=stop, eos=[])
    iterations = 0
    for event in decode(run, settings):
        if hasattr(event, "draws"):
            continue
        iterations += 1
        known = [set() for _ in models]
        for leaf in event.active:
            for model, nodes in zip(models, known, strict=True):
                node = leaf
                while node.parent is not None:
                    if node in model.pool:
                        nodes.add(node)
                    node = node.parent
        for model, nodes in zip(models, known, strict=True):
            # The next iteration is under way: its plan is entered, its forest has reserved space.
            reserved = sum(len(each.slots) for each in model.pool._reservations)
            assert model.pool.slots.live - reserved == len(PROMPT) + len(nodes)
            rows = model.pool.masks.table.shape[0]
            assert rows - 1 - len(model.pool.masks._free) - reserved == len(model.pool._open)
    assert iterations > 5
    for model in models:
        assert not model.pool.reserved


@pytest.mark.parametrize("way", ["cover", "paper", "beam", "kv-one"])
def test_a_run_that_is_left_leaves_nothing_behind(pair, way):
    settings = Settings(method="beam", width=3, max_new_tokens=30) if way == "beam" else settings_of(way)
    models = trees(pair, True)
    wanted = told(trees(pair, True), settings, 1)
    for stop_after in range(1, 9):
        events = decode(begun(models, settings, 0, budget=60), settings)
        for _ in range(stop_after):
            next(events)
        events.close()
        assert told(models, settings, 1) == wanted


@pytest.mark.parametrize("way", ["cover", "paper"])
@pytest.mark.parametrize("who", [0, 1])
def test_logits_that_are_not_finite_stop_the_run(pair, who, way):
    models, settings = trees([copy.deepcopy(model) for model in pair], True), settings_of(way)
    told(models, settings, 0)
    with torch.no_grad():
        # Every token but those of the prompt breaks the model.
        weight = models[who].model.model.embed_tokens.weight
        weight[torch.isin(torch.arange(len(weight)), torch.tensor(PROMPT), invert=True)] = float("nan")
    with pytest.raises(RunError, match=f"the {('target', 'draft')[who]} model"):
        told(models, settings, 0)


def test_what_cannot_be_recorded_is_drafted_step_by_step(pair, monkeypatch):
    def broken(self, packed, key):
        raise RuntimeError("no\nmore")

    settings = settings_of("paper")
    wanted = told(trees(pair, None), settings, 1)
    monkeypatch.setattr("dsbd_cli.decoding.device.iteration.DeviceLoop._record", broken)
    models = trees(pair, True)
    assert told(models, settings, 1) == wanted
    assert models[0].notes == ["target: drafting step by step, an iteration cannot be recorded (no)"]
    assert not isinstance(begun(models, settings, 1).proposer, DeviceProposer)


def test_where_iterations_cannot_be_chained_the_host_verifies(pair, monkeypatch):
    def broken(self, request):
        raise RuntimeError("no\nmore")

    settings = settings_of("cover")
    wanted = told(trees(pair, None), settings, 1)
    monkeypatch.setattr("dsbd_cli.decoding.device.chain_iteration.DeviceChain._record", broken)
    models = trees(pair, True)
    assert told(models, settings, 1)[:3] == wanted[:3]
    assert models[0].notes == ["target: the host verifies, iterations cannot be chained (no)"]
    assert begun(models, settings, 1).chain is None


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_models_with_learned_positions_are_chained_too(tmp_path, kind):
    """A recording runs once before there are beams: at positions that exist."""
    models = [rand(tmp_path / str(seed), kind, seed=seed, initializer_range=0.3) for seed in (0, 1)]
    settings = settings_of("cover")
    device, host = trees(models, True), trees(models, None)
    for seed in range(3):
        got, wanted = (told(each, settings, seed, budget=12) for each in (device, host))
        assert got[:3] == wanted[:3]
    assert device[0]._chains


def test_a_forest_deeper_than_a_context_is_left_to_the_host(pair):
    settings = settings_of("cover", gamma=12)
    said = []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[1].max_positions = 13
        run = begun(models, settings, 0, budget=8)
        for _ in decode(run, settings):
            pass
        assert run.chain is None
        said.append([node.tokens() for node in run.hypotheses.ranking()])
    assert said[0] == said[1]


def test_one_kept_beam_is_not_chained_without_a_draft_either(pair):
    settings, said = settings_of("kv-one"), []
    for graphs in (True, None):
        run = begun(trees(pair, graphs)[:1], settings, 0, budget=25, eos=[])
        for _ in decode(run, settings):
            pass
        said.append([node.tokens() for node in run.hypotheses.ranking()])
    assert said[0] == said[1]


def test_recorded_iterations_are_kept_up_to_a_number(pair, monkeypatch):
    monkeypatch.setattr("dsbd_cli.decoding.model.hf_model._MOST_ITERATIONS", 2)
    models = trees(pair, True)
    for temperature in (0.5, 0.6, 0.5, 0.7):
        told(models, settings_of("cover", temperature=temperature), 0, budget=6)
    assert [key[3].temperature for key in models[0]._chains] == [0.5, 0.7]
    for gamma in (1, 2, 3):
        told(models, settings_of("paper", gamma=gamma), 0, budget=6)
    assert [key[3] for key in models[0]._loops] == [2, 3]


def test_what_the_device_does_meanwhile_counts_once(pair):
    target = trees(pair, True)[0]
    assert target.meanwhile(1.0) == 0
    target.landed(0.5)
    target.set_off(True)
    assert target.meanwhile(0.2) == pytest.approx(0.2)
    target.set_off(True)  # one more behind it: the first is still the one at work
    assert target.meanwhile(1.0) == pytest.approx(0.3)
    assert target.meanwhile(1.0) == 0
    target.landed(None)
    assert target.meanwhile(1.0) == 0
    target.set_off(True)
    assert target.meanwhile(0.1) == pytest.approx(0.1)


@pytest.mark.parametrize("good", range(1, 6))
def test_a_launch_that_fails_leaves_what_is_under_way(pair, monkeypatch, good):
    """Out of memory, say, while an iteration is under way: that one lands, the host goes on."""
    launch, calls = DeviceChain.launch, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) > good:
            raise RuntimeError("no more")
        return launch(self, *arguments)

    settings = settings_of("cover")
    wanted = told(trees(pair, None), settings, 1)
    monkeypatch.setattr(DeviceChain, "launch", failing)
    models = trees(pair, True)
    assert told(models, settings, 1)[1] == wanted[1]
    assert models[0].notes == ["target: the host verifies, iterations cannot be chained (no more)"]
    assert all(not model.pool.reserved for model in models)


@pytest.mark.parametrize("way", ["cover", "beam"])
def test_what_the_device_decided_is_there_for_a_prompt_that_goes_on(pair, way):
    """A chat's next prompt takes over the answer's keys and values; what it is told is what a fresh start tells."""
    settings = settings_of(way)
    for seed in range(4):
        models = trees(pair, True)
        run = begun(models, settings, seed, budget=30)
        run.keep_answer = True
        for _ in decode(run, settings):
            pass
        prompt = [*PROMPT, *run.hypotheses.ranking()[0].tokens()[:-1], 9, 10]
        fresh = trees(pair, True)
        rows = []
        for target, reuse in ((models[0], True), (fresh[0], False)):
            shared = len(target.pool.shared_prefix(prompt)) if reuse else 0
            root = Node(-1, None)
            target.prefill(prompt, root, top_n=10, reuse=reuse)
            rows.append((shared, *target.best(root, 10)))
        assert rows[0][0] == len(prompt) - 2
        assert np.array_equal(rows[0][1], rows[1][1])
        assert np.abs(rows[0][2] - rows[1][2]).max() < 1e-4


def test_chained_iterations_go_on_through_growing_buffers(pair, monkeypatch):
    settings, said = settings_of("cover"), []
    let_go = []
    monkeypatch.setattr("dsbd_cli.decoding.forward.graphs.Recorder.forget", lambda self: let_go.append(self))
    for graphs in (True, None):
        models = trees(pair, graphs)
        for model in models:
            model.pool = type(model.pool)(16, 4, model.dtype, model.device)
        run = begun(models, settings, 2, budget=80, eos=[])
        for _ in decode(run, settings):
            pass
        said.append([node.tokens() for node in run.hypotheses.ranking()])
    assert said[0] == said[1]
    # A memory whose recordings are all gone cannot be recorded into again.
    assert len(let_go) > 2


def _noting(forward, furthest):
    """`forward`, which notes the furthest position of each call."""

    def noted(cache, ids, positions, *rest):
        furthest.append(int(positions.max()))
        return forward(cache, ids, positions, *rest)

    return noted


@pytest.mark.parametrize("who", [0, 1])
def test_chained_iterations_end_before_a_context_does(pair, who):
    """The device may be two iterations further than what was committed; no position may leave the table."""
    settings, said = settings_of("cover"), []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[who].max_positions = len(PROMPT) + 20
        furthest: list[int] = []
        models[who]._forward = _noting(models[who]._forward, furthest)
        run = begun(models, settings, 0, budget=20, eos=[])
        for _ in decode(run, settings):
            pass
        assert max(furthest) < len(PROMPT) + 20
        said.append([node.tokens() for node in run.hypotheses.ranking()])
    assert said[0] == said[1]


def test_a_draft_at_the_end_of_its_context_is_noticed(pair):
    settings, said = settings_of("cover"), []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[1].max_positions = len(PROMPT) + 12
        run = begun(models, settings, 0, budget=40, eos=[])
        for _ in decode(run, settings):
            pass
        assert run.proposer is not None
        assert run.proposer.exhausted
        said.append([node.tokens() for node in run.hypotheses.ranking()])
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "processor",
    [
        LogitsProcessor(0.7, 6, 0.8),
        LogitsProcessor(1.0, 3, 1.0),
        LogitsProcessor(0.0, 6, 1.0),
        LogitsProcessor(2.0, 9, 0.3),
        LogitsProcessor(1.0, 5, 0.0),
    ],
)
def test_the_law_on_the_device_is_the_law(processor):
    rng = np.random.default_rng(0)
    size = max(1, processor.top_n)
    for trial in range(200):
        parents = int(rng.integers(1, 6))
        logps = torch.log_softmax(torch.tensor(3 * rng.normal(size=(parents, 50)), dtype=torch.float32), -1)
        values, ids = torch.topk(logps, size)
        scores = rng.normal(size=parents)
        rows = [Row(i.numpy(), v.double().numpy()) for i, v in zip(ids, values, strict=True)]
        law = joint(scores, rows, processor)
        sample = SeededSampler(trial, 0).sample(law.prob, 6)
        # One place more, as where there are fewer beams than there may be.
        wide = torch.tensor([*scores, -np.inf])
        more = [torch.cat([part, part[:1]]) for part in (ids, values)]
        got = draft_layer(wide, *more, processor, torch.tensor(SeededSampler(trial, 0).peek(6)))
        inside = got.prob > 0
        assert np.allclose(got.prob[inside], law.prob, rtol=1e-12, atol=0)
        assert np.array_equal(got.parent[inside], law.parent)
        assert np.array_equal(got.token[inside], law.token)
        assert np.array_equal(got.token[got.draws], law.token[sample])
        first = [sample.index(pick) == i for i, pick in enumerate(sample)]
        assert torch.isfinite(got.scores).tolist() == first
        best = best_layer(wide, *more, size)
        exact = joint(scores, rows, LogitsProcessor(top_k=size))
        assert np.array_equal(best.token, exact.token[most_probable(exact, size)])
