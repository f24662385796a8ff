"""The output of a batch: append only, resumable, and never two runs in one file.

One process appends its records to OUT in the order of the input. Those that are there before their turn are kept in
a part file, `OUT.early`, until it comes. Several processes (torchrun) each append to a part file `OUT.rank-R-of-N`
as answers come; when all prompts are done, rank 0 writes OUT in order, whole. Parts of a run that was cut off are
read by the next, and go when OUT is whole. What was run stands beside it in `OUT.run.json`; a run with other
settings, models or input is refused. A line that a kill tore is dropped and its prompt done again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.batch.records import Records, index_of, lines_of
from dsbd_cli.batch.shard import Shard, dealt
from dsbd_cli.batch.watch import Watch, part_of
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_parents, refuse_special, refuse_unwritable, write_whole


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
        if path.absolute().parent in (Path("/dev"), Path("/dev/fd")) or path.absolute().parts[1:2] == (
            "proc",
        ):
            # /dev/stdout is a regular file where the shell sent it to one.
            raise UserError(f"--output {path} is a stream, not a file: for stdout there is --lines")
        refuse_special(path, f"--output {path}", "it is read again to go on; for a pipe there is --lines")
        make_parents(path, "--output")
        self.path, self.total, self.shard, self.tell = path, total, shard, tell
        self.sidecar = path.with_name(path.name + ".run.json")
        self._early = path.with_name(path.name + ".early")
        own = path if shard.world == 1 else part_of(path, shard.rank, shard.world)
        self._files: list[Records] = []
        self._whole: list[bytes] = []
        self._parts: dict[int, bytes] = {}
        self._ahead: Records | None = None
        try:
            self._own = self._open(own)
            if shard.world > 1 and shard.rank == 0:
                self._open(path)
            self._look()
        except BaseException:
            self.close()
            raise
        # Records whose turn in OUT has not come, and whose turn it is; several processes join theirs at the end.
        self._turn = len(self._whole)
        early = self._parts if shard.world == 1 else {}
        self._waiting = {index: line for index, line in early.items() if index >= self._turn}

    def _look(self) -> None:
        """See what is there, and cut a torn last line off the file that this process appends to."""
        there = [path for path in (self._own.path, self.path, *self._part_paths()) if _has_bytes(path)]
        if there and not self.sidecar.exists():
            raise UserError(f"{there[0]} is there, but not {self.sidecar.name} that says what was run: "
                            "give another --output, or move that file away")  # fmt: skip
        # Parts first: a merge that runs meanwhile replaces OUT before it removes them.
        self._parts = self._read_parts()
        self._whole = self._read_whole()
        self._cut(self._own)

    def _open(self, path: Path) -> Records:
        self._files.append(Records(path, patient=self.shard.world > 1))
        return self._files[-1]

    def _cut(self, file: Records) -> None:
        if file.cut():
            again = "" if self.is_whole else ": its prompt is done again"
            self.tell(f"dropped a torn last line of {file.path.name}{again}")

    def close(self) -> None:
        """Let go of the files; one that has no record goes away."""
        while self._files:
            self._files.pop().close()

    @property
    def is_whole(self) -> bool:
        """Whether OUT has a record of every prompt."""
        return len(self._whole) == self.total

    def is_of(self, facts: Mapping[str, Any], seed_given: bool) -> bool:
        """Whether what is there is of a run of these facts: those given, `sources` among them.

        True needs no look at the models; False says nothing yet if it is the sources alone that differ.

        Raises:
            UserError: there are records of a run with other facts than these, whatever the sources hold.
        """
        there = self._read_sidecar()
        if there is None:
            return False
        known = {name: there.get(name) for name in facts}
        facts = json.loads(json.dumps(facts))
        if changed := _differences(known, facts, seed_given):
            self._refuse(changed)
        return not changed and known.get("sources") == facts.get("sources")

    @property
    def refused(self) -> dict[int, str]:
        """Why prompts were refused, by index, of those whose record says so."""
        lines = self._parts | dict(enumerate(self._whole))
        records = {index: json.loads(line) for index, line in lines.items() if b'"error"' in line}
        return {index: str(record["error"]) for index, record in records.items() if "error" in record}

    @property
    def done(self) -> set[int]:
        """Indices of the prompts that need no decoding."""
        return {*range(len(self._whole)), *self._parts}

    @property
    def begun(self) -> bool:
        """Whether there is any record yet."""
        return bool(self._whole or self._parts)

    @property
    def models(self) -> dict[str, str | None]:
        """By what the records that are there were decoded; nothing where there are none."""
        there = self._read_sidecar() if self.begun else None
        models = (there or {}).get("models")
        if not isinstance(models, dict):
            return {}  # `claim` says so
        return {role: text if isinstance(text, str) else None for role, text in models.items()}

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
            changed = _differences(there, facts, seed_given)
            if not changed:
                if there.get("sources") == facts.get("sources"):
                    return int(there["seed"])
                facts["seed"] = there["seed"]
            else:
                self._refuse(changed)
        write_whole(self.sidecar, json.dumps(facts, ensure_ascii=False, indent=1) + "\n")
        return int(facts["seed"])

    def _refuse(self, changed: str) -> None:
        if self.begun:
            parts = "".join(f", {part.name}" for part in self._part_paths() if _has_bytes(part))
            raise UserError(f"{self.path} was begun with another {changed}: give another --output, or delete "
                            f"it{parts} and {self.sidecar.name} to start again")  # fmt: skip

    def _follow(self, facts: dict[str, Any], seed_given: bool) -> int:
        """Ranks above 0 wait until rank 0 has written what is run."""
        watch = Watch(self.path, self.shard, self.tell)
        while True:
            there = self._read_sidecar()
            changed = "run" if there is None else _differences(there, facts, seed_given)
            if there is not None and not changed:
                return int(there["seed"])
            watch.wait({0}, f"no {self.sidecar.name} of this run yet")

    def add(self, index: int, record: Mapping[str, Any]) -> None:
        """Keep the record of prompt `index`: on disk, whole, when this returns.

        Raises:
            RunError: the disk is full, or a file is no longer what this run has written.
        """
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"
        if self.shard.world > 1:
            self._own.add(line)
            return
        self._waiting[index] = line
        self._catch_up()
        if index in self._waiting:
            if self._ahead is None:
                self._ahead = self._open(self._early)
                self._cut(self._ahead)
            self._ahead.add(line)

    def _catch_up(self) -> None:
        """Records whose turn has come take their place in OUT."""
        while self._turn in self._waiting:
            self._own.add(self._waiting[self._turn])
            del self._waiting[self._turn]
            self._turn += 1
        if self._ahead is not None and self._ahead.size and not self._waiting:
            self._ahead.clear()

    def finish(self) -> None:
        """All prompts of this process are done. Rank 0 waits for the others and writes OUT.

        Raises:
            RunError: what was written is no longer there.
        """
        if self.shard.rank > 0:
            return
        self._catch_up()
        self._own.check()
        if self.shard.world > 1:
            watch = Watch(self.path, self.shard, self.tell)
            while missing := set(range(self.total)) - self.done:
                watch.wait({dealt(index, self.shard.world) for index in missing},
                           f"{self.total - len(missing)} of {self.total} prompts are done")  # fmt: skip
                self._parts = self._read_parts()
            write_whole(self.path, (self._line(index) for index in range(self.total)))
        for part in self._part_paths():
            part.unlink(missing_ok=True)

    def _line(self, index: int) -> bytes:
        return self._whole[index] if index < len(self._whole) else self._parts[index]

    # Reading.

    def _read_whole(self) -> list[bytes]:
        lines = lines_of(self.path)
        for place, line in enumerate(lines):
            if index_of(line) != place or place >= self.total:
                raise _of_another(self.path, place)
        return lines

    def _read_parts(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for part in self._part_paths():
            for place, line in enumerate(lines_of(part)):
                if (index := index_of(line)) is None:
                    continue
                if index >= self.total:  # the input had more prompts
                    raise _of_another(part, place)
                found[index] = line
        return found

    def _part_paths(self) -> list[Path]:
        name = re.compile(re.escape(self.path.name) + r"\.(early|rank-\d+-of-\d+)")
        return sorted(entry for entry in self.path.absolute().parent.iterdir() if name.fullmatch(entry.name))

    def _read_sidecar(self) -> dict[str, Any] | None:
        try:
            facts = json.loads(self.sidecar.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError):
            facts = None
        if not isinstance(facts, dict) or type(facts.get("seed")) is not int:
            raise UserError(f"{self.sidecar} cannot be read as what a batch wrote: move it away")
        return facts


def _of_another(file: Path, place: int) -> UserError:
    return UserError(f"{file} line {place + 1} is no record of this batch: give another --output, "
                     "or move that file away")  # fmt: skip


def _has_bytes(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], seed_given: bool) -> str:
    """What differs, in words; '' if nothing does. A seed that nobody gave is no difference, nor are sources:
    whether other files hold other weights, `weights` tells."""
    changed = []
    for name in dict.fromkeys([*there, *here]):
        one, two = there.get(name), here.get(name)
        if one == two or name == "sources" or (name == "seed" and not seed_given):
            continue
        if name == "prices":
            # Shared out, each machine has its own.
            changed += [] if None in (one, two) else ["table of prices, which its text follows"]
            continue
        if name == "input":
            changed.append("content or form of --input")
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            changed += [f"{key} ({one.get(key)}, now {two.get(key)})" for key in dict.fromkeys([*one, *two])
                        if one.get(key) != two.get(key)]  # fmt: skip
        else:
            changed.append(f"{name} ({one}, now {two})")
    return ", ".join(changed)
