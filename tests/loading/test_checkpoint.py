"""Broken and pointer weight files: the path, the size and the likely cause, before anything slow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair
from tests.builders import rand

NO_MODEL = {
    "config of nothing": "{}",
    "config without a type": '{"architectures": ["LlamaForCausalLM"], "hidden_size": 32}',
    "config of no type": '{"model_type": null}',
}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


def sharded(folder: Path) -> None:
    """Turn the one weight file into two shards and an index."""
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, mine in halves.items():
        save_file({name: weights[name] for name in mine}, folder / shard, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, mine in halves.items() for name in mine}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def damage(folder: Path, kind: str) -> None:
    weights = folder / "model.safetensors"
    if kind == "pointer":
        weights.write_text(POINTER)
    elif kind == "cut":
        weights.write_bytes(weights.read_bytes()[:20000])
    elif kind == "empty":
        weights.write_bytes(b"")
    elif kind == "text":
        weights.write_text("this is no model " * 10)
    elif kind == "cut in the header":
        weights.write_bytes(weights.read_bytes()[:100])
    elif kind == "no config":
        (folder / "config.json").unlink()
    elif kind == "config pointer":
        (folder / "config.json").write_text(POINTER)
    elif kind == "config cut":
        (folder / "config.json").write_text('{"model_type": "lla')
    elif kind == "config list":
        (folder / "config.json").write_text("[]")
    elif kind in NO_MODEL:
        (folder / "config.json").write_text(NO_MODEL[kind])
    elif kind == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif kind == "tokenizer pointer":
        (folder / "tokenizer.json").write_text(POINTER)
    elif kind == "tokenizer cut":
        text = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(text[:500])
    elif kind == "no weights":
        weights.unlink()
    elif kind == "shard missing":
        sharded(folder)
        (folder / "b.safetensors").unlink()
    elif kind == "shard cut":
        sharded(folder)
        (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-5])
    elif kind == "tensor missing":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "tensor of another shape":
        tensors = load_file(weights)
        tensors["model.norm.weight"] = torch.ones(7)
        save_file(tensors, weights, {"format": "pt"})
    elif kind == "architecture":
        (folder / "config.json").write_text('{"model_type": "hypermodel"}')
    elif kind == "torch file cut":
        weights.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and no more")


CASES = [
    ("pointer", "model.safetensors (63 bytes) is a Git LFS pointer"),
    ("cut", "model.safetensors has 20,000 bytes where its header promises"),
    ("empty", "model.safetensors is empty (0 bytes)"),
    ("text", "model.safetensors (170 bytes) is not a safetensors file"),
    ("cut in the header", "model.safetensors (100 bytes) is not a safetensors file"),
    ("no config", "has no config.json"),
    ("config pointer", "config.json (63 bytes) is a Git LFS pointer"),
    ("config cut", "config.json (19 bytes) is not valid JSON"),
    ("config list", "config.json does not hold a JSON object"),
    *(
        (kind, "config.json does not say what model it is (no model_type): fetch the checkpoint again")
        for kind in NO_MODEL
    ),
    ("no tokenizer", "has no tokenizer"),
    ("tokenizer pointer", "tokenizer.json (63 bytes) is a Git LFS pointer"),
    ("tokenizer cut", "tokenizer.json (500 bytes) does not end like JSON"),
    ("no weights", "holds no weights"),
    ("shard missing", "b.safetensors is missing, one of 2 weight files"),
    ("shard cut", "b.safetensors has"),
    ("tensor missing", "lack 1 of 21 tensors, model.layers.1.mlp.up_proj.weight first"),
    ("tensor of another shape", "tensor model.norm.weight is [7] in the weight file and [32] by config.json"),
    ("architecture", "does not know architecture 'hypermodel'"),
    ("torch file cut", "pytorch_model.bin (16 bytes) is not a torch weight file"),
]


@pytest.mark.parametrize(("kind", "said"), CASES)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_broken_folder_is_one_line(tmp_path, kind, said, role, monkeypatch):
    rand(tmp_path / "good")
    rand(tmp_path / "bad")
    damage(tmp_path / "bad", kind)
    loaded = []
    from dsbd_cli.loading import pair

    own = pair.load_weights
    monkeypatch.setattr(
        pair, "load_weights", lambda place, *rest: (loaded.append(place.role), own(place, *rest))[1]
    )
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    spec = PairSpec(bad, good) if role == "target" else PairSpec(good, bad)
    with pytest.raises(UserError) as caught:
        load_pair(spec)
    line = str(caught.value)
    assert said in line
    assert line.startswith(role)
    assert "\n" not in line
    # A broken draft costs no minutes of the target's loading.
    assert role == "target" or "target" not in loaded


def test_whole_shards_and_torch_files_load(tmp_path):
    model = rand(tmp_path / "m")
    ids = torch.tensor([[0, 5, 6]])
    sharded(tmp_path / "m")
    with torch.no_grad():
        assert torch.equal(
            load_pair(PairSpec(str(tmp_path / "m"))).target.model(ids).logits, model(ids).logits
        )
    rand(tmp_path / "b")
    (tmp_path / "b" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "b" / "pytorch_model.bin")
    with torch.no_grad():
        assert torch.equal(
            load_pair(PairSpec(str(tmp_path / "b"))).target.model(ids).logits, model(ids).logits
        )


def test_remote_code_is_refused_unless_allowed(tmp_path):
    rand(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["model_type"] = "homemade"
    config["auto_map"] = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyModel"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    (tmp_path / "m" / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UserError, match=r"brings modelling code of its own.*--trust-remote-code"):
        load_pair(PairSpec(str(tmp_path / "m")))


def test_model_that_is_not_causal_is_refused(tmp_path):
    rand(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text('{"model_type": "vit", "hidden_size": 32}')
    with pytest.raises(UserError, match="is not a causal language model"):
        load_pair(PairSpec(str(tmp_path / "m")))
