"""`dsbd tune` and the prices that `dsbd doctor` shows, from the command line."""

from __future__ import annotations

import functools
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.cli import tune
from dsbd_cli.errors import UserError
from dsbd_cli.presets import load_preset
from dsbd_cli.prices import Curve, Prices, store
from dsbd_cli.prices.measure import measure
from dsbd_cli.prices.probe import measured_now
from dsbd_cli.settings import Settings
from tests.cli.conftest import Call, pair


@pytest.fixture
def options(models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    monkeypatch.setattr("dsbd_cli.prices.pair.measure", functools.partial(measure, budget=0.01))
    return [*pair(models("rand", seed=1), models("rand", seed=2)), "--max-new-tokens", "6", "--quick",
            "--out", str(tmp_path / "mine.yaml")]  # fmt: skip


def test_a_preset_is_written_and_can_be_used(dsbd: Call, options: list[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hello\n\nworld\nmore\n")
    ran = dsbd("tune", prompts, *options)
    assert ran.code == 0, ran.err
    assert "(as given)" in ran.text
    assert ran.text.splitlines()[-1].startswith(f"{tmp_path / 'mine.yaml'}: ")
    assert re.search(r"(\d+) of \1 answers", ran.err)
    preset = load_preset(tmp_path / "mine.yaml")
    assert preset.settings.width == 4
    assert preset.settings.max_new_tokens == 6
    assert "prompts" in preset.why["preset"]
    assert dsbd("generate", "hello", "--preset", tmp_path / "mine.yaml", "--seed", "1").code == 0
    # Nothing is written over unless that is asked for.
    before = (tmp_path / "mine.yaml").read_bytes()
    dsbd("tune", prompts, *options).refused("mine.yaml", "--force")
    assert (tmp_path / "mine.yaml").read_bytes() == before
    forced = dsbd("tune", prompts, *options, "--force", "--json")
    assert forced.code == 0, forced.err
    assert {"preset", "best", "verdict", "trials"} == forced.json.keys()
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]
    # The doctor shows the prices that were measured on the way.
    report = json.loads(dsbd("doctor", "--json").text)
    assert any("ms by nodes" in line for line in report["prices"])


def test_what_was_given_is_in_the_preset_and_said_less_the_seed(
    dsbd: Call, options: list[str], tmp_path: Path
) -> None:
    more = ["--seed", "7", "--stop", "x y", "--top-p", "1", "--width", "2"]
    ran = dsbd("tune", *options, *more, stdin=b"hello\n")
    said = ran.text.splitlines()[-1]
    assert "width 2" in said.partition("; as given: ")[0]
    given = said.partition("; as given: ")[2]
    assert {"max-new-tokens 6", 'stop ["x y"]', "top-p 1.0"} <= set(given.split(", "))
    names = [part.split()[0] for part in given.split(", ")]
    assert sorted(names) == ["draft", "max-new-tokens", "stop", "target", "top-p"]
    settings = load_preset(tmp_path / "mine.yaml").settings
    assert (settings.max_new_tokens, settings.stop, settings.top_p, settings.seed) == (6, ("x y",), 1.0, None)
    # A preset's own seed is a setting like any other.
    seeded = tmp_path / "seeded.yaml"
    seeded.write_text((tmp_path / "mine.yaml").read_text().replace("seed: null", "seed: 3"))
    dsbd(
        "tune", "--preset", seeded, "--seed", "7", "--quick", "--out", tmp_path / "new.yaml", stdin=b"hello\n"
    )
    assert load_preset(tmp_path / "new.yaml").settings.seed == 3


def test_on_a_busy_machine_the_prices_of_a_calm_moment_stay(
    dsbd: Call, options: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    busy = [""]

    def prices(*_: Any) -> Prices:
        return Prices(
            Curve((1,), (1.0 + len(busy[0]),)), Curve((1,), (0.5,)), 0.0, f"timed {busy[0]}", busy[0]
        )

    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dsbd_cli.prices.pair.measure", prices)
    assert "busy" not in dsbd("tune", *options, stdin=b"hello\n").err
    busy[0] = "others took 61%"
    ran = dsbd("tune", *options, "--force", stdin=b"hello\n")
    assert ran.code == 0, ran.err
    assert "the machine was busy (others took 61%): the prices timed  stay" in ran.err
    assert "61%" not in (tmp_path / "mine.yaml").read_text()
    assert [one.busy for _, one in store.listed()] == [""]


@pytest.mark.parametrize("dtype", [[], ["--dtype", "bfloat16"]])
def test_whatever_is_said_of_busy_prices_names_the_preset_that_measures_them_anew(
    dsbd: Call, models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: list[str]
) -> None:
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    moment = measured_now(0.6)
    prices = Prices(Curve((1,), (1.0,)), Curve((1,), (0.5,)), 0.0, moment.origin, moment.busy)
    monkeypatch.setattr("dsbd_cli.prices.pair.measure", lambda *_: prices)
    given = tmp_path / "given.yaml"
    given.write_text(f"target: {models('rand', seed=1)}\ndraft: {models('rand', seed=2)}\n")
    options = ["--preset", str(given), *dtype, "--max-new-tokens", "6"]
    told = dsbd("generate", "hello", *options, "--stats", "--seed", "1")
    tuned = dsbd("tune", *options, "--quick", "--out", tmp_path / "mine.yaml", stdin=b"hello\n")
    answer = dsbd("generate", "hello", *options, "--json").json
    name = "PRESET" if dtype else str(given)  # no preset holds the pair in another format
    written = (tmp_path / "mine.yaml").read_text()
    for said in (told.err, tuned.err, written, answer["stats"]["paths"]["prices"]):
        assert re.findall(r"dsbd doctor --measure (\S+)", " ".join(said.split())) == [name], said


def test_the_bar_counts_only_what_has_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(tune, "panel_stream", lambda: screen)
    for name, value in {"TERM": "xterm", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)
    with tune._progress() as (tell, step):
        tell("measuring what forwards cost")
        before = screen.getvalue()
        step(0, 12)
        step(3, 12)
    assert "measuring what forwards cost" in before
    assert "0:00:00" in before
    assert "None" not in screen.getvalue()
    assert "3/12" in screen.getvalue()


def test_prompts_come_from_stdin_too(dsbd: Call, options: list[str]) -> None:
    for source in ([], ["-"]):
        ran = dsbd("tune", *source, *options, "--force", stdin=b"hello\n")
        assert ran.code == 0, ran.err


def test_lines_that_ask_nothing_are_no_prompts(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n  \ntwo\n")
    assert tune._prompts(str(tmp_path / "p.txt"), Settings()) == ["one", "two"]
    turns = [[{"role": "user", "content": text}] for text in ("one", " ")]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in turns))
    assert tune._prompts(str(path), Settings()) == turns[:1]
    with pytest.raises(UserError, match="prompt 1 holds messages; messages have no place in a raw prompt"):
        tune._prompts(str(path), Settings(raw=True))


def test_lines_of_stdin_that_look_like_json_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"messages": []}'
    monkeypatch.setattr(tune, "stdin_lines", lambda: iter(["one", "", line, line]))
    assert tune._prompts("-", Settings()) == ["one", line, line]
    said = "line 3 looks like JSON: stdin is read as texts; a .jsonl file takes messages"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--method", "beam"], ["beam", "--method dsbd"]),
        (["--loss", "-1"], ["--loss", "'-1'"]),
        (["--loss", "nan"], ["--loss", "'nan'"]),
        (["--out", "x.json"], ["x.json", ".yaml"]),
        (["--out", "/dev/null/x.yaml"], ["/dev/null is a file, not a folder"]),
        (["nowhere.txt"], ["nowhere.txt"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(
    dsbd: Call, options: list[str], more: list[str], words: list[str]
) -> None:
    dsbd("tune", *options, *more).refused(*words)


def test_stdin_without_a_prompt_is_refused_where_it_is_named(dsbd: Call, options: list[str]) -> None:
    dsbd("tune", "-", *options, stdin=b"\n\n").refused("stdin")


def test_a_narrow_terminal_breaks_between_words() -> None:
    from dsbd_cli.cli.tune import _table
    from dsbd_cli.settings import Settings
    from dsbd_cli.tune.search import Answer, Outcome, Trial

    one = Trial(Settings(forest="full"), 10.0, [Answer(10, 1.0, -5.0)])
    wide, narrow = (_table(Outcome(one, [one], one), columns) for columns in (None, 60))
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == wide.split()
    assert len(wide.splitlines()) == 2
