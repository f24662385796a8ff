"""Commands with something going wrong: killed, stopped, out of disk, or before a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from dsbd_cli.cli.main import run
from dsbd_cli.decoder import Decoder


@dataclass
class Ended:
    """How a command ended; `code` is None after a kill."""

    code: int | None
    out: bytes
    err: str

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()


class Stream(io.BytesIO):
    """Stdout that fails with its write number `at`."""

    def __init__(self, at: int, error: OSError | None) -> None:
        super().__init__()
        self.left, self.error = at, error

    def write(self, data: Any) -> int:
        if self.error is not None and self.left == 0:
            raise self.error
        self.left -= 1
        return super().write(data)


@dataclass
class Fault:
    """What goes wrong, and with which of the writes (or prompts, for `stop`), and after how many bytes of it."""

    kind: str = "none"
    at: int = 0
    bytes: int = 0

    @contextlib.contextmanager
    def happening(self, folder: Path) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            getattr(self, f"_{self.kind}")(patch, folder)
            yield

    def _none(self, patch: Any, folder: Path) -> None:
        pass

    def _pipe(self, patch: Any, folder: Path) -> None:
        pass

    _stdout_full = _pipe

    def _records(self, patch: Any, end: Callable[[], None]) -> None:
        """`end` in the middle of a record."""
        real, seen = os.write, [0]

        def write(fd: int, data: Any) -> int:
            seen[0] += 1
            if seen[0] == self.at + 1 and self.bytes:
                return real(fd, bytes(data)[: self.bytes])
            if seen[0] > self.at:
                end()
            return real(fd, data)

        patch.setattr("os.write", write)

    def _kill(self, patch: Any, folder: Path) -> None:
        self._records(patch, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def _kill_late(self, patch: Any, folder: Path) -> None:
        real = os.write

        def write(fd: int, data: Any) -> int:
            count = real(fd, data)
            self.at -= 1
            if self.at < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return count

        patch.setattr("os.write", write)

    def _kill_replacing(self, patch: Any, folder: Path) -> None:
        real = os.replace

        def replacing(one: Any, two: Any) -> None:
            if self.bytes % 2:
                real(one, two)
            os.kill(os.getpid(), signal.SIGKILL)

        patch.setattr("os.replace", replacing)

    def _full(self, patch: Any, folder: Path) -> None:
        self._records(patch, _no_space)

    def _full_beside(self, patch: Any, folder: Path) -> None:
        patch.setattr("os.fsync", lambda fd: _no_space())

    def _stop(self, patch: Any, folder: Path) -> None:
        real = Decoder.stream

        def stream(decoder: Decoder, *rest: Any, **how: Any) -> Any:
            for moment in real(decoder, *rest, **how):
                self.at -= 1
                if self.at < 0:
                    raise KeyboardInterrupt
                yield moment

        patch.setattr(Decoder, "stream", stream)


def _no_space() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


FAULTS = ["none", "none", "none", "kill", "kill_late", "kill_replacing", "full", "full_beside", "stop"]
faults = st.builds(Fault, st.sampled_from(FAULTS), st.integers(0, 4), st.integers(0, 60))
stdout_faults = st.builds(
    Fault, st.sampled_from(["none", "none", "pipe", "stdout_full", "stop"]), st.integers(0, 4)
)


class Commands:
    """Runs them in this process, or in a fork of it where they are killed; each must end sanely.

    Attributes:
        folder: what they work on.
    """

    folder: Path

    def call(self, arguments: list[str], fault: Fault | None = None, stdin: bytes = b"") -> Ended:
        fault = replace(fault or Fault())  # it counts down
        if fault.kind.startswith("kill"):
            return self._killed(arguments, fault, stdin)
        return self._here(arguments, fault, stdin)

    def _here(self, arguments: list[str], fault: Fault, stdin: bytes) -> Ended:
        error = {
            "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
            "stdout_full": OSError(errno.ENOSPC, "full"),
        }
        raw = Stream(fault.at, error.get(fault.kind))
        out, err = io.TextIOWrapper(raw, write_through=True), io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stderr(err),
            fault.happening(self.folder),
        ):
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            patch.setattr(sys, "stdout", out)
            code = run(arguments)
        ended = Ended(code, raw.getvalue(), err.getvalue())
        self.sane(ended)
        return ended

    def _killed(self, arguments: list[str], fault: Fault, stdin: bytes) -> Ended:
        """In a fork, since nothing of a killed process may tidy up. (It may end by itself before the fault.)"""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                ended = self._here(arguments, fault, stdin)
                os.close(reading)
                with open(writing, "w", encoding="utf-8") as report:
                    json.dump([ended.code, ended.out.decode("utf-8"), ended.err], report)
                os._exit(0)
            os._exit(99)
        os.close(writing)
        with open(reading, encoding="utf-8") as report:
            said = report.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, -signal.SIGKILL)
        if status:
            return Ended(None, b"", "")
        code, out, err = json.loads(said)
        return Ended(code, out.encode("utf-8"), err)

    def sane(self, ended: Ended) -> None:
        """Known codes, our lines, and for a failure exactly one that is not a note."""
        assert ended.code in (0, 1, 2, 130), ended
        assert "Traceback" not in ended.err
        for line in ended.lines:
            assert line.startswith(("dsbd: ", "/")), ended.err  # or what /help lists
        if ended.code:
            assert ended.lines, ended

    def call_stats(self, command: list[str], fault: Fault, stdin: bytes) -> Ended:
        """The numbers of --stats are no lines of ours."""
        if "--stats" not in command:
            return self.call(command, fault, stdin)
        real, self.sane = self.sane, lambda ended: None  # type: ignore[method-assign]
        try:
            ended = self.call(command, fault, stdin)
        finally:
            self.sane = real  # type: ignore[method-assign]
        ours = [line for line in ended.lines if line.startswith("dsbd: ")]
        ended = Ended(ended.code, ended.out, "".join(f"{line}\n" for line in ours))
        self.sane(ended)
        return ended
