"""A run's folder: `run.json` (what is run), `results.jsonl` (append only), `ratings.jsonl`, and one writer.

A line is on disk when `append` returns. A line that a kill tore is dropped with a notice and done again.
Several processes (torchrun) each append to a part `results.rank-R-of-N.jsonl`; rank 0 merges.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dsbd_cli.errors import RunError, UserError

RUN, RESULTS, RATINGS, SUMMARY = "run.json", "results.jsonl", "ratings.jsonl", "summary.json"
Record = dict[str, Any]
Key = tuple[str, str, int]
Tell = Callable[[str], None]


def key_of(record: Mapping[str, Any]) -> Key:
    """What makes a result unique within a run: (item, arm, repeat)."""
    return str(record["item"]), str(record["arm"]), int(record["repeat"])


class Store:
    """One process's view of a run's folder; a context manager.

    Args:
        folder: created if it is not there.
        rank, world: which process of how many.
        tell: receives notices, one line each.

    Raises:
        UserError: the folder cannot be written, another bench writes to it, or it holds something else.
    """

    def __init__(self, folder: Path, rank: int, world: int, tell: Tell) -> None:
        self.folder, self.rank, self.world, self.tell = folder, rank, world, tell
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {folder} cannot be made: {error.strerror}") from None
        name = ".lock" if rank == 0 else f".lock.rank-{rank}-of-{world}"
        self._lock = FileLock(str(folder / name))
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"another bench is writing to {folder}: wait for it, or give another --out"
            ) from None
        except OSError as error:
            raise UserError(f"--out {folder} cannot be written: {error.strerror}") from None
        self._own = folder / (RESULTS if world == 1 else f"results.rank-{rank}-of-{world}.jsonl")
        self._out: int | None = None
        self._ratings: int | None = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files and of the folder."""
        for handle in (self._out, self._ratings):
            if handle is not None:
                os.close(handle)
        self._out = self._ratings = None
        self._lock.release()

    # What is run.

    def claim(self, facts: Mapping[str, Any]) -> int:
        """Make sure that all results are of one fingerprint, and begin a session.

        Args:
            facts: `fingerprint` (what must not change), `session` (this process's circumstances), and more
                that the report needs; plain values.

        Returns:
            The number of this session.

        Raises:
            UserError: the folder holds results of another fingerprint; the message says what differs.
        """
        there = self.read_run()
        if there is not None and (changed := differences(there.get("fingerprint", {}), facts["fingerprint"])):
            if self.has_results():
                raise UserError(
                    f"{self.folder} was begun with another {changed}: give another --out, or delete it"
                )
            there = None
        if there is None and self.has_results():
            raise UserError(
                f"{self.folder} holds results but no {RUN} that says what was run: give another --out"
            )
        there = there or {}
        for name, arm in facts.get("arms", {}).items():
            old = there.get("arms", {}).get(name)
            if old is not None and (changed := differences(old, arm)) and self.has_results():
                raise UserError(f"{self.folder}: {name} was begun with another {changed}: give another --out")
        sessions = [*there.get("sessions", []), facts["session"]]
        arms = {**there.get("arms", {}), **facts.get("arms", {})}
        rest = {name: value for name, value in facts.items() if name not in ("session", "arms")}
        run = {"format": 1, **there, **rest, "arms": arms, "sessions": sessions}
        write_whole(self.folder / RUN, json.dumps(run, ensure_ascii=False, indent=1) + "\n")
        return len(sessions) - 1

    def read_run(self) -> Record | None:
        """What `run.json` holds, or None."""
        return read_run(self.folder)

    def has_results(self) -> bool:
        """Whether any result was written yet."""
        files = [self.folder / RESULTS, *part_files(self.folder)]
        return any(path.is_file() and path.stat().st_size > 0 for path in files)

    # Results.

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one result: on disk, whole, when this returns.

        Raises:
            RunError: the disk is full, or the file can no longer be written.
        """
        if self._out is None:
            self._out = _open(self._own)
        _append(self._out, record, self._own)

    def append_rating(self, record: Mapping[str, Any]) -> None:
        """Append one rating of the judge. Raises like `append`."""
        if self._ratings is None:
            self._ratings = _open(self.folder / RATINGS)
        _append(self._ratings, record, self.folder / RATINGS)

    def mend(self) -> list[Record]:
        """The results on disk: parts of earlier runs merged in, torn lines dropped, none twice."""
        path = self.folder / RESULTS
        parts = part_files(self.folder)
        records, torn = _read([path, *parts])
        if torn:
            self.tell(f"dropped {torn} torn line(s) of {RESULTS}: those items are done again")
        if torn or any(part.stat().st_size for part in parts):
            self.write_results(records.values())
        _drop(parts)
        mend_ratings(self.folder)
        return list(records.values())

    def own_lines(self) -> list[Record]:
        """What this process has appended to its own file."""
        return list(_read([self._own])[0].values())

    def write_results(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace `results.jsonl`, whole or not at all."""
        if self._out is not None and self.world == 1:
            os.close(self._out)
            self._out = None
        write_whole(self.folder / RESULTS, "".join(_line(record) for record in records))

    def drop_parts(self) -> None:
        """Remove the parts once they are merged."""
        if self._out is not None and self.world > 1:
            os.close(self._out)
            self._out = None
        _drop(part_files(self.folder))


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
    except (OSError, ValueError):
        run = None
    if not isinstance(run, dict) or not isinstance(run.get("fingerprint"), dict):
        raise UserError(f"{path} cannot be read as what a bench wrote: move it away, or give another --out")
    return run


def read_results(folder: Path) -> list[Record]:
    """All whole results of a folder, parts included; nothing on disk is changed."""
    return list(_read([folder / RESULTS, *part_files(folder)])[0].values())


def read_ratings(folder: Path) -> list[Record]:
    """All whole ratings of a folder."""
    return [record for record in _lines(folder / RATINGS) if record is not None]


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
            found.append(f"{prefix}{name} ({one}, now {two})")
    return ", ".join(found)


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file so that it is there whole or not at all.

    Raises:
        RunError: the disk is full.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as stream:
            stream.write(text.encode("utf-8") if isinstance(text, str) else text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise _write_error(path, error) from None
    finally:
        draft.unlink(missing_ok=True)


def mend_ratings(folder: Path) -> None:
    """Drop a torn line of the ratings, so that the next one is not glued on to it."""
    lines = list(_lines(folder / RATINGS))
    if any(record is None for record in lines):
        good = "".join(_line(record) for record in lines if record is not None)
        write_whole(folder / RATINGS, good)


def _read(paths: Iterable[Path]) -> tuple[dict[Key, Record], int]:
    """(results by key, torn lines); of two results of one key the first counts."""
    found: dict[Key, Record] = {}
    torn = 0
    for path in paths:
        for record in _lines(path):
            try:
                assert record is not None
                found.setdefault(key_of(record), record)
            except (AssertionError, KeyError, ValueError, TypeError):
                torn += 1
    return found, torn


def _lines(path: Path) -> Iterator[Record | None]:
    """Each line's object; None for a line that is torn. A last line without its newline is torn."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return
    for line in raw.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        yield record if isinstance(record, dict) else None


def _drop(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    except OSError as error:
        raise _write_error(path, error) from None


def _line(record: Mapping[str, Any]) -> str:
    # Lone surrogates cannot be UTF-8; escapes keep every text, and every reader reads them.
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record, allow_nan=False)
    return text + "\n"


def _append(handle: int, record: Mapping[str, Any], path: Path) -> None:
    view = memoryview(_line(record).encode("utf-8"))
    try:
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a pipe or device that knows no fsync
            return
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> RunError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"no space left for {path}: free some; the same command then goes on")
    return RunError(f"{path} cannot be written: {error.strerror}")
