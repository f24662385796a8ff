"""A pipelined iteration is the iteration of the host: same draws, same tokens, nothing leaks."""

from __future__ import annotations

import numpy as np
import pytest

from dsbd_cli.decoding.device.iteration import CoverIteration
from dsbd_cli.decoding.device.lanes import Uniforms
from dsbd_cli.decoding.forward.capture import Captures
from dsbd_cli.decoding.forward.outcomes import CannotCapture, OutOfMemory
from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.setup import decode, forest_is_free
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.settings import Settings
from tests.builders import rand
from tests.decoding.crossing import Crossing
from tests.decoding.device.helpers import (
    PIPELINED,
    PROMPT,
    TESTED,
    begun,
    finished,
    is_drawn,
    reserved,
    said,
    settings_of,
    told,
    trees,
)
from tests.decoding.spy import Spy


@pytest.mark.parametrize("way", PIPELINED)
@pytest.mark.parametrize("stop", [(), tuple(range(20, 60))])
@pytest.mark.parametrize("budget", [1, 2, 5, 40])
def test_pipelined_iterations_decide_what_the_host_decides(pair, way, stop, budget):
    settings = settings_of(way)
    device, host = trees(pair, True), trees(pair, None)
    seeds = (
        (3 if budget == 40 else 5) if is_drawn(settings) else 2
    )  # the second one finds the first one's captures
    # The device drafts below stop strings: other forests, hence another text, of the same law.
    compared = not stop or forest_is_free(settings) or settings.method != "dsbd"
    for seed in range(seeds if compared else 1):
        got = told(device, settings, seed, stop=stop, budget=budget)
        assert device.choice.engine is not None
        assert device.choice.proposer is None
        if not compared:
            continue
        wanted = told(host, settings, seed, stop=stop, budget=budget)
        if settings.kv == "one":
            # A layer from the one beam that is kept, of the same iteration here, of one more on the host.
            assert got[1:3] == wanted[1:3]
        elif stop and settings.method == "dsbd":
            # A drafted stop string ends the forest that the events show.
            assert got[1] == wanted[1]
        else:
            assert got[:3] == wanted[:3]
        # The host may know the logits of some last beams, which the device would compute anew. (Its draft computes
        # nothing below what the target has said, and holds less.)
        both = 1 if forest_is_free(settings) else 2
        assert all(mine <= theirs for mine, theirs in zip(got[3][:both], wanted[3][:both], strict=True))
    assert not device.notes


@pytest.mark.parametrize("way", TESTED)
def test_tested_draws_are_accepted_as_the_host_accepts_them(pair, way):
    settings = settings_of(way)
    device, host = trees(pair, True), trees(pair, None)
    for budget, seed in ((2, 0), (4, 1), (30, 2), (30, 3)):
        got, wanted = (told(models, settings, seed, budget=budget) for models in (device, host))
        assert got[:2] == wanted[:2]
        # Where a layer was filled up with what the forest holds, the host may have nothing to compute next.
        assert got[2] == wanted[2] + wanted[4]
        assert all(mine <= theirs for mine, theirs in zip(got[3], wanted[3], strict=True))
        assert device.choice.engine is not None
    assert not device.notes


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_models_with_learned_positions_are_pipelined_too(tmp_path, kind):
    """A capture runs once before there are beams: at positions that exist."""
    models = [rand(tmp_path / str(seed), kind, seed=seed, initializer_range=0.3) for seed in (0, 1)]
    settings = settings_of("cover")
    device, host = trees(models, True), trees(models, None)
    for seed in range(3):
        got, wanted = (told(each, settings, seed, budget=12) for each in (device, host))
        assert got[:3] == wanted[:3]
    assert device.choice.engine is not None


@pytest.mark.parametrize("way", ["kv-one", "cover-dynamic", "deterministic"])
def test_without_a_draft_the_text_is_the_host_s_too(pair, way):
    settings, texts = settings_of(way), []
    for graphs in (True, None):
        models = trees(pair, graphs).alone()
        texts.append(said(finished(models, settings, 0, budget=25, eos=[])))
        assert (models.choice.engine is not None) == bool(graphs)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("good", range(1, 6))
def test_a_launch_that_fails_leaves_what_is_in_flight(pair, monkeypatch, good):
    """An iteration in flight still comes back, then the host goes on with the right random numbers."""
    launch, calls = CoverIteration.launch, []

    def failing(self, sent):
        calls.append(1)
        if len(calls) > good:
            raise CannotCapture("no more")
        return launch(self, sent)

    settings = settings_of("cover")
    wanted = told(trees(pair, None), settings, 1)
    monkeypatch.setattr(CoverIteration, "launch", failing)
    models = trees(pair, True)
    assert told(models, settings, 1)[1] == wanted[1]
    assert models.notes == ["target: the host verifies, an iteration cannot be captured (no more)"]
    assert not any(reserved(model) for model in models)
    told(models, settings, 1)
    assert models.choice.engine is None  # remembered


def test_a_device_short_of_memory_is_asked_again_by_the_next_run(pair, monkeypatch):
    launch, calls = CoverIteration.launch, []

    def short(self, sent):
        calls.append(1)
        if len(calls) == 3:
            raise OutOfMemory("CUDA out of memory")
        return launch(self, sent)

    settings = settings_of("cover")
    wanted = told(trees(pair, None), settings, 1)
    monkeypatch.setattr(CoverIteration, "launch", short)
    models = trees(pair, True)
    assert told(models, settings, 1)[1] == wanted[1]
    assert not any(reserved(model) for model in models)
    note = "target: the host verifies for now, no memory is left for captures (CUDA out of memory)"
    assert models.notes == [note]
    assert told(models, settings, 1)[1] == wanted[1]
    assert models.choice.engine is not None
    assert len(calls) > 4
    assert models.notes == [note]


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
        prompt = [*PROMPT, *said(run)[0][:-1], 9, 10]
        fresh = trees(pair, True)
        rows = []
        for target, reuse in ((models[0], True), (fresh[0], False)):
            shared = len(target.tree.shared_prefix(prompt)) if reuse else 0
            root = Node(-1, None)
            target.prefill(prompt, root, top_n=10, reuse=reuse)
            rows.append((shared, *target.best(root, 10)))
        assert rows[0][0] == len(prompt) - 2
        assert np.array_equal(rows[0][1], rows[1][1])
        assert np.abs(rows[0][2] - rows[1][2]).max() < 1e-4


def test_pipelined_iterations_go_on_through_growing_buffers(pair, monkeypatch):
    settings, texts = settings_of("cover"), []
    let_go, release = [], Captures.release
    monkeypatch.setattr(Captures, "release", lambda self: (let_go.append(self), release(self))[1])
    for graphs in (True, None):
        models = trees(pair, graphs)
        for model in models:
            model.tree = type(model.tree).alone(16, 4, model.dtype, model.device)
            if model.graphs is not None:
                model.graphs.tree = model.tree
        texts.append(said(finished(models, settings, 2, budget=80, eos=[])))
    assert texts[0] == texts[1]
    # A memory whose captures are all gone cannot be captured into again.
    assert len(let_go) > 2


@pytest.mark.parametrize("who", [0, 1])
def test_pipelined_iterations_end_before_a_context_does(pair, who):
    """The device may be two iterations further than what was committed; no position may leave the table."""
    settings, texts = settings_of("cover"), []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[who].max_positions = len(PROMPT) + 20
        furthest: list[int] = []
        models[who]._forward = Spy(
            models[who]._forward,
            lambda cache, ids, where, *rest, seen=furthest: seen.append(int(where.max())),
        )
        texts.append(said(finished(models, settings, 0, budget=20, eos=[])))
        assert max(furthest) < len(PROMPT) + 20
    assert texts[0] == texts[1]


def test_a_draft_at_the_end_of_its_context_is_noticed(pair):
    settings, texts = settings_of("cover"), []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[1].max_positions = len(PROMPT) + 12
        run = finished(models, settings, 0, budget=40, eos=[])
        assert run.proposer is not None
        assert run.proposer.exhausted
        texts.append(said(run))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("way", ["cover", "cover-dynamic", "deterministic"])
def test_a_steady_iteration_crosses_few_modules(pair, monkeypatch, way):
    """What the host does in an iteration can be read in so many files (replays are the device's part)."""
    crossing, captured = Crossing(), Captures._captured

    def unseen(self, steps):
        outputs, replay = captured(self, steps)
        return outputs, crossing.unseen(replay)

    monkeypatch.setattr(Captures, "_captured", unseen)
    run = begun(trees(pair, True), settings_of(way), 3, budget=60, eos=[])
    counts = crossing.modules(decode(run, settings_of(way)))
    steady = counts[2:-1]
    assert len(steady) > 6
    usual = min(steady, key=len)
    assert len(usual) <= 11, usual
    # Now and then uniforms are taken from the sampler, or a bucket of slots is new.
    assert sum(len(one) > 11 for one in steady) <= len(steady) // 4, steady


def test_nobody_in_a_seat_is_served_nothing(pair):
    run = begun(trees(pair, True), settings_of("cover"), 0)
    assert run.engine is not None
    assert not run.engine.begin(run, run.take)  # the prompt's logits are known: nothing to compute
    run.engine.step()
    assert run.layers_taken() == []


def test_uniforms_are_those_of_the_sampler_whatever_is_looked_at():
    sampler, plain = SeededSampler(3, 0), SeededSampler(3, 0)
    uniforms = Uniforms(sampler, 4)
    wanted = SeededSampler(3, 0).uniforms(4 * 400).reshape(400, 4)
    used = 0
    for step in range(60):
        assert np.array_equal(uniforms.ahead(8), wanted[used : used + 8])
        for _ in range(step % 4 + 1):
            uniforms.use()
            used += 1
    uniforms.settle()
    plain.uniforms(4 * used)
    assert np.array_equal(sampler.uniforms(5), plain.uniforms(5))


@pytest.mark.parametrize("way", ["cover", "paper", "beam", "kv-one"])
def test_a_run_that_is_left_leaves_nothing_behind(pair, way):
    settings = Settings(method="beam", width=3, max_new_tokens=30) if way == "beam" else settings_of(way)
    models = trees(pair, True)
    wanted = told(trees(pair, True), settings, 1, budget=12)
    for stop_after in range(1, 9):
        events = decode(begun(models, settings, 0, budget=60), settings)
        for _ in range(stop_after):
            next(events)
        events.close()
        assert told(models, settings, 1, budget=12) == wanted


@pytest.mark.parametrize("stop", [(), tuple(range(20, 40))])
@pytest.mark.parametrize("way", ["paper", "cover", "beam"])
def test_nothing_leaks_from_what_was_reserved(pair, way, stop):
    models, settings = trees(pair, True), settings_of(way)
    if way == "beam":
        models = models.alone()
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
                    if node in model.tree:
                        nodes.add(node)
                    node = node.parent
        for model, nodes in zip(models, known, strict=True):
            # The next iteration is in flight: its plan is entered, its forest has reserved space.
            held = reserved(model)
            assert model.tree.slots.live - held == len(PROMPT) + len(nodes)
            rows = model.tree.masks.table.shape[0]
            assert rows - 1 - len(model.tree.masks._free) - held == len(model.tree._open)
    assert iterations > 5
    assert not any(reserved(model) for model in models)
