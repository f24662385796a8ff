"""Verdicts equal the published scorer's; hostile SQL is contained."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from dsbd_cli.bench.datasets import sample, spider
from dsbd_cli.bench.scoring.spider import SpiderScorer, same_result
from dsbd_cli.bench.scoring.sql_runner import SqlRunner
from tests.bench.conftest import DATA


@pytest.fixture(scope="session")
def databases(sample_spider, tmp_path_factory) -> Path:
    """The sample's databases and one of edge cases."""
    folder = tmp_path_factory.mktemp("databases")
    shutil.copytree(sample_spider / "database", folder, dirs_exist_ok=True)
    (folder / "edge").mkdir()
    connection = sqlite3.connect(folder / "edge" / "edge.sqlite")
    connection.executescript((DATA / "edge.sql").read_text())
    connection.commit()
    connection.close()
    return folder


def edge(databases: Path) -> Path:
    return databases / "edge" / "edge.sqlite"


@pytest.mark.parametrize("keep_distinct", [False, True])
def test_verdicts_equal_the_published_scorers(databases, runner, keep_distinct):
    """Each line: a gold query, a made-up prediction, and what test-suite-sql-eval's exec_eval.py said of it."""
    name = "spider_verdicts_keep_distinct.jsonl" if keep_distinct else "spider_verdicts.jsonl"
    pairs = [json.loads(line) for line in (DATA / name).read_text().splitlines()]
    scorer = SpiderScorer(runner, keep_distinct=keep_distinct)
    differ = []
    for pair in pairs:
        database = databases / pair["db"] / f"{pair['db']}.sqlite"
        verdict = scorer.judge(pair["prediction"], pair["gold"], database)
        if verdict.correct is not pair["correct"]:
            differ.append((pair, verdict))
    assert differ == []
    assert len(pairs) >= (40 if keep_distinct else 300)
    assert 0.2 < sum(pair["correct"] for pair in pairs) / len(pairs) < 0.9


def test_every_gold_of_the_sample_is_correct_against_itself(sample_spider, runner):
    dataset = spider.load(sample_spider)
    scorer = SpiderScorer(runner)
    assert len(dataset.items) >= 60
    assert len({item.schema.db_id for item in dataset.items}) >= 4
    assert {item.hardness for item in dataset.items} == {"easy", "medium", "hard", "extra"}
    for item in dataset.items:
        assert scorer.score(item.gold, item.gold, item.database).outcome == "correct", item.id
        assert scorer.gold(item.database, item.gold).rows, (
            item.id
        )  # no question of the sample has an empty answer


@pytest.mark.slow
def test_every_gold_of_the_dev_set_is_correct_against_itself(bench_data, runner):
    dataset = spider.load(bench_data)
    scorer = SpiderScorer(runner)
    wrong = [i.id for i in dataset.items if scorer.score(i.gold, i.gold, i.database).outcome != "correct"]
    assert wrong == []
    assert len(dataset.items) == 972


HOSTILE = [
    ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r) SELECT count(*) FROM r", {"timeout"}),
    (
        "SELECT count(*) FROM wide a, wide b, wide c, wide d, wide e, wide f, wide g, wide h, wide i",
        {"timeout"},
    ),
    ("SELECT zeroblob(1000000000)", {"too_large"}),
    ("SELECT group_concat(hex(randomblob(100000000)))", {"too_large", "timeout"}),
    (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r) SELECT n, hex(zeroblob(9999)) FROM r",
        {"too_large", "timeout"},
    ),
    ("DROP TABLE singer", {"error"}),
    ("DELETE FROM singer", {"error"}),
    ("UPDATE singer SET name = 'x'", {"error"}),
    ("INSERT INTO singer VALUES (9, 'z', 1)", {"error"}),
    ("PRAGMA writable_schema=1", {"error"}),
    ("ATTACH DATABASE '/tmp/x.sqlite' AS x", {"error"}),
    ("VACUUM INTO '/tmp/x.sqlite'", {"error"}),
    ("SELECT load_extension('x')", {"error"}),
    ("SELECT writefile('/tmp/x', 'x')", {"error"}),
    ("SELECT readfile('/etc/passwd')", {"error"}),
    ("CREATE TEMP TABLE t AS SELECT 1", {"error"}),
    ("BEGIN EXCLUSIVE", {"error"}),
    ("SELECT 'a" + "\0" + "b'", {"error", "rows"}),
    ("SELECT '\ud800'", {"error"}),
    ("SELECT " + "(" * 5000 + "1" + ")" * 5000, {"error"}),
]


@pytest.mark.parametrize(("sql", "status"), HOSTILE)
def test_hostile_sql_ends_in_time_and_harms_nothing(databases, sql, status):
    database = edge(databases)
    before = hashlib.sha256(database.read_bytes()).hexdigest()
    with SqlRunner(seconds=0.5, max_bytes=1 << 20) as runner:
        began = time.monotonic()
        result = runner.run(database, sql)
        assert result.status in status, result
        assert time.monotonic() - began < 20  # a hang guard, not a measurement
        assert runner.run(database, "SELECT count(*) FROM singer").rows == [(8,)]
        worker = runner._worker
    assert worker.poll() is not None
    assert hashlib.sha256(database.read_bytes()).hexdigest() == before
    assert [path.name for path in database.parent.iterdir()] == ["edge.sqlite"]


def test_a_long_c_call_is_stopped_too(databases):
    """SQLite's interrupt is only looked at between its instructions; the process timer ends one long call."""
    endless = "SELECT instr(hex(zeroblob(9000000)), hex(zeroblob(4000000)) || '1')"  # hours inside one call
    with SqlRunner(seconds=0.2) as runner:
        assert runner.run(edge(databases), endless).status == "timeout"
        assert runner.run(edge(databases), "SELECT 1").rows == [(1,)]


def test_a_killed_worker_is_started_anew(databases):
    with SqlRunner() as runner:
        runner.run(edge(databases), "SELECT 1")
        os.kill(runner._worker.pid, 9)
        runner._worker.wait()
        assert runner.run(edge(databases), "SELECT 1").rows == [(1,)]


def test_a_read_only_folder_is_enough(databases, tmp_path):
    folder = tmp_path / "odd name ?#%"
    folder.mkdir()
    database = folder / "d.sqlite"
    shutil.copy(edge(databases), database)
    database.chmod(0o444)
    folder.chmod(0o555)
    try:
        with SqlRunner() as runner:
            assert runner.run(database, "SELECT count(*) FROM singer").rows == [(8,)]
    finally:
        folder.chmod(0o755)


def test_bytes_that_are_not_utf8_compare_alike_on_both_sides(databases, runner):
    query = "SELECT name FROM singer WHERE id = 7"
    verdict = SpiderScorer(runner).judge(query, query, edge(databases))
    assert verdict.correct
    (row,) = runner.run(edge(databases), query).rows
    assert json.loads(json.dumps({"rows": row}, ensure_ascii=False).encode("utf-8")) == {
        "rows": ["Albarracn"]
    }


def test_values_survive_the_pipe_exactly(databases, runner):
    query = "SELECT 9007199254740993, 0.1+0.2, x'00ff', NULL, '', 9e999, -0.0, 'é' || char(10)"
    (row,) = runner.run(edge(databases), query).rows
    assert row == (9007199254740993, 0.1 + 0.2, b"\x00\xff", None, "", float("inf"), -0.0, "é\n")


GOLD = "SELECT name FROM singer WHERE age = 20"


@pytest.mark.parametrize(
    ("answer", "reason", "outcome"),
    [
        (GOLD, "eos", "correct"),
        ("```sql\n" + GOLD + "\n```", "eos", "correct"),
        ("SELECT name FROM singer", "eos", "wrong"),
        ("SELECT name FROM singer", "length", "cut"),
        ("SELECT name FROM singer; and so on and", "length", "wrong"),
        ("SELECT name FROM singer WHERE", "length", "cut"),
        (GOLD, "length", "correct"),
        ("SELECT name FROM nowhere", "eos", "error"),
        ("I do not know", "eos", "no_sql"),
        ("", "eos", "no_sql"),
        ("DROP TABLE singer", "eos", "error"),
        ("WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM r) SELECT n FROM r", "eos", "too_large"),
    ],
)
def test_outcomes_are_told_apart(databases, answer, reason, outcome):
    with SqlRunner(seconds=2, max_bytes=1 << 16) as runner:
        verdict = SpiderScorer(runner).score(answer, GOLD, edge(databases), finish_reason=reason)
    assert verdict.outcome == outcome
    assert verdict.correct is (outcome == "correct")


def test_a_failing_gold_is_a_fault_of_the_data(databases, runner):
    verdict = SpiderScorer(runner).score("SELECT 1", "SELECT nowhere FROM singer", edge(databases))
    assert verdict.outcome == "data_fault"
    assert verdict.correct is None
    assert "nowhere" in verdict.message


def test_a_test_suite_of_several_databases_must_agree_on_all(databases, runner, tmp_path):
    shutil.copy(edge(databases), tmp_path / "edge.sqlite")
    shutil.copy(edge(databases), tmp_path / "edge_2.sqlite")
    scorer = SpiderScorer(runner)
    wrong = "SELECT count(*) FROM singer WHERE id < 9"
    gold = "SELECT count(*) FROM singer"
    assert scorer.judge(wrong, gold, tmp_path / "edge.sqlite").outcome == "correct"
    connection = sqlite3.connect(tmp_path / "edge_3.sqlite")
    connection.executescript((DATA / "edge.sql").read_text() + "INSERT INTO singer VALUES (9, 'new', 1);")
    connection.commit()
    connection.close()
    assert scorer.judge(wrong, gold, tmp_path / "edge.sqlite").outcome == "wrong"


def test_many_equal_columns_do_not_take_factorial_time():
    row = tuple([1] * 11 + [2])
    other = tuple([2] + [1] * 11)
    assert same_result([row] * 50, [other] * 50, ordered=False)
    assert not same_result([row] * 50, [other] * 49 + [tuple([2, 2] + [1] * 10)], ordered=False)
    square = [tuple((i + j) % 10 for j in range(10)) for i in range(10)]
    assert same_result(square, [tuple(reversed(r)) for r in square], ordered=False)


def test_the_sample_is_built_once_and_whole(tmp_path):
    first = sample.build_spider(tmp_path)
    stamp = (first / "dev.json").stat().st_mtime_ns
    assert sample.build_spider(tmp_path) == first
    assert (first / "dev.json").stat().st_mtime_ns == stamp
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["spider"]
