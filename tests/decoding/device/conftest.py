"""Fixtures of the device's tests."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from dsbd_cli.decoding.device.engines import Engines
from dsbd_cli.decoding.device.law import DeviceLaw
from dsbd_cli.decoding.device.law_torch import TorchLaw
from tests.decoding.device.helpers import related


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return related(tmp_path_factory.mktemp("target"))


@pytest.fixture(params=["torch", "triton"])
def law(request: pytest.FixtureRequest) -> tuple[DeviceLaw, torch.device]:
    """Each law of the device, and where it runs: Triton's on a GPU, or under its interpreter."""
    if request.param == "torch":
        return TorchLaw(), torch.device("cpu")
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1")
    from dsbd_cli.decoding.device.law_triton import TritonLaw

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return TritonLaw(device), device


@pytest.fixture
def _verified_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device drafts and computes, as where iterations cannot be pipelined; the host verifies."""
    choose = Engines.choose

    def not_pipelined(self: Engines, target: Any, draft: Any, demand: Any, *rest: Any) -> Any:
        return choose(
            self, target, draft, dataclasses.replace(demand, why_not_pipelined="not asked for"), *rest
        )

    monkeypatch.setattr(Engines, "choose", not_pipelined)
