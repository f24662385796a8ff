"""Two processes that hold one target, from the command line: the first reads, speaks and writes for both."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, environment, pair, program

Models = Callable[..., str]


def team(arguments: Sequence[str | Path], stdin: bytes = b"", size: int = 2) -> list[tuple[int, bytes, str]]:
    """Exit code and both streams of each process; stdin goes to all of them, as under torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            program(*arguments, "--tensor-parallel", str(size), "--device", "cpu"),
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                            MASTER_PORT=port),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]  # fmt: skip
    for process in running[1:]:  # nobody reads theirs
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    said = [
        process.communicate(stdin if rank == 0 else None, timeout=300) for rank, process in enumerate(running)
    ]
    return [(one.returncode, out, err.decode()) for one, (out, err) in zip(running, said, strict=True)]


def records(path: Path) -> list[Any]:
    """What a batch says of each prompt: numbers are rounded otherwise, and forests may be."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        [*(record[name] for name in ("index", "text", "token_ids", "finish_reason", "seed", "settings")),
         [beam["token_ids"] for beam in record["beams"]]]
        for record in found
    ]  # fmt: skip


@pytest.mark.slow
def test_a_team_writes_what_one_process_writes(models: Models, dsbd: Call, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("".join(f"prompt {index}\n" for index in range(5)))
    command = ["generate", *pair(models("rand"), models("rand", seed=1)), "--input", source, "--max-new-tokens",
               "5", "--dtype", "float32", "--prices", "off", "--output"]  # fmt: skip
    ran = team([*command, tmp_path / "team"])  # a seed that nobody gave
    assert [code for code, _, _ in ran] == [0, 0], ran
    assert ran[0][2].splitlines()[-1].startswith("dsbd: seed ")
    assert [ran[1][1], ran[1][2]] == [b"", ""]
    seed = ran[0][2].split()[-1]
    alone = dsbd(*command, tmp_path / "alone", "--seed", seed, "--device", "cpu")
    assert alone.code == 0, alone.err
    assert records(tmp_path / "team") == records(tmp_path / "alone")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "alone.run.json", "in.txt", "team",
                                                                "team.run.json"]  # fmt: skip


@pytest.mark.slow
def test_a_line_of_stdin_reaches_all_and_what_is_wrong_with_it_too(models: Models, dsbd: Call) -> None:
    command = ["generate", "--lines", *pair(models("rand"), models("rand", seed=1)), "--max-new-tokens", "5",
               "--seed", "3", "--dtype", "float32"]  # fmt: skip
    lines = b"one\n\xff\ntwo\n"
    ran = team(command, lines)
    alone = dsbd(*command, "--device", "cpu", "--prices", "off", stdin=lines)
    assert (ran[0][0], ran[0][1]) == (alone.code, alone.out)
    assert [line == b"null" for line in alone.out.splitlines()] == [False, True, False]
    assert "1 of 3 prompts were refused; line 2: the prompt is not UTF-8 text" in ran[0][2].splitlines()[-1]
    assert (ran[1][0], ran[1][1]) == (2, b"")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["generate", "hi", "--tensor-parallel", "2"], "started alone: torchrun --nproc-per-node 2"),
        (["generate", "hi", "--tensor-parallel", "0"], "must be at least 1"),
        (["chat", "--tensor-parallel", "2"], "started alone: torchrun"),
        (["tune", "--tensor-parallel", "2"], "leave --tensor-parallel out"),
    ],
)
def test_teams_that_cannot_be_are_refused(dsbd: Call, models: Models, command: list[str], words: str) -> None:
    dsbd(*command, *pair(models("rand"))).refused(words)


def test_a_device_by_number_is_no_teams(dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    dsbd("generate", "hi", *pair(models("rand")), "--tensor-parallel", "2", "--device", "cuda:1").refused(
        "cuda:1"
    )


def test_a_prompt_for_several_teams_is_refused(
    dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    dsbd("generate", "hi", *pair(models("rand")), "--tensor-parallel", "2").refused("one team of 2 processes")
