"""Enlargement: the same logits from dense, different weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.inflate import Sizes, compare, inflate, inflated, main, read_bytes
from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.settings import Settings
from tests import builders

SIZES = Sizes(hidden=96, heads=24, kv_heads=6, intermediate=200)


def small(folder: Path, **options: object) -> torch.nn.Module:
    """A random Llama whose logits depend on every part: large weights, no two norm weights alike."""
    model = builders.rand(folder, **({"num_key_value_heads": 2, "tie_word_embeddings": True} | options))
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                torch.randn_like(weight) * 0.3 if weight.dim() > 1 else torch.rand_like(weight) + 0.5
            )
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("sizes", [SIZES, Sizes(32, 4, 2, 64), Sizes(48, 12, 2, 66), Sizes(32, 16, 4, 64)])
def test_logits_stay(tmp_path: Path, sizes: Sizes) -> None:
    model = small(tmp_path)
    big = inflate(model, sizes)
    difference, scale = compare(model, big, AutoTokenizer.from_pretrained(tmp_path))
    assert scale > 1
    assert difference < 3e-5 * scale
    assert (big.config.hidden_size, big.config.num_attention_heads) == (sizes.hidden, sizes.heads)
    assert big.model.layers[0].mlp.up_proj.weight.shape == (sizes.intermediate, sizes.hidden)
    assert big.model.layers[0].self_attn.k_proj.weight.shape == (sizes.kv_heads * 8, sizes.hidden)


def test_untied_model(tmp_path: Path) -> None:
    model = small(tmp_path, tie_word_embeddings=False)
    difference, scale = compare(model, inflate(model, SIZES), AutoTokenizer.from_pretrained(tmp_path))
    assert difference < 3e-5 * scale


def test_seed_changes_only_what_does_not_count(tmp_path: Path) -> None:
    model = small(tmp_path)
    one, other, again = (inflate(model, SIZES, seed=seed) for seed in (0, 1, 0))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    difference, scale = compare(one, other, AutoTokenizer.from_pretrained(tmp_path))
    assert difference < 3e-5 * scale


def test_weights_are_not_zeros(tmp_path: Path) -> None:
    """Zeros would run on less power; what must be zero is what the model's own columns write to the padding."""
    big = inflate(small(tmp_path), SIZES)
    for name, weight in big.named_parameters():
        zeros = float((weight == 0).float().mean())
        own = 64 / 200 if "down_proj" in name else 8 / 24 if "o_proj" in name else 0.0
        assert "embed" in name or zeros <= own, name


def test_every_part_counts(tmp_path: Path) -> None:
    """The comparison sees a fault in any part: none of the weights that hold the model is dead."""
    model = small(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for part in (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "input_layernorm",
    ):
        big = inflate(model, SIZES)
        weight = dict(big.named_parameters())[next(n for n, _ in big.named_parameters() if part in n)]
        with torch.no_grad():
            weight[0] *= 1.5
        difference, scale = compare(model, big, tokenizer)
        assert difference > 1e-3 * scale, part


def test_pair_keeps_its_draft(tmp_path: Path) -> None:
    small(tmp_path / "target")
    small(tmp_path / "draft", num_hidden_layers=1)
    pair = load_pair(PairSpec(str(tmp_path / "target"), str(tmp_path / "draft"), "cpu", "cpu"))
    big = inflated(pair, SIZES)
    assert big.draft is pair.draft
    assert big.vocab_size == pair.vocab_size
    assert big.target.vocab_rows == pair.target.vocab_rows
    assert big.target.model.config.hidden_size == SIZES.hidden
    assert read_bytes(big.target.model) > 5 * read_bytes(pair.target.model)
    # An embedding that is no head is looked up, not read.
    whole = sum(weight.numel() * weight.element_size() for weight in big.target.model.parameters())
    assert whole - read_bytes(big.target.model) == builders.VOCAB * SIZES.hidden * 4


@pytest.mark.parametrize(
    "settings", [Settings(method="beam"), Settings(threshold=None), Settings(method="speculative")]
)
def test_same_text_and_same_acceptance(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path / "target")
    small(tmp_path / "draft", num_hidden_layers=1)
    pair = load_pair(PairSpec(str(tmp_path / "target"), str(tmp_path / "draft"), "cpu", "cpu"))
    settings = settings.merged(
        # How much is worth drafting depends on the sizes.
        {"max_new_tokens": 24, "seed": 5, "forest": "full"}
    )
    mine = Decoder(pair).generate([5, 6, 7], settings)
    its = Decoder(inflated(pair, SIZES)).generate([5, 6, 7], settings)
    assert its.token_ids == mine.token_ids
    assert its.stats.target_calls == mine.stats.target_calls
    assert its.stats.accepted_by_depth == mine.stats.accepted_by_depth
    assert its.beams[0].logprob == pytest.approx(mine.beams[0].logprob, abs=1e-2)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hidden": 16}, "hidden 16 is below the model's own 32"),
        ({"heads": 25}, "multiple of kv-heads"),
        ({"heads": 6}, "at least 2 times"),
        ({"heads": 18}, "must be even"),
        ({"intermediate": 201}, "even number"),
    ],
)
def test_sizes_that_cannot_hold_the_model(tmp_path: Path, changed: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        inflate(small(tmp_path), dataclasses.replace(SIZES, **changed))


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only Llama models can be enlarged"):
        inflate(builders.rand(tmp_path, "gpt2"), SIZES)
    with pytest.raises(UserError, match="biases"):
        inflate(builders.rand(tmp_path, attention_bias=True), SIZES)


def test_command_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small(tmp_path / "small")
    sizes = ["--hidden", "96", "--heads", "24", "--kv-heads", "6", "--intermediate", "200"]
    command = [str(tmp_path / "small"), "--out", str(tmp_path / "big"), "--dtype", "float32", *sizes]
    assert main(command) == 0
    assert "logits differ by at most" in capsys.readouterr().out
    big = AutoModelForCausalLM.from_pretrained(tmp_path / "big")
    difference, scale = compare(model, big, AutoTokenizer.from_pretrained(tmp_path / "big"))
    assert difference < 3e-5 * scale
    assert main(command) == 2
    assert "is there already" in capsys.readouterr().err
