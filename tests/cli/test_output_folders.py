"""Folders that an output lies in: made where they are missing, by every command; a file in the way is told early."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_folder, refuse_no_folder, refuse_unwritable
from dsbd_cli.prices.measure import measure
from tests.cli.conftest import Call, pair

Models = Callable[..., str]


def test_every_output_file_makes_the_folders_above_it(
    dsbd: Call, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    monkeypatch.setattr("dsbd_cli.prices.pair.measure", functools.partial(measure, budget=0.01))
    abc = [*pair(models("says", "A", "B")), "--seed", "1"]
    (tmp_path / "in.txt").write_text("a\n")
    monkeypatch.chdir(tmp_path)
    commands = {
        "one/a/out.jsonl": ["generate", *abc, "--input", "in.txt", "--output"],
        "two/a/run.jsonl": ["generate", "hi", *abc, "--trace"],
        "three/a/run.html": ["trace", "two/a/run.jsonl", "--html"],
        "four/a/mine.yaml": ["tune", "in.txt", *abc, "--max-new-tokens", "6", "--quick", "--out"],
    }
    for path, command in commands.items():
        ran = dsbd(*command, path)
        assert ran.code == 0, ran.err
        assert Path(path).stat().st_size > 0


def test_what_is_refused_makes_none(dsbd: Call, models: Models, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    output = tmp_path / "a" / "out.jsonl"
    abc = pair(models("says", "A"))
    dsbd("generate", *abc, "--input", tmp_path / "none.txt", "--output", output).refused("no such file")
    dsbd("generate", "hi", *abc, "--width", "0", "--trace", output).refused("width")
    inside = tmp_path / "in.txt" / "b" / "out.jsonl"
    dsbd("generate", *abc, "--input", tmp_path / "in.txt", "--output", inside).refused(
        "--output", f"{tmp_path / 'in.txt'} is a file, not a folder"
    )
    assert os.listdir(tmp_path) == ["in.txt"]


@pytest.mark.parametrize("refuse", [refuse_unwritable, refuse_no_folder])
def test_permission_is_asked_of_the_nearest_folder_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[Path, str], None]
) -> None:
    asked = []
    monkeypatch.setattr(os, "access", lambda place, how: asked.append(place))
    with pytest.raises(UserError, match=f"--out .* cannot be written: no permission for {tmp_path}$"):
        refuse(tmp_path / "a" / "b" / "c", "--out")
    assert asked == [tmp_path]
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--out x cannot be made: Not a directory$"):
        make_folder(tmp_path / "file" / "folder", "--out x")
