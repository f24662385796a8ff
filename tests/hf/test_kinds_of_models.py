"""Models that need care inside another program: rope that follows the length, weights elsewhere, no tree."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dsbd_cli
from dsbd_cli.errors import UserError
from tests.compat import zoo
from tests.hf.states import tiny

IDS = torch.tensor([[7, 8, 9, 10]])
RUN: dict[str, Any] = {"custom_generate": dsbd_cli.generate}
ORIGINAL = 16
_LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.4, 1.6],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "original_max_position_embeddings": ORIGINAL,
}


@pytest.fixture(scope="module")
def draft() -> Any:
    return tiny("llama", 1)


@pytest.fixture(scope="module", params=["phi3", "llama"])
def long_rope(request: pytest.FixtureRequest) -> Any:
    """Factors change behind 16 tokens, and are told apart by the text."""
    model = tiny(
        request.param,
        0,
        rope_parameters=_LONG_ROPE,
        original_max_position_embeddings=ORIGINAL,
        max_position_embeddings=64,
    )
    ids = torch.arange(2, 2 + ORIGINAL + 2)[None]
    short = dict(_LONG_ROPE, long_factor=_LONG_ROPE["short_factor"])
    plain = tiny(request.param, 0, rope_parameters=short, original_max_position_embeddings=ORIGINAL)
    assert not torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-2)
    return model


@pytest.mark.parametrize("length", [5, ORIGINAL + 4])
def test_rope_factors_that_depend_on_the_length(long_rope: Any, draft: Any, length: int) -> None:
    """On either side of the border: the model's own text, and `cover` that of beams alone."""
    ids = torch.arange(2, 2 + length)[None]
    new = min(12, ORIGINAL - length) if length < ORIGINAL else 12
    theirs = long_rope.generate(ids, num_beams=3, max_new_tokens=new).tolist()
    drawn = []
    for method in ("beam", "dsbd"):
        run = RUN | {"method": method, "draft_model": draft, "width": 3, "max_new_tokens": new}
        assert long_rope.generate(ids, **run).tolist() == theirs, method
        drawn.append(long_rope.generate(ids, do_sample=True, top_k=5, seed=4, **run).tolist())
    assert drawn[0] == drawn[1]


def test_rope_factors_that_change_within_the_answer_are_refused(long_rope: Any, draft: Any) -> None:
    for method in ("beam", "dsbd"):
        with pytest.raises(UserError, match=f"{ORIGINAL}: give max_new_tokens=12 or less"):
            long_rope.generate(IDS, method=method, draft_model=draft, max_new_tokens=13, **RUN)


def test_a_width_wins_over_the_num_beams_of_a_checkpoint(draft: Any, tmp_path: Path) -> None:
    made = tiny("llama", 0)
    made.generation_config.num_beams = 4
    made.save_pretrained(tmp_path)
    model = type(made).from_pretrained(tmp_path).eval()
    own: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    for given, beams in (({}, 4), ({"width": 4}, 4), ({"width": 3}, 3), ({"num_beams": 2}, 2)):
        for method in ("beam", "dsbd"):
            ours = model.generate(IDS, method=method, draft_model=draft, **own, **given, **RUN)
            assert ours.tolist() == model.generate(IDS, num_beams=beams, **own).tolist(), (method, given)
    for method in ("multinomial", "speculative", "specinfer"):
        ours = model.generate(IDS, method=method, draft_model=draft, **own, **RUN)
        assert ours.tolist() == model.generate(IDS, num_beams=1, **own).tolist(), method
    with pytest.raises(UserError, match=r"num_beams=3 and width=2"):
        model.generate(IDS, method="beam", num_beams=3, width=2, **own, **RUN)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_weights_run_through_the_models_own_forward(
    kind: str, where: str, draft: Any, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    own: dict[str, Any] = {"num_beams": 3, "do_sample": False, "max_new_tokens": 8}
    theirs = tiny(kind, 0).generate(IDS, **own).tolist()
    model = tiny(kind, 0)
    if where == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert any(weight.is_meta for weight in model.parameters())
    for method in ("beam", "dsbd"):
        # Only for a kind that has a fused forward is there something to say.
        with pytest.warns(UserWarning, match="own forward") if kind == "llama" else nullcontext():
            ours = model.generate(
                IDS, method=method, draft_model=draft, width=3, max_new_tokens=8, **RUN
            ).tolist()
        assert ours == theirs, method


@pytest.mark.parametrize("kind", ["bloom", "mpt", "mamba"])
def test_what_no_tree_serves_is_decoded_path_by_path(kind: str, draft: Any) -> None:
    sizes = {
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
        "mpt": {"d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64},
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    }[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=40, bos_token_id=0, eos_token_id=1, pad_token_id=0, **sizes
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    theirs = model.generate(IDS, do_sample=False, max_new_tokens=8).tolist()
    with pytest.warns(UserWarning, match="path by path"):
        ours = model.generate(IDS, method="multinomial", max_new_tokens=8, **RUN).tolist()
    assert ours == theirs
    for method in ("beam", "dsbd", "speculative", "specinfer"):
        with pytest.raises(UserError, match=f"{kind} .*method multinomial decodes it path by path"):
            model.generate(IDS, method=method, draft_model=draft, max_new_tokens=8, **RUN)


@pytest.mark.parametrize(
    ("name", "ignores"),
    [
        ("llama", True),
        ("opt", True),
        ("bloom", True),
        ("mamba", True),
        ("rwkv", False),
        ("bart", False),
        ("xlm", False),
        ("glm_moe_dsa", False),
    ],
)
def test_padding_that_a_model_does_not_ignore_is_refused(name: str, ignores: bool) -> None:
    """Learned positions and recurrent state may run over it: the text of a prompt then depends on its neighbours."""
    model = zoo.build(name)
    ids = torch.tensor([[0, 0, 0, 7, 8], [9, 10, 11, 12, 13]])
    mask = torch.tensor([[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]])
    own = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 39}
    theirs = model.generate(ids, attention_mask=mask, **own)
    alone = model.generate(ids[:1, 3:], **own)
    same = theirs[0, 5:].tolist()[: alone.shape[1] - 2] == alone[0, 2:].tolist()
    assert same == ignores  # else this model is no example
    run = own | RUN | {"method": "multinomial"}
    assert model.generate(ids[:1, 3:], **run).tolist() == alone.tolist()
    if ignores:
        assert model.generate(ids, attention_mask=mask, **run).tolist() == theirs.tolist()
    else:
        with pytest.raises(UserError, match=r"does not ignore padding.* one prompt a call"):
            model.generate(ids, attention_mask=mask, **run)


def test_no_limit_may_be_written_as_a_negative_number() -> None:
    model = zoo.build("xlnet")
    assert model.config.max_position_embeddings < 0
    theirs = model.generate(IDS, do_sample=False, max_new_tokens=4)
    assert model.generate(IDS, method="multinomial", max_new_tokens=4, **RUN).tolist() == theirs.tolist()
