"""Local folders never ask the network, and a wrong name is told at once, through the whole tool."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, pair

Models = Callable[..., str]


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """No network, and a record of who asked for it."""
    asked: list[Any] = []

    def refuse(*arguments: Any, **_: Any) -> None:
        asked.append(arguments)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return asked


def test_local_folders_never_touch_the_network(
    dsbd: Call, models: Models, cut_off: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Path(models("says", "A"))
    assert dsbd("generate", "hi", *pair(str(target))).out == b"A\n"
    monkeypatch.chdir(target.parent)
    assert dsbd("generate", "hi", *pair(f"./{target.name}")).out == b"A\n"
    assert cut_off == []


def test_a_path_that_is_not_there_says_so_at_once(
    dsbd: Call, models: Models, cut_off: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    dsbd("generate", "hi", *pair("./typo", models("says", "A"))).refused("target", "typo")
    dsbd("generate", "hi", *pair(models("says", "A"), "./typo")).refused("draft", "typo")
    dsbd("generate", "hi", *pair(str(tmp_path / "none"))).refused("none")
    assert time.monotonic() - began < 30  # no retries; the seconds are those of a loaded machine
    assert cut_off == []


def test_an_uncached_hub_name_offline(
    dsbd: Call, cut_off: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    dsbd("generate", "hi", *pair("org/name")).refused("org/name", "HF_HUB_OFFLINE")
    assert cut_off == []
