"""A captured iteration after which the host verifies is the iteration of the host."""

from __future__ import annotations

import copy

import pytest
import torch

from dsbd_cli.decoding.device.draft_iteration import DraftIteration
from dsbd_cli.decoding.device.proposer import CapturedProposer
from dsbd_cli.decoding.forward.outcomes import OutOfMemory, TooLarge
from dsbd_cli.errors import RunError
from tests.decoding.device.helpers import PROMPT, WAYS, finished, is_drawn, said, settings_of, told, trees


@pytest.mark.usefixtures("_verified_by_the_host")
@pytest.mark.parametrize("stop", [(), tuple(range(20, 120))])
@pytest.mark.parametrize("way", WAYS)
def test_the_device_decides_what_the_host_decides(pair, way, stop):
    settings = settings_of(way)
    device, host = trees(pair, True), trees(pair, None)
    host.recalls = False  # these iterations are drafted by the draft alone
    for seed in range(4 if is_drawn(settings) else 2):
        got, wanted = (told(models, settings, seed, stop=stop) for models in (device, host))
        if not stop:
            assert got[:4] == wanted[:4]  # what the host spares, a device may count with another event
        elif way in ("cover", "deterministic"):
            # Past a stop string the device drafts no further, where the host goes on from other
            # parents: other forests, the same law, and here the same text.
            assert got[1] == wanted[1]
        assert isinstance(device.choice.proposer, CapturedProposer)
        assert device.choice.engine is None
    assert not device.notes
    assert len(device.choice.proposer._iteration.captures) > 0


@pytest.mark.usefixtures("_verified_by_the_host")
def test_a_forest_deeper_than_a_context_is_left_to_the_host(pair):
    settings = settings_of("cover", gamma=12)
    texts = []
    for graphs in (True, None):
        models = trees(pair, graphs)
        models[1].max_positions = 13
        texts.append(said(finished(models, settings, 0, budget=8)))
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("_verified_by_the_host")
def test_more_nodes_than_a_capture_holds_are_too_many_this_time_only(pair, monkeypatch):
    """Many beams are drafted step by step; 4 beams afterwards, in the same process, on the device again."""
    launches, refused, launch = [], [], DraftIteration.launch

    def noted(self, request):
        try:
            launched = launch(self, request)
        except TooLarge:
            refused.append(len(request.beams))
            raise
        launches.append(len(request.beams))
        return launched

    monkeypatch.setattr(DraftIteration, "launch", noted)
    models = trees(pair, True)
    many = {"width": 120, "min_width": 120, "draft_width": 120, "gamma": 1}
    wide = settings_of("paper", **many, threshold=None, temperature=5.0, top_k=200, top_p=1.0)
    finished(models, wide, 0, budget=5, eos=[])
    assert refused
    assert min(refused) > 64
    assert not models.notes
    assert models.choice.proposer is not None
    launches.clear()
    narrow = settings_of("paper")
    assert told(models, narrow, 1) == told(trees(pair, None), narrow, 1)
    assert launches
    assert not models.notes


@pytest.mark.usefixtures("_verified_by_the_host")
def test_a_device_short_of_memory_drafts_again_in_the_next_run(pair, monkeypatch):
    launch, calls = DraftIteration.launch, []

    def short(self, request):
        calls.append(1)
        if len(calls) == 2:
            raise OutOfMemory("CUDA out of memory")
        return launch(self, request)

    settings = settings_of("paper")
    wanted = told(trees(pair, None), settings, 1)
    monkeypatch.setattr(DraftIteration, "launch", short)
    models = trees(pair, True)
    assert told(models, settings, 1) == wanted
    assert models.notes == [
        "target: drafting step by step for now, no memory is left for captures (CUDA out of memory)"
    ]
    assert told(models, settings, 1) == wanted
    assert len(calls) > 3


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
