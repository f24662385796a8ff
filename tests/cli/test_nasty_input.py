"""What a breaker tried: streams that are gone, special files, broken text, numbers out of all bounds."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Call, environment, pair, program

Models = Callable[..., str]


@pytest.fixture(scope="module")
def abc(models: Models) -> list[str]:
    return [*pair(models("says", "A", "B", "C")), "--seed", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "presets",
        "presets show smol",
        "doctor",
        "--help",
        "generate --help",
        "--version",
        "--show-completion bash",
    ],
)
def test_every_command_with_a_stdout_that_is_gone_or_full(command: str, tmp_path: Path) -> None:
    env = environment(DSBD_CACHE=str(tmp_path))
    quoted = " ".join(f"'{part}'" for part in program(*command.split()))
    for where, said in ((">&-", "dsbd: stdout is closed"), (">/dev/full", "dsbd: no space left for stdout")):
        done = subprocess.run(f"{quoted} {where}", shell=True, env=env, capture_output=True, text=True)
        assert done.returncode == 1
        assert [line[: len(said)] for line in done.stderr.splitlines()] == [said]
    done = subprocess.run(f"{quoted} | head -c 1", shell=True, env=env, capture_output=True, text=True)
    assert (len(done.stdout), done.stderr) == (1, "")


def test_without_stderr_nothing_strays_into_the_answer(abc: list[str], tmp_path: Path) -> None:
    quoted = " ".join(f"'{part}'" for part in program("generate", "hi", *abc, "--stats"))
    done = subprocess.run(
        f"{quoted} 2>&- <&-", shell=True, env=environment(), capture_output=True, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, b"ABC\n")


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout")
def test_a_stream_is_no_output_wherever_it_goes(abc: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    command = program("generate", "--input", tmp_path / "in.txt", "--output", "/dev/stdout", *abc)
    with (tmp_path / "out").open("wb") as out:
        ran = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, env=environment(), text=True)
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1), ran.stderr
    assert "a stream, not a file: for stdout there is --lines" in ran.stderr
    assert not Path("/dev/stdout.run.json").exists()


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full", "/dev/zero", "pipe"])
def test_special_files_are_no_input_and_no_output(
    dsbd: Call, abc: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("in.txt").write_text("a\n")
    dsbd("generate", "--input", "in.txt", "--output", name, *abc).refused(name, "--lines")
    dsbd("generate", "--input", name, "--output", "out", *abc).refused(name, "--lines")
    dsbd("trace", name).refused(name)
    dsbd("generate", "hi", "--target", name, "--method", "beam").refused("a device or a pipe")
    dsbd("generate", "hi", "--preset", f"./{name}").refused("no such file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "pipe"]


@pytest.mark.parametrize("name", [".", "/", "..", "folder", "in.txt/x", "x" * 300, "-"])
def test_outputs_that_no_file_can_be(
    dsbd: Call, abc: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("in.txt").write_text("a\n")
    assert dsbd("generate", "hi", *abc, "--trace", "run.jsonl").code == 0
    dsbd("generate", "--input", "in.txt", "--output", name, *abc).refused("--output")
    if name != "-":
        dsbd("trace", "run.jsonl", "--html", name).refused("--html")
        # Before the model is loaded: that it does not exist is told only after.
        dsbd("generate", "hi", *abc, "--trace", name).refused("--trace")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.txt", "run.jsonl"]


@pytest.mark.parametrize(
    "options",
    [["--system", "caf\udce9"], ["--stop", "\udce9"], ["--preset", "sur.yaml"], ["--raw", "caf\udce9"]],
)
def test_texts_that_are_not_utf8(
    dsbd: Call, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sur.yaml").write_text('system: "\\ud800"\n')
    start = ["generate"] if options[0] == "--raw" else ["generate", "hi"]
    dsbd(*start, *options, *pair(models("says", "A"))).refused("not UTF-8 text")


def test_a_line_that_is_not_utf8_is_refused_alone(dsbd: Call, abc: list[str]) -> None:
    ran = dsbd("generate", "--lines", *abc, stdin=b"one\ncaf\xe9\ntwo\n")
    assert (ran.code, ran.text) == (2, '"ABC"\nnull\n"ABC"\n')
    assert "1 of 3 prompts were refused; line 2: the prompt is not UTF-8 text" in ran.err


def test_half_a_surrogate_pair_in_json_refuses_that_prompt_alone(
    dsbd: Call, abc: list[str], tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('"\\ud800"\n"fine"\n')
    ran = dsbd("generate", "--input", source, "--output", out, *abc)
    assert (ran.code, "1 of 2 prompts were refused" in ran.err) == (2, True)
    first, second = map(json.loads, out.read_text().splitlines())
    assert "not UTF-8" in first["error"]
    assert second["text"] == "ABC"
    source.write_text('{"prompt": "x", "id": "\\ud800"}\n')
    dsbd("generate", "--input", source, "--output", tmp_path / "2.jsonl", *abc).refused("line 1", "id")


def test_a_byte_order_mark_is_no_part_of_a_prompt(dsbd: Call, abc: list[str]) -> None:
    marked = b"\xef\xbb\xbfhi\r\n"
    plain = dsbd("generate", *abc, "--show-tokens", stdin=b"hi\n")
    assert dsbd("generate", *abc, "--show-tokens", stdin=marked).err == plain.err
    counts = [
        json.loads(line)["stats"]["prompt_tokens"]
        for line in dsbd("generate", "--lines", "--json", *abc, stdin=marked + marked).text.splitlines()
    ]
    assert counts == [2, 5]  # only the first line of a file can begin with one


SEPARATORS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"


def test_characters_that_some_take_for_line_ends(dsbd: Call, models: Models, tmp_path: Path) -> None:
    """One line a record means line feeds, whatever Unicode counts as a line end."""
    target = models("says", SEPARATORS)
    trace = tmp_path / "run.jsonl"
    assert dsbd("generate", "hi", *pair(target), "--seed", "1", "--trace", trace).text == SEPARATORS + "\n"
    assert dsbd("trace", trace).code == 0
    assert dsbd("trace", trace, "--html", tmp_path / "run.html").code == 0
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = {"prompt": f"what is {SEPARATORS}?"}
    prompts.write_text(json.dumps(asked, ensure_ascii=False) + "\n", encoding="utf-8")
    for _ in range(2):  # and once more, reading what is there
        assert dsbd("generate", "--input", prompts, "--output", out, *pair(target), "--seed", "1").code == 0
    assert [json.loads(line)["text"] for line in out.read_bytes().split(b"\n")[:-1]] == [SEPARATORS]
    from dsbd_cli.bench.datasets.files import read_jsonl

    assert read_jsonl(prompts) == [(1, asked)]


@pytest.mark.parametrize(
    "lines",
    [
        '{"type":"start","format":1}\n',
        '{"type":"start","format":1,"prompt":5,"models":3,"settings":[]}\n{"type":"iteration","n":1}\n',
        '{"type":"start","format":1,"models":{},"settings":{},"prompt":"x"}\n{"type":"finished","result":[]}\n',
        '{"type":[]}\n[1]\n',
        "[" * 100_000 + "\n",
    ],
)
def test_a_trace_that_no_dsbd_wrote(dsbd: Call, tmp_path: Path, lines: str) -> None:
    file = tmp_path / "run.jsonl"
    file.write_text(lines)
    for more in ([], ["--html", str(tmp_path / "run.html")]):
        ran = dsbd("trace", file, *more)
        assert ran.code == 2
        assert "Traceback" not in ran.err
        assert ran.err.startswith("dsbd: ")
        assert str(file) in ran.err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["trace", "x", "--delay", "inf"], "--delay"),
        (["trace", "x", "--delay", "nan"], "--delay"),
        (["bench", "--dataset", "squad", "--sql-timeout", "nan"], "--sql-timeout"),
        (["bench", "--dataset", "squad", "--sql-timeout", "0"], "--sql-timeout"),
        (["bench", "--dataset", "squad", "--judge-timeout", "inf"], "--judge-timeout"),
        (
            ["bench", "judge", "x", "--judge-url", "u", "--judge-model", "m", "--judge-timeout", "-1"],
            "--judge-timeout",
        ),
        (["bench", "--dataset", "squad", "--sweep", "width=1..99999999999"], "the range"),
        (["bench", "--dataset", "squad", "--sweep", "width=1..200 gamma=1..200"], "40000 combinations"),
        (["generate", "hi", "--device", "cuda:99999999999999999999"], "cuda:N"),
        (["generate", "hi", "--device", "cuda:٣"], "cuda:N"),
        (["generate", "hi", "--preset", ""], "no preset"),
        (["generate", "hi", "--target", "x" * 300, "--method", "beam"], "too long"),
    ],
)
def test_values_out_of_all_bounds(dsbd: Call, command: list[str], words: str) -> None:
    dsbd(*command).refused(words)


@pytest.mark.parametrize("number", [str(10**30), str(2**63 - 1), str(2**64)])
def test_huge_numbers_that_mean_something(dsbd: Call, abc: list[str], number: str) -> None:
    for option in ("--seed", "--max-new-tokens", "--top-k"):
        assert dsbd("generate", "hi", *abc, option, number).out == b"ABC\n"


HI = ["generate", "hi"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [*HI, "--target", "~nobody-of-this-name/x", "--method", "beam"],
            ["target ~nobody", "no such folder"],
        ),
        ([*HI, "--preset", "~nobody-of-this-name/x.yaml"], ["preset ~nobody", "no such file"]),
        ([*HI, "--target", "loop", "--method", "beam"], ["target loop cannot be read", "symbolic links"]),
        ([*HI, "--target", "zero\0byte", "--method", "beam"], ["target zero", "null byte"]),
        ([*HI, "--target", "closed", "--method", "beam"], ["target closed cannot be read: no permission"]),
        ([*HI, "--trace=~/run.jsonl"], ["--trace ~/run.jsonl", "left ~ as it is", "home/run.jsonl"]),
        (["bench", "--dataset", "squad", "--out=~/x"], ["--out ~/x", "left ~ as it is", "home/x"]),
        (["generate", "--input", "in.txt", "--output", "away/x"], ["away is a link that leads nowhere"]),
        (["bench", "--dataset", "squad", "--out", "away/x"], ["away is a link that leads nowhere"]),
        (["bench", "report", "run", "--out", "in.txt/x"], ["--out in.txt/x"]),
    ],
)
def test_paths_that_lead_nowhere(
    dsbd: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("in.txt").write_text("a\n")
    Path("loop").symlink_to("loop")
    Path("away").symlink_to("nowhere")
    Path("closed").mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, how: Path(path).name != "closed" and access(path, how))
    before = sorted(path.name for path in tmp_path.iterdir())
    dsbd(*arguments).refused(*words)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_folder_called_tilde_is_a_folder(
    dsbd: Call, abc: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Path("~").mkdir()
    assert dsbd("generate", "hi", *abc, "--trace=~/run.jsonl").code == 0
    assert Path("~/run.jsonl").is_file()


def test_without_a_home_folder_the_cache_has_to_be_named(dsbd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("DSBD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    dsbd("generate", "hi").refused("no home folder is known", "set DSBD_CACHE")


@pytest.mark.parametrize(("code", "left"), [(errno.EACCES, 2), (errno.ENOENT, 2), (errno.EIO, 1)])
def test_a_fault_of_a_file_that_nobody_foresaw_is_one_line(
    dsbd: Call, monkeypatch: pytest.MonkeyPatch, code: int, left: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code), "some/file")

    monkeypatch.setattr("dsbd_cli.presets.list_presets", refuse)
    monkeypatch.setattr("dsbd_cli.cli.presets.list_presets", refuse, raising=False)
    ran = dsbd("presets")
    assert (ran.code, ran.err) == (left, f"dsbd: some/file cannot be used: {os.strerror(code)}\n")
