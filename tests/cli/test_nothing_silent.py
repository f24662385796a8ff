"""What was given and changes nothing, what would be written over, and what a message must say."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call, pair

Models = Callable[..., str]


@pytest.mark.parametrize("how", [[], ["--lines"]])
def test_options_without_effect_are_noted(dsbd: Call, models: Models, how: list[str]) -> None:
    command = [
        "generate",
        *how,
        *pair(models("says", "A")),
        "--method",
        "multinomial",
        "--seed",
        "1",
        "--kv",
        "one",
    ]
    ran = dsbd(*command, "--gamma", "3", stdin=b"hi\n")
    assert (ran.code, ran.text.strip().strip('"')) == (0, "A")
    assert "dsbd: gamma, kv have no effect with method multinomial" in ran.err.splitlines()
    assert "no effect" not in dsbd(*command[:-2], stdin=b"hi\n").err
    if not how:
        assert dsbd(*command, "-q", stdin=b"hi").err == ""
    ran = dsbd("generate", "hi", *pair(models("says", "A")), "--seed", "1", "--min-width", "1")
    assert ran.err == "dsbd: min-width has no effect without a threshold\n"


def test_no_seed_is_told_where_nothing_is_drawn(dsbd: Call, models: Models, tmp_path: Path) -> None:
    options = [*pair(models("says", "A")), "--max-new-tokens", "4"]
    (tmp_path / "p.txt").write_text("hi\n")
    for number, (draws, more) in enumerate(
        [(True, []), (False, ["--temperature", "0"]), (False, ["--deterministic"])]
    ):
        output = tmp_path / f"{number}.jsonl"
        for command in (["generate", "hi"], ["generate", "--lines"],
                        ["generate", "--input", tmp_path / "p.txt", "--output", output]):  # fmt: skip
            ran = dsbd(*command, *options, *more, stdin=b"hi\n")
            assert ran.code == 0, ran.err
            assert ("dsbd: seed " in ran.err) is draws, (command, more, ran.err)


def test_notes_of_prompts_of_a_batch_are_told(dsbd: Call, models: Models, tmp_path: Path) -> None:
    options = [*pair(models("says", "A")), "--seed", "1", "--max-new-tokens", "4"]
    (tmp_path / "p.txt").write_text("hi\n\nho\n\n")
    empty = "the prompt is empty: the target starts from its BOS token"
    for command in (["--lines"], ["--input", tmp_path / "p.txt", "--output", tmp_path / "out.jsonl"]):
        ran = dsbd("generate", *command, *options, stdin=b"hi\n\nho\n\n")
        lines = ran.err.splitlines()
        assert f"dsbd: line 2: {empty}" in lines
        assert f"dsbd: 2 prompts: {empty}" in lines
        assert sum(empty in line for line in lines) == 2
        assert ran.code == 0


def test_text_in_stdin_that_is_not_read_is_noted(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    from dsbd_cli.cli.main import run

    options = [*pair(models("says", "A")), "--seed", "1", "--max-new-tokens", "4"]
    for written, more, noted in ((b"two\n", [], True), (b"", [], False), (b"two\n", ["-q"], False)):
        reading, writing = os.pipe()
        os.write(writing, written)  # and left open: whoever waited for its end would wait for ever
        with os.fdopen(reading) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", stream)
            assert run(["generate", "one", *options, *more]) == 0
            assert (
                b"dsbd: stdin is not read: the prompt is the argument" in capsysbinary.readouterr().err
            ) is noted
            os.close(writing)
            assert stream.read() == written.decode()  # it is left to whoever else reads it


@pytest.fixture
def dear(tmp_path: Path) -> Path:
    """Prices by which each node costs a whole forward: no forest can pay."""
    line = {"nodes": [1, 101], "ms": [1.0, 101.0]}
    path = tmp_path / "dear.json"
    path.write_text(json.dumps({"format": 1, "target": line, "draft": line, "layer_ms": 0.0, "origin": "x"}))
    return path


def test_that_nothing_was_drafted_is_said(dsbd: Call, models: Models, dear: Path) -> None:
    command = ["generate", "hi", *pair(models("rand", seed=1)), "--seed", "1", "--max-new-tokens", "8"]
    stored = (
        "nothing drafted: by the prices of this machine no forest pays here (--forest full drafts anyway)"
    )
    words = "nothing was drafted: on this machine drafting is expected to cost more time than it saves"
    priced = [*command, "--prices", dear]
    assert dsbd(*priced, "--json").json["stats"]["notes"] == [stored]
    assert words in dsbd(*priced, "--stats").err
    assert words not in dsbd(*priced, "--forest", "full", "--stats").err
    assert words not in dsbd(*command, "--method", "beam", "--stats").err
    assert words not in dsbd(*command, "--gamma", "0", "--stats").err
    ran = dsbd("generate", "--lines", *priced[2:], "--stats", stdin=b"hi\nho\n")
    assert f"{words} (--forest full drafts anyway)\n" in ran.err, ran.err
    assert stored not in ran.err


def test_what_a_preset_holds_yields_quietly(dsbd: Call, models: Models, tmp_path: Path) -> None:
    target = models("says", "A")
    (tmp_path / "p.yaml").write_text(f"target: {target}\ndraft: {target}\ngamma: 3\nmin_width: 1\nkv: one\n")
    ran = dsbd("generate", "hi", "--preset", tmp_path / "p.yaml", "--method", "beam", "--seed", "1")
    assert (ran.code, ran.text, ran.err) == (0, "A\n", "")


def test_a_revision_of_what_is_not_on_the_hub_is_refused(dsbd: Call, models: Models, tmp_path: Path) -> None:
    target = models("says", "A")
    dsbd("generate", "hi", *pair(target), "--revision", "v1").refused(
        "revision v1", target, "leave revision out"
    )
    dsbd("generate", "hi", *pair(target), "--draft-revision", "v1").refused(
        "draft-revision v1", "draft", target
    )
    alone = ["generate", "hi", "--target", target, "--method", "beam"]
    dsbd(*alone, "--draft-revision", "v1").refused("draft-revision v1 without a draft")
    preset = tmp_path / "p.yaml"
    preset.write_text("target: some/model\nrevision: v1\ndraft: some/draft\ndraft_revision: v2\n")
    # It is the revision of the preset's own target.
    ran = dsbd("generate", "hi", "--preset", preset, *pair(target), "--seed", "1")
    assert (ran.code, ran.text) == (0, "A\n")
    preset.write_text(f"target: {target}\nrevision: v1\n")
    dsbd("generate", "hi", "--preset", preset, "--method", "beam").refused("revision v1")


def test_files_of_others_are_not_written_over(dsbd: Call, models: Models, tmp_path: Path) -> None:
    run = ["generate", "hi", *pair(models("says", "A")), "--seed", "1", "--trace"]
    mine, other, page = tmp_path / "mine", tmp_path / "notes.md", tmp_path / "page.html"
    other.write_text("dear diary")
    dsbd(*run, other).refused("--trace", str(other), "is no trace", "another name")
    mine.touch()
    for _ in range(2):
        assert dsbd(*run, mine).code == 0
    dsbd("trace", mine, "--html", other).refused("--html", str(other), "another name")
    for _ in range(2):
        assert dsbd("trace", mine, "--html", page).code == 0
    dsbd("trace", page.with_name("mine"), "--html", page, "--delay", "1").refused("--delay")
    dsbd(*run, page).refused("--trace")
    dsbd("trace", mine, "--html", mine).refused("--html")
    cut = tmp_path / "cut"
    cut.write_text(mine.read_text()[:12])
    assert dsbd(*run, cut).code == 0
    assert other.read_text() == "dear diary"


def test_a_bench_says_what_is_wrong_with_a_file(dsbd: Call, models: Models, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    data, results = tmp_path / "q.jsonl", tmp_path / "results"
    run = ["bench", "--dataset", data, "--target", models("says", "A"), "--methods", "beam"]
    data.write_text(json.dumps({"prompt": "hi", "references": []}) + "\n")
    dsbd(*run).refused("line 1", "'references' is an empty list", "leave it out")
    data.write_text(json.dumps({"prompt": "hi"}) + "\n")
    results.write_text("mine")
    for where in (results, results / "deep" / "er"):
        dsbd(*run, "--out", where).refused("--out", str(results), "is a file")
    dsbd("bench", "report", tmp_path, "--out", results).refused("--out", "is a file")
    dsbd("bench", "compare", tmp_path, tmp_path, "--out", results).refused("--out", "is a file")
    for options, word in (
        (["--hf-limit", "2"], "--hf-limit"),
        (["--keep-distinct"], "--keep-distinct"),
        (["--sql-timeout", "9"], "--sql-timeout"),
        (["--judge-timeout", "9"], "--judge-timeout"),
    ):
        dsbd(*run, *options, "--out", tmp_path / "new").refused(word)
    assert results.read_text() == "mine"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("bench", ["--dataset is missing: spider, squad, mt-bench", "dsbd bench run --help"]),
        ("bench --limit 3", ["--dataset is missing: spider, squad, mt-bench"]),
        ("bench spider", ["dsbd bench spider: no such command", "run, report, compare, judge", "--dataset"]),
        ("bench reprot", ["did you mean report"]),
        ("bench report", ["DIR... is missing: Folders"]),
        ("bench judge x", ["--judge-url is missing: OpenAI-compatible endpoint"]),
        ("distill", ["--target and --out are missing", "dsbd distill evaluate", "dsbd distill --help"]),
        ("distill --target x", ["--out is missing"]),
        ("distill evaluate", ["--target is missing: Target: folder"]),
        ("trace", ["FILE is missing: "]),
        ("presets show", ["NAME is missing: A preset's name"]),
        ("tune nofile.txt", ["dsbd: nofile.txt: no such file"]),
        ("tune setup.cfg.ini", ["dsbd: setup.cfg.ini: no such file"]),
        ("generate hi --device gpu", ["dsbd: device must be auto"]),
        ("generate hi --target-device gpu", ["dsbd: target-device must be auto"]),
        ("generate hi --draft-device gpu", ["dsbd: draft-device must be auto"]),
        ("generate hi --dtype float17", ["dsbd: dtype must be one of"]),
        ("generate hi --draft-dtype float17", ["dsbd: draft-dtype must be one of"]),
    ],
)
def test_what_is_missing_or_wrong_is_named_as_it_was_asked_for(
    dsbd: Call, command: str, words: list[str]
) -> None:
    ran = dsbd(*command.split())
    ran.refused(*words)
    assert len(ran.err) < 250, ran.err  # a line, not a page of help


def test_a_team_of_one_process(dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ran = dsbd("generate", "hi", *pair(models("says", "A")), "--tensor-parallel", "2")
    ran.refused("this one was started alone", "torchrun --nproc-per-node 2 -m dsbd_cli")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--share", "0.5"], "--share has no effect without --prompts"),
        (["--only", "train", "--tokens", "5"], "--tokens has no effect with --only train"),
        (
            ["evaluate", "--draft", "x", "--save-answers", "y"],
            "--save-answers has no effect without --prompts",
        ),
        (
            ["evaluate", "--draft", "x", "--answers", "y", "--seed", "1"],
            "--seed has no effect without --prompts",
        ),
    ],
)
def test_distilling_takes_nothing_in_vain(dsbd: Call, tmp_path: Path, options: list[str], word: str) -> None:
    if options[0] == "evaluate":
        dsbd("distill", *options, "--target", "x").refused(word)
    else:
        dsbd("distill", *options, "--target", "x", "--out", tmp_path / "d").refused(word)
