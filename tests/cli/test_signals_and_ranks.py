"""SIGTERM, a RANK left over, and errors of users under torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.batch import watch
from dsbd_cli.cli import chat as chat_command
from dsbd_cli.cli import main, ranks, signals
from dsbd_cli.errors import RunError, UserError
from tests import builders
from tests.cli.conftest import ROOT, Call, environment, pair, program
from tests.terminal import Terminal

Models = Callable[..., str]


@pytest.fixture
def heeding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SIGTERM raises here, as in the program; everything is as before afterwards."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    monkeypatch.setattr(signals, "_ended", False)
    signals.heed()
    yield
    signal.signal(signal.SIGTERM, before)


def end_at(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM to this process with the `count`-th prompt."""
    from dsbd_cli.decoder import Decoder

    real, seen = Decoder.stream, []

    def stream(self: Any, *rest: Any, **how: Any) -> Any:
        seen.append(1)
        if len(seen) == count:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.01)
        return real(self, *rest, **how)

    monkeypatch.setattr(Decoder, "stream", stream)


def test_sigterm_says_so(dsbd: Call, models: Models, heeding: None, monkeypatch: pytest.MonkeyPatch) -> None:
    end_at(1, monkeypatch)
    ran = dsbd("generate", "hi", *pair(models("says", "A")))
    assert (ran.code, ran.out, ran.err) == (130, b"", "dsbd: stopped by SIGTERM\n")
    assert signals.terminated()


def test_a_batch_says_how_far_it_was_and_goes_on(
    dsbd: Call, models: Models, heeding: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\nthree\n")
    command = ["generate", "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--target",
               models("rand"), "--method", "beam", "--max-new-tokens", "4", "--seed", "1",
               "--batch", "1"]  # fmt: skip
    with monkeypatch.context() as patch:
        end_at(3, patch)
        ran = dsbd(*command)
    assert ran.code == 130
    assert ran.err.splitlines() == ["dsbd: stopped with 2 of 3 prompts; the same command goes on"]
    again = dsbd(*command)
    assert again.code == 0
    assert again.err.splitlines()[0] == "dsbd: 2 of 3 prompts are done already: going on"


def test_the_exit_code_is_that_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(main, "run", lambda: 130)
    monkeypatch.setattr(main.streams, "hold_descriptors", lambda: None)
    monkeypatch.setattr(signals, "heed", lambda: None)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "exit", lambda code: None)
    for ended in (False, True):
        monkeypatch.setattr(signals, "_ended", ended)
        main.main()
    assert codes == [130, 143]


def test_what_the_parent_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signals.heed()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_chat_that_goes_on_after_ctrl_c_ends_after_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", typed)
    monkeypatch.setattr(signals, "_ended", True)
    with pytest.raises(KeyboardInterrupt):
        next(chat_command._typed())


@pytest.mark.slow
def test_sigterm_to_the_program_while_it_streams(tmp_path: Path) -> None:
    table = builders.torch.zeros(builders.VOCAB + 2, builders.VOCAB + 2)
    table[:, builders.VOCAB] = table[:, builders.VOCAB + 1] = 0.5
    builders.markov(tmp_path, table, ["so ", "on "], max_position_embeddings=1_000_000)
    command = program("generate", "hi", *pair(str(tmp_path)), "--max-new-tokens", "100000")
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE)  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.read(20)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert (first + out).endswith((b"so\n", b"on\n", b"so \n", b"on \n"))
    assert err.decode().splitlines()[-1] == "dsbd: stopped by SIGTERM"
    terminal = Terminal(command, env=environment(TERM="xterm", LANG="C.UTF-8"))
    assert terminal.until(lambda output: b"live beams" in output, 120)
    time.sleep(1)
    terminal.process.terminate()
    assert terminal.finish() == 143
    assert terminal.after_panels.splitlines()[-1].startswith("dsbd: stopped after ")


# Ranks.


def test_a_rank_that_is_left_over_waits_with_a_word_and_a_limit(
    dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name, value in {"POLL_S": 0.01, "SAY_S": 0.05, "LIMIT_S": 0.3}.items():
        monkeypatch.setattr(watch, name, value)
    ran = dsbd("generate", "--input", tmp_path / "in.txt", "--output", tmp_path / "out", "--target",
               models("rand"), "--method", "beam")  # fmt: skip
    assert ran.code == 1
    waits, ends = ran.err.splitlines()
    assert waits.startswith("dsbd: waiting for rank 0 of 2: no out.run.json of this run yet (this is rank 1,")
    assert ends.startswith("dsbd: no sign of life from rank 0 of 2 for 0 s")
    assert "unset RANK and WORLD_SIZE" in ends
    assert os.listdir(tmp_path) == ["in.txt"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Be rank N of a torchrun."""

    def be(rank: int) -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")

    monkeypatch.setattr(ranks, "PATIENCE_S", 0.05)
    return be


@pytest.mark.parametrize("fault", [UserError("wrong"), RunError("broke")])
def test_rank_0_says_it_at_once_and_others_after_a_while(
    launched: Callable[[int], None], fault: Exception
) -> None:
    said: list[str] = []
    launched(0)
    ranks.leave(2, said.append, str(fault))
    assert said == [str(fault)]
    launched(1)
    ranks.leave(2, said.append, str(fault))
    assert said[1:] == [f"rank 1: {fault}"]


def test_a_rank_that_is_ended_while_it_waits_leaves_with_its_own_code_and_no_word(
    launched: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(1)
    codes: list[int] = []

    class Left(Exception):
        pass

    def leave(code: int) -> None:
        codes.append(code)
        raise Left

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Left):
        ranks.leave(2, lambda line: pytest.fail(line), "wrong")
    assert codes == [2]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_without_a_launcher_is_nobodys_follower(dsbd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    dsbd("generate", "hi", "--target", "./gone").refused("no such folder")


def test_options_that_are_wrong_are_said_once_too(
    dsbd: Call, launched: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(1)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for wrong in (["--widht", "3"], ["--width", "many"], ["--num-beams", "3"], ["--target", "./gone"]):
        ran = dsbd("generate", "hi", *wrong)
        assert (ran.code, ran.err.count("dsbd: rank 1: ")) == (2, 1)
    assert waited == [0.05] * 4


def test_ctrl_c_to_a_launcher_is_answered_by_one_rank(
    dsbd: Call, models: Models, launched: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dsbd_cli.decoder.Decoder.stream", stop)
    for rank, line in ((0, "dsbd: stopped\n"), (1, "")):
        launched(rank)
        ran = dsbd("generate", "hi", *pair(models("says", "A")), "-q")
        assert (ran.code, ran.err) == (130, line)


@pytest.mark.slow
def test_under_torchrun_a_users_error_is_one_line_of_ours(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\ntwo\n")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "dsbd_cli", "generate",
         "--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out"), "--target", "./gone", "--method",
         "beam"],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    ours = [line for line in done.stderr.splitlines() if line.startswith("dsbd: ")]
    assert ours == ["dsbd: target ./gone: no such folder or file"]
    assert done.returncode != 0
