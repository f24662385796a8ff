"""The batch forms of `dsbd generate` through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsbd_cli.batch.items import item_seed
from dsbd_cli.batch.run import MEASURED
from dsbd_cli.cli.batch import check_batch
from dsbd_cli.errors import UserError
from tests import builders
from tests.cli.conftest import Call, environment, pair, program

Models = Callable[..., str]


def test_lines_gives_one_line_for_each_in_order(dsbd: Call, models: Models) -> None:
    target = pair(models("rand"), models("rand", seed=1))
    options = ["--lines", "--seed", "3", "--max-new-tokens", "6"]
    ran = dsbd("generate", *target, *options, stdin="one\r\n\nthree 🙂".encode())
    assert ran.code == 0, ran.err
    answers = [json.loads(line) for line in ran.text.split("\n")[:-1]]
    assert len(answers) == 3
    records = dsbd("generate", *target, *options, "--json", stdin="one\r\n\nthree 🙂".encode())
    parsed = [json.loads(line) for line in records.text.split("\n")[:-1]]
    assert [record["text"] for record in parsed] == answers
    assert [record["index"] for record in parsed] == [0, 1, 2]
    # Each is what the prompt gives alone, with its own seed.
    for index, prompt in enumerate(("one", "", "three 🙂")):
        alone = dsbd(
            "generate", prompt, *target, "--seed", str(item_seed(3, index)), "--max-new-tokens", "6", "--json"
        )
        assert alone.json["token_ids"] == parsed[index]["token_ids"]


def test_lines_with_several_answers_and_with_refusals(dsbd: Call, models: Models) -> None:
    target = pair(models("rand", max_position_embeddings=64))
    options = ["--lines", "--seed", "1", "--max-new-tokens", "4"]
    ran = dsbd("generate", *target, *options, "--num-return", "3", stdin=b"a\nb\n")
    assert all(2 <= len(json.loads(line)) <= 3 for line in ran.text.splitlines())
    count = sum(len(json.loads(line)) for line in ran.text.splitlines())
    assert f"{count} of {count} beams are unfinished" in ran.err
    ran = dsbd("generate", *target, *options, stdin=b"a\n" + b"q" * 100 + b"\nb\n")
    assert ran.code == 2
    assert [type(json.loads(line)) for line in ran.text.splitlines()] == [str, type(None), str]
    assert ran.err.splitlines()[-1].startswith(
        "dsbd: 1 of 3 prompts were refused; line 2: the prompt leaves no room"
    )
    assert "2 of 2 answers are unfinished (--json says which)" in ran.err
    assert "unfinished" not in dsbd("generate", *target, *options, "--json", stdin=b"a\n").err


def test_a_file_says_how_many_answers_are_unfinished(dsbd: Call, models: Models, tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("a\nb\n")
    command = ["generate", *pair(models("rand")), "--seed", "1", "--max-new-tokens", "4"]
    files = ["--input", source, "--output", out]
    assert (
        f"dsbd: 2 of 2 answers are unfinished (`finished` in {out} says which)\n"
        in dsbd(*command, *files).err
    )
    out.write_bytes(out.read_bytes().splitlines(keepends=True)[0])
    assert "1 of 1 answers given now are unfinished" in dsbd(*command, *files).err
    whole = ["generate", *pair(models("says", "A")), "--input", source, "--output", tmp_path / "whole.jsonl"]
    assert "unfinished" not in dsbd(*whole).err
    assert (
        "unfinished" not in dsbd(*command, "--input", source, "--output", tmp_path / "quiet.jsonl", "-q").err
    )


def test_lines_go_on_behind_what_is_refused(dsbd: Call, models: Models) -> None:
    target = pair(models("rand", max_position_embeddings=64))
    options = ["--lines", "--seed", "1", "--max-new-tokens", "4"]
    ran = dsbd("generate", *target, *options, "--json", stdin=b"q" * 100 + b"\n")
    assert "no room" in json.loads(ran.text)["error"]
    assert dsbd("generate", *target, *options, stdin=b"").out == b""
    bad = dsbd("generate", *target, *options, stdin=b"fine\n\xff\nfine\n")
    assert bad.code == 2
    assert [type(json.loads(line)) for line in bad.text.splitlines()] == [str, type(None), str]
    assert "line 2" in bad.err


def test_a_drawn_seed_is_reported_and_repeats_the_run(dsbd: Call, models: Models) -> None:
    command = ["generate", *pair(models("rand")), "--lines", "--max-new-tokens", "6"]
    first = dsbd(*command, stdin=b"a\nb\n")
    seed = first.err.splitlines()[-1].removeprefix("dsbd: seed ")
    assert dsbd(*command, "--seed", seed, stdin=b"a\nb\n").out == first.out


def test_no_seed_is_told_of_nothing(dsbd: Call, models: Models) -> None:
    ran = dsbd("generate", *pair(models("says", "A")), "--lines", stdin=b"")
    assert (ran.code, ran.err) == (0, "dsbd: stdin held no prompt: nothing was decoded\n")


def test_a_file_of_prompts(dsbd: Call, models: Models, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "id": "first"}\n{"prompt": "b"}\n')
    command = ["generate", *pair(models("says", "A", "B")), "--input", source, "--output", out, "--stats"]
    ran = dsbd(*command)
    assert (ran.code, ran.out) == (0, b""), ran.err
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(record["index"], record.get("id"), record["text"]) for record in records] == [
        (0, "first", "AB"),
        (1, None, "AB"),
    ]
    for said in (
        "2/2 prompts",
        "prompts                  2",
        "new_tokens               6",
        "loading included",
        "(all answers together, over those seconds)",
        "seed ",
    ):
        assert said in ran.err
    again = dsbd(*command)
    assert again.code == 0
    assert "all 2 prompts are done already" in again.err
    dsbd(*command, "--width", "2").refused("width (4, now 2)", "out.jsonl")
    quiet = dsbd(
        "generate", *pair(models("says", "A")), "--input", source, "--output", tmp_path / "q.jsonl", "-q"
    )
    assert (quiet.code, quiet.err) == (0, "")


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_stdin_without_a_prompt_is_told(dsbd: Call, models: Models, more: list[str]) -> None:
    ran = dsbd("generate", *pair(models("says", "A")), "--lines", *more)
    assert (ran.code, ran.out) == (0, b"")
    assert "stdin held no prompt" in ran.err


def test_files_that_cannot_serve(dsbd: Call, models: Models, tmp_path: Path) -> None:
    target = pair(models("says", "A"))
    good = tmp_path / "in.txt"
    good.write_text("a\n")
    cases: list[tuple[Path, Path, str]] = [
        (tmp_path / "none.txt", tmp_path / "o.jsonl", "no such file"),
        (good, good / "o.jsonl", "cannot be written"),
        (good, tmp_path, "cannot be written"),
        (good, good, "one file"),
    ]
    for source, output, word in cases:
        dsbd("generate", *target, "--input", source, "--output", output).refused(word)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt"]
    dsbd("generate", "--target", tmp_path / "typo", "--method", "beam", "--input", good, "--output",
         tmp_path / "o.jsonl").refused("typo")  # fmt: skip
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt"]


@pytest.mark.slow
def test_lines_are_answered_as_they_come(models: Models) -> None:
    process = subprocess.Popen(program("generate", *pair(models("says", "A")), "--lines"), env=environment(),
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(3):
        process.stdin.write(b"a line\n")
        process.stdin.flush()
        assert process.stdout.readline() == b'"A"\n'
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_line_and_the_run_goes_on_later(models: Models, tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"prompt {index}\n" for index in range(12)))
    command = [
        *program("generate", *pair(models("says", "A")), "--input", source, "--output", out, "--seed", "1")
    ]
    # A limit on the size of a file is the nearest thing to a full disk that needs no rights.
    limited = subprocess.run(["bash", "-c", 'ulimit -f 8; exec "$0" "$@"', *command], env=environment(),
                             capture_output=True, text=True)  # fmt: skip
    assert limited.returncode == 1, limited.stderr
    said = f"dsbd: {out} is as large as a file may be here (ulimit -f, or the file system)"
    assert limited.stderr.splitlines()[-1] == said
    assert "Traceback" not in limited.stderr
    rest = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert rest.returncode == 0, rest.stderr
    assert "prompts are done already: going on" in rest.stderr
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == list(range(12))


@pytest.mark.slow
def test_torchrun_shares_the_prompts_out(models: Models, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"prompt {index}\n" for index in range(5)))
    target = pair(models("rand"), models("rand", seed=1))
    # Full forests: others follow how many prompts are under way in a process, and the statistics follow them.
    command: list[str | Path] = ["generate", *target, "--input", source, "--max-new-tokens", "5", "--seed", "2",
                                 "--forest", "full", "--output"]  # fmt: skip
    ranks = [
        subprocess.Popen(program(*command, tmp_path / "shared.jsonl"), stderr=subprocess.PIPE,
                         env=environment(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)))
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    subprocess.run(
        program(*command, tmp_path / "single.jsonl"), env=environment(), check=True, capture_output=True
    )
    shared, single = ([json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
                      for name in ("shared", "single"))  # fmt: skip
    for record in [*shared, *single]:
        for name in MEASURED:
            record["stats"].pop(name)
    assert json.dumps(shared) == json.dumps(single)
    refused = subprocess.run(program("generate", *target, "--lines"), env=environment(RANK="0", WORLD_SIZE="2"),
                             capture_output=True, text=True)  # fmt: skip
    assert refused.returncode == 2
    assert "--lines is for one process" in refused.stderr


@pytest.mark.parametrize("screen", [False, True])
@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_lines_draw_progress_where_it_does_not_stand_among_the_answers(
    dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch, screen: bool, quiet: list[str]
) -> None:
    drawn: list[bool] = []
    monkeypatch.setattr("dsbd_cli.cli.batch.panel_stream", lambda: sys.stderr)
    monkeypatch.setattr("dsbd_cli.cli.batch.is_terminal", lambda stream: screen)
    monkeypatch.setattr("dsbd_cli.batch.run.run_lines", lambda *_, bar, **__: drawn.append(bar) or [])
    assert dsbd("generate", "--lines", *pair(models("says", "A")), *quiet).code == 0
    assert drawn == [not screen and not quiet]


@pytest.mark.parametrize("batch", ["0", "4097", "1e3", "-1", "٣", "", "9" * 5000])
def test_how_many_at_a_time_is_a_number_of_some_size(batch: str) -> None:
    with pytest.raises(UserError, match="must be auto or a whole number from 1 to 4096"):
        check_batch(batch)


def test_a_role_that_no_template_knows_is_told_with_its_prompt(dsbd: Call, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    turns = [[{"role": role, "content": "hi"}] for role in ("user", "usr")]
    source.write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns))
    builders.says(tmp_path / "model", "A")
    template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    builders.tok(tmp_path / "model", ["A"], chat_template=template)
    ran = dsbd(
        "generate", *pair(str(tmp_path / "model")), "--input", source, "--output", output, "--seed", "1"
    )
    assert ran.code == 2
    why = "message 1 has the role 'usr', which the target's chat template does not know (did you mean user?)"
    assert f"1 of 2 prompts were refused; the others are done; prompt 2: {why}" in ran.err
    first, second = map(json.loads, output.read_text().splitlines())
    assert first["text"] == "A"
    assert second["error"].startswith(why)


def test_one_prompt_is_not_prompts(dsbd: Call, models: Models, tmp_path: Path) -> None:
    source, output, trace = tmp_path / "in.txt", tmp_path / "out.jsonl", tmp_path / "run.jsonl"
    source.write_text("q" * 100 + "\n")
    target = [*pair(models("rand", max_position_embeddings=64)), "--seed", "1", "--max-new-tokens", "1"]
    ran = dsbd("generate", *target, "--input", source, "--output", output)
    assert ran.code == 2
    assert ran.err.splitlines()[0].startswith("dsbd: 1/1 prompt, ")
    assert "dsbd: 1 of 1 prompt was refused; line 1: the prompt leaves no room" in ran.err
    assert (
        "dsbd: the 1 prompt is done already: "
        in dsbd("generate", *target, "--input", source, "--output", output).err
    )
    lines = dsbd("generate", *target, "--lines", stdin=b"q" * 100 + b"\n")
    assert lines.err.splitlines()[-1].startswith("dsbd: 1 of 1 prompt was refused; line 1: ")
    assert dsbd("generate", "hi", *target, "--method", "beam", "--trace", trace).code == 0
    shown = dsbd("trace", trace)
    assert "1 token in " in shown.text
    assert "1 tokens" not in shown.text


def test_messages_in_a_raw_run_are_refused_before_anything_is_loaded(dsbd: Call, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"a text"\n' + json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    dsbd(
        "generate",
        "--target",
        tmp_path / "none",
        "--method",
        "beam",
        "--raw",
        "--input",
        source,
        "--output",
        output,
    ).refused("in.jsonl: prompt 2 holds messages", "no place in a raw prompt", "leave out --raw")
    assert not output.exists()


def test_texts_that_look_like_json_are_told_once(dsbd: Call, models: Models, tmp_path: Path) -> None:
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    command = ["generate", *pair(models("says", "A")), "--seed", "1"]
    ran = dsbd(*command, "--lines", stdin=f"hi\n{line}\n{line}\n".encode())
    assert (ran.code, ran.text) == (0, '"A"\n' * 3)
    assert ran.err.count("looks like JSON") == 1
    assert "line 2 looks like JSON: --lines takes texts; --input takes messages" in ran.err
    source = tmp_path / "in.txt"
    source.write_text(f"{line}\n{line}\n")
    ran = dsbd(*command, "--input", source, "--output", tmp_path / "out.jsonl")
    assert (ran.code, ran.err.count("looks like JSON")) == (0, 1)
    assert "line 1 looks like JSON: in.txt is read as texts; a .jsonl file takes messages" in ran.err
