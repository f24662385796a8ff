"""The files of a run's folder: reading what is whole, writing whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.paths import check_own, write_error
from dsbd_cli.paths import write_whole as write_whole

RUN, RESULTS, RATINGS, SUMMARY = "run.json", "results.jsonl", "ratings.jsonl", "summary.json"
Record = dict[str, Any]
Key = tuple[str, str, int]


def key_of(record: Mapping[str, Any]) -> Key:
    """What makes a result unique within a run: (item, arm, repeat)."""
    return str(record["item"]), str(record["arm"]), int(record["repeat"])


def read_run(folder: Path) -> Record | None:
    """`run.json` of a folder, or None where there is none.

    Raises:
        UserError: it cannot be read as what a bench wrote.
    """
    path = folder / RUN
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        run = None
    if not isinstance(run, dict) or not isinstance(run.get("fingerprint"), dict):
        raise UserError(f"{path} cannot be read as what a bench wrote: move it away, or give another --out")
    return run


def read_results(folder: Path) -> list[Record]:
    """All whole results of a folder, parts included; nothing on disk is changed."""
    return list(read_files([folder / RESULTS, *part_files(folder)])[0].values())


def read_ratings(folder: Path) -> list[Record]:
    """All whole ratings of a folder."""
    return [record for record in lines_of(folder / RATINGS) if record is not None]


def part_files(folder: Path) -> list[Path]:
    """Parts that processes of a torchrun have left."""
    return sorted(folder.glob("results.rank-*-of-*.jsonl"))


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> str:
    """What differs between two fingerprints, in words; '' if nothing does."""
    found = []
    for name in dict.fromkeys([*there, *here]):
        one, two = there.get(name), here.get(name)
        if one == two:
            continue
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found.append(differences(one, two, f"{prefix}{name}."))
        else:
            found.append(f"{prefix}{name} ({_word(one)}, now {_word(two)})")
    return ", ".join(found)


def _word(value: Any) -> str:
    """A fact in words: none, or what a thing is called and is."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_word(fact)}" for name, fact in value.items())
    return "none" if value is None else str(value)


def mend_ratings(folder: Path) -> None:
    """Drop a torn line of the ratings, so that the next one is not glued on to it."""
    lines = list(lines_of(folder / RATINGS))
    if any(record is None for record in lines):
        good = "".join(line_of(record) for record in lines if record is not None)
        write_whole(folder / RATINGS, good)


def read_files(paths: Iterable[Path]) -> tuple[dict[Key, Record], int]:
    """(results by key, torn lines); of two results of one key the first counts."""
    found: dict[Key, Record] = {}
    torn = 0
    for path in paths:
        for record in lines_of(path):
            try:
                assert record is not None
                found.setdefault(key_of(record), record)
            except (AssertionError, KeyError, ValueError, TypeError):
                torn += 1
    return found, torn


def lines_of(path: Path) -> Iterator[Record | None]:
    """Each line's object; None for a line that is torn. A last line without its newline is torn."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return
    for line in raw.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            record = None
        yield record if isinstance(record, dict) else None


def drop(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def line_of(record: Mapping[str, Any]) -> str:
    # Lone surrogates cannot be UTF-8; escapes keep every text, and every reader reads them.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record, allow_nan=False)
    return text + "\n"


class Appending:
    """A file that only this process writes to, opened at its end.

    Args:
        path: made if it is not there; what it holds now is taken as it is.

    Raises:
        RunError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(path, error, "the same command then goes on") from None
        self._size = os.fstat(self._handle).st_size

    def check(self) -> None:
        """Raise RunError where the file was removed, cut or lengthened by another."""
        check_own(self._handle, self._path, self._size, "bench")

    def add(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records; they are on disk when this returns.

        Raises:
            RunError: the disk is full, or the file is no longer what this process has written.
        """
        self.check()
        view = memoryview("".join(map(line_of, records)).encode("utf-8"))
        try:
            while view:
                written = os.write(self._handle, view)
                self._size += written
                view = view[written:]
            os.fsync(self._handle)
        except OSError as error:
            if error.errno == errno.EINVAL:  # a file system that knows no fsync
                return
            raise write_error(self._path, error, "the same command then goes on") from None

    def close(self) -> None:
        os.close(self._handle)
