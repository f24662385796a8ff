"""Pruning, int8 storage, and that a stored draft is the same model wherever it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsbd_cli.distill import draft as drafts
from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair
from dsbd_cli.loading.shared import dequantised
from tests import builders

IDS = torch.tensor([[3, 40, 50, 60, 70]])


@pytest.fixture
def target(tmp_path: Path) -> Any:
    return builders.rand(
        tmp_path / "target", num_hidden_layers=4, initializer_range=0.2, tie_word_embeddings=True
    )


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_all_layers_kept_is_the_target(target: Any) -> None:
    assert torch.equal(logits(drafts.prune(target, [0, 1, 2, 3]).eval()), logits(target))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox", "qwen2"])
def test_pruning_of_other_architectures(tmp_path: Path, kind: str) -> None:
    model = builders.rand(tmp_path, kind)
    assert torch.equal(logits(drafts.prune(model, [0, 1]).eval()), logits(model))
    short = drafts.prune(model, [1])
    assert len(drafts.layer_list(short)[1]) == 1
    assert not torch.equal(logits(short.eval()), logits(model))


def test_kept_layers_are_the_named_ones(target: Any) -> None:
    draft = drafts.prune(target, [3, 1])
    for place, layer in enumerate((3, 1)):
        mine, theirs = (m.model.layers[i].mlp.up_proj.weight for m, i in ((draft, place), (target, layer)))
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("keep", [[], [4], [-1]])
def test_layers_that_are_not_there(target: Any, keep: list[int]) -> None:
    with pytest.raises(UserError, match="layers 0 to 3"):
        drafts.prune(target, keep)


def test_even_spread() -> None:
    assert drafts.choose_layers(30, 4) == [0, 10, 19, 29]
    assert drafts.choose_layers(30, 1) == [0]
    assert drafts.choose_layers(3, 3) == [0, 1, 2]
    with pytest.raises(UserError):
        drafts.choose_layers(3, 4)


def test_int8_rows_are_within_half_a_step(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(50, 30, generator=torch.Generator().manual_seed(0)),
        "zero.w": torch.zeros(2, 3),
        "norm": torch.rand(30),
    }
    packed = drafts.quantise(state)
    assert packed["w"].dtype == torch.int8
    save_file(packed, str(tmp_path / "rows.safetensors"))
    back = dequantised(tmp_path / "rows.safetensors")
    step = packed["w.scale"].float()
    # The largest entry of a row may be cut by the rounding of its scale, by 2^-11 of itself.
    assert ((back["w"] - state["w"]).abs() <= 0.5 * step + state["w"].abs() / 2048 + 1e-7).all()
    assert torch.equal(back["zero.w"], state["zero.w"])
    assert (back["norm"] - state["norm"]).abs().max() < 1e-3


def test_a_shared_draft_is_the_same_model_in_the_product(target: Any, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    drafts.save_draft(drafts.prune(target, [0, 3]), folder, share_embeddings=True)
    here = drafts.load_shared_draft(folder, target)
    spec = PairSpec(str(tmp_path / "target"), str(folder), target_dtype="float32", draft_dtype="float32")
    pair = load_pair(spec)
    assert pair.draft is not None
    assert torch.equal(logits(here), logits(pair.draft.model))
    exact = logits(drafts.prune(target, [0, 3]).eval())
    assert (logits(here) - exact).abs().mean() < 0.03 * exact.std()
    names = set(drafts.quantise(drafts.own_state(here)))
    assert not any("embed" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox"])
def test_a_shared_draft_of_an_architecture_with_names_of_its_own(kind: str, tmp_path: Path) -> None:
    """GPT-2's config says n_embd and n_layer."""
    target = builders.rand(tmp_path / "target", kind).eval()
    drafts.save_draft(drafts.prune(target, [0, 1]), tmp_path / "draft", share_embeddings=True)
    here = drafts.load_shared_draft(tmp_path / "draft", target)
    assert (logits(here) - logits(target)).abs().mean() < 0.03 * logits(target).std()
    names = {role: str(tmp_path / role) for role in ("target", "draft")}
    pair = load_pair(PairSpec(**names, target_dtype="float32", draft_dtype="float32"))
    assert pair.draft is not None
    assert torch.equal(logits(here), logits(pair.draft.model))


def test_an_ordinary_draft_is_a_folder_of_its_own(target: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    draft = drafts.prune(target, [0, 3]).eval()
    drafts.save_draft(
        draft, tmp_path / "draft", share_embeddings=False, tokenizer=builders.tok(tmp_path / "target")
    )
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "draft").eval()
    assert torch.equal(logits(again), logits(draft))
    assert (tmp_path / "draft" / "tokenizer.json").is_file()


def test_going_on_from_an_earlier_draft(target: Any, tmp_path: Path) -> None:
    drafts.save_draft(drafts.prune(target, [1, 2]), tmp_path / "draft", share_embeddings=True)
    other = drafts.prune(target, [0, 3])
    drafts.start_from(other, tmp_path / "draft")
    assert torch.equal(logits(other.eval()), logits(drafts.load_shared_draft(tmp_path / "draft", target)))
    with pytest.raises(UserError, match="other layers"):
        drafts.start_from(drafts.prune(target, [0]), tmp_path / "draft")
    with pytest.raises(UserError, match="holds no"):
        drafts.start_from(other, tmp_path / "target")


def test_saving_a_whole_draft_draws_no_bar_of_another_library(
    tmp_path: Path, target: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    drafts.save_draft(drafts.prune(target, [0, 1]), tmp_path / "draft", share_embeddings=False)
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    assert capfd.readouterr() == ("", "")
