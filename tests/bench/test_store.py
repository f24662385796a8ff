"""Results on disk: torn lines, two writers, other runs, a full disk, killed writers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsbd_cli.bench.files import RESULTS, RUN, differences, read_ratings, read_results
from dsbd_cli.bench.store import Store
from dsbd_cli.errors import RunError, UserError


def record(item, arm="beam", repeat=0, **more):
    return {"item": item, "arm": arm, "repeat": repeat, **more}


def facts(**fingerprint):
    return {"fingerprint": fingerprint, "session": {"host": "x"}, "arms": {"beam": {}}}


@pytest.fixture
def open_store(tmp_path):
    notices = []
    stores = []

    def make(rank=0, world=1):
        store = Store(tmp_path / "out", rank, world, notices.append)
        stores.append(store)
        return store

    make.folder, make.notices = tmp_path / "out", notices
    yield make
    for store in stores:
        store.close()


def test_a_torn_line_is_dropped_with_a_notice_and_nothing_is_glued_to_it(open_store):
    with open_store() as store:
        store.claim(facts(a=1))
        store.append(record("one"))
        store.append(record("two", text="é"))
    path = open_store.folder / RESULTS
    path.write_bytes(path.read_bytes()[:-7])
    with open_store() as store:
        assert [r["item"] for r in store.mend()] == ["one"]
        assert "torn" in open_store.notices[0]
        store.append(record("two", text="é"))
    assert [r["item"] for r in read_results(open_store.folder)] == ["one", "two"]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


@pytest.mark.parametrize("junk", [b"{\n", b"[]\n", b'{"item": "x"}\n', b"\x00\x00\n", b'{"item": "z", "ar'])
def test_lines_that_are_no_results_are_dropped(open_store, junk):
    with open_store() as store:
        store.append(record("one"))
    with (open_store.folder / RESULTS).open("ab") as stream:
        stream.write(junk)
    with open_store() as store:
        assert [r["item"] for r in store.mend()] == ["one"]
    assert (open_store.folder / RESULTS).read_text().count("\n") == 1


def test_of_two_results_of_one_key_the_first_counts(open_store):
    with open_store() as store:
        store.append(record("one", text="first"))
        store.append(record("one", text="second"))
        store.append(record("one", "dsbd", text="other arm"))
    assert [r["text"] for r in read_results(open_store.folder)] == ["first", "other arm"]


def test_a_second_writer_is_refused(open_store):
    with open_store():
        code = (
            "import sys; from pathlib import Path; from dsbd_cli.bench.store import Store\n"
            "from dsbd_cli.errors import UserError\n"
            "try: Store(Path(sys.argv[1]), 0, 1, print)\n"
            "except UserError as error: print(error); sys.exit(2)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(open_store.folder)], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "another bench is writing" in done.stdout
    with open_store():
        pass


def test_another_run_is_refused_and_the_difference_named(open_store):
    with open_store() as store:
        assert store.claim(facts(seed=1, models={"target": "a"})) == 0
        assert store.claim(facts(seed=2, models={"target": "a"})) == 0  # nothing written yet: begin again
        store.append(record("one"))
    with open_store() as store:
        with pytest.raises(UserError, match=r"models\.target \(a, now b\)"):
            store.claim(facts(seed=2, models={"target": "b"}))
        assert store.claim(facts(seed=2, models={"target": "a"})) == 1
        run = store.read_run()
        assert len(run["sessions"]) == 2


def test_arms_add_up_over_sessions(open_store):
    with open_store() as store:
        store.claim(facts(a=1) | {"arms": {"beam": {"width": 4}}})
        store.append(record("one"))
        store.claim(facts(a=1) | {"arms": {"dsbd": {}}})
        assert set(store.read_run()["arms"]) == {"beam", "dsbd"}


def test_results_without_the_file_that_says_what_was_run_are_refused(open_store):
    with open_store() as store:
        store.claim(facts(a=1))
        store.append(record("one"))
    (open_store.folder / RUN).unlink()
    with open_store() as store, pytest.raises(UserError, match=r"no run\.json"):
        store.claim(facts(a=1))
    (open_store.folder / RUN).write_text("{oops")
    with open_store() as store, pytest.raises(UserError, match="cannot be read"):
        store.claim(facts(a=1))


def test_a_full_disk_is_an_error(open_store):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this platform")
    store = open_store()
    (open_store.folder / RESULTS).symlink_to("/dev/full")
    with pytest.raises(RunError, match="no space left"):
        store.append(record("one"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out"):
        Store(tmp_path / "file" / "out", 0, 1, print)


def test_parts_of_several_processes_are_merged(open_store):
    with open_store() as zero:
        zero.append(record("0"))
    first, second = open_store(0, 2), open_store(1, 2)
    first.append(record("1"))
    second.append(record("2"))
    second.append(record("0", text="again"))
    assert [r["item"] for r in second.own_lines()] == ["2", "0"]
    first.close()
    second.close()
    assert {r["item"] for r in read_results(open_store.folder)} == {"0", "1", "2"}
    with open_store() as store:
        assert [r["item"] for r in store.mend()] == ["0", "1", "2"]
    assert list(open_store.folder.glob("*.rank-*.jsonl")) == []


def test_a_torn_rating_is_dropped(open_store):
    with open_store() as store:
        store.append_rating(record("one", turn=0, value=7))
    with (open_store.folder / "ratings.jsonl").open("ab") as stream:
        stream.write(b'{"item": "tw')
    with open_store() as store:
        store.mend()
        store.append_rating(record("two", turn=0, value=None))
    assert [r["item"] for r in read_ratings(open_store.folder)] == ["one", "two"]


def test_text_that_is_no_unicode_still_gives_valid_utf8(open_store):
    with open_store() as store:
        store.append(record("one", text="a\ud800b"))
        store.append(record("two", text="한 🙂"))
    lines = (open_store.folder / RESULTS).read_bytes().decode("utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["a\ud800b", "한 🙂"]


def test_nan_never_reaches_the_file(open_store):
    with open_store() as store, pytest.raises(ValueError):
        store.append(record("one", value=float("nan")))


WRITER = """
import sys, time
from pathlib import Path
from dsbd_cli.bench.store import Store
with Store(Path(sys.argv[1]), 0, 1, print) as store:
    done = {r["item"] for r in store.mend()}
    for n in range(100000):
        if str(n) not in done:
            store.append({"item": str(n), "arm": "beam", "repeat": 0, "text": "x" * 2000})
            print(n, flush=True)
"""


def test_kill_nine_twice_loses_nothing_that_was_reported(open_store):
    reported = []
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(open_store.folder)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(40):
            reported.append(process.stdout.readline().strip())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        time.sleep(0.01)
    with open_store() as store:
        items = [r["item"] for r in store.mend()]
    assert len(items) == len(set(items))
    assert set(reported) <= set(items)
    assert items == [str(n) for n in range(len(items))]


def test_differences_say_where():
    assert differences({"a": 1, "m": {"t": 1, "d": 2}}, {"a": 1, "m": {"t": 1, "d": 3}}) == "m.d (2, now 3)"
    assert differences({"a": 1}, {"a": 1}) == ""
    assert differences({}, {"a": None}) == ""
    # A draft that one run has and another has not.
    model = {"name": "d", "dtype": "int8", "weights": None}
    assert differences({"m": None}, {"m": model}) == "m (none, now name d, dtype int8, weights none)"


def test_folder_with_odd_name(tmp_path):
    with Store(tmp_path / "[x] é", 0, 1, print) as store:
        store.append(record("one"))
    assert len(read_results(Path(tmp_path / "[x] é"))) == 1


@pytest.mark.parametrize("harm", ["removed", "cut", "lengthened"])
def test_a_file_that_changes_under_a_bench_ends_it(open_store, harm):
    with open_store() as store:
        number = store.claim(facts(a=1))
        for name, add in ((RESULTS, store.append), ("ratings.jsonl", store.append_rating)):
            path = open_store.folder / name
            add(record("one"))
            if harm == "removed":
                path.unlink()
            else:
                path.write_bytes(b"" if harm == "cut" else path.read_bytes() * 2)
            with pytest.raises(
                RunError, match=rf"{name} was (removed|changed).* while the bench was running"
            ):
                add(record("two"))
        with pytest.raises(RunError, match="while the bench was running"):
            store.end_session(number, {})
