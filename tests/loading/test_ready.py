"""Pairs that are remembered: the same bits as a full load, for as long as nothing they depend on changes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.decoder import Decoder
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.ready import file, key
from dsbd_cli.loading.ready import pair as ready
from dsbd_cli.loading.ready.tokenizer import ReadyTokenizer, faithful, stored_form
from dsbd_cli.prices.measure import facts_of
from dsbd_cli.settings import Settings
from tests import builders

TEMPLATE = (
    "{% for turn in messages %}{% if turn['role'] == 'system' %}{{ raise_exception('no system turn here') }}"
    "{% endif %}{{ bos_token + turn['role'] + ': ' + turn['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama tied": {"tie_word_embeddings": True},
    "llama llama3": {"rope_parameters": LLAMA3},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 8},
}


@pytest.fixture
def spec(tmp_path: Path) -> PairSpec:
    builders.rand(tmp_path / "target")
    builders.rand(tmp_path / "draft", seed=1)
    return PairSpec(str(tmp_path / "target"), str(tmp_path / "draft"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def remembered(spec: PairSpec) -> bool:
    """Load in full, test, and remember."""
    pair = load_pair(spec, need_draft=spec.draft is not None)
    return ready.remember(spec, pair, Decoder(pair).verdicts())


def files(cache: Path) -> list[Path]:
    return sorted((cache / "ready").iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_remembered_model_is_the_loaded_one(tmp_path: Path, kind: str) -> None:
    builders.rand(tmp_path / "model", kind.split()[0], **KINDS[kind])
    spec = PairSpec(str(tmp_path / "model"))
    assert remembered(spec)
    full, again = load_pair(spec), ready.load(spec)
    assert again is not None
    assert type(again.target.model).__name__ == "ReadyLlama"
    for field in ("name", "device", "dtype", "max_positions", "vocab_rows", "window", "tree_refusal"):
        assert getattr(again.target, field) == getattr(full.target, field), field
    for field in ("eos_ids", "vocab_size", "notes", "draft"):
        assert getattr(again, field) == getattr(full, field), field
    settings = Settings(method="beam", max_new_tokens=12, seed=3)
    results = [Decoder(pair).generate("hello", settings, energy=False) for pair in (full, again)]
    assert results[0].token_ids == results[1].token_ids
    assert [beam.logprob for beam in results[0].beams] == [beam.logprob for beam in results[1].beams]
    assert results[0].stats.paths == results[1].stats.paths
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again.target.model(ids).logits, full.target.model(ids).logits)  # its real model's


@pytest.mark.parametrize(
    ("kind", "options", "more"),
    [
        ("gpt2", {}, {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, {}),
        ("llama", {}, {"trust_remote_code": True}),
    ],
)
def test_what_is_not_plain_is_loaded_in_full(
    tmp_path: Path, kind: str, options: dict[str, Any], more: dict[str, Any]
) -> None:
    builders.rand(tmp_path / "model", kind, **options)
    spec = PairSpec(str(tmp_path / "model"), **more)
    assert not remembered(spec)
    assert ready.load(spec) is None


def test_models_of_the_hub_are_asked_for_as_ever() -> None:
    assert ready.load(PairSpec("owner/name")) is None


def test_prices_of_the_first_start_are_those_of_the_second(spec: PairSpec) -> None:
    """Two tables of one machine would be two texts under one seed, and the time to measure twice."""
    full = Decoder(load_pair(spec))
    first = facts_of(full.target, full.draft)
    assert remembered(spec)
    pair = ready.load(spec)
    assert pair is not None
    again = Decoder(pair)
    assert facts_of(again.target, again.draft) == first


def test_the_self_test_is_not_run_again(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remembered(spec)
    pair = ready.load(spec)
    assert pair is not None
    monkeypatch.setattr("dsbd_cli.decoding.model.hf_model.check_tree", lambda *_: pytest.fail("tested again"))
    decoder = Decoder(pair)
    assert decoder.generate("hi", Settings(seed=1, max_new_tokens=3), energy=False).token_ids


def test_another_forward_than_was_tested_is_tested(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remembered(spec)
    pair = ready.load(spec)
    assert pair is not None
    for verdict in pair.verdicts.values():
        verdict |= {"forward": "another", "refused": 0}
    calls = []
    monkeypatch.setattr("dsbd_cli.decoding.model.hf_model.check_tree", lambda *_: calls.append(1))
    Decoder(pair).verdicts()
    assert len(calls) == 2


def test_refused_forwards_are_not_made_again_and_still_told(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = iter(["off by 3", None, None])
    with monkeypatch.context() as patch:
        patch.setattr("dsbd_cli.decoding.model.hf_model.check_tree", lambda *_: next(says))
        pair = load_pair(spec)
        first = Decoder(pair)
        assert ready.remember(spec, pair, first.verdicts())
    again = ready.load(spec)
    assert again is not None
    second = Decoder(again)
    assert [second.target.notes, second.draft and second.draft.notes] == [first.target.notes, []]
    assert "off by 3" in second.target.notes[0]
    assert second.describe() == first.describe()


def _other_weights(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    builders.rand(spec.target, seed=5)


def _touched(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    os.utime(Path(spec.target) / "model.safetensors", ns=(1, 1))


def _new_template(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    (Path(spec.target) / "chat_template.jinja").write_text(TEMPLATE)


def _other_draft(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    builders.rand(str(spec.draft), seed=6)


def _other_processor(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("dsbd_cli.loading.processor.description", lambda: "flags: none")


def _no_kernels(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("DSBD_NATIVE", "0")


def _other_code(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key, "code_sum", lambda: "0")


def _other_version(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("importlib.metadata.version", lambda name: "0.0")
    patch.setattr(key, "versions", key.versions.__wrapped__)  # not what this process found before


CHANGES = [
    _other_weights, _touched, _new_template, _other_draft, _other_processor, _no_kernels, _other_code, _other_version,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_depends_on_is_in_its_key(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch, change: Any
) -> None:
    if (
        change is _no_kernels
        and key.key_of(spec, True, ready._sources(spec, True), Path("x"))["compiled"] is None
    ):  # type: ignore[index]
        pytest.skip("nothing is compiled here")
    assert remembered(spec)
    assert ready.load(spec) is not None
    with monkeypatch.context() as patch:
        change(spec, patch)
        assert ready.load(spec) is None


def test_dtypes_and_devices_are_asked_for_apart(spec: PairSpec) -> None:
    assert remembered(spec)
    assert ready.load(spec.replace(target_dtype="bfloat16")) is None
    assert ready.load(spec, need_draft=False) is None


def test_a_changed_pair_takes_the_place_of_the_old_one(spec: PairSpec, cache: Path) -> None:
    assert remembered(spec)
    before = files(cache)
    _other_weights(spec, pytest.MonkeyPatch())
    assert remembered(spec)
    assert files(cache) == before
    assert ready.load(spec) is not None


def test_a_damaged_file_is_no_file(spec: PairSpec, cache: Path) -> None:
    assert remembered(spec)
    (path,) = files(cache)
    whole = path.read_bytes()
    step = max(1, len(whole) // 23)
    damaged = [
        whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(0, len(whole), step)
    ]
    for data in [*damaged, b"", whole[:10], whole[:60], whole[:-1], whole + b"x", b"hello"]:
        path.write_bytes(data)
        assert ready.load(spec) is None
    path.unlink()
    path.mkdir()
    assert ready.load(spec) is None
    path.rmdir()
    assert remembered(spec)
    assert path.read_bytes() == whole


def test_a_file_of_another_pair_is_not_taken(spec: PairSpec, cache: Path) -> None:
    other = PairSpec(spec.target)
    assert remembered(spec)
    (path,) = files(cache)
    foreign = path.read_bytes()
    path.unlink()
    assert remembered(other)
    (path,) = files(cache)
    path.write_bytes(foreign)
    assert ready.load(other) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_cannot_be_written_leaves_nothing_and_is_no_error(
    spec: PairSpec, cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    for name in ("os.replace", "tempfile.mkstemp"):
        with monkeypatch.context() as patch:
            patch.setattr(name, refuse)
            assert not file.write(cache / "ready" / "one", {}, {}, b"x")
    assert files(cache) == []
    (cache / "file").write_text("")
    assert not file.write(cache / "file" / "one", {}, {}, b"x")


def test_a_tokenizer_by_itself_says_what_the_real_one_says(tmp_path: Path) -> None:
    real = builders.tok(tmp_path, ["word", "<b>"], chat_template=TEMPLATE)
    facts, data = stored_form(real) or pytest.fail("it is of the plain kind")
    asked: list[str] = []

    def load() -> Any:
        asked.append("real")
        return real

    alone = ReadyTokenizer(facts, data, load)
    assert faithful(alone, real)
    asked.clear()
    plain = {"add_generation_prompt": True, "continue_final_message": False, "tokenize": False}
    chat = [{"role": "user", "content": " hi </s>\n"}]
    assert alone.apply_chat_template(chat, **plain) == real.apply_chat_template(chat, **plain)
    how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert alone.decode([259, 0, 5], **how) == real.decode([259, 0, 5], **how)
    assert asked == []
    # What is not plain is the real one's affair, its errors too.
    system = [{"role": "system", "content": "x"}]
    with pytest.raises(Exception, match="no system turn here"):
        alone.apply_chat_template(system, **plain)
    gone_on = plain | {"add_generation_prompt": False, "continue_final_message": True}
    turns = [*chat, {"role": "assistant", "content": "well"}]
    assert alone.apply_chat_template(turns, **gone_on) == real.apply_chat_template(turns, **gone_on)
    assert alone.model_max_length == real.model_max_length
    assert alone.decode([259, 5]) == real.decode([259, 5])
    assert asked == ["real"] * 4


@pytest.mark.parametrize("what", ["vocabulary", "splitting", "template"])
def test_a_tokenizer_that_differs_is_seen(tmp_path: Path, what: str) -> None:
    real = builders.tok(tmp_path / "a", ["word"], chat_template=TEMPLATE)
    other = builders.tok(tmp_path / "b", ["ward" if what == "vocabulary" else "word"], chat_template=TEMPLATE)
    if what == "splitting":
        from tokenizers import normalizers

        other.backend_tokenizer.normalizer = normalizers.Lowercase()
    if what == "template":
        other.chat_template = TEMPLATE.replace("user", "you").replace(": ", " says ")
    facts, data = stored_form(other) or pytest.fail("it is of the plain kind")
    assert not faithful(ReadyTokenizer(facts, data, lambda: other), real)


def test_a_template_with_what_transformers_adds_is_left_to_it(tmp_path: Path) -> None:
    real = builders.tok(tmp_path, chat_template="{{ strftime_now('%Y') }}" + TEMPLATE)
    facts, data = stored_form(real) or pytest.fail("it is of the plain kind")
    asked = []
    alone = ReadyTokenizer(facts, data, lambda: asked.append(1) or real)  # type: ignore[func-returns-value]
    chat = [{"role": "user", "content": "hi"}]
    alone.apply_chat_template(chat, add_generation_prompt=True, continue_final_message=False, tokenize=False)
    assert asked


# Each of these costs a tenth of a second or more, and a run of a remembered pair needs none of it.
HEAVY = (
    "accelerate", "datasets", "gguf", "huggingface_hub", "matplotlib", "onnx", "pandas", "PIL", "peft",
    "requests", "rich", "scipy", "sklearn", "sympy", "tensorflow", "torch._dynamo", "torch._inductor", "torchvision",
    "torch.distributed.checkpoint", "torch.distributed.tensor", "transformers", "triton",
)  # fmt: skip
PROGRAM = """
import sys
from dsbd_cli.cli.main import run
code = run(sys.argv[2:])
from dsbd_cli.loading.ready import quick_torch
assert ("torch._meta_registrations" in quick_torch.waiting()) is quick_torch.serves(), quick_torch.waiting()
print(code, *[name for name in sys.argv[1].split() if name in sys.modules], file=sys.stderr)
"""


def test_a_run_imports_what_it_needs(spec: PairSpec, cache: Path) -> None:
    (Path(spec.target) / "chat_template.jinja").write_text(TEMPLATE)
    assert remembered(spec)
    command = ["generate", "hi", "--target", spec.target, "--draft", str(spec.draft), "--seed", "1",
               "--max-new-tokens", "4"]  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, " ".join(HEAVY), *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ran.stderr.splitlines()[-1] == "0", ran.stderr
    full = Decoder(load_pair(spec)).generate("hi", Settings(seed=1, max_new_tokens=4), energy=False)
    assert ran.stdout == full.text + "\n"
