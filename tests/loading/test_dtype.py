"""What `auto` means as a number format."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.loading import PairSpec, load_pair, processor
from dsbd_cli.loading.hardware import pick_dtype
from tests import builders

CPU = torch.device("cpu")


@pytest.mark.parametrize("likely", [True, False])
def test_a_cpu_takes_bfloat16_where_it_is_quick_and_loses_nothing(monkeypatch, likely):
    monkeypatch.setattr(processor, "amx_likely", lambda: likely)
    assert pick_dtype("auto", CPU, coarse=True) == (torch.bfloat16 if likely else torch.float32)
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("float32", CPU, coarse=True) == torch.float32
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16


def test_a_checkpoint_keeps_the_digits_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "amx_likely", lambda: True)
    builders.rand(tmp_path / "full")
    builders.rand(tmp_path / "half").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    for target, draft in (("full", "half"), ("half", "full")):
        pair = load_pair(PairSpec(str(tmp_path / target), str(tmp_path / draft)))
        assert pair.target.dtype == (torch.float32 if target == "full" else torch.bfloat16)
        assert pair.draft.dtype == (torch.float32 if draft == "full" else torch.bfloat16)


def test_without_a_compiler_or_its_instructions_nothing_is_likely(monkeypatch):
    flags = processor.AMX | {"more"}
    monkeypatch.setattr(processor, "flags", lambda: flags)
    monkeypatch.setattr(processor, "can_compile", lambda: True)
    assert processor.amx_likely()
    monkeypatch.setattr(processor, "can_compile", lambda: False)
    assert not processor.amx_likely()
    monkeypatch.setattr(processor, "can_compile", lambda: True)
    monkeypatch.setattr(processor, "flags", lambda: flags - {"amx_bf16"})
    assert not processor.amx_likely()
