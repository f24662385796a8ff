"""Which engine runs, why no other, and what is kept and remembered from run to run."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding.device import engines
from dsbd_cli.decoding.device.draft_iteration import DraftIteration
from dsbd_cli.decoding.device.iteration import CoverIteration
from dsbd_cli.decoding.device.law_torch import TorchLaw
from dsbd_cli.decoding.device.layout import CoverLayout
from dsbd_cli.decoding.forward.capture import Captures
from dsbd_cli.decoding.methods.setup import demand_of
from dsbd_cli.decoding.model.protocol import Side
from dsbd_cli.settings import Settings
from tests.builders import rand
from tests.decoding.device.helpers import begun, settings_of, told, trees


def broken(self, request, steps):
    raise RuntimeError("no\nmore")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (settings_of("cover"), ""),
        (settings_of("greedy"), ""),
        (settings_of("cover-dynamic"), ""),
        (settings_of("paper"), ""),
        (settings_of("continue"), ""),
        (settings_of("paper", draws="distinct", threshold=None), ""),
        (settings_of("speculative"), ""),
        (settings_of("kv-one"), ""),
        (settings_of("deterministic"), ""),
        (settings_of("deterministic", verify="paper"), ""),
        (Settings(method="specinfer"), ""),
        (Settings(method="specinfer", tree_rule="spectr"), ""),
        (Settings(method="specinfer", tree_rule="rsd"), ""),
        (Settings(method="beam"), ""),
        (Settings(method="beam", deterministic=True), ""),
    ],
)
def test_what_methods_ask_for(settings, why):
    demand = demand_of(settings, True)
    assert why in demand.why_not_pipelined
    assert bool(why) == bool(demand.why_not_pipelined)
    assert (demand.gamma > 0) == (settings.method in ("dsbd", "speculative", "specinfer"))


@pytest.mark.parametrize("way", ["cover", "paper", "deterministic"])
def test_without_captures_the_host_does_everything(pair, way):
    models = trees(pair, None)
    begun(models, settings_of(way), 0)
    assert models.choice.engine is None
    assert models.choice.proposer is None
    assert models.choice.describe().startswith("step by step on the host (")


def test_sentences_say_what_runs_and_why(pair):
    models = trees(pair, True)
    begun(models, settings_of("cover"), 0)
    assert models.choice.describe().startswith("pipelined iterations, the device verifies (T")
    begun(models, Settings(method="specinfer"), 0)
    law = "TorchLaw, token trees by tensor operations"
    assert models.choice.describe() == f"pipelined iterations, the device verifies ({law})"
    begun(models, Settings(method="specinfer", tree=(5, 5, 2)), 0)
    why = "not pipelined: the host drafts token trees of more than 64 nodes"
    assert (
        models.choice.describe()
        == f"step by step on the host ({why}; not captured: the host drafts token trees)"
    )


@pytest.mark.usefixtures("_verified_by_the_host")
def test_a_sentence_says_why_the_host_verifies(pair):
    models = trees(pair, True)
    begun(models, settings_of("paper"), 0)
    assert models.choice.describe() == "captured iterations, the host verifies (not pipelined: not asked for)"


@pytest.mark.usefixtures("_verified_by_the_host")
def test_what_cannot_be_captured_is_drafted_step_by_step(pair, monkeypatch):
    settings = settings_of("paper")
    wanted = told(trees(pair, None), settings, 1)
    capture = Captures._capture
    calls: list[int] = []

    def only_forwards(self, request, steps):
        calls.append(1)
        return broken(self, request, steps) if request.shape[0] == 1 else capture(self, request, steps)

    monkeypatch.setattr(Captures, "_capture", only_forwards)
    models = trees(pair, True)
    assert told(models, settings, 1) == wanted
    assert models.notes == ["target: drafting step by step, an iteration cannot be captured (no)"]
    before = len(calls)
    begun(models, settings, 1)
    assert len(calls) == before  # not tried again
    assert models.choice.proposer is None
    assert "(no" not in models.choice.why_no_engine
    assert models.choice.why_no_proposer == "no"


def test_where_iterations_cannot_be_pipelined_the_host_verifies(pair, monkeypatch):
    def cannot(self):
        raise engines.CannotCapture("no")

    settings, host = settings_of("cover"), trees(pair, None)
    host.recalls = False  # no pipeline does
    wanted = told(host, settings, 1)
    monkeypatch.setattr(CoverIteration, "prepare", cannot)
    models = trees(pair, True)
    for _ in range(2):
        assert told(models, settings, 1)[:3] == wanted[:3]
        assert models.notes == ["target: the host verifies, an iteration cannot be captured (no)"]
        assert models.choice.engine is None
        assert models.choice.proposer is not None


@pytest.mark.usefixtures("_verified_by_the_host")
def test_no_memory_for_an_iteration_is_not_remembered(pair, monkeypatch):
    prepare, short = DraftIteration.prepare, [True]

    def prepared(self):
        if short.pop() if short else False:
            raise engines.OutOfMemory("CUDA out of memory")
        prepare(self)

    monkeypatch.setattr(DraftIteration, "prepare", prepared)
    models = trees(pair, True)
    begun(models, settings_of("paper"), 0)
    assert models.choice.proposer is None
    begun(models, settings_of("paper"), 0)
    assert models.choice.proposer is not None


def test_captured_iterations_are_kept_up_to_a_number(pair, monkeypatch):
    monkeypatch.setattr(engines, "_MOST_ITERATIONS", 2)
    models = trees(pair, True)
    kept = []
    for gamma in (1, 2, 1, 3):
        told(models, settings_of("cover", gamma=gamma), 0, budget=6)
        kept.append(list(models.engines._iterations.values()))
    assert [one.layout.gamma for one in kept[-1]] == [1, 3]
    assert kept[-1][0] is kept[0][0]
    for gamma in (1, 2, 3):
        told(models, settings_of("paper", gamma=gamma), 0, budget=6)
    assert [one.layout.gamma for one in models.engines._iterations.values()] == [2, 3]


def test_one_capture_serves_every_temperature(pair):
    models = trees(pair, True)
    for temperature in (0.5, 0.9, 2.0):
        settings = settings_of("cover", temperature=temperature)
        assert told(models, settings, 2)[:3] == told(trees(pair, None), settings, 2)[:3]
    (iteration,) = models.engines._iterations.values()
    assert len(iteration.captures) == 1


@pytest.mark.parametrize("way", ["cover", "paper"])
def test_captures_are_kept_from_prompt_to_prompt(pair, way):
    models, settings = trees(pair, True), settings_of(way)
    for seed in range(6):
        told(models, settings, seed)
    (iteration,) = models.engines._iterations.values()
    assert len(iteration.captures) == 1  # one number of slots


@pytest.mark.usefixtures("_verified_by_the_host")
def test_captures_that_the_host_verifies_are_kept_from_prompt_to_prompt(pair):
    models, settings = trees(pair, True), settings_of("paper")
    for seed in range(6):
        told(models, settings, seed)
    (iteration,) = models.engines._iterations.values()
    # Sizes: 4, 8 or 16 nodes of the draft and of the target.
    assert 1 < len(iteration.captures) <= 9


def test_iterations_of_pools_that_are_no_more_are_let_go(pair):
    models = trees(pair, True)
    told(models, settings_of("cover"), 0)
    for model in models:
        model.tree = type(model.tree).alone(2048, 512, model.dtype, model.device)
    told(models, settings_of("cover", gamma=2), 0)
    (iteration,) = models.engines._iterations.values()
    assert iteration.target.tree is models[0].tree


def test_sizes_beyond_a_law_go_to_the_next(pair, monkeypatch):
    class Narrow(engines.TorchLaw):
        def takes(self, layout, target_top_n, draft_top_n):
            return layout.width <= 4

    monkeypatch.setattr(engines, "_laws", lambda device: iter([Narrow(), engines.TorchLaw()]))
    models = trees(pair, True)
    for width, law in ((4, "Narrow"), (6, "TorchLaw"), (4, "Narrow")):
        settings = settings_of("cover", width=width)
        assert told(models, settings, 1)[:3] == told(trees(pair, None), settings, 1)[:3]
        assert models.choice.law == law


def test_a_decoder_says_which_paths_ran(tmp_path):
    rand(tmp_path / "t")
    rand(tmp_path / "d", seed=1)
    decoder = Decoder.from_pair(
        tmp_path / "t", tmp_path / "d", device="cpu", settings=Settings(max_new_tokens=4)
    )
    assert set(decoder.describe()) == {"target forward", "draft forward"}
    result = decoder.generate([5, 6, 7], energy=False)
    assert result.stats.paths == decoder.describe() | {"prices": result.stats.paths["prices"]}
    # A CPU's reader is told nothing of what GPUs have.
    assert (
        result.stats.paths["engine"]
        == "step by step on the host (nothing is pipelined or captured: that is for GPUs)"
    )
    assert not {"CUDA", "captured"} & set(result.stats.paths["target forward"].split())


def test_laws_are_chosen_by_device_and_environment(monkeypatch):
    monkeypatch.setenv("DSBD_NATIVE", "0")
    assert [type(law).__name__ for law in engines._laws(torch.device("cpu"))] == ["TorchLaw"]


@pytest.mark.parametrize(
    ("sizes", "device", "tensors", "kernels"),
    [
        ((1, 4, 8, 3, 0, 10), "cuda", "host", "TritonLaw"),  # several draws a layer are tested
        ((1, 4, 8, 3, 0, 10), "cpu", "TorchLaw", "TritonLaw"),
        ((1, 4, 33, 3, 0, 10), "cuda", "host", "host"),  # more of them than a kernel goes through
        ((1, 1, 1, 3, 0, 10), "cuda", "TorchLaw", "TritonLaw"),  # speculative sampling
        ((1, 4, 8, 3, 0, 0), "cuda", "TorchLaw", "TritonLaw"),  # `cover`
        ((1, 65, 8, 3, 0, 0), "cuda", "TorchLaw", "TorchLaw"),
    ],
)
def test_a_card_leaves_to_the_host_what_the_host_does_quicker(monkeypatch, sizes, device, tensors, kernels):
    side = Side(None, None, 100, 10)

    def taken(*laws):
        monkeypatch.setattr(engines, "_laws", lambda device: iter(laws))
        law = engines._law(torch.device(device), CoverLayout.of(*sizes), side, side)
        return type(law).__name__ if law is not None else "host"

    assert taken(TorchLaw()) == tensors
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
    from dsbd_cli.decoding.device.law_triton import TritonLaw

    assert taken(TritonLaw(), TorchLaw()) == kernels
