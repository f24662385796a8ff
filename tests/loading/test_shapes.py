"""Weight files against their config: what does not fit is named, as early as headers tell; what is left over too."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair
from tests.builders import rand
from tests.loading.test_shared import write_shared


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def add(folder, name, tensor):
    path = folder / "model.safetensors"
    save_file({**load_file(path), name: tensor}, path, {"format": "pt"})


def both(tmp_path, role):
    """A good and a bad folder's place in a pair, by role."""
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    return PairSpec(bad, good) if role == "target" else PairSpec(good, bad)


@pytest.fixture
def folders(tmp_path):
    rand(tmp_path / "good")
    rand(tmp_path / "bad", seed=1)
    return tmp_path


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights fails the test."""
    monkeypatch.setattr("dsbd_cli.loading.pair.load_weights", lambda *_: pytest.fail("began to read weights"))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_tensors_that_the_config_does_not_use_are_counted_and_named(folders, role):
    edit(folders / "bad", num_hidden_layers=1)
    notes = load_pair(both(folders, role)).notes
    assert len(notes) == 1
    said = f"{role} bad: its config does not use 9 tensors of its weight files (model.layers.1.input_lay"
    assert notes[0].startswith(said)


def test_one_tensor_too_many_is_told_and_a_checkpoint_that_fits_says_nothing(folders):
    assert load_pair(both(folders, "target")).notes == []
    add(folders / "bad", "model.layers.0.self_attn.q_norm.weight", torch.ones(8))
    notes = load_pair(both(folders, "target")).notes
    assert [note.split(" of its")[0] for note in notes] == ["target bad: its config does not use 1 tensor"]
    assert "q_norm" in notes[0]


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    ("name", "shape"), [("model.layers.1.mlp.up_proj.weight", (48, 32)), ("model.norm.weight", (7,))]
)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(folders, role, name, shape):
    add(folders / "bad", name, torch.zeros(shape))
    with pytest.raises(UserError) as caught:
        load_pair(both(folders, role))
    wanted = [64, 32] if len(shape) == 2 else [32]
    assert str(caught.value) == (
        f"{role} {folders / 'bad'}: tensor {name} is {list(shape)} in the weight file and {wanted} by "
        "config.json: are they of one model?"
    )


def test_how_many_more_do_not_fit_is_said(folders):
    for layer in (0, 1):
        add(folders / "bad", f"model.layers.{layer}.mlp.up_proj.weight", torch.zeros(48, 32))
    with pytest.raises(UserError, match=r"layers.0.mlp.*\(1 more tensor does not fit either\)"):
        load_pair(both(folders, "target"))


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("change", [{"hidden_size": 64}, {"vocab_size": 300}])
@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_another_width_or_vocabulary_is_refused_before_weights_are_read(
    tmp_path, no_weights, role, change, kind
):
    rand(tmp_path / "good")
    rand(tmp_path / "bad", kind)
    if kind == "gpt2":
        change = {{"hidden_size": "n_embd"}.get(key, key): value for key, value in change.items()}
    if kind == "opt" and "hidden_size" in change:
        change = {"hidden_size": 64, "word_embed_proj_dim": 64}
    edit(tmp_path / "bad", **change)
    with pytest.raises(UserError, match=rf"{role} .*bad: tensor .* is \[259, 32\] in the weight file"):
        load_pair(both(tmp_path, role))


@pytest.mark.parametrize("config", [True, False])
def test_a_draft_made_for_another_target_is_refused_before_weights_are_read(tmp_path, no_weights, config):
    rand(tmp_path / "t")
    other = rand(tmp_path / "other", hidden_size=64, num_attention_heads=4)
    write_shared(tmp_path / "d", other, config=config)
    said = "is 64 wide where t is 32: it was made for another target" if config else "does not fit its config"
    with pytest.raises(UserError, match=said):
        load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d")))


def test_a_pair_that_fits_is_loaded_as_before(tmp_path):
    target = rand(tmp_path / "t", "opt")
    write_shared(tmp_path / "d", rand(tmp_path / "t2"), config=True)
    rand(tmp_path / "d2", "gpt2", seed=1)
    assert load_pair(PairSpec(str(tmp_path / "t2"), str(tmp_path / "d"))).notes == []
    pair = load_pair(PairSpec(str(tmp_path / "t"), str(tmp_path / "d2")))
    ids = torch.tensor([[0, 9, 8]])
    with torch.no_grad():
        assert torch.equal(pair.target.model(ids).logits, target(ids).logits)
