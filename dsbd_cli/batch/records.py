"""A file that one process appends records to, a line each; and what such a file holds."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from dsbd_cli.batch.watch import lock
from dsbd_cli.errors import UserError
from dsbd_cli.paths import check_own, same_file, write_error


class Records:
    """The file, held for this process alone until `close`.

    Args:
        path: made where it is not there.
        patient: wait a moment for a process that looks whether it is held.

    Attributes:
        size: bytes that it has.

    Raises:
        UserError: it cannot be written, or another process holds it.
    """

    def __init__(self, path: Path, *, patient: bool = False) -> None:
        self.path = path
        self._fd = _held(path, patient)
        self.size = os.fstat(self._fd).st_size

    def cut(self) -> bool:
        """Cut off a torn last line; whether there was one."""
        good = sum(map(len, lines_of(self.path)))
        torn = good < self.size
        if torn:
            os.ftruncate(self._fd, good)
        self.size = good
        return torn

    def add(self, line: bytes) -> None:
        """Append one line as it is: on disk, whole, when this returns.

        Raises:
            RunError: the disk is full, or the file is no longer what this process has written.
        """
        self.check()
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise write_error(self.path, error, "the same command then goes on") from error
        self.size += len(line)

    def clear(self) -> None:
        """Take all records out. Raises like `check`."""
        self.check()
        os.ftruncate(self._fd, 0)
        self.size = 0

    def check(self) -> None:
        """Raise where it is not what this process has written.

        Raises:
            RunError: it was removed, replaced or changed since.
        """
        check_own(self._fd, self.path, self.size, "batch")

    def close(self) -> None:
        """Let go of the file; one that has no record goes away."""
        facts = os.fstat(self._fd)
        unused = stat.S_ISREG(facts.st_mode) and facts.st_size == 0 and not self.path.is_symlink()
        if unused and same_file(self._fd, self.path):
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def lines_of(path: Path) -> list[bytes]:
    """The whole records of a file, less a torn last line; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not (lines[-1].endswith(b"\n") and index_of(lines[-1]) is not None):
        lines.pop()
    return lines


def index_of(line: bytes) -> int | None:
    """Which prompt a line is the record of; None where it is no record."""
    try:
        index = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return index if type(index) is int and index >= 0 else None


def _held(path: Path, patient: bool) -> int:
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"--output {path} cannot be written: {error.strerror}") from None
        if not lock(fd, patient=patient):
            os.close(fd)
            raise UserError(f"another dsbd is writing to {path}: wait for it, or give another --output")
        if same_file(fd, path):
            return fd
        # The run before ended, and took its empty file with it, between our opening and locking.
        os.close(fd)
