"""A run's folder: `run.json` (what is run), `results.jsonl` (append only), `ratings.jsonl`, and one writer.

A line is on disk when `append` returns. A line that a kill tore is dropped with a notice and done again.
Several processes (torchrun) each append to a part `results.rank-R-of-N.jsonl`; rank 0 merges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dsbd_cli.bench.files import (
    RATINGS,
    RESULTS,
    RUN,
    Appending,
    Record,
    differences,
    drop,
    line_of,
    mend_ratings,
    part_files,
    read_files,
    read_run,
    write_whole,
)
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_folder

Tell = Callable[[str], None]


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
        make_folder(folder, f"--out {folder}")
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
        self._out: Appending | None = None
        self._ratings: Appending | None = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files and of the folder."""
        for handle in (self._out, self._ratings):
            if handle is not None:
                handle.close()
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

    def end_session(self, number: int, facts: Mapping[str, Any]) -> None:
        """Add what is known of a session at its end only.

        Raises:
            RunError: the results that this process wrote are no longer there.
        """
        if self._out is not None:
            self._out.check()
        run = self.read_run()
        if run is not None and number < len(run["sessions"]):
            run["sessions"][number] |= facts
            write_whole(self.folder / RUN, json.dumps(run, ensure_ascii=False, indent=1) + "\n")

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
            RunError: the disk is full, or the file was removed or changed since.
        """
        self.append_all([record])

    def append_all(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append results that are there together, with one wait for the disk. Raises like `append`."""
        if self._out is None:
            self._out = Appending(self._own)
        self._out.add(records)

    def append_rating(self, record: Mapping[str, Any]) -> None:
        """Append one rating of the judge. Raises like `append`."""
        if self._ratings is None:
            self._ratings = Appending(self.folder / RATINGS)
        self._ratings.add([record])

    def mend(self) -> list[Record]:
        """The results on disk: parts of earlier runs merged in, torn lines dropped, none twice."""
        path = self.folder / RESULTS
        parts = part_files(self.folder)
        records, torn = read_files([path, *parts])
        if torn:
            self.tell(f"dropped {counted(torn, 'torn line')} of {RESULTS}: those items are done again")
        if torn or any(part.stat().st_size for part in parts):
            self.write_results(records.values())
        drop(parts)
        mend_ratings(self.folder)
        return list(records.values())

    def own_lines(self) -> list[Record]:
        """What this process has appended to its own file."""
        return list(read_files([self._own])[0].values())

    def write_results(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace `results.jsonl`, whole or not at all."""
        if self._out is not None and self.world == 1:
            self._out.close()
            self._out = None
        write_whole(self.folder / RESULTS, "".join(line_of(record) for record in records))

    def drop_own_part(self) -> None:
        """Remove this process's part once it is merged; without one there is nothing to do."""
        if self.world > 1:
            if self._out is not None:
                self._out.close()
                self._out = None
            self._own.unlink(missing_ok=True)
