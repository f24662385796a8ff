"""Fixtures of the device's tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decoding.device.helpers import related


@pytest.fixture(autouse=True)
def _whole_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device drafts whole forests; on a CPU the host would spare some of them."""
    monkeypatch.setenv("DSBD_FIXED_FOREST", "1")


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return related(tmp_path_factory.mktemp("target"))
