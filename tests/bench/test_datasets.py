"""Official layouts are read, and every fault of a file is one line that says where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsbd_cli.bench.datasets import load_dataset, mt_bench, plain, spider, spider_prompt, squad
from dsbd_cli.errors import UserError


@pytest.mark.parametrize(("kind", "count"), [("spider", 65), ("squad", 60), ("mt-bench", 8)])
def test_the_sample_says_what_it_is(kind, count, tmp_path):
    dataset = load_dataset(kind, None, tmp_path)
    assert dataset.builtin
    assert "built-in sample" in dataset.label
    assert len(dataset.items) == dataset.total == count
    assert len({item.id for item in dataset.items}) == count


def test_official_data(bench_data, tmp_path):
    dataset = load_dataset("spider", bench_data, tmp_path)
    assert (len(dataset.items), dataset.skipped) == (972, {"database wta_1 is not there": 62})
    assert not dataset.builtin
    assert len(load_dataset("squad", bench_data, tmp_path).items) == 3319
    bench = load_dataset("mt-bench", bench_data, tmp_path)
    assert len(bench.items) == 80
    assert sum(bool(item.references) for item in bench.items) == 30
    assert set(bench.extras["judge_prompts"]) == set(mt_bench.PROMPTS.values())


def test_a_larger_limit_holds_the_smaller_one(tmp_path):
    dataset = load_dataset("spider", None, tmp_path)
    few, more = dataset.select(10), dataset.select(30)
    assert more.items[:10] == few.items
    assert len({item.schema.db_id for item in few.items}) > 2
    assert few.total == 65
    assert dataset.select(None).digest() == dataset.digest() != few.digest()


def test_prompts_are_one_shot(tmp_path):
    item = load_dataset("spider", None, tmp_path).items[0]
    roles = [message["role"] for message in item.messages([])]
    assert roles == ["user", "assistant", "user"]
    assert item.messages([])[1]["content"] == spider_prompt.EXAMPLE_SQL
    text = item.text([])
    assert text.count("Question:") == 2
    assert text.endswith("SQL:")
    for name, columns in item.schema.tables:
        assert f"{name}({', '.join(columns)})" in text
    assert "loan.book_id = book.book_id" in text
    assert item.gold not in text
    question = load_dataset("squad", None, tmp_path).items[0]
    assert question.text([]).endswith("Answer:")
    assert question.text([]).index(question.context) < question.text([]).rindex("Question:")


def test_the_worked_example_runs():
    import sqlite3

    connection = sqlite3.connect(":memory:")
    for name, columns in spider_prompt.EXAMPLE_SCHEMA.tables:
        connection.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
    connection.execute(spider_prompt.EXAMPLE_SQL)


def test_second_turns_hold_the_first(tmp_path):
    item = load_dataset("mt-bench", None, tmp_path).items[0]
    assert item.turns == 2
    second = item.messages(["my answer"])
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == "my answer"
    assert "my answer" in item.text(["my answer"])


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_the_samples_tables_json_is_what_the_databases_hold(sample_spider):
    import sqlite3

    schemas = {item.schema.db_id: item.schema for item in spider.load(sample_spider).items}
    assert len(schemas) == 5
    for db_id, schema in schemas.items():
        connection = sqlite3.connect(sample_spider / "database" / db_id / f"{db_id}.sqlite")
        for name, columns in schema.tables:
            assert columns == tuple(row[1] for row in connection.execute(f"pragma table_info({name})"))


@pytest.fixture
def spider_copy(sample_spider, tmp_path):
    import shutil

    return shutil.copytree(sample_spider, tmp_path / "spider")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("dev.json", "{not json", "dev.json: line 1"),
        ("dev.json", "{}", "must be a list"),
        ("dev.json", '[{"db_id": "library", "question": "q"}]', "entry 0: 'query'"),
        ("dev.json", '[{"db_id": "library", "question": " ", "query": "x"}]', "entry 0: 'question'"),
        ("dev.json", '[{"db_id": "gone", "question": "q", "query": "x"}]', "no question"),
        ("tables.json", "[{}]", "tables.json: entry 0"),
        ("tables.json", "[]", "not in"),
        ("dev.json", "version https://git-lfs.github.com/spec/v1\n", "LFS pointer"),
        ("database/library/library.sqlite", "version https://git-lfs", "not an SQLite database"),
    ],
)
def test_faults_of_spider_files(spider_copy, name, content, words):
    write(spider_copy / name, content)
    with pytest.raises(UserError, match=words):
        spider.load(spider_copy)


def test_a_missing_database_is_counted_and_named(spider_copy):
    (spider_copy / "database" / "farm" / "farm.sqlite").unlink()
    dataset = spider.load(spider_copy)
    assert dataset.skipped == {"database farm is not there": 13}
    assert len(dataset.items) == 52


V2 = {"data": [{"title": "t", "paragraphs": [{"context": "c d", "qas": [
    {"id": "1", "question": "q?", "answers": [{"text": "c", "answer_start": 0}, {"text": "c", "answer_start": 0}]},
    {"id": "2", "question": "q?", "answers": [], "is_impossible": True},
    {"id": "3", "question": "q?", "answers": []},
]}]}]}  # fmt: skip


def test_squad_questions_without_references_are_counted_not_scored(tmp_path):
    write(tmp_path / "dev-v2.0.json", V2)
    dataset = squad.load(tmp_path)
    assert [item.references for item in dataset.items] == [("c",)]
    assert dataset.skipped == {"unanswerable (v2.0)": 1, "no reference answers": 1}


def test_squad_lines(tmp_path):
    line = {"id": "a", "title": "t", "context": "c", "question": "q", "answers": {"text": ["x", "y"]}}
    write(tmp_path / "dev.jsonl", json.dumps(line) + "\n\n" + json.dumps(line | {"id": "b"}) + "\n")
    assert [item.references for item in squad.load(tmp_path).items] == [("x", "y")] * 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"id": "a"}', "line 1: 'context'"),
        ('{"id": "a", "context": "c", "question": "q", "answers": {"text": "x"}}', "'answers'"),
        ("[]", "must be an object"),
        ("{oops", "line 1: not JSON"),
        ("", "no question"),
        (
            "\n".join(['{"id": "a", "context": "c", "question": "q", "answers": {"text": ["x"]}}'] * 2),
            "twice",
        ),
    ],
)
def test_faults_of_squad_files(tmp_path, content, words):
    write(tmp_path / "dev.jsonl", content)
    with pytest.raises(UserError, match=words):
        squad.load(tmp_path)


def test_a_folder_without_the_files_is_named(tmp_path):
    for kind in ("spider", "squad", "mt-bench"):
        with pytest.raises(UserError, match=str(tmp_path)):
            load_dataset(kind, tmp_path, tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        load_dataset("squad", tmp_path / "gone", tmp_path)


def test_a_file_of_prompts(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        '{"prompt": "hi"}\n{"prompt": [{"role": "user", "content": "x"}], "references": "y", "id": "z"}\n',
    )
    first, second = load_dataset(str(path), None, tmp_path).items
    assert (first.id, first.messages([]), first.references) == (
        "line-1",
        [{"role": "user", "content": "hi"}],
        (),
    )
    turns = [{"role": "user", "content": "x"}]
    assert (second.id, second.text([]), second.references) == ("z", turns, ("y",))
    other = write(tmp_path / "other.jsonl", path.read_text().replace('"prompt": [', '"messages": ['))
    assert plain.load(other).items == (first, second)
    parts = write(
        tmp_path / "parts.jsonl", path.read_text().replace('"x"', '[{"type": "text", "text": "x"}]')
    )
    assert plain.load(parts).items[1].messages([])[0]["content"] == [{"type": "text", "text": "x"}]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"prompt": ""}', "line 1: the prompt is empty: nothing is asked"),
        ('{"messages": [{"role": "user", "content": " "}]}', "line 1: the prompt is empty: nothing is asked"),
        ('{"prompt": 3}', "line 1: prompt must be a text or a list of messages, not a number"),
        ('{"prompt": [{"role": "user"}]}', "line 1: message 1 has no content"),
        ('{"prompt": "x", "messages": []}', "line 1: must have either prompt or messages"),
        ('{"text": "x"}', "unknown key 'text'"),
        ("{}", "line 1: must have either prompt or messages"),
        ('{"prompt": "x", "references": []}', "'references'"),
        ('{"prompt": "x", "id": "a"}\n{"prompt": "y", "id": "a"}', "twice"),
        ("", "no prompts"),
        pytest.param("[" * 200_000, "line 1: not JSON", id="too deep"),
        pytest.param(
            '{"prompt": "x"}\n{"prompt": "x", "id": ' + "9" * 5000 + "}", "line 2: not JSON", id="digits"
        ),
        (r'{"prompt": "x", "id": "\ud800"}', "line 1: holds half a surrogate pair"),
        (r'{"prompt": "x\uD83D"}', "line 1: holds half a surrogate pair"),
    ],
)
def test_faults_of_a_file_of_prompts(tmp_path, content, words):
    with pytest.raises(UserError, match=words):
        plain.load(write(tmp_path / "mine.jsonl", content))


@pytest.mark.parametrize(
    ("references", "kind"),
    [
        ([None, None], "jsonl"),
        (["Paris", None], "jsonl"),
        (["It is Paris, the capital of France since the year of 987 or so."], "prose"),
        (["Paris.\n\nIt lies on the Seine."], "prose"),
        (["Paris\n"], "jsonl"),
        ([["Paris", "a b\nc"]], "jsonl"),  # the short one can be matched
        (["one\ntwo", "Paris"], "jsonl"),
        (["one\ntwo", None, "Paris", "three\nfour"], "prose"),
    ],
)
def test_whether_answers_can_match_a_files_references(tmp_path, references, kind):
    lines = [json.dumps({"prompt": "x"} | ({} if one is None else {"references": one})) for one in references]
    loaded = load_dataset(str(write(tmp_path / "mine.jsonl", "\n".join(lines))), None, tmp_path)
    assert loaded.kind == kind
    assert loaded.is_file


def test_a_text_file_is_a_prompt_a_line(tmp_path):
    loaded = load_dataset(str(write(tmp_path / "mine.txt", "one\r\n\n  two \u2028 b\n")), None, tmp_path)
    assert [(item.id, item.prompt, item.references) for item in loaded.items] == [
        ("line-1", "one", ()),
        ("line-3", "  two \u2028 b", ()),
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nope.jsonl", "no such file"), ("a/b", "no such file"), ("squd", "did you mean squad")],
)
def test_a_data_set_that_is_not_there(tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        load_dataset(name, None, tmp_path)


def test_escapes_that_are_whole_pairs_are_text(tmp_path):
    loaded = plain.load(write(tmp_path / "mine.jsonl", r'{"prompt": "\ud83d\ude42 \\ud800"}'))
    assert loaded.items[0].text([]) == "\N{SLIGHTLY SMILING FACE} \\ud800"
    assert loaded.digest()


def test_an_unknown_data_set_is_refused_with_the_near_one(tmp_path):
    with pytest.raises(UserError, match="did you mean spider"):
        load_dataset("spidr", None, tmp_path)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A stand-in for the `datasets` package that serves given rows, or fails."""
    import sys
    import types

    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))

    def serve(rows):
        calls = []

        def load_dataset(name, split):
            calls.append((name, split))
            if isinstance(rows, Exception):
                raise rows
            return rows

        module = types.ModuleType("datasets")
        module.load_dataset = load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)
        return calls

    return serve


def test_squad_from_the_hub_is_fetched_once(hub, tmp_path):
    answers = {"text": ["x", "x"], "answer_start": [0, 0]}
    calls = hub([{"id": "a", "title": "t", "context": "x y", "question": "q?", "answers": answers}])
    for _ in range(2):
        dataset = load_dataset("squad", Path("hub"), tmp_path)
        assert [item.references for item in dataset.items] == [("x",)]
        assert "hub rajpurkar/squad" in dataset.label
    assert calls == [("rajpurkar/squad", "validation")]


def test_mt_bench_from_the_hub(hub, tmp_path):
    rows = [
        {"prompt_id": 1, "category": "math", "prompt": ["a", "b"], "reference": ["r", "s"]},
        {"prompt_id": 2, "category": "writing", "prompt": ["c", "d"], "reference": []},
    ]
    calls = hub(rows)
    dataset = load_dataset("mt-bench", Path("hub:some/copy"), tmp_path)
    assert [item.questions for item in dataset.items] == [("a", "b"), ("c", "d")]
    assert [item.references for item in dataset.items] == [("r", "s"), ()]
    assert set(dataset.extras["judge_prompts"]) == set(mt_bench.PROMPTS.values())
    assert calls[0][0] == "some/copy"


def test_a_hub_that_cannot_be_reached_is_one_line(hub, tmp_path, monkeypatch):
    hub(ConnectionError("Couldn't reach it\nlong story"))
    with pytest.raises(UserError, match=r"cannot be fetched from the hub: Couldn.t reach it$"):
        load_dataset("squad", Path("hub"), tmp_path)
    with pytest.raises(UserError, match="hold no databases"):
        load_dataset("spider", Path("hub"), tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load_dataset("squad", Path("hub"), tmp_path)
