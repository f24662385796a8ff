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


@pytest.mark.parametrize(
    ("only", "sample", "train", "said"),
    [
        (None, (15.0, None), (30.0, None),
         "sampling takes 15 minutes (--sample-minutes, --tokens), then training takes 30 minutes (--minutes, --steps)"),
        (None, (1.0, 12000), (0.5, 1),
         "sampling takes 1 minute or 12,000 answer tokens (--sample-minutes, --tokens), "
         "then training takes 0.5 minutes or 1 step (--minutes, --steps)"),
        ("sample", (None, 1), (30.0, None), "sampling takes 1 answer token (--sample-minutes, --tokens)"),
        ("train", (15.0, None), (None, 7), "training takes 7 steps (--minutes, --steps)"),
    ],
)  # fmt: skip
def test_what_a_run_takes_is_said_before_it(only, sample, train, said) -> None:  # type: ignore[no-untyped-def]
    assert log.ahead(only, sample, train) == f"{said}; stopped, the same command goes on"
