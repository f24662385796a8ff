"""Fixtures of the device's tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.decoding.device.helpers import related


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return related(tmp_path_factory.mktemp("target"))
