"""Adapters, hooks and changed weights between calls: always the text of the model's own `generate`."""

from __future__ import annotations

import pytest
import torch
from transformers import TextIteratorStreamer

import dsbd_cli
from dsbd_cli.errors import UserError
from tests.hf.states import KINDS, Program, tiny

IDS = torch.tensor([[7, 8, 9, 10]])


@pytest.mark.parametrize("kind", KINDS)
def test_every_state_gives_the_models_own_text(kind: str) -> None:
    pytest.importorskip("peft")
    program = Program(kind, seed=7)
    for _ in range(6):
        program.step()
        assert program.differs() is None, program.told


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


def test_a_draft_of_another_size_changes_nothing() -> None:
    ids = IDS % 5 + 2
    for rows, fewer in ((64, 40), (40, 64), (64, 7)):
        target, draft = tiny("llama", 0, vocab_size=rows), tiny("llama", 1, vocab_size=fewer)
        ours = target.generate(
            ids, custom_generate=dsbd_cli.generate, draft_model=draft, width=3, max_new_tokens=14
        )
        assert ours.tolist() == target.generate(ids, num_beams=3, max_new_tokens=14).tolist()
