"""One thing is not things, wherever a count is told."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.cli import doctor
from dsbd_cli.counted import all_are, counted, of_were


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 prompts"), (1, "1 prompt"), (2, "2 prompts"), (1200, "1200 prompts")]
)
def test_the_plural_is_for_all_but_one(count: int, said: str) -> None:
    assert counted(count, "prompt") == said
    assert counted(1200, "prompt", form=",") == "1,200 prompts"


def test_verbs_follow() -> None:
    assert (all_are(1, "answer"), all_are(3, "answer")) == ("the 1 answer is", "all 3 answers are")
    assert (of_were(1, 1, "prompt"), of_were(1, 2, "prompt")) == ("1 of 1 prompt was", "1 of 2 prompts were")


@pytest.mark.parametrize(("threads", "said"), [(1, "cpu: 1 thread, "), (2, "cpu: 2 threads, ")])
def test_the_doctor_counts_threads(monkeypatch: pytest.MonkeyPatch, threads: int, said: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert doctor._devices(None)[0].startswith(said)
