from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.batch.shard import Shard
from dsbd_cli.batch.store import Store, write_whole
from dsbd_cli.errors import UserError

FACTS: dict[str, Any] = {"seed": 3, "settings": {"width": 4, "top_p": 0.8}, "weights": {"target": "ab"}}


class Told(list[str]):
    __call__ = list.append


def opened(path: Path, total: int = 4, shard: Shard | None = None, told: Told | None = None) -> Store:
    return Store(path, total, shard or Shard(), told if told is not None else Told())


def record(index: int, text: str = "x") -> dict[str, Any]:
    return {"index": index, "text": text}


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
    store = opened(path)
    store.claim(FACTS, True)
    store.add(0, record(0))
    store.add_line(torn)
    store.close()
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
    store = opened(path)
    store.claim(FACTS, True)
    for index in range(3):
        store.add(index, record(index))
    store.close()
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
    store = opened(path)
    store.claim(FACTS, True)
    store.add(0, record(0))
    store.close()
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
    store = opened(path)
    store.claim(FACTS, True)
    store.close()
    assert not path.exists()
    again = opened(path)
    assert again.claim(FACTS | {"seed": 5}, True) == 5
    again.close()
    assert json.loads((tmp_path / "out.jsonl.run.json").read_text())["seed"] == 5


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="another dsbd"):
        opened(tmp_path / "out.jsonl")
    store.close()
    opened(tmp_path / "out.jsonl").close()


def test_finished_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    store = opened(path, total=2)
    store.claim(FACTS, True)
    store.add(0, record(0))
    store.close()
    few = {name: FACTS[name] for name in ("seed", "settings")}
    half = opened(path, total=2)
    assert not half.is_finished(few, True)
    half.add(1, record(1))
    half.close()
    whole = opened(path, total=2)
    assert whole.is_finished(few, True)
    assert whole.is_finished(few | {"seed": 8}, False)
    assert not whole.is_finished(few | {"seed": 8}, True)
    assert not whole.is_finished(few | {"settings": {"width": 8, "top_p": 0.8}}, True)
    whole.close()


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
    for index in range(6):
        line = single.kept(index)
        if line is not None:
            single.add_line(line)
        else:
            single.add(index, record(index))
    single.finish()
    single.close()
    assert indices(path) == list(range(6))
    assert not list(tmp_path.glob("*.rank-*"))


def test_a_whole_file_is_there_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")

    def breaks():  # type: ignore[no-untyped-def]
        yield b"new"
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        write_whole(path, breaks())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["x"]
