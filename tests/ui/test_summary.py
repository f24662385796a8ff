"""The line left behind: it never wraps, and loses what is least telling first."""

from __future__ import annotations

import dataclasses

import pytest

from dsbd_cli.result import Beam
from dsbd_cli.settings import Settings
from dsbd_cli.ui.summary import summary, unfinished
from tests.ui.fake import FakeDecoder, stream

FULL = ["tokens", "tok/s", "layers/target call", "acceptance", "width", "J/token", "ended by itself"]


def result():  # type: ignore[no-untyped-def]
    done = list(stream(FakeDecoder(), 40, delay=0.0, fail=None))[-1].result
    stats = dataclasses.replace(
        done.stats, new_tokens=248, decode_s=31.25, tokens_per_s=7.94, layers_per_target_call=2.7,
        acceptance_rate=0.52, mean_width=4.0, mean_distinct_width=3.1, joules_per_token=0.4,
        widths=[4, 4], target_calls=2, layers=2,
    )  # fmt: skip
    return dataclasses.replace(done, stats=stats, finish_reason="eos")


@pytest.mark.parametrize("width", range(1, 160))
def test_whole_parts_that_fit(width: int) -> None:
    parts = summary(result()).split(", ")
    shown = summary(result(), width).split(", ")
    assert [part for part in parts if part in shown] == shown
    assert shown[0].startswith("248 tokens")
    assert shown[-1] == "ended by itself"
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


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("eos", "ended by itself"),
        ("stop", "ended at a stop text"),
        ("length", "cut at max-new-tokens"),
        ("early_stop", "stopped before its end (early-stopping)"),
    ],
)
def test_how_it_ended_is_said_in_words(reason: str, words: str) -> None:
    done = dataclasses.replace(result(), finish_reason=reason)
    assert summary(done).split(", ")[-1] == words


@pytest.mark.parametrize(
    ("decode_s", "said"), [(0.037, "0.04 s"), (0.5, "0.50 s"), (1.0, "1.0 s"), (31.25, "31.2 s")]
)
def test_a_short_answer_takes_some_time(decode_s: float, said: str) -> None:
    done = result()
    done = dataclasses.replace(done, stats=dataclasses.replace(done.stats, decode_s=decode_s))
    assert summary(done).startswith(f"248 tokens in {said}, ")


EARLY = "the run ended after 5 tokens (early-stopping first)"


@pytest.mark.parametrize(
    ("ended", "tokens", "said"),
    [
        ([True], 8, None),
        ([False], 8, "the answer is unfinished: cut at max-new-tokens 8"),
        ([False], 5, f"the answer is unfinished: {EARLY}"),
        ([True, True, True], 8, None),
        ([True, False, True], 8, "beam 2 of 3 is unfinished: cut at max-new-tokens 8"),
        ([False, False, True], 5, f"beams 1, 2 of 3 are unfinished: {EARLY}"),
        ([False, True], 5, f"beam 1 of 2 is unfinished: {EARLY}"),
        ([False, False], 8, "all 2 beams are unfinished: cut at max-new-tokens 8"),
        ([True, False], 5, f"beam 2 of 2 is unfinished: {EARLY}"),
    ],
)
def test_which_ended_by_themselves(ended: list[bool], tokens: int, said: str | None) -> None:
    cut = "length" if tokens == 8 else "early_stop"
    beams = [Beam("x", [3] * (2 if one else tokens), -1.0, -1.0, one, "eos" if one else cut) for one in ended]
    settings = Settings(num_return=len(ended), early_stopping="first")
    done = dataclasses.replace(result(), beams=beams, settings=settings)
    assert unfinished(done) == said
