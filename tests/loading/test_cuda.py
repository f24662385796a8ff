"""Pairs on GPUs: what auto picks, and target and draft in different places."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.loading import PairSpec, load_pair
from tests.builders import rand
from tests.loading.test_shared import write_shared

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
IDS = torch.tensor([[0, 9, 8, 70]])


def test_auto_is_the_gpu_in_bfloat16(tmp_path):
    rand(tmp_path / "t")
    rand(tmp_path / "d", seed=1)
    pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))
    for model in (pair.target, pair.draft):
        assert model.device == torch.device("cuda", torch.cuda.current_device())
        assert model.dtype == torch.bfloat16
        assert all(tensor.device == model.device for tensor in model.model.parameters())
        assert all(tensor.device == model.device for tensor in model.model.buffers())


@pytest.mark.parametrize(("target", "draft"), [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")])
def test_shared_ends_follow_the_draft(tmp_path, target, draft):
    want = write_shared(tmp_path / "d", rand(tmp_path / "t"))
    spec = PairSpec(str(tmp_path / "t"), str(tmp_path / "d"), target_device=target, draft_device=draft,
                    target_dtype="float32", draft_dtype="float32")  # fmt: skip
    pair = load_pair(spec)
    assert (str(pair.target.device), str(pair.draft.device)) == (target, draft)
    shared = pair.draft.model.lm_head.weight is pair.target.model.lm_head.weight
    assert shared == (target == draft)
    with torch.no_grad():
        got = pair.draft.model(IDS.to(draft)).logits.cpu()
        assert (got - want(IDS).logits).abs().max() < 1e-3


def test_device_map_spreads_the_target(tmp_path):
    model = rand(tmp_path / "t")
    write_shared(tmp_path / "d", model)
    spec = PairSpec(str(tmp_path / "t"), str(tmp_path / "d"), device_map="auto", target_dtype="float32",
                    draft_dtype="float32")  # fmt: skip
    pair = load_pair(spec)
    with torch.no_grad():
        got = pair.target.model(IDS.to(pair.target.device)).logits.cpu()
        assert (got - model(IDS).logits).abs().max() < 1e-3
        assert torch.isfinite(pair.draft.model(IDS.to(pair.draft.device)).logits).all()
