"""Two models that must agree on tokens, ends, devices and number formats."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.progress import logged
from tests.builders import rand, says, tok


def edit(path: Path, **values) -> None:
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | values))


def pair_of(folder: Path, **spec):
    return load_pair(PairSpec(str(folder / "t"), str(folder / "d"), **spec))


@pytest.mark.parametrize(("target", "draft"), [(320, 264), (264, 320), (259, 259), (320, 259)])
def test_padded_heads_are_trimmed_both_ways_round(tmp_path, target, draft):
    rand(tmp_path / "t", vocab=target)
    rand(tmp_path / "d", vocab=draft, seed=1)
    pair = pair_of(tmp_path)
    assert pair.vocab_size == 259
    assert (pair.target.vocab_rows, pair.draft.vocab_rows) == (target, draft)
    assert pair.notes == []


def test_tokenizer_larger_than_the_model_is_cut_to_it(tmp_path):
    rand(tmp_path / "t", vocab=259, words=("one", "two"))
    assert load_pair(PairSpec(str(tmp_path / "t"))).vocab_size == 259


def test_contents_decide_not_sizes(tmp_path):
    rand(tmp_path / "t", vocab=261, words=("aa", "bb"))
    rand(tmp_path / "d", vocab=261, words=("aa", "cc"))
    with pytest.raises(UserError) as caught:
        pair_of(tmp_path)
    assert str(caught.value) == (
        "target t and draft d do not share a vocabulary: token 260 is 'bb' in the target and 'cc' in the draft"
    )


def test_one_tokenizer_may_go_on_where_the_other_ends(tmp_path):
    rand(tmp_path / "t", vocab=261, words=("aa", "bb"))
    rand(tmp_path / "d", vocab=260, words=("aa",))
    assert pair_of(tmp_path).vocab_size == 261


def test_a_pair_is_refused_before_weights_load(tmp_path, monkeypatch):
    rand(tmp_path / "t", vocab=260, words=("aa",))
    rand(tmp_path / "d", vocab=260, words=("bb",))
    monkeypatch.setattr("dsbd_cli.loading.pair.load_weights", lambda *_: pytest.fail("loaded weights"))
    with pytest.raises(UserError, match="token 259"):
        pair_of(tmp_path)


def test_special_tokens_are_the_targets(tmp_path):
    rand(tmp_path / "t")
    rand(tmp_path / "d", seed=1)
    other = tok(tmp_path / "d")
    core = json.loads((tmp_path / "d" / "tokenizer.json").read_text())
    text = json.dumps(core).replace("<|eot|>", "<|fim|>")
    (tmp_path / "d" / "tokenizer.json").write_text(text)
    config = tmp_path / "d" / "tokenizer_config.json"
    config.write_text(config.read_text().replace("<|eot|>", "<|fim|>"))
    edit(tmp_path / "d" / "config.json", eos_token_id=77)
    pair = pair_of(tmp_path)
    assert pair.eos_ids == (1,)
    assert pair.tokenizer.convert_ids_to_tokens(2) == "<|eot|>"
    assert other.convert_ids_to_tokens(2) == "<|eot|>"
    assert pair.notes == [
        "1 special token differs, the target's are used: 2 is '<|eot|>', in the draft '<|fim|>'"
    ]


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ([1, 2], 1, (1, 2)),
        (2, 1, (1, 2)),
        (None, 1, (1,)),
        ("missing", 1, (1,)),
        ([2, 5], [7, 1], (1, 2, 5, 7)),
        (2, None, (1, 2)),  # the tokenizer's own is 1
    ],
)
def test_ends_are_the_union_of_three_sources(tmp_path, generation, config, ends):
    says(tmp_path / "t", "A", "B", end=2)
    edit(tmp_path / "t" / "config.json", eos_token_id=config)
    path = tmp_path / "t" / "generation_config.json"
    if generation == "missing":
        path.unlink()
    else:
        edit(path, eos_token_id=generation)
    assert load_pair(PairSpec(str(tmp_path / "t"))).eos_ids == ends


def test_no_end_at_all_is_allowed(tmp_path):
    rand(tmp_path / "t", eos_token_id=None)
    (tmp_path / "t" / "generation_config.json").unlink()
    edit(tmp_path / "t" / "tokenizer_config.json", eos_token=None)
    assert load_pair(PairSpec(str(tmp_path / "t"))).eos_ids == ()


def test_inherited_options_are_named_and_ignored(tmp_path):
    rand(tmp_path / "t")
    options = {"repetition_penalty": 1.1, "min_p": 0.05, "no_repeat_ngram_size": 3, "typical_p": 1.0}
    edit(tmp_path / "t" / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.9, **options)
    notes = load_pair(PairSpec(str(tmp_path / "t"))).notes
    assert len(notes) == 3
    for name in ("repetition_penalty 1.1", "min_p 0.05", "no_repeat_ngram_size 3"):
        assert any(name in note for note in notes), name


def test_the_log_says_what_is_loaded_and_from_where(tmp_path, caplog):
    rand(tmp_path / "t")
    rand(tmp_path / "d", seed=1)
    with caplog.at_level(logging.INFO, "dsbd"):
        pair_of(tmp_path)
    said = [record.getMessage() for record in caplog.records if record.name == "dsbd"]
    assert said[0] == f"loading target t from {tmp_path / 't'}"
    assert said[1] == f"loading draft d from {tmp_path / 'd'}"
    assert re.fullmatch(r"loaded t \(float32, cpu\) \+ d \(float32, cpu\) in \d+\.\d s", said[-1])


def test_stages_are_logged_once_each(caplog):
    with caplog.at_level(logging.INFO, "dsbd"):
        tell = logged()
        for done in (0, 5, 9):
            tell("downloading x", done, 9)
        tell("converting x")
    assert caplog.messages == ["downloading x", "converting x"]


def test_draft_stays_on_disk_unless_needed(tmp_path):
    rand(tmp_path / "t")
    spec = PairSpec(str(tmp_path / "t"), "./not-there")
    assert load_pair(spec, need_draft=False).draft is None
    assert load_pair(PairSpec(str(tmp_path / "t"))).draft is None


def test_models_are_ready_to_run(tmp_path):
    model = rand(tmp_path / "t", max_position_embeddings=64)
    rand(tmp_path / "d", "opt", seed=1, max_position_embeddings=48)
    pair = pair_of(tmp_path)
    assert (pair.target.max_positions, pair.draft.max_positions) == (64, 48)
    assert not pair.target.model.training
    assert not pair.draft.model.training
    assert (pair.target.name, pair.draft.name) == ("t", "d")
    assert pair.target.device == torch.device("cpu")
    ids = torch.tensor([[0, 9, 8]])
    with torch.no_grad():
        assert torch.equal(pair.target.model(ids).logits, model(ids).logits)


def test_auto_is_float32_on_a_cpu(tmp_path):
    rand(tmp_path / "t", dtype="float16")
    rand(tmp_path / "d", seed=1)
    pair = pair_of(tmp_path, target_device="cpu", draft_device="cpu")
    assert pair.target.dtype == pair.draft.dtype == torch.float32


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bf16", "fp16"), ("float16", "float32")])
def test_each_model_has_its_own_dtype(tmp_path, dtypes):
    rand(tmp_path / "t")
    rand(tmp_path / "d", seed=1)
    pair = pair_of(tmp_path, target_dtype=dtypes[0], draft_dtype=dtypes[1])
    full = {"bf16": "bfloat16", "fp16": "float16"}
    for model, dtype in zip((pair.target, pair.draft), dtypes, strict=True):
        assert str(model.dtype) == f"torch.{full.get(dtype, dtype)}"
        logits = model.model(torch.tensor([[0, 4]])).logits
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("role", ["target", "draft"])
def test_absent_device_is_refused_before_loading(tmp_path, monkeypatch, role):
    rand(tmp_path / "t")
    rand(tmp_path / "d")
    monkeypatch.setattr("dsbd_cli.loading.pair.load_config", lambda *_: pytest.fail("began to load"))
    with pytest.raises(UserError, match=f"{role} device cuda:9 is not there: torch sees"):
        pair_of(tmp_path, **{f"{role}_device": "cuda:9"})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_device": "gpu"}, "target-device must be auto, cpu, mps, cuda or cuda:N, not 'gpu'"),
        ({"draft_dtype": "float46"}, "draft-dtype must be one of .* (did you mean float16?)"),
        ({"quantization": "3bit"}, "quantization must be one of 8bit, 4bit"),
        ({"trust_remote_code": "yes"}, "trust-remote-code must be true or false"),
        ({"revision": 3}, "revision must be a text"),
        ({"target": "  "}, "target is empty"),
    ],
)
def test_spec_checks_itself(given, said):
    with pytest.raises(UserError, match=said.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")):
        PairSpec(**({"target": "t"} | given))


def test_replace_knows_its_fields():
    spec = PairSpec("t").replace(draft="d", target_dtype="torch.bfloat16")
    assert (spec.draft, spec.target_dtype) == ("d", "bfloat16")
    with pytest.raises(
        UserError, match=r"unknown option 'target_dtyp' of a pair \(did you mean target_dtype\?\)"
    ):
        spec.replace(target_dtyp="float32")


def test_quantised_loading_says_what_it_needs(tmp_path):
    pytest.importorskip("torch")
    import importlib.util

    if importlib.util.find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    rand(tmp_path / "t")
    with pytest.raises(UserError, match="quantization 4bit needs bitsandbytes: pip install bitsandbytes"):
        load_pair(PairSpec(str(tmp_path / "t"), quantization="4bit"))
