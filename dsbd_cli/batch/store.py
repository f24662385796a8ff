"""The output file of a batch: append only, resumable, and never two runs in one file.

One process appends its records to OUT in the order of the input. Several (torchrun) each append to
a part file `OUT.rank-R-of-N`; when all prompts are done, rank 0 writes OUT in order, whole, and
removes the parts. What was run stands beside it in `OUT.run.json`; a run with other settings,
models or input is refused. A line that a kill tore is dropped and its prompt done again.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.batch.shard import Shard
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.paths import refuse_special, refuse_unwritable, replacing

_POLL_S = 0.2
_SIDECAR_S = 600.0


class Store:
    """One process's view of the output.

    Args:
        path: OUT.
        total: prompts of the whole batch.
        shard: which process this is.
        tell: receives notices, one line each.

    Raises:
        UserError: a file that is no output of a batch, or that another process writes to.
    """

    def __init__(self, path: Path, total: int, shard: Shard, tell: Callable[[str], None]) -> None:
        refuse_unwritable(path, "--output")
        refuse_special(path, f"--output {path}", "it is read again to go on; for a pipe there is --lines")
        self.path, self.total, self.shard, self.tell = path, total, shard, tell
        self.sidecar = path.with_name(path.name + ".run.json")
        own = path if shard.world == 1 else path.with_name(f"{path.name}.rank-{shard.rank}-of-{shard.world}")
        self._own = own
        self._files: list[tuple[int, Path]] = []
        self._whole: list[bytes] = []
        self._parts: dict[int, bytes] = {}
        try:
            self._out = self._open(own)
            if shard.world > 1 and shard.rank == 0:
                self._open(path)
            self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> None:
        """See what is there, and cut a torn last line off the file that this process appends to."""
        size = os.fstat(self._out).st_size
        if size and not self.sidecar.exists():
            raise UserError(f"{self._own} is there, but not {self.sidecar.name} that says what was run: "
                            "give another --output, or move that file away")  # fmt: skip
        # Parts first: a merge that runs meanwhile replaces OUT before it removes them.
        self._parts = self._read_parts()
        self._whole = self._read_whole()
        good = sum(map(len, _lines(self._own)))
        if good < size:
            os.ftruncate(self._out, good)
            self.tell(f"dropped a torn last line of {self._own.name}: its prompt is done again")

    def close(self) -> None:
        """Let go of the files; one that got no record goes away."""
        while self._files:
            fd, path = self._files.pop()
            facts = os.fstat(fd)
            unused = stat.S_ISREG(facts.st_mode) and facts.st_size == 0 and not path.is_symlink()
            if unused and _same_file(fd, path):
                path.unlink(missing_ok=True)
            os.close(fd)

    def is_finished(self, facts: dict[str, Any], seed_given: bool) -> bool:
        """Whether every prompt is done, in a run of these `facts` (those given; others are not compared)."""
        there = self._read_sidecar() or {}
        same = {name: there.get(name) for name in facts}
        ignore = () if seed_given else ("seed",)
        return len(self._whole) == self.total and not _differences(
            same, json.loads(json.dumps(facts)), ignore
        )

    @property
    def done(self) -> set[int]:
        """Indices of the prompts that need no decoding."""
        return {*range(len(self._whole)), *self._parts}

    @property
    def whole(self) -> int:
        """How many records OUT itself held when it was opened: those of the first prompts."""
        return len(self._whole)

    @property
    def begun(self) -> bool:
        """Whether there is any record yet."""
        return bool(self._whole or self._parts)

    def claim(self, facts: dict[str, Any], seed_given: bool) -> int:
        """Make sure that all records are of one run, and return that run's seed.

        Args:
            facts: what was asked for (`seed` among it), plain values; written beside OUT.
            seed_given: False adopts the seed of the run that is there.

        Raises:
            UserError: OUT holds another run.
        """
        facts = json.loads(json.dumps(facts))
        if self.shard.rank > 0:
            return self._follow(facts, seed_given)
        there = self._read_sidecar()
        if there is not None:
            changed = _differences(there, facts, ignore=() if seed_given else ("seed",))
            if not changed:
                return int(there["seed"])
            if self.begun:
                raise UserError(f"{self.path} was begun with another {changed}: give another --output, or delete "
                                f"it and {self.sidecar.name} to start again")  # fmt: skip
        write_whole(self.sidecar, [json.dumps(facts, ensure_ascii=False, indent=1).encode("utf-8") + b"\n"])
        return int(facts["seed"])

    def _follow(self, facts: dict[str, Any], seed_given: bool) -> int:
        """Ranks above 0 wait until rank 0 has written what is run."""
        end = time.monotonic() + _SIDECAR_S
        while True:
            there = self._read_sidecar()
            changed = "run" if there is None else _differences(there, facts, () if seed_given else ("seed",))
            if there is not None and not changed:
                return int(there["seed"])
            if time.monotonic() > end:
                raise RunError(f"rank 0 wrote no {self.sidecar.name} that fits this run ({changed})")
            time.sleep(_POLL_S)

    def kept(self, index: int) -> bytes | None:
        """The record of a prompt that an earlier run left in a part file, for OUT in its place."""
        return self._parts.get(index)

    def add(self, index: int, record: Mapping[str, Any]) -> None:
        """Append the record of prompt `index`: on disk, whole, when this returns."""
        self.add_line(json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")

    def add_line(self, line: bytes) -> None:
        """Append one line as it is."""
        view = memoryview(line)
        while view:
            view = view[os.write(self._out, view) :]

    def finish(self) -> None:
        """All prompts of this process are done. Rank 0 waits for the others and writes OUT."""
        if self.shard.rank > 0:
            return
        if self.shard.world > 1:
            told = time.monotonic()
            while len(self.done) < self.total:
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    self.tell(
                        f"waiting for the other ranks: {len(self.done)} of {self.total} prompts are done"
                    )
                time.sleep(_POLL_S)
                self._parts = self._read_parts()
            write_whole(self.path, (self._line(index) for index in range(self.total)))
        for part in self._part_paths():
            part.unlink(missing_ok=True)

    def _line(self, index: int) -> bytes:
        return self._whole[index] if index < len(self._whole) else self._parts[index]

    # Reading.

    def _open(self, path: Path) -> int:
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
            except OSError as error:
                raise UserError(f"--output {path} cannot be written: {error.strerror}") from None
            if not _lock(fd):
                os.close(fd)
                raise UserError(f"another dsbd is writing to {path}: wait for it, or give another --output")
            if _same_file(fd, path):
                self._files.append((fd, path))
                return fd
            # The run before ended, and took its empty file with it, between our opening and locking.
            os.close(fd)

    def _read_whole(self) -> list[bytes]:
        lines = _lines(self.path)
        for place, line in enumerate(lines):
            if _index(line) != place or place >= self.total:
                raise UserError(f"{self.path} line {place + 1} is no record of this batch: give another "
                                "--output, or move that file away")  # fmt: skip
        return lines

    def _read_parts(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for part in self._part_paths():
            for line in _lines(part):
                index = _index(line)
                if index is not None and index < self.total:
                    found[index] = line
        return found

    def _part_paths(self) -> list[Path]:
        name = re.compile(re.escape(self.path.name) + r"\.rank-\d+-of-\d+")
        return sorted(entry for entry in self.path.absolute().parent.iterdir() if name.fullmatch(entry.name))

    def _read_sidecar(self) -> dict[str, Any] | None:
        try:
            facts = json.loads(self.sidecar.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            facts = None
        if not isinstance(facts, dict) or not isinstance(facts.get("seed"), int):
            raise UserError(f"{self.sidecar} cannot be read as what a batch wrote: move it away")
        return facts


def _lines(path: Path) -> list[bytes]:
    """The whole records of a file, less a torn last line."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    if lines and not (lines[-1].endswith(b"\n") and _index(lines[-1]) is not None):
        lines.pop()
    return lines


def _index(line: bytes) -> int | None:
    try:
        index = json.loads(line)["index"]
    except (ValueError, KeyError, TypeError):
        return None
    return index if type(index) is int and index >= 0 else None


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], ignore: Iterable[str] = ()) -> str:
    """What differs, in words; '' if nothing does."""
    changed = []
    for name in dict.fromkeys([*there, *here]):
        one, two = there.get(name), here.get(name)
        if name in ignore or one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            changed += [f"{key} ({one.get(key)}, now {two.get(key)})" for key in dict.fromkeys([*one, *two])
                        if one.get(key) != two.get(key)]  # fmt: skip
        else:
            changed.append(f"{name} ({one}, now {two})")
    return ", ".join(changed)


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file so that it is there whole or not at all."""
    with replacing(path) as draft, draft.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(fd: int) -> bool:
    """Hold the file for this process until it ends, however it ends; False if another holds it."""
    try:
        import fcntl
    except ImportError:  # Windows: no such lock; two writers are then the user's own care
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
