"""Whole runs with the Triton kernels: on a GPU, or anywhere with TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from tests.decoding.device.helpers import TESTED, related, settings_of, told, trees

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Kernels are checked case by case in test_law_*.py; interpreted, a short run has to do.
SEEDS, BUDGET = (2, 12) if DEVICE == "cuda" else (1, 6)
SIZES = {} if DEVICE == "cuda" else {"width": 3, "draft_width": 4, "gamma": 2}
WAYS = ["cover", "beam", "multinomial", "paper"]
if DEVICE == "cuda":
    WAYS += ["greedy", "one layer", "speculative", "continue", "distinct", *TESTED]


@pytest.mark.parametrize("way", WAYS)
def test_the_kernels_decide_what_the_host_decides(tmp_path, monkeypatch, way):
    settings, pair = settings_of(way, **SIZES), [model.to(DEVICE) for model in related(tmp_path)]
    models = [trees(pair, graphs) for graphs in (True, False)]
    for seed in range(SEEDS):
        got, wanted = (told(each, settings, seed, budget=BUDGET) for each in models)
        assert got[:3] == wanted[:3]
    assert not models[0].notes
    assert models[0].choice.law == "TritonLaw"
