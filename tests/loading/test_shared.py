"""Drafts that store layers only and take embeddings and head from their target."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.shared import dequantised
from dsbd_cli.loading.source import SHARED_WEIGHTS
from tests.builders import rand

IDS = torch.tensor([[0, 9, 8, 70]])


def write_shared(
    folder: Path, target: Any, layers: int = 1, config: bool = True, seed: int = 5, flat: bool = False
) -> Any:
    """A random draft of `layers` layers in the storage form; returns the model it stands for."""
    shape = copy.deepcopy(target.config)
    shape.num_hidden_layers = layers
    if getattr(shape, "layer_types", None):
        shape.layer_types = shape.layer_types[:layers]
    torch.manual_seed(seed)
    draft = AutoModelForCausalLM.from_config(shape).eval()
    borrowed = {id(draft.get_input_embeddings().weight), id(draft.get_output_embeddings().weight)}
    stored = {}
    for name, tensor in draft.named_parameters():
        if id(tensor) in borrowed:
            continue
        tensor = tensor.detach()
        if tensor.ndim == 2:
            scale = (tensor.abs().amax(1, keepdim=True) / 127).half()
            stored[name] = (tensor / scale.float()).round().clamp(-127, 127).to(torch.int8)
            stored[name + ".scale"] = scale.flatten() if flat else scale
        else:
            stored[name] = tensor.half()
    folder.mkdir()
    save_file(stored, folder / SHARED_WEIGHTS, {"format": "pt"})
    if config:
        text = shape.to_dict() | {"dsbd_shared_embeddings": True}
        (folder / "config.json").write_text(json.dumps(text))
    draft.load_state_dict(dequantised(folder / SHARED_WEIGHTS), strict=False)
    draft.get_input_embeddings().weight.data.copy_(target.get_input_embeddings().weight)
    draft.get_output_embeddings().weight.data.copy_(target.get_output_embeddings().weight)
    return draft


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2"])
def test_draft_is_its_layers_between_the_targets_ends(tmp_path, config, tied, kind):
    options = {"head_dim": 8} if kind == "gemma2" else {}
    target = rand(tmp_path / "t", kind, tie_word_embeddings=tied, **options)
    want = write_shared(tmp_path / "d", target, config=config)
    pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))
    with torch.no_grad():
        assert (pair.draft.model(IDS).logits - want(IDS).logits).abs().max() < 1e-5
    assert pair.draft.model.config.num_hidden_layers == 1
    assert pair.draft.vocab_rows == pair.target.vocab_rows
    assert pair.draft.name == "d"


def test_scales_may_be_a_row_or_a_column(tmp_path):
    target = rand(tmp_path / "t", intermediate_size=32)  # square matrices, where a wrong broadcast is silent
    want = write_shared(tmp_path / "a", target)
    write_shared(tmp_path / "b", target, flat=True)
    for name in ("a", "b"):
        pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / name)))
        with torch.no_grad():
            assert (pair.draft.model(IDS).logits - want(IDS).logits).abs().max() < 1e-5


def test_scales_of_another_count_are_refused(tmp_path):
    write_shared(tmp_path / "d", rand(tmp_path / "t"))
    weights = load_file(tmp_path / "d" / SHARED_WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(
        weights | {f"{name}.scale": torch.ones(3).half()}, tmp_path / "d" / SHARED_WEIGHTS, {"format": "pt"}
    )
    with pytest.raises(UserError, match=f"{name} has 64 rows and 3 scales"):
        load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))


def test_ends_are_the_targets_own_tensors(tmp_path):
    write_shared(tmp_path / "d", rand(tmp_path / "t"))
    pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))
    for get in ("get_input_embeddings", "get_output_embeddings"):
        mine, theirs = getattr(pair.draft.model, get)(), getattr(pair.target.model, get)()
        assert mine.weight is theirs.weight


@pytest.mark.parametrize("tied", [True, False])
def test_ends_are_copied_into_another_dtype(tmp_path, tied):
    target = rand(tmp_path / "t", tie_word_embeddings=tied)
    want = write_shared(tmp_path / "d", target)
    pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d"), draft_dtype="bfloat16"))
    assert pair.draft.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in pair.draft.model.parameters()} == {torch.bfloat16}
    assert pair.target.model.lm_head.weight.dtype == torch.float32
    with torch.no_grad():
        got = pair.draft.model(IDS).logits.float()
        assert (got - want(IDS).logits).abs().max() < 0.05
        assert (pair.target.model(IDS).logits - target(IDS).logits).abs().max() == 0
    assert (pair.draft.model.lm_head.weight is pair.draft.model.model.embed_tokens.weight) == tied


def test_padded_target_rows_are_kept(tmp_path):
    target = rand(tmp_path / "t", vocab=320)
    write_shared(tmp_path / "d", target)
    pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))
    assert pair.draft.model(IDS).logits.shape[-1] == 320
    assert pair.vocab_size == 259


def test_draft_of_another_target_is_refused(tmp_path):
    rand(tmp_path / "t")
    write_shared(tmp_path / "d", rand(tmp_path / "other", hidden_size=64))
    with pytest.raises(UserError, match="is 64 wide where t is 32: it was made for another target"):
        load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))


def test_layers_that_do_not_fit_are_refused(tmp_path):
    rand(tmp_path / "t")
    write_shared(tmp_path / "d", rand(tmp_path / "o", "opt"), config=False)
    with pytest.raises(UserError, match="was the draft made for this target"):
        load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))


def test_layers_of_another_shape_are_refused(tmp_path):
    rand(tmp_path / "t")
    write_shared(tmp_path / "d", rand(tmp_path / "o", intermediate_size=48), config=False)
    with pytest.raises(UserError, match="does not fit its config"):
        load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))


def test_cut_and_missing_layers_are_refused(tmp_path):
    write_shared(tmp_path / "d", rand(tmp_path / "t"))
    weights = tmp_path / "d" / SHARED_WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-9])
    spec = PairSpec(str(tmp_path / "t"), str(tmp_path / "d"))
    with pytest.raises(UserError, match="where its header promises"):
        load_pair(spec)
    weights.unlink()
    with pytest.raises(UserError, match=r"no weights|has no layers.int8"):
        load_pair(spec)


def test_a_shared_draft_cannot_be_a_target(tmp_path):
    write_shared(tmp_path / "d", rand(tmp_path / "t"))
    with pytest.raises(UserError, match="has no embeddings of its own"):
        load_pair(PairSpec(str(tmp_path / "d")))
