"""Number formats that were measured, from the command line: batches that go on, and what the doctor shows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.loading import processor
from dsbd_cli.prices import Curve, Prices, formats, slices
from dsbd_cli.prices.measure import measure
from tests import builders
from tests.cli.conftest import Call


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the clock would say now, and in a second element why the machine is busy."""
    says = ["bfloat16"]

    def judged(*_: Any, **__: Any) -> formats.Verdict:
        return formats.Verdict(says[0], {}, "made up", *says[1:])

    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    monkeypatch.setattr(processor, "bf16_likely", lambda: True)
    monkeypatch.setattr(slices, "judge", judged)
    monkeypatch.setattr("dsbd_cli.prices.pair.measure", functools.partial(measure, budget=0.01))
    return says


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    for name, seed in (("big", 1), ("small", 2)):
        builders.rand(tmp_path / name, seed=seed).to(torch.bfloat16).save_pretrained(tmp_path / name)
    return ["--target", str(tmp_path / "big"), "--draft", str(tmp_path / "small"), "--device", "cpu"]


def dtypes(record: dict[str, Any]) -> list[str]:
    return [record["models"][role]["dtype"] for role in ("target", "draft")]


def test_a_batch_goes_on_in_the_formats_it_was_begun_in(
    dsbd: Call, judge: list[str], pair: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    out = tmp_path / "out.jsonl"
    command = ["generate", "--input", tmp_path / "in.txt", "--output", out, *pair, "--seed", "3",
               "--max-new-tokens", "6"]  # fmt: skip
    assert dsbd(*command).code == 0
    whole = out.read_bytes()
    # The last line is done again by a program that would choose the other format.
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    formats.forget(["big", "small"])
    judge[0] = "float32"
    resumed = dsbd(*command)
    assert resumed.code == 0, resumed.err
    lines = [[json.loads(line) for line in text.splitlines()] for text in (whole, out.read_bytes())]
    assert [line["token_ids"] for line in lines[1]] == [line["token_ids"] for line in lines[0]]
    assert [dtypes(line) for line in lines[1]] == [["bfloat16", "bfloat16"]] * 3
    # A new one is begun in what was found since.
    again = dsbd(*command[:4], tmp_path / "new.jsonl", *command[5:])
    assert again.code == 0, again.err
    assert dtypes(json.loads((tmp_path / "new.jsonl").read_text().splitlines()[0])) == ["float32"] * 2


def test_a_batch_asked_for_in_another_format_is_another_run(
    dsbd: Call, judge: list[str], pair: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    command = ["generate", "--input", tmp_path / "in.txt", "--output", tmp_path / "out.jsonl", *pair, "--seed", "3",
               "--max-new-tokens", "6"]  # fmt: skip
    assert dsbd(*command).code == 0
    other = dsbd(*command, "--dtype", "float32")
    assert other.code == 2
    assert "was begun with another" in other.err


@pytest.mark.skipif(not processor.int8_likely(), reason="no C compiler or vectors here")
def test_8_bits_asked_for_where_there_are_no_blocks_are_told(
    dsbd: Call, pair: list[str], tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    tail = [*pair, "--seed", "3", "--max-new-tokens", "2", "--dtype"]
    for command in (
        ["generate", "one"],
        ["generate", "--input", tmp_path / "in.txt", "--output", tmp_path / "o.jsonl"],
    ):
        ran = dsbd(*command, *tail, "int8")
        assert ran.code == 0, ran.err
        assert ran.err.count("target: no activation is rounded to 8 bits") == 1
    assert "8 bits" not in dsbd("generate", "one", *tail, "float32").err


def begun(dsbd: Call, pair: list[str], folder: Path) -> tuple[list[Any], Path]:
    """A batch of two prompts of which one is done: its command, and the file of facts beside its output."""
    (folder / "in.txt").write_text("one\ntwo\n")
    out = folder / "out.jsonl"
    command = [
        "generate",
        "--input",
        folder / "in.txt",
        "--output",
        out,
        *pair,
        "--seed",
        "3",
        "--max-new-tokens",
        "4",
    ]
    assert dsbd(*command).code == 0
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    return command, folder / "out.jsonl.run.json"


def test_a_batch_begun_in_a_format_that_is_not_to_be_had_here_says_so(
    dsbd: Call, judge: list[str], pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine with other instructions, say: its user has asked for no format."""
    command, sidecar = begun(dsbd, pair, tmp_path)
    sidecar.write_text(sidecar.read_text().replace("big bfloat16 cpu", "big int8 cpu"))
    monkeypatch.setattr(processor, "int8_likely", lambda: False)
    resumed = dsbd(*command)
    assert resumed.code == 2
    assert "was begun with the target in int8, which is not to be had here" in resumed.err
    assert "give another --output" in resumed.err


@pytest.mark.parametrize("found", [5, ["x"], None, "big int3 cpu", "x"])
def test_a_batch_beside_whose_records_stands_nonsense_is_another_run(
    dsbd: Call, judge: list[str], pair: list[str], tmp_path: Path, found: Any
) -> None:
    command, sidecar = begun(dsbd, pair, tmp_path)
    facts = json.loads(sidecar.read_text())
    facts["models"]["target"] = found
    sidecar.write_text(json.dumps(facts))
    resumed = dsbd(*command)
    assert resumed.code == 2
    assert "was begun with another target" in resumed.err


def test_the_doctor_shows_them_and_has_them_chosen_anew(
    dsbd: Call, judge: list[str], pair: list[str], tmp_path: Path
) -> None:
    command = ["generate", "hello", *pair, "--seed", "3", "--max-new-tokens", "4", "--json"]
    first = dsbd(*command)
    assert dtypes(first.json) == ["bfloat16", "bfloat16"]
    judge[0] = "float32"
    assert dsbd(*command).json["token_ids"] == first.json["token_ids"]
    (found,) = [line for line in dsbd("doctor", "--json").json["formats"] if line.startswith("target big")]
    assert found.endswith(": bfloat16, made up")
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        f"target: {tmp_path / 'big'}\ndraft: {tmp_path / 'small'}\ntarget_device: cpu\ndraft_device: cpu\n"
    )
    report = dsbd("doctor", "--measure", preset, "--json")
    assert report.code == 0, report.err
    assert [line.rpartition(": ")[2] for line in report.json["formats"]] == ["float32, made up"] * 2
    assert dtypes(dsbd(*command).json) == ["float32", "float32"]
    for path, facts, _ in [*formats.listed()][:1]:  # what other code has timed is not used
        path.write_text(path.read_text().replace(facts["code"], "other"))
    assert dsbd("doctor", "--json").json["formats"][1:] == ["1 more, by another version of dsbd: not used"]
    told = dsbd("doctor").text
    assert "float32 or bfloat16 for weights stored in bfloat16" in told
    assert "whichever is timed to be quicker" in told


def test_on_a_busy_machine_the_doctor_keeps_what_a_calm_moment_gave(
    dsbd: Call, judge: list[str], pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = [""]

    def prices(*_: Any) -> Prices:
        return Prices(Curve((1,), (1.0,)), Curve((1,), (0.5,)), 0.0, "timed", busy[0])

    monkeypatch.setattr("dsbd_cli.prices.pair.measure", prices)
    preset = tmp_path / "mine.yaml"
    preset.write_text(
        f"target: {tmp_path / 'big'}\ndraft: {tmp_path / 'small'}\ntarget_device: cpu\ndraft_device: cpu\n"
    )
    command = ["doctor", "--measure", preset, "--json"]
    calm = dsbd(*command)
    assert (calm.code, "busy" in calm.err) == (0, False), calm.err
    judge[:], busy[0] = ["float32", "others took 61%"], "others took 62%"
    kept = dsbd(*command)
    assert kept.code == 0, kept.err
    said = [line for line in kept.err.splitlines() if "busy" in line]
    assert len(said) == 3  # a format for each model, and prices
    assert all("stay" in line and "--force" in line for line in said)
    assert sum("61%" in line for line in said) == 2
    assert kept.json["formats"] == calm.json["formats"]
    assert kept.json["prices"] == calm.json["prices"]
    # What stays is found at the next start, and nothing is measured again.
    ran = dsbd("generate", "hello", *pair, "--seed", "3", "--max-new-tokens", "4", "--json")
    assert dtypes(ran.json) == ["bfloat16", "bfloat16"]
    assert not ran.err
    forced = dsbd(*command, "--force")
    assert forced.code == 0, forced.err
    assert [line.rpartition(": ")[2] for line in forced.json["formats"]] == ["float32, made up"] * 2
    (said,) = (line for line in forced.err.splitlines() if "busy" in line)
    assert "measured now may be off" in said


def test_force_without_measuring_is_refused(dsbd: Call) -> None:
    dsbd("doctor", "--force").refused("--force", "--measure PRESET")
