"""What a step says where no bar can be drawn: soon, then now and then."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from dsbd_cli.distill import log


def test_a_pipe_hears_soon_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(log.time, "monotonic", lambda: now[0])
    heard = io.StringIO()
    with log.Step(Console(file=heard), "sample", every=15.0) as step:
        for second, done in ((1, 0), (2, 0), (3, 1), (16, 2), (17, 5), (31, 9), (33, 10)):
            now[0] = 100.0 + second
            step.update(done, 10, lambda done=done: f"{done} texts" if done else "")
    assert heard.getvalue().splitlines() == [
        "sample 0% 2 s",
        "sample 50% 17 s, left 17 s 5 texts",
        "sample 100% 33 s, left 0 s 10 texts",
    ]
