"""The line left behind: it never wraps, and loses what is least telling first."""

from __future__ import annotations

import dataclasses

import pytest

from dsbd_cli.ui.summary import summary
from tests.ui.fake import FakeDecoder, stream

FULL = ["tokens", "tok/s", "layers/target call", "acceptance", "width", "J/token", "ended by"]


def result():  # type: ignore[no-untyped-def]
    done = list(stream(FakeDecoder(), 40, delay=0.0, fail=None))[-1].result
    stats = dataclasses.replace(
        done.stats, new_tokens=248, decode_s=31.25, tokens_per_s=7.94, layers_per_target_call=2.7,
        acceptance_rate=0.52, mean_width=4.0, mean_distinct_width=3.1, joules_per_token=0.4,
        widths=[4, 4], target_calls=2, layers=2,
    )  # fmt: skip
    return dataclasses.replace(done, stats=stats)


@pytest.mark.parametrize("width", range(1, 160))
def test_whole_parts_that_fit(width: int) -> None:
    parts = summary(result()).split(", ")
    shown = summary(result(), width).split(", ")
    assert [part for part in parts if part in shown] == shown
    assert shown[0].startswith("248 tokens")
    assert shown[-1].startswith("ended by")
    assert len(", ".join(shown)) <= width or len(shown) == 2


def test_what_goes_first() -> None:
    gone = []
    for width in range(160, 1, -1):
        shown = summary(result(), width)
        gone += [name for name in FULL if name not in shown and name not in gone]
    assert gone == ["width", "acceptance", "J/token", "layers/target call", "tok/s"]
    assert all(name in summary(result()) for name in FULL)


def test_an_unknown_energy_goes_before_anything_else() -> None:
    done = result()
    done = dataclasses.replace(done, stats=dataclasses.replace(done.stats, joules_per_token=None))
    full = summary(done)
    assert "n/a J/token" in full
    assert summary(done, len(full) - 1) == full.replace("n/a J/token, ", "")
