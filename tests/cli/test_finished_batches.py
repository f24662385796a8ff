"""A finished batch is told apart from another run that would be written to the same file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call, Ran

Models = Callable[..., str]


@pytest.fixture
def done(dsbd: Call, models: Models, tmp_path: Path) -> Callable[..., Ran]:
    """A finished batch over a pair in tmp_path/t and tmp_path/d, and the same command with other options."""
    shutil.copytree(models("rand"), tmp_path / "t")
    shutil.copytree(models("rand", seed=1), tmp_path / "d")
    source, output = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("one\ntwo\n")

    def call(*options: str | Path, target: Path = tmp_path / "t", draft: Path = tmp_path / "d") -> Ran:
        names = ("--target", target, "--draft", draft) if target.name != "-" else ()
        return dsbd("generate", "--input", source, "--output", output, *names, "--seed", "1",
                    "--max-new-tokens", "4", *options)  # fmt: skip

    first = call()
    assert first.code == 0, first.err
    return call


def is_done(ran: Ran, output: Path) -> None:
    assert (ran.code, ran.err) == (0, f"dsbd: all 2 prompts are done already: {output}\n")


def test_the_same_command_has_nothing_to_do_and_loads_nothing(
    done: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsbd_cli.loading.load_pair", lambda *_, **__: pytest.fail("loaded"))
    is_done(done(), tmp_path / "out.jsonl")
    is_done(done("--target-device", "auto"), tmp_path / "out.jsonl")


def test_other_models_are_refused_by_name(done: Callable[..., Ran], models: Models, tmp_path: Path) -> None:
    before = (tmp_path / "out.jsonl").read_bytes()
    done(target=tmp_path / "gone").refused("target", "gone", "no such folder")
    done(draft=tmp_path / "gone").refused("draft", "gone", "no such folder")
    done(target=Path(models("rand", seed=7))).refused("out.jsonl was begun with another", "target (t float32")
    done(draft=Path(models("rand", seed=7))).refused("out.jsonl was begun with another", "draft (d float32")
    done("--dtype", "bfloat16").refused("target (t float32 cpu, now t bfloat16 cpu)")
    done("--draft-dtype", "float16").refused("draft (d float32 cpu, now d float16 cpu)")
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_method_or_preset_is_refused_before_anything_is_loaded(
    done: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text(f"target: {tmp_path / 't'}\ndraft: {tmp_path / 'd'}\nwidth: 2\n")
    monkeypatch.setattr("dsbd_cli.loading.load_pair", lambda *_, **__: pytest.fail("loaded"))
    done("--method", "beam").refused("method (dsbd, now beam)")
    done("--preset", preset, target=Path("-")).refused("width (4, now 2)")
    (tmp_path / "in.txt").write_text("one\nthree\n")
    done().refused("content or form of --input")


@pytest.mark.parametrize("role", ["t", "d"])
def test_weights_that_were_replaced_in_place_are_refused(
    done: Callable[..., Ran], models: Models, tmp_path: Path, role: str
) -> None:
    weights = tmp_path / role / "model.safetensors"
    times = weights.stat()
    shutil.copyfile(Path(models("rand", seed=7)) / "model.safetensors", weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    done().refused("out.jsonl was begun with another", "target (" if role == "t" else "draft (")


def test_the_same_weights_touched_or_moved_are_done_and_known_the_next_time(
    done: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.utime(tmp_path / "t" / "model.safetensors")
    is_done(done(), tmp_path / "out.jsonl")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / "t", tmp_path / "elsewhere" / "t")
    moved = tmp_path / "elsewhere" / "t"
    is_done(done(target=moved), tmp_path / "out.jsonl")
    monkeypatch.setattr("dsbd_cli.loading.load_pair", lambda *_, **__: pytest.fail("loaded"))
    is_done(done(target=moved), tmp_path / "out.jsonl")


def test_a_draft_that_the_method_does_not_read_is_no_difference(
    dsbd: Call, models: Models, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("one\n")
    command = ["generate", "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "o"), "--target",
               models("rand"), "--method", "beam", "--max-new-tokens", "4"]  # fmt: skip
    assert dsbd(*command).code == 0
    again = dsbd(*command, "--draft", models("rand", seed=1))
    assert (again.code, again.err) == (0, f"dsbd: the 1 prompt is done already: {tmp_path / 'o'}\n")
