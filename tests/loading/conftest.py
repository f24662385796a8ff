"""Loading is tested on the CPU, also where there is a GPU; `test_cuda.py` is for the latter."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def on_the_cpu(request, monkeypatch):
    if "cuda" not in request.node.path.name:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
