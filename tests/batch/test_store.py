from __future__ import annotations

import errno
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.batch import watch
from dsbd_cli.batch.shard import Shard
from dsbd_cli.batch.store import Store
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.paths import write_whole

FACTS: dict[str, Any] = {"seed": 3, "settings": {"width": 4, "top_p": 0.8}, "weights": {"target": "ab"}}


class Told(list[str]):
    __call__ = list.append


def opened(path: Path, total: int = 4, shard: Shard | None = None, told: Told | None = None) -> Store:
    return Store(path, total, shard or Shard(), told if told is not None else Told())


def begun(path: Path, *indices: int) -> Store:
    """A run that has so many records."""
    store = opened(path)
    store.claim(FACTS, True)
    for index in indices:
        store.add(index, record(index))
    return store


def record(index: int, text: str = "x") -> dict[str, Any]:
    return {"index": index, "text": text}


def append(path: Path, line: bytes) -> None:
    with path.open("ab") as file:
        file.write(line)


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


def test_records_are_on_disk_as_soon_as_they_are_added(tmp_path: Path) -> None:
    store = opened(tmp_path / "out.jsonl")
    assert store.claim(FACTS, True) == 3
    store.add(0, record(0, "ä\u2028\n"))
    assert (tmp_path / "out.jsonl").read_bytes() == '{"index": 0, "text": "ä\u2028\\n"}\n'.encode()
    store.close()
    again = opened(tmp_path / "out.jsonl")
    assert again.done == {0}
    again.close()


@pytest.mark.parametrize("torn", [b'{"index": 1, "te', b'{"index": 1}', b"\x00\x00\x00", b"\n"])
def test_a_torn_last_line_is_dropped_with_a_notice(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 0).close()
    append(path, torn)
    told = Told()
    again = opened(path, told=told)
    assert again.done == {0}
    assert len(told) == 1
    assert "torn" in told[0]
    again.add(1, record(1))
    again.close()
    assert indices(path) == [0, 1]


def test_a_file_that_is_no_batch_is_neither_read_nor_changed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes")
    with pytest.raises(UserError, match="is there, but not"):
        opened(path)
    assert path.read_text() == "my notes"


def test_a_damaged_record_in_the_middle_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 0, 1, 2).close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(UserError, match="line 2"):
        opened(path)
    path.write_bytes(lines[0] + lines[2] + lines[1])
    with pytest.raises(UserError, match="line 2"):
        opened(path)
    assert path.read_bytes() == lines[0] + lines[2] + lines[1]


def test_runs_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 0).close()
    changes = (
        ({"settings": {"width": 8, "top_p": 0.8}}, r"width \(4, now 8\)"),
        ({"weights": {"target": "cd"}}, r"target \(ab, now cd\)"),
        ({"seed": 4}, r"seed \(3, now 4\)"),
    )
    for change, said in changes:
        again = opened(path)
        with pytest.raises(UserError, match=said):
            again.claim(FACTS | change, True)
        again.close()
    again = opened(path)
    # No seed asked for: the one of the run that is there goes on.
    assert again.claim(FACTS | {"seed": 99}, False) == 3
    again.close()
    assert indices(path) == [0]


def test_without_a_record_another_run_may_take_the_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun(path).close()
    assert not path.exists()
    again = opened(path)
    assert again.claim(FACTS | {"seed": 5}, True) == 5
    again.close()
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["seed"] == 5


@pytest.mark.parametrize("harm", ["removed", "replaced", "cut", "lengthened"])
def test_a_file_that_changes_under_a_run_ends_it(tmp_path: Path, harm: str) -> None:
    path = tmp_path / "out.jsonl"
    store = begun(path, 0)
    if harm in ("removed", "replaced"):
        path.unlink()
    if harm == "replaced":
        path.write_text("mine\n")
    elif harm != "removed":
        path.write_bytes(b"" if harm == "cut" else path.read_bytes() * 2)
    left = path.read_bytes() if path.exists() else None
    for go_on in (lambda: store.add(1, record(1)), store.finish):
        with pytest.raises(RunError, match=r"out\.jsonl was (removed|changed)"):
            go_on()
    store.close()
    assert (path.read_bytes() if path.exists() else None) == (None if harm == "cut" else left)


def test_brackets_too_deep_are_no_record_and_no_sidecar(tmp_path: Path) -> None:
    path, deep = tmp_path / "out.jsonl", b"[" * 200_000
    begun(path, 0).close()
    append(path, deep)
    again = opened(path)
    assert again.done == {0}
    again.close()
    (tmp_path / "out.jsonl.run.json").write_bytes(deep)
    again = opened(path)
    with pytest.raises(UserError, match="move it away"):
        again.claim(FACTS, True)
    again.close()


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="another dsbd"):
        opened(tmp_path / "out.jsonl")
    store.close()
    opened(tmp_path / "out.jsonl").close()


def test_finished_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    asked = {"pair": {"target": "t"}, "files": {"target": "ab"}}
    store = opened(path, total=2)
    store.claim(FACTS | {"sources": asked}, True)
    store.add(0, record(0))
    store.close()
    few = {name: FACTS[name] for name in ("seed", "settings")} | {"sources": asked}
    half = opened(path, total=2)
    assert half.is_of(few, True)
    assert not half.is_whole
    half.add(1, record(1))
    half.close()
    whole = opened(path, total=2)
    assert whole.is_whole
    assert whole.is_of(few, True)
    assert whole.is_of(few | {"seed": 8}, False)
    # Other files may hold the same weights: that is not known yet.
    assert not whole.is_of(few | {"sources": asked | {"files": {"target": "cd"}}}, True)
    for change, said in (
        ({"seed": 8}, r"seed \(3, now 8\)"),
        ({"settings": {"width": 8, "top_p": 0.8}}, r"width \(4, now 8\)"),
    ):
        with pytest.raises(UserError, match=said):
            whole.is_of(few | change, True)
    whole.close()


def test_the_same_weights_in_other_files_go_on_and_are_known_the_next_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    store = opened(path)
    store.claim(FACTS | {"sources": "here"}, True)
    store.add(0, record(0))
    store.close()
    moved = opened(path)
    assert moved.claim(FACTS | {"sources": "there", "seed": 99}, False) == 3
    assert moved.is_of(FACTS | {"sources": "there"}, True)
    moved.close()
    assert indices(path) == [0]


def test_ranks_write_parts_and_rank_0_joins_them_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    stores = [opened(path, 7, Shard(rank, 3)) for rank in range(3)]
    with pytest.raises(UserError, match="another dsbd"):
        opened(path, 7)
    stores[0].claim(FACTS, True)
    for rank in (2, 1, 0):
        assert stores[rank].claim(FACTS | {"seed": 7}, False) == 3
        for index in range(rank, 7, 3):
            if index != 5:
                stores[rank].add(index, record(index))
    waiter = threading.Thread(target=stores[0].finish)
    waiter.start()
    time.sleep(0.5)
    assert waiter.is_alive()
    stores[2].add(5, record(5))
    for store in stores[1:]:
        store.finish()
    waiter.join(20)
    assert not waiter.is_alive()
    for store in stores:
        store.close()
    assert indices(path) == list(range(7))
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.run.json"]


def test_what_ranks_left_is_taken_over_by_one_process(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    stores = [opened(path, 6, Shard(rank, 2)) for rank in range(2)]
    stores[0].claim(FACTS, True)
    stores[1].add(1, record(1, "from rank 1"))
    stores[1].add(5, record(5, "from rank 1"))
    for store in stores:
        store.close()
    single = opened(path, 6)
    assert single.claim(FACTS, True) == 3
    assert single.done == {1, 5}
    for index in (0, 2, 3, 4):
        single.add(index, record(index))
    single.finish()
    single.close()
    assert indices(path) == list(range(6))
    assert not list(tmp_path.glob("*.rank-*"))


def test_records_before_their_turn_wait_in_a_file_of_their_own(tmp_path: Path) -> None:
    path, early = tmp_path / "out.jsonl", tmp_path / "out.jsonl.early"
    store = opened(path, 6)
    store.claim(FACTS, True)
    for index, there, waits in ((2, [], [2]), (1, [], [2, 1]), (0, [0, 1, 2], []), (5, [0, 1, 2], [5])):
        store.add(index, record(index))
        assert (indices(path), indices(early)) == (there, waits)
    store.close()
    # A run that ends here leaves what the next one needs, and that one what the one after it needs.
    again = opened(path, 6)
    assert again.claim(FACTS, True) == 3
    assert again.done == {0, 1, 2, 5}
    again.add(4, record(4))
    again.close()
    assert (indices(path), indices(early)) == ([0, 1, 2], [5, 4])
    last = opened(path, 6)
    last.claim(FACTS, True)
    last.add(3, record(3))
    assert indices(path) == list(range(6))
    last.finish()
    last.close()
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.run.json"]


def test_nothing_is_left_of_records_that_only_waited_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    begun(path, 1, 0).close()
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.run.json"]


@pytest.mark.parametrize("torn", [b'{"index": 3, "te', b"\x00\x00\x00"])
def test_a_torn_record_before_its_turn_spoils_none_that_comes_after_it(tmp_path: Path, torn: bytes) -> None:
    path, early = tmp_path / "out.jsonl", tmp_path / "out.jsonl.early"
    begun(path, 2).close()
    append(early, torn)
    told = Told()
    again = opened(path, told=told)
    assert again.done == {2}
    again.add(1, record(1))
    assert told == ["dropped a torn last line of out.jsonl.early: its prompt is done again"]
    again.close()
    last = opened(path)
    assert last.done == {1, 2}
    last.close()


def test_all_that_is_left_to_do_is_to_put_records_in_their_place(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    stores = [opened(path, 4, Shard(rank, 2)) for rank in range(2)]
    stores[0].claim(FACTS, True)
    for index in range(4):
        stores[index % 2].add(index, record(index))
    for store in stores:
        store.close()
    single = opened(path)
    single.claim(FACTS, True)
    single.finish()
    single.close()
    assert indices(path) == [0, 1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.run.json"]


def test_ranks_take_over_what_one_process_had_before_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    single = opened(path)
    single.claim(FACTS, True)
    for index in (0, 2):
        single.add(index, record(index, "from one"))
    single.close()
    stores = [opened(path, 4, Shard(rank, 2)) for rank in range(2)]
    for store in stores:
        assert store.done == {0, 2}
    assert stores[0].claim(FACTS, True) == 3
    for index in (3, 1):
        stores[1].add(index, record(index))
    for store in reversed(stores):
        store.finish()
        store.close()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["from one", "x"] * 2
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "out.jsonl.run.json"]


@pytest.mark.parametrize("part", ["early", "rank-1-of-2"])
def test_parts_of_a_run_that_nothing_tells_of_are_not_taken_for_another(tmp_path: Path, part: str) -> None:
    """OUT and its sidecar deleted to start again, the part beside them overlooked."""
    path, left = tmp_path / "out.jsonl", tmp_path / f"out.jsonl.{part}"
    left.write_text(json.dumps(record(1, "of another run")) + "\n")
    with pytest.raises(UserError, match=rf"out\.jsonl\.{part} is there, but not out\.jsonl\.run\.json"):
        opened(path)
    assert sorted(os.listdir(tmp_path)) == [left.name]
    # Beside its sidecar it is of a run, and all that has to go is named.
    (tmp_path / "out.jsonl.run.json").write_text(json.dumps(FACTS))
    store = opened(path)
    with pytest.raises(UserError, match=rf"delete it, {left.name} and out\.jsonl\.run\.json to start again"):
        store.claim(FACTS | {"seed": 4}, True)
    store.close()


@pytest.mark.parametrize("part", ["early", "rank-1-of-2"])
def test_records_before_their_turn_of_a_longer_input_are_not_taken_for_none(
    tmp_path: Path, part: str
) -> None:
    """No record in OUT itself, and those in the part are of prompts that the input has no longer."""
    path, left = tmp_path / "out.jsonl", tmp_path / f"out.jsonl.{part}"
    begun(path, 2, 3).close()
    (tmp_path / "out.jsonl.early").rename(left)
    before = left.read_bytes()
    assert not path.exists()
    with pytest.raises(
        UserError, match=rf"out\.jsonl\.{part} line 1 is no record of this batch: give another"
    ):
        opened(path, 2)
    assert left.read_bytes() == before
    store = opened(path)
    assert store.done == {2, 3}
    store.close()


def test_a_whole_file_is_there_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def breaks():  # type: ignore[no-untyped-def]
        yield b"new"
        raise OSError("full")

    with pytest.raises(RunError, match=r"x cannot be written: full"):
        write_whole(path, breaks())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]


def test_a_rank_whose_first_rank_is_not_there_says_so_and_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(watch, "SAY_S", 0.05)
    monkeypatch.setattr(watch, "LIMIT_S", 0.3)
    told = Told()
    alone = opened(tmp_path / "out.jsonl", 4, Shard(1, 2), told)
    with pytest.raises(RunError, match=r"no sign of life from rank 0 of 2 .* or unset RANK and WORLD_SIZE"):
        alone.claim(FACTS, True)
    alone.close()
    assert told == [
        "waiting for rank 0 of 2: no out.jsonl.run.json of this run yet (this is rank 1, by RANK and WORLD_SIZE)"
    ]


def test_rank_0_says_whom_it_waits_for_and_waits_as_long_as_they_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.01)
    monkeypatch.setattr(watch, "SAY_S", 0.05)
    monkeypatch.setattr(watch, "LIMIT_S", 0.3)
    told = Told()
    path = tmp_path / "out.jsonl"
    first, second = (opened(path, 5, Shard(rank, 3), told) for rank in (0, 1))
    first.claim(FACTS, True)
    for index in (0, 3):
        first.add(index, record(index))
    failed: list[BaseException] = []

    def finish() -> None:
        try:
            first.finish()
        except BaseException as error:
            failed.append(error)

    waiter = threading.Thread(target=finish)
    waiter.start()
    time.sleep(1.0)
    assert not failed
    assert told == [
        "waiting for ranks 1, 2 of 3: 2 of 5 prompts are done (this is rank 0, by RANK and WORLD_SIZE)"
    ]
    second.close()
    waiter.join(20)
    assert [type(error) for error in failed] == [RunError]
    assert "no sign of life from ranks 1, 2 of 3" in str(failed[0])
    first.close()
    # Nothing is lost: one process takes over.
    single = opened(path, 5)
    assert single.done == {0, 3}
    single.close()


def test_a_look_at_who_is_alive_does_not_keep_a_rank_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    part = watch.part_of(path, 1, 2)
    assert not watch.is_alive(part)
    part.touch()
    holder = os.open(part, os.O_RDWR)
    assert watch.lock(holder)
    threading.Timer(0.3, os.close, [holder]).start()
    store = opened(path, 4, Shard(1, 2))
    assert watch.is_alive(part)
    store.close()


def test_a_disk_that_is_full_is_named_and_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    store = begun(path, 0)
    real = os.write

    def full(fd: int, data: Any) -> int:
        """Takes a few bytes, then nothing."""
        monkeypatch.setattr(os, "write", refuse)
        return real(fd, bytes(data)[:7])

    def refuse(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match=f"no space left for {path}: free some; the same command then goes on"):
        store.add(1, record(1))
    monkeypatch.setattr(os, "write", real)
    store.close()
    again = opened(path)
    assert again.done == {0}
    again.close()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ENOSPC, "no space left for {path}: free some; then give the same command again"),
        (errno.EDQUOT, "no space left for {path}: free some; then give the same command again"),
        (errno.EROFS, "{path} cannot be written: Read-only file system"),
    ],
)
def test_what_a_disk_refuses_is_named_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError) as caught:
        write_whole(tmp_path / "x", "new")
    assert str(caught.value) == said.format(path=tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_read_only_file_system_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="no permission for"):
        opened(tmp_path / "out.jsonl")
    real = os.statvfs(tmp_path)
    read_only = os.statvfs_result([*real[:8], real.f_flag | os.ST_RDONLY, real.f_namemax])
    monkeypatch.setattr(os, "statvfs", lambda *_: read_only)
    with pytest.raises(UserError, match=r"--output .* cannot be written: its file system is read-only"):
        opened(tmp_path / "out.jsonl")


def test_a_torn_line_behind_all_records_has_no_prompt_to_do_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    store = opened(path, total=1)
    store.claim(FACTS, True)
    store.add(0, record(0))
    store.close()
    append(path, b"x")
    told = Told()
    opened(path, total=1, told=told).close()
    assert told == ["dropped a torn last line of out.jsonl"]
