"""Few-shot prompts: where the examples come from, what they never share with the item, and what identifies a run."""

from __future__ import annotations

import json
import shutil

import pytest

from dsbd_cli.bench.command import run_bench
from dsbd_cli.bench.datasets import load_dataset
from dsbd_cli.bench.datasets.shots import DEFAULT_SHOTS, load_shots
from dsbd_cli.bench.files import read_run
from dsbd_cli.bench.runner import Runner
from dsbd_cli.errors import UserError
from tests.bench.double import BytesTokenizer, FakeBackend, plan, prompter


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("dsbd_cli.bench.report._figures", lambda *_: {})


class ChatTokenizer(BytesTokenizer):
    """Has a template, which shows who speaks."""

    chat_template = "yes"

    def apply_chat_template(self, messages, **_):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def read(ids):
    """The prompt's text."""
    return bytes(token - 3 for token in ids).decode()


@pytest.mark.parametrize(("kind", "count"), [("squad", 3), ("squad", 12), ("spider", 5), ("spider", 9)])
def test_no_example_is_of_the_items_own_article_or_database(kind, count, tmp_path):
    dataset = load_dataset(kind, None, tmp_path)
    shots = load_shots(kind, None, tmp_path, count)
    first = set()
    for item in dataset.items:
        examples = shots.of(item)
        assert len(examples) == len(set(examples)) == count
        assert all(not example.groups & item.groups for example in examples)
        assert item.asked not in [example.asked for example in examples]
        assert all("\n" not in example.answer for example in examples)
        first.add(examples)
    assert len(first) <= count + 1  # all but those of the examples' own articles get the same ones
    assert shots.source == "the built-in sample"


def test_examples_are_of_different_articles_where_there_are_enough(tmp_path):
    item = load_dataset("squad", None, tmp_path).items[0]
    titles = [max(example.groups, key=len) for example in load_shots("squad", None, tmp_path, 8).of(item)]
    assert len(set(titles)) == 8


def test_more_examples_than_there_are_is_one_line(tmp_path):
    dataset = load_dataset("spider", None, tmp_path)
    with pytest.raises(UserError, match="--shots 60: the built-in sample has 52 worked examples"):
        load_shots("spider", None, tmp_path, 60).of(dataset.items[0])
    with pytest.raises(UserError, match="--shots 60: the built-in sample has 52"):
        plan(tmp_path / "out", shots=60)


@pytest.fixture
def squad_folder(tmp_path):
    """A dev set whose article and paragraph are in the training set too."""

    def line(name, title, context, answer):
        return {
            "id": name,
            "title": title,
            "context": context,
            "question": f"{name}?",
            "answers": {"text": [answer]},
        }

    def write(path, lines):
        path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))

    folder = tmp_path / "squad"
    folder.mkdir()
    write(folder / "dev.jsonl", [line("a", "T", "C one", "one"), line("b", "", "C two", "two")])
    write(
        folder / "train.jsonl",
        [
            line("same title", "T", "other words", "other"),
            line("same paragraph", "U", "C two", "two"),
            *(line(f"fine {n}", f"V{n}", f"C {n}", str(n)) for n in range(4)),
        ],
    )
    return folder


def test_training_data_is_taken_where_it_is(squad_folder, tmp_path):
    shots = load_shots("squad", squad_folder, tmp_path, 4)
    assert shots.source == "train.jsonl"
    one, two = load_dataset("squad", squad_folder, tmp_path).items
    assert not any("same title" in example.asked for example in shots.of(one))
    assert not any("same paragraph" in example.asked for example in shots.of(two))
    assert load_shots("squad", squad_folder, tmp_path, 4) == shots
    (squad_folder / "train.jsonl").unlink()
    assert load_shots("squad", squad_folder, tmp_path, 4).source == "the built-in sample"


def test_spiders_training_questions_need_a_schema_but_no_database(sample_spider, tmp_path):
    folder = shutil.copytree(sample_spider, tmp_path / "spider")
    shutil.rmtree(folder / "database" / "farm")
    questions = json.loads((folder / "dev.json").read_text())
    farm = [entry for entry in questions if entry["db_id"] == "farm"]
    train = [*farm, {"db_id": "gone", "question": "q", "query": "SELECT 1"}]
    (folder / "train_spider.json").write_text(json.dumps(train))
    shots = load_shots("spider", folder, tmp_path, 5)
    assert shots.source == "train_spider.json"
    item = load_dataset("spider", folder, tmp_path).items[0]
    assert all(example.groups == {"farm"} for example in shots.of(item))
    (folder / "train_spider.json").write_text("{}")
    with pytest.raises(UserError, match=r"train_spider.json: must be a list"):
        load_shots("spider", folder, tmp_path, 5)


def test_official_training_data(bench_data, tmp_path):
    shots = load_shots("spider", bench_data, tmp_path, 5)
    assert shots.source == "train_spider.json"
    assert len({example.groups for example in shots.pool}) == 6
    for item in load_dataset("spider", bench_data, tmp_path).items[::50]:
        assert len(shots.of(item)) == 5


@pytest.mark.parametrize("kind", DEFAULT_SHOTS)
def test_the_default_is_text_that_ends_at_the_lines_end(kind, tmp_path):
    made = plan(tmp_path / "out", dataset=kind)
    assert made.shots.count == DEFAULT_SHOTS[kind]
    asks = prompter(made, tokenizer=ChatTokenizer())
    assert asks.form == "plain text"
    item = made.dataset.items[0]
    text = read(asks.ids(item, []))
    assert "<user>" not in text
    assert text.count("\nQuestion:") == made.shots.count + 1
    for example in made.shots.of(item):
        assert f"{example.asked} {example.answer}\n\n" in text
    assert text.endswith(item.asked)
    runner = Runner(FakeBackend(), asks, None, 1, made.stops)
    assert runner.effective(made.arms[0]).settings.stop == ("\n",)


def test_as_turns_the_examples_are_asked_and_answered(tmp_path):
    made = plan(tmp_path / "out", dataset="squad", settings={"raw": False})
    asks = prompter(made, tokenizer=ChatTokenizer())
    assert asks.form == "chat template"
    item = made.dataset.items[0]
    text = read(asks.ids(item, []))
    assert text.count("<user>") == text.count("<assistant>") == 4
    for example in made.shots.of(item):
        assert f"{example.asked}<assistant>{example.answer}<user>" in text
    assert text.endswith(f"<user>{item.asked}<assistant>")
    runner = Runner(FakeBackend(), asks, None, 1, made.stops)
    assert runner.effective(made.arms[0]).settings.stop == ()


def test_a_system_text_needs_turns(tmp_path):
    made = plan(tmp_path / "out", dataset="squad", settings={"system": "Be brief."})
    assert prompter(made, tokenizer=ChatTokenizer()).form == "chat template"


@pytest.mark.parametrize("kind", DEFAULT_SHOTS)
def test_without_shots_there_is_the_one_written_example(kind, tmp_path):
    made = plan(tmp_path / "out", dataset=kind, shots=0)
    assert made.shots is None
    asks = prompter(made, tokenizer=ChatTokenizer())
    assert asks.form == "chat template"
    item = made.dataset.items[0]
    assert read(asks.ids(item, [])).count("<user>") == 2
    assert made.stops == made.dataset.raw_stops


def test_examples_do_not_depend_on_the_runs_seed(tmp_path):
    one, two = (plan(tmp_path / "out", dataset="squad", settings={"seed": seed}) for seed in (1, 2))
    assert one.shots == two.shots


@pytest.mark.parametrize(
    ("dataset", "shots", "words"),
    [("mt-bench", 2, "means nothing to mt-bench"), ("squad", -1, "0..64, not -1"), ("squad", 65, "0..64")],
)
def test_shots_that_cannot_be(dataset, shots, words, tmp_path):
    with pytest.raises(UserError, match=words):
        plan(tmp_path / "out", dataset=dataset, shots=shots)
    assert plan(tmp_path / "out", dataset="mt-bench", shots=0).shots is None


def bench(folder, **options):
    made = plan(folder, dataset="squad", **options)
    run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made, tokenizer=ChatTokenizer()))


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ({}, {"shots": 2}, r"shots\.count \(3, now 2\)"),
        ({}, {"shots": 0}, r"shots\.count \(3, now 0\)"),
        ({"shots": 0}, {}, r"shots\.count \(0, now 3\)"),
        ({}, {"settings": {"raw": False}}, r"prompt_form \(plain text, now chat template\)"),
    ],
)
def test_a_run_is_not_resumed_with_other_examples(first, then, words, tmp_path):
    bench(tmp_path / "out", **first)
    with pytest.raises(UserError, match=words):
        bench(tmp_path / "out", **then)
    bench(tmp_path / "out", **first)


def test_what_is_shown_is_part_of_the_run(tmp_path, monkeypatch):
    bench(tmp_path / "out")
    kept = read_run(tmp_path / "out")["fingerprint"]
    assert kept["shots"]["source"] == "the built-in sample"
    assert kept["stops"] == ["\n"]
    monkeypatch.setattr("dsbd_cli.bench.datasets.shots.SEED", 2)
    with pytest.raises(UserError, match=r"shots\.sha256"):
        bench(tmp_path / "out")
