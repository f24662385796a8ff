"""What a config says about trees and windows: refused by name, or served up to the window."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.architecture import max_positions_of, tree_refusal, window_of
from tests.builders import rand


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("bloom", {}, "bloom uses ALiBi"),
        ("mpt", {}, "mpt uses ALiBi"),
        ("falcon", {"alibi": True}, "falcon uses ALiBi"),
        ("mamba", {}, "mamba keeps recurrent state"),
        ("mamba2", {}, "mamba2 keeps recurrent state"),
        ("rwkv", {}, "rwkv keeps recurrent state"),
        ("jamba", {}, "jamba keeps recurrent state"),
        ("recurrent_gemma", {}, "recurrent_gemma keeps recurrent state"),
        ("gpt_neo", {}, "gpt_neo builds its own causal mask"),
        ("t5", {}, "t5 is an encoder-decoder model"),
        ("qwen3_next", {}, "qwen3_next keeps recurrent state"),
        ("llama", {"sliding_window": 64}, "the config has sliding_window=64, which llama does not know"),
        ("gpt2", {"attention_chunk_size": 9}, "the config has attention_chunk_size=9, which gpt2 does not"),
    ],
)
def test_refused_by_name(kind, options, said):
    assert str(tree_refusal(AutoConfig.for_model(kind, **options))).startswith(said)


@pytest.mark.parametrize(
    "kind", ["llama", "opt", "gpt2", "gpt_neox", "qwen2", "qwen3", "mistral", "phi", "gemma2", "gemma3_text"]
)
def test_served(kind):
    assert tree_refusal(AutoConfig.for_model(kind)) is None


def test_falcon_without_alibi_is_served():
    assert tree_refusal(AutoConfig.for_model("falcon", alibi=False)) is None


def test_unknown_kinds_of_layers_are_refused():
    config = AutoConfig.for_model("llama")
    config.layer_types = ["full_attention", "shiny_attention"]
    assert "shiny_attention" in str(tree_refusal(config))


@pytest.mark.parametrize(
    ("kind", "options", "window"),
    [
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}, None),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, 8),
        ("gemma2", {"sliding_window": 16}, 16),
        ("gemma3_text", {"sliding_window": 32}, 32),
        ("llama", {}, None),
        ("mistral", {"sliding_window": 4096, "max_position_embeddings": 4096}, None),  # never reached
    ],
)
def test_window(kind, options, window):
    assert window_of(AutoConfig.for_model(kind, **options)) == window


@pytest.mark.parametrize(
    ("kind", "options", "limit"),
    [
        ("llama", {"max_position_embeddings": 77}, 77),
        ("gpt2", {"n_positions": 66}, 66),
        ("opt", {"max_position_embeddings": 55}, 55),
        ("bloom", {}, None),
    ],
)
def test_context_limit(kind, options, limit):
    assert max_positions_of(AutoConfig.for_model(kind, **options)) == limit


def test_a_loaded_model_carries_them(tmp_path):
    rand(tmp_path / "t", "mistral", sliding_window=8)
    rand(tmp_path / "b", "bloom", hidden_size=32, n_layer=1, n_head=4)
    assert load_pair(PairSpec(str(tmp_path / "t"))).target.window == 8
    assert "bloom" in str(load_pair(PairSpec(str(tmp_path / "b"))).target.tree_refusal)
