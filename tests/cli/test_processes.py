"""`dsbd` as a process: pipes that close, signals, full disks, terminals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import builders
from tests.cli.conftest import Call, environment, pair, program
from tests.terminal import Terminal

Models = Callable[..., str]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A pair that never ends its answer by itself, in a context without a limit worth the name."""
    folder = tmp_path_factory.mktemp("endless")
    table = builders.torch.zeros(builders.VOCAB + 2, builders.VOCAB + 2)
    table[:, builders.VOCAB] = table[:, builders.VOCAB + 1] = 0.5
    builders.markov(folder, table, ["so ", "on "], max_position_embeddings=1_000_000)
    return [*pair(str(folder)), "--max-new-tokens", "100000"]


def start(*arguments: str, **options: object) -> subprocess.Popen[bytes]:
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.Popen(program(*arguments), env=environment(), **streams)  # type: ignore[call-overload, no-any-return]


def interrupt_when_streaming(
    process: subprocess.Popen[bytes], times: int = 1
) -> tuple[int, float, bytes, bytes]:
    """SIGINT once text flows; (exit code, seconds until the end, stdout, stderr)."""
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.read(20)
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=60)
    return process.returncode, time.monotonic() - began, first + out, err


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_reader_goes_away(endless: list[str], unbuffered: str) -> None:
    env = environment(PYTHONUNBUFFERED=unbuffered)
    process = subprocess.Popen(
        program("generate", "hi", *endless), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1) in (b"s", b"o")
    process.stdout.close()
    began = time.monotonic()
    assert process.wait(60) in (0, 141)
    assert time.monotonic() - began < 30  # the whole answer would take minutes
    complaints = [
        line for line in process.stderr.read().decode().splitlines() if not line.startswith("dsbd: ")
    ]
    assert complaints == []


def test_help_into_a_closed_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        program("generate", "--help"), env=environment(), stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (0, b"")


def test_a_full_disk_is_one_line_and_exit_1(models: Models) -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            program("generate", "hi", *pair(models("says", "A"))), env=environment(), stdin=subprocess.DEVNULL,
            stdout=full, stderr=subprocess.PIPE,
        )  # fmt: skip
    assert process.returncode == 1
    assert process.stderr.decode().splitlines() == ["dsbd: no space left for stdout: free some"]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_while_streaming(endless: list[str], times: int) -> None:
    code, seconds, out, err = interrupt_when_streaming(start("generate", "hi", *endless), times)
    assert code == 130
    assert seconds < 20  # a second on an idle machine; decoding on would take minutes
    assert out.endswith((b"so\n", b"on\n"))
    assert b"Traceback" not in err
    assert err.decode().splitlines()[-1] == "dsbd: stopped"


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A target that says one word, and after a prompt that ends with x never comes to an end."""
    folder = tmp_path_factory.mktemp("uneven")
    so, on, done, x = range(builders.VOCAB, builders.VOCAB + 4)
    table = builders.torch.zeros(x + 1, x + 1)
    table[:so, done] = table[done, 1] = table[x, so] = 1
    table[so, so] = table[so, on] = table[on, so] = table[on, on] = 0.5
    builders.markov(folder, table, ["so ", "on ", "done", "x"], max_position_embeddings=1_000_000)
    return ["--target", str(folder), "--method", "multinomial", "--max-new-tokens", "20000"]


def lines_in(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


@pytest.mark.parametrize(
    ("sent", "code", "at_a_time"),
    [(signal.SIGINT, 130, "auto"), (signal.SIGTERM, 143, "3"), (signal.SIGKILL, -9, "auto")],
)
def test_what_a_batch_has_done_behind_a_slow_first_prompt_outlives_its_end(
    uneven: list[str], tmp_path: Path, sent: signal.Signals, code: int, at_a_time: str
) -> None:
    source, out, early = tmp_path / "in.txt", tmp_path / "out", tmp_path / "out.early"
    source.write_text("x\na\nb\nc\nd\n")
    command = ["generate", *uneven, "--input", str(source), "--output", str(out), "--batch", at_a_time]
    process = start(*command)
    end = time.monotonic() + 60
    while len(lines_in(early)) < 4 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(sent)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert lines_in(out) == []
    said = err.decode().splitlines()
    assert sent == signal.SIGKILL or said[-1] == "dsbd: stopped with 4 of 5 prompts; the same command goes on"
    # The rest alone is left to do.
    again = start(*command)
    assert again.stderr is not None
    assert again.stderr.readline() == b"dsbd: 4 of 5 prompts are done already: going on\n"
    assert b"1 under way" in again.stderr.readline() + again.stderr.readline()
    again.send_signal(signal.SIGINT)
    _, err = again.communicate(timeout=60)
    assert again.returncode == 130
    assert err.decode().splitlines() == ["dsbd: stopped with 4 of 5 prompts; the same command goes on"]
    assert sorted(json.loads(line)["index"] for line in lines_in(early)) == [1, 2, 3, 4]


def test_progress_is_there_long_before_the_first_answer(uneven: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("x\nx\n")
    command = program("generate", *uneven, "--input", tmp_path / "in.txt", "--output", tmp_path / "out")
    terminal = Terminal(command, env=environment(TERM="xterm", LANG="C.UTF-8"))
    assert terminal.until(lambda output: b"2 under way" in output and b"tok/s" in output, 120)
    terminal.send(b"\x03")
    assert terminal.finish() == 130
    assert "stopped with 0 of 2 prompts; the same command goes on" in terminal.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.run.json"]


def test_lines_say_how_far_they_were(uneven: list[str]) -> None:
    process = start("generate", *uneven, "--lines", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"a\nx\nb\n")
    process.stdin.flush()
    assert process.stdout.readline() == b'"done"\n'
    time.sleep(0.5)  # it counts what it has written
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert (
        err.decode().splitlines()[-1] == "dsbd: stopped after 1 line; --input with --output can go on later"
    )


def test_notes_that_nobody_reads_cost_a_batch_no_answers(models: Models, tmp_path: Path) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out"
    source.write_text("a\nb\nc\n")
    # More tokens than its context holds: a note with the first prompt.
    process = start("generate", *pair(models("says", "A")), "--max-new-tokens", "100000", "--input", str(source),
                    "--output", str(out), "--batch", "1")  # fmt: skip
    assert process.stderr is not None
    process.stderr.close()
    assert process.wait(60) == 0
    assert [json.loads(line)["index"] for line in lines_in(out)] == [0, 1, 2]


def test_ctrl_c_while_loading() -> None:
    # A source that never answers keeps the process in its loading phase.
    process = start("generate", "hi", "--target", "/dev/stdin", "--draft", "x", stdin=subprocess.PIPE)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (2, 130)
    assert b"Traceback" not in err


def test_sigint_at_any_moment_of_the_start(endless: list[str]) -> None:
    for wait in (0.4, 1.2, 2.5):
        process = start("generate", "hi", *endless)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        reader = threading.Thread(target=process.communicate, kwargs={"timeout": 60})
        reader.start()
        reader.join(60)
        assert process.returncode in (130, -signal.SIGINT)


def test_a_failure_while_decoding_ends_the_program(dsbd: Call, tmp_path: Path) -> None:
    model = builders.rand(tmp_path)
    model.lm_head.weight.data[5] = float("nan")
    model.save_pretrained(str(tmp_path))
    for method in ("dsbd", "beam", "multinomial"):
        ran = dsbd("generate", "hi", *pair(str(tmp_path)), "--method", method)
        assert ran.code == 1
        last = ran.err.splitlines()[-1]
        assert last.startswith("dsbd: ")
        for word in ("target", "float32", "step"):
            assert word in last


def test_nothing_given_at_a_terminal_is_usage_not_a_wait(models: Models) -> None:
    terminal = Terminal(program("generate", *pair(models("says", "A"))), env=environment())
    assert terminal.finish() == 2
    assert 'no prompt: dsbd generate "your prompt"' in terminal.text


def test_no_stdin_at_all(models: Models) -> None:
    command = " ".join(f"'{part}'" for part in program("generate", *pair(models("says", "A"))))
    for prompt, code in (("hi", 0), ("", 0)):
        done = subprocess.run(f"{command} {prompt} <&-", shell=True, env=environment(), capture_output=True)
        assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr


def test_streams_that_were_closed_beforehand(models: Models) -> None:
    command = " ".join(f"'{part}'" for part in program("generate", "hi", *pair(models("says", "A"))))
    closed = subprocess.run(f"{command} >&-", shell=True, env=environment(), capture_output=True)
    assert closed.returncode == 1
    assert closed.stderr.decode().splitlines()[-1].startswith("dsbd: stdout is closed")
    silent = subprocess.run(f"{command} 2>&-", shell=True, env=environment(), capture_output=True)
    assert (silent.returncode, silent.stdout) == (0, b"A\n")


@pytest.mark.parametrize("columns", [60, 200])
def test_panels_on_a_real_pair_leave_the_answer_and_a_summary(models: Models, columns: int) -> None:
    target = models("parrot", "hi", "ok 🙂é 한 [x] a != b 'sword' end")
    terminal = Terminal(program("generate", "hi", *pair(target), "--seed", "1"), columns=columns,
                        env=environment(TERM="xterm-256color", LANG="C.UTF-8"))  # fmt: skip
    assert terminal.finish() == 0
    assert b"\x1b[?1049h" in terminal.output
    answer, summary, *_ = terminal.after_panels.strip().splitlines()
    assert answer == "ok 🙂é 한 [x] a != b 'sword' end"
    assert ("layers/target call" in summary) == (columns == 200)
    assert "ended by itself" in summary
    assert len(summary) <= columns


LONG = "It was the best of times, it was the worst of times, it was the age of wisdom"


@pytest.mark.parametrize("how", [[], ["-q"], ["--no-stream"]])
def test_an_answer_at_a_terminal_is_broken_between_words(models: Models, how: list[str]) -> None:
    target = pair(models("parrot", "hi", LONG))
    terminal = Terminal(program("generate", "hi", *target, "--seed", "1", *how), columns=40,
                        env=environment(TERM="xterm", LANG="C.UTF-8"))  # fmt: skip
    assert terminal.finish() == 0
    begin = "It was the best of times, it was the\nworst of times, it was the age of wisdom\n"
    assert begin in terminal.after_panels


def test_an_answer_in_a_pipe_is_not_broken(models: Models) -> None:
    command = program("generate", "hi", *pair(models("parrot", "hi", LONG)), "--seed", "1")
    done = subprocess.run(command, env=environment(COLUMNS="40", TERM="xterm"), capture_output=True)
    assert done.stdout.decode() == LONG + "\n"


def test_a_dumb_terminal_gets_the_plain_stream(models: Models) -> None:
    terminal = Terminal(program("generate", "hi", *pair(models("says", "A", "B")), "--seed", "1"),
                        env=environment(TERM="dumb"))  # fmt: skip
    assert terminal.finish() == 0
    assert b"\x1b" not in terminal.output
    assert terminal.text.endswith("AB\n")


def test_ctrl_c_under_panels(endless: list[str]) -> None:
    terminal = Terminal(program("generate", "hi", *endless), env=environment(TERM="xterm", LANG="C.UTF-8"))
    assert terminal.until(lambda output: b"live beams" in output, 120)
    time.sleep(1)
    terminal.send(b"\x03")
    began = time.monotonic()
    assert terminal.finish() == 130
    assert time.monotonic() - began < 20
    assert terminal.after_panels.startswith(("so ", "on "))
    assert "Traceback" not in terminal.text
    assert terminal.after_panels.splitlines()[-1].startswith("dsbd: stopped after ")
    assert terminal.after_panels.count("stopped") == 1
