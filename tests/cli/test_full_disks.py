"""A disk that takes no more: what there is of an answer is printed, the path and the cause are named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.trace import PAGE, record
from tests.cli.conftest import Call, pair

Models = Callable[..., str]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")


@needs_full
@pytest.mark.parametrize("how", [[], ["--no-stream"], ["--json"], ["-q"]])
def test_a_trace_on_a_full_disk_costs_the_trace_alone(dsbd: Call, models: Models, how: list[str]) -> None:
    command = ["generate", "hi", *pair(models("says", "A", "B")), "--seed", "1", *how]
    ran = dsbd(*command, "--trace", FULL)
    assert ran.code == 1
    assert (ran.json["text"] if "--json" in how else ran.text) == ("AB" if "--json" in how else "AB\n")
    assert ran.err.splitlines() == [
        "dsbd: no space left for the end of the trace /dev/full (the answer is not touched by it): free some"
    ]


@needs_full
def test_the_statistics_are_printed_as_well(dsbd: Call, models: Models) -> None:
    ran = dsbd("generate", "hi", *pair(models("says", "A")), "--stats", "--trace", FULL)
    names = [line.split()[0] for line in ran.err.splitlines()]
    assert "tokens_per_s" in names
    assert "seed" in [line.split()[1] for line in ran.err.splitlines() if line.startswith("dsbd: ")]
    assert ran.err.splitlines()[-1].startswith("dsbd: no space left for the end of the trace")


def test_a_disk_that_fills_up_on_the_way_leaves_whole_lines_first(
    dsbd: Call, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = record._Recorder._write
    written: list[Any] = []

    def write(self: Any, entry: dict[str, Any]) -> None:
        if len(written) == 2:
            error = OSError(errno.ENOSPC, "No space left on device")
            monkeypatch.setattr(self._file, "write", lambda line: (_ for _ in ()).throw(error))
        written.append(entry)
        real(self, entry)

    monkeypatch.setattr(record._Recorder, "_write", write)
    path = tmp_path / "trace"
    ran = dsbd(
        "generate", "hi", *pair(models("rand")), "--max-new-tokens", "12", "--no-stream", "--trace", path
    )
    assert (ran.code, len(ran.text.splitlines()) > 0) == (1, True)
    assert str(path) in ran.err.splitlines()[-1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["start", "iteration"]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "dsbd: no space left for stdout: free some"),
        (errno.EDQUOT, "dsbd: no space left for stdout: free some"),
        (errno.EIO, "dsbd: stdout cannot be written: Input/output error"),
    ],
)
@pytest.mark.parametrize("how", [[], ["--no-stream"], ["--json"]])
def test_stdout_on_a_full_disk_is_called_stdout(
    dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch, code: int, said: str, how: list[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("dsbd_cli.cli.output.Out._raw", staticmethod(refuse))
    ran = dsbd("generate", "hi", *pair(models("says", "A")), "--seed", "1", *how)
    assert (ran.code, ran.out, ran.err.splitlines()) == (1, b"", [said])


def test_a_page_on_a_full_disk_leaves_the_old_one(
    dsbd: Call, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, page = tmp_path / "trace", tmp_path / "page.html"
    assert dsbd("generate", "hi", *pair(models("says", "A")), "--trace", trace).code == 0
    old = f"{PAGE}old"
    page.write_text(old)

    def refuse(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    ran = dsbd("trace", trace, "--html", page)
    assert (ran.code, page.read_text()) == (1, old)
    assert ran.err == f"dsbd: no space left for {page}: free some; then give the same command again\n"
    assert sorted(os.listdir(tmp_path)) == ["page.html", "trace"]


def test_energy_that_cannot_be_read_costs_no_answer(
    dsbd: Call, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    (folder / "name").write_text("package-0")
    (folder / "energy_uj").write_text("5000000")
    monkeypatch.setattr("dsbd_cli.energy_probes.POWERCAP", tmp_path)
    counter = iter((5_000_000, 1_000_000))
    monkeypatch.setattr("dsbd_cli.energy_probes.Rapl.read", lambda self: next(counter))
    ran = dsbd("generate", "hi", *pair(models("says", "A")), "--json")
    assert ran.code == 0
    assert ran.json["text"] == "A"
    assert ran.json["stats"]["energy_j"] is None
    assert "wrapped round" in ran.json["stats"]["energy_source"]
