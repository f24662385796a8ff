"""Folders that are built once, whole or not at all, by one of several processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from dsbd_cli.errors import RunError, UserError
from dsbd_cli.loading.cache import build_once, cache_root, is_built


def test_the_folder_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "a"))
    assert cache_root() == tmp_path / "a"
    assert cache_root(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("DSBD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_root() == tmp_path / "c" / "dsbd"


def test_built_once(tmp_path):
    calls = []

    def build(part: Path) -> None:
        calls.append(part)
        (part / "file").write_text("x")

    folder = tmp_path / "deep" / "thing"
    for _ in range(2):
        assert build_once(folder, build, what="thing") == folder
    assert len(calls) == 1
    assert (folder / "file").read_text() == "x"
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["thing", "thing.lock"]


@pytest.mark.parametrize("harm", ["cut", "lengthened", "removed", "all zeros", "zeros at its end"])
def test_what_was_damaged_is_built_anew(tmp_path, harm):
    whole = b"whole" * 50_000

    def build(part: Path) -> None:
        (part / "inner").mkdir()
        (part / "inner" / "library.so").write_bytes(whole)

    folder = build_once(tmp_path / "thing", build, what="thing")
    file = folder / "inner" / "library.so"
    if harm == "removed":
        file.unlink()
    else:
        zeros = {"all zeros": len(whole), "zeros at its end": 4096}.get(harm, 0)
        damaged = {"cut": whole[:9], "lengthened": whole + b"and more"}
        file.write_bytes(damaged.get(harm, whole[: len(whole) - zeros] + bytes(zeros)))
    assert not is_built(folder)
    assert build_once(folder, build, what="thing") == folder
    assert file.read_bytes() == whole
    # As earlier versions left it: with sizes alone, and without.
    (folder / ".built.json").unlink()
    assert is_built(folder)
    (folder / ".sizes.json").write_text(f'{{"inner/library.so": {len(whole)}}}')
    assert is_built(folder)
    file.write_bytes(whole[:9])
    assert not is_built(folder)


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(part: Path) -> None:
        (part / "half").write_text("x")
        raise ValueError("broke")

    with pytest.raises(ValueError, match="broke"):
        build_once(tmp_path / "thing", build, what="thing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["thing.lock"]
    build_once(tmp_path / "thing", lambda part: (part / "file").touch(), what="thing")
    assert (tmp_path / "thing" / "file").exists()


def _die_midway(folder: str) -> None:
    def build(part: Path) -> None:
        (part / "half").write_text("x")
        os._exit(9)

    build_once(Path(folder), build, what="thing")


def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path):
    worker = multiprocessing.get_context("fork").Process(target=_die_midway, args=(str(tmp_path / "thing"),))
    worker.start()
    worker.join(timeout=20)
    assert worker.exitcode == 9
    assert not (tmp_path / "thing").exists()
    build_once(tmp_path / "thing", lambda part: (part / "file").touch(), what="thing")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["thing", "thing.lock"]


def _slowly(folder: str, log: str) -> None:
    def build(part: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(1.5)
        (part / "file").write_text("whole")

    stages: list[str] = []
    build_once(
        Path(folder), build, what="thing", progress=lambda stage, done=0, total=0: stages.append(stage)
    )
    with open(log, "a") as file:
        file.write("".join(f"{line}\n" for line in stages) + (Path(folder) / "file").read_text() + "\n")


def test_one_builds_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    arguments = (str(tmp_path / "thing"), str(tmp_path / "log"))
    workers = [context.Process(target=_slowly, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("built") == 1
    assert lines.count("whole") == 3
    assert lines.count("waiting for another dsbd that is preparing thing") == 2


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, RunError, "no space left for the cache in"),
        (errno.EACCES, UserError, "cannot be written .* set DSBD_CACHE to one that can"),
        (errno.EROFS, UserError, "cannot be written .* set DSBD_CACHE to one that can"),
    ],
)
def test_what_the_file_system_refuses_is_one_line(tmp_path, code, kind, said):
    def build(part: Path) -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(kind, match=said):
        build_once(tmp_path / "thing", build, what="thing")


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "cache").write_text("I am a file")
    with pytest.raises(UserError, match="cannot be written"):
        build_once(tmp_path / "cache" / "thing", lambda part: None, what="thing")


def test_a_place_where_no_folder_can_be_made_is_one_line(tmp_path, monkeypatch):
    def refused(self, *_, **__):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(UserError, match="cannot be written"):
        build_once(tmp_path / "cache" / "thing", lambda part: None, what="thing")


def test_a_finished_folder_is_used_from_a_read_only_cache(tmp_path):
    folder = tmp_path / "thing"
    folder.mkdir()
    tmp_path.chmod(0o500)
    try:
        assert build_once(folder, lambda part: pytest.fail("built"), what="thing") == folder
    finally:
        tmp_path.chmod(0o700)


def test_files_get_the_permissions_of_the_umask(tmp_path):
    def build(part: Path) -> None:
        (part / "file").touch(mode=0o600)

    old = os.umask(0o022)
    try:
        build_once(tmp_path / "thing", build, what="thing")
    finally:
        os.umask(old)
    assert (tmp_path / "thing").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "thing" / "file").stat().st_mode & 0o777 == 0o644
