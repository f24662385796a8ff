"""Adapters, hooks and changed weights between calls: always the text of the model's own `generate`."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import dsbd_cli
from dsbd_cli.errors import UserError
from dsbd_cli.hf import forget
from dsbd_cli.hf.kept import kept
from dsbd_cli.prices import Curve, Prices
from tests.hf.states import KINDS, Program, tiny

IDS = torch.tensor([[7, 8, 9, 10]])


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_gives_the_models_own_text(kind: str) -> None:
    pytest.importorskip("peft")
    program = Program(kind, seed=7)
    for _ in range(6):
        program.step()
        assert program.differs() is None, program.told


def _sdpa(module, query, *rest, **more):
    return sdpa_attention_forward(module, query * 3, *rest, **more)


PATCHES = {
    "a method of the family": (modeling_llama.LlamaMLP, "forward", lambda old: lambda self, x: old(self, x) * 1.5),
    "the call of a class": (modeling_llama.LlamaRMSNorm, "__call__", lambda old: lambda self, x: -old(self, x)),
    "a layer of torch": (torch.nn.Linear, "forward", lambda old: lambda self, x: old(self, x) * 1.2),
    "a function of the family": (
        modeling_llama, "apply_rotary_pos_emb", lambda old: lambda q, k, *rest, **more: (q * 2, k)
    ),
    "a function of torch": (
        torch.nn.functional, "linear", lambda old: lambda x, weight, bias=None: old(x, weight, bias) * 1.2
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PATCHES)
def test_code_that_is_replaced_between_two_calls_is_noticed(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name, change = PATCHES[what]
    _differs(lambda: monkeypatch.setattr(place, name, change(getattr(place, name))))


def test_an_attention_that_is_registered_between_two_calls_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _differs(lambda: monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", _sdpa))


def _differs(change) -> None:
    """The text before and after a change of code is the model's own, and another one after it."""
    model = tiny("llama", 0)
    run = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12}
    found = []
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = model.generate(IDS, custom_generate=dsbd_cli.generate, method="beam", **run).tolist()
        assert ours == model.generate(IDS, **run).tolist()
        found.append(ours)
        if len(found) == 1:
            change()
    assert found[0] != found[1]


@pytest.mark.parametrize("more", [torch.nn.Identity(), torch.nn.Softsign()], ids=["wrapped", "capped"])
def test_a_head_that_is_no_plain_layer(more: torch.nn.Module) -> None:
    model = tiny("llama", 0)
    model.lm_head = torch.nn.Sequential(model.lm_head, more)
    run = {"num_beams": 3, "do_sample": False, "max_new_tokens": 12}
    with pytest.warns(UserWarning, match="holds a Sequential where a plain Linear is expected"):
        ours = model.generate(IDS, custom_generate=dsbd_cli.generate, method="beam", **run)
    assert ours.tolist() == model.generate(IDS, **run).tolist()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_layers_that_quantise_what_they_are_given_are_refused_or_right() -> None:
    """Their rounding depends on what shares a forward: a tree cannot be what its paths are."""
    model = tiny("llama", 0)
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    run = {"do_sample": False, "max_new_tokens": 8}
    with pytest.raises(UserError, match="a tree of sequences does not compute like single sequences"):
        model.generate(IDS, custom_generate=dsbd_cli.generate, method="beam", num_beams=3, **run)
    ours = model.generate(IDS, custom_generate=dsbd_cli.generate, method="multinomial", **run)
    assert ours.tolist() == model.generate(IDS, **run).tolist()


class _Words:
    def decode(self, ids, **_):
        return " ".join(map(str, ids)) + " "


@pytest.mark.parametrize("method", ["multinomial", "dsbd"])
def test_a_streamer_gets_all_tokens_and_its_end(method: str) -> None:
    target, draft = tiny("llama", 0), tiny("llama", 1)
    streamer = TextIteratorStreamer(_Words(), skip_prompt=True, timeout=5)  # type: ignore[arg-type]
    out = target.generate(IDS, custom_generate=dsbd_cli.generate, draft_model=draft, method=method,
                          streamer=streamer, max_new_tokens=8)  # fmt: skip
    assert "".join(streamer).split() == [str(token) for token in out[0, 4:].tolist()]
    broken = TextIteratorStreamer(_Words(), timeout=5)  # type: ignore[arg-type]
    with pytest.raises(UserError):
        target.generate(IDS, custom_generate=dsbd_cli.generate, draft_model=draft, streamer=broken,
                        repetition_penalty=1.5, max_new_tokens=8)  # fmt: skip
    list(broken)  # ends


def test_inputs_that_change_the_text_are_refused_and_flags_come_back() -> None:
    model = tiny("gpt2", 0)
    run = {"custom_generate": dsbd_cli.generate, "method": "beam", "max_new_tokens": 4}
    with pytest.raises(UserError, match="token_type_ids"):
        model.generate(IDS, token_type_ids=torch.zeros_like(IDS), **run)
    with pytest.raises(UserError, match="position_ids"):
        model.generate(IDS, position_ids=torch.tensor([[0, 1, 0, 1]]), **run)
    model.train()
    model.transformer.h[0].eval()
    flags = [module.training for module in model.modules()]
    model.generate(IDS, **run)
    assert [module.training for module in model.modules()] == flags


def test_flags_come_back_after_an_error_of_either_model_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error at load, in the prompt's forward and in the middle of an answer; two submodules differ."""
    # Prices by which the draft is always asked.
    prices = Prices(Curve((1, 256), (1.0, 1.01)), Curve((1, 256), (0.01, 0.011)))
    (tmp_path / "prices.json").write_text(json.dumps(prices.to_dict()))
    monkeypatch.setenv("DSBD_PRICES", str(tmp_path / "prices.json"))
    target, draft = tiny("gpt2", 0), tiny("llama", 1)
    for model in (target, draft):
        model.train()
    target.transformer.h[0].eval()
    draft.lm_head.eval()
    flags = [module.training for model in (target, draft) for module in model.modules()]
    for broken, after in ((target, 0), (draft, 0), (target, 12), (draft, 12)):
        calls = 0

        def fail(*_: object, after: int = after) -> None:
            nonlocal calls
            calls += 1
            if calls > after:
                raise RuntimeError("out of order")

        handle = broken.register_forward_pre_hook(fail)
        with pytest.raises((RuntimeError, UserError), match="out of order"):
            target.generate(
                IDS,
                custom_generate=dsbd_cli.generate,
                draft_model=draft,
                width=3,
                max_new_tokens=40,
            )
        handle.remove()
        assert flags == [module.training for model in (target, draft) for module in model.modules()]
    ours = target.generate(
        IDS, custom_generate=dsbd_cli.generate, draft_model=draft, width=3, max_new_tokens=8
    )
    assert flags == [module.training for model in (target, draft) for module in model.modules()]
    assert ours.tolist() == target.eval().generate(IDS, num_beams=3, max_new_tokens=8).tolist()


def test_forget_works_on_the_wrapper_and_on_what_it_wraps() -> None:
    peft = pytest.importorskip("peft")
    for of in ("wrapper", "inside"):
        base = tiny("llama", 0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
        wrapped = peft.get_peft_model(base, config).eval()
        run = {"custom_generate": dsbd_cli.generate, "method": "beam", "width": 3, "max_new_tokens": 8}
        wrapped.generate(input_ids=IDS, **run)
        assert kept(base).decoder is not None
        forget(wrapped if of == "wrapper" else base)
        assert kept(base).decoder is None
        with torch.no_grad():
            base.lm_head.weight.data[3:6] *= -1
        ours = wrapped.generate(input_ids=IDS, **run)
        assert ours.tolist() == wrapped.generate(input_ids=IDS, num_beams=3, max_new_tokens=8).tolist()


def test_a_draft_of_another_size_changes_nothing() -> None:
    ids = IDS % 5 + 2
    for rows, fewer in ((64, 40), (40, 64), (64, 7)):
        target, draft = tiny("llama", 0, vocab_size=rows), tiny("llama", 1, vocab_size=fewer)
        ours = target.generate(
            ids, custom_generate=dsbd_cli.generate, draft_model=draft, width=3, max_new_tokens=14
        )
        assert ours.tolist() == target.generate(ids, num_beams=3, max_new_tokens=14).tolist()
