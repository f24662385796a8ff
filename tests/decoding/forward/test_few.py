"""Which models have small products on a GPU: asked without one."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.decoding.forward import few
from tests.builders import rand

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_small_models_are_served(tmp_path, kind):
    assert few.why_not(rand(tmp_path, kind, **SMALL).to(torch.bfloat16)) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [({"hidden_size": 96}, "multiples of 64"), ({"intermediate_size": 200}, "multiples of 64"),
     ({"head_dim": 48}, "powers of two"), ({"head_dim": 16}, "powers of two"), ({"mlp_bias": True}, "bias")],
)  # fmt: skip
def test_others_are_not_and_it_is_said_why(tmp_path, options, says):
    assert says in (few.why_not(rand(tmp_path, "llama", **SMALL | options).to(torch.bfloat16)) or "")


def test_neither_are_float32_nor_large_matrices(tmp_path, monkeypatch):
    model = rand(tmp_path, "llama", **SMALL)
    assert "bfloat16" in (few.why_not(model) or "")
    assert "bfloat16" in (few.why_not(model.half()) or "")  # which ends at 65,504
    monkeypatch.setattr(few, "_LARGEST", 2 * 192 * 128 * 2 - 1)  # gate and up are one matrix
    assert "large" in (few.why_not(model.to(torch.bfloat16)) or "")


def test_nor_are_weights_that_do_not_lie_in_order(tmp_path):
    model = rand(tmp_path, "llama", **SMALL).to(torch.bfloat16)
    down = model.model.layers[1].mlp.down_proj.weight
    down.data = down.data.t().contiguous().t()
    assert "order" in (few.why_not(model) or "")
