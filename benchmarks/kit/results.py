"""One results file: what was run, and one record a measurement; whole on disk, and taken up again."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.errors import RunError, UserError

Record = dict[str, Any]
_FORMAT = 1
# A kill loses at most this much work; writing after every record would cost more than some records do.
_EVERY_S = 2.0


class Results:
    """The file at `path`; a context manager that leaves it complete.

    Args:
        path: taken up again where it exists.
        facts: must be what the file was begun with.
        key: fields of a record that make it unique.

    Attributes:
        records: all of them, in order.
        parts: everything else that is to be kept, by name.

    Raises:
        UserError: the file is something else, or was begun with other facts; says which.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], key: Sequence[str]) -> None:
        self.path, self.facts, self._key = path, dict(facts), tuple(key)
        self.records: list[Record] = []
        self.parts: dict[str, Any] = {}
        self._saved = 0.0
        if path.exists():
            self._take_up()
        self._done = {self._key_of(record) for record in self.records}
        self.save()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()

    def has(self, **key: Any) -> bool:
        """Whether the measurement was made already."""
        return self._key_of(key) in self._done

    def add(self, record: Mapping[str, Any]) -> None:
        """Keep one measurement; on disk within two seconds, or when the file is closed."""
        self.records.append(dict(record))
        self._done.add(self._key_of(record))
        if time.monotonic() - self._saved > _EVERY_S:
            self.save()

    def whole(self) -> dict[str, Any]:
        """Everything, as `read` gives it back."""
        return {"facts": self.facts, **self.parts, "records": self.records}

    def save(self) -> None:
        """Write the whole file, or leave the old one.

        Raises:
            RunError: it cannot be written.
        """
        write(self.path, self.whole())
        self._saved = time.monotonic()

    def _take_up(self) -> None:
        try:
            there = json.loads(self.path.read_text(encoding="utf-8"))
            facts, self.records = there.pop("facts"), there.pop("records")
            if there.pop("format") != _FORMAT:
                raise ValueError
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            raise UserError(f"{self.path} is not a results file of this script: name another") from None
        mine = json.loads(json.dumps(self.facts))
        changed = [name for name in {**facts, **mine} if facts.get(name) != mine.get(name)]
        if changed:
            raise UserError(f"{self.path} was begun with another {changed[0]} ({facts.get(changed[0])}, now "
                            f"{mine.get(changed[0])}): name another file, or delete it")  # fmt: skip
        self.parts = there

    def _key_of(self, record: Mapping[str, Any]) -> Hashable:
        return tuple(record[name] for name in self._key)


def write(path: Path, whole: Mapping[str, Any]) -> None:
    """Write a results file, or leave the old one.

    Raises:
        RunError: it cannot be written.
    """
    text = json.dumps({"format": _FORMAT, **whole}, allow_nan=False)
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text + "\n")
        os.chmod(part, 0o644)
        os.replace(part, path)
    except OSError as error:
        if part is not None:
            Path(part).unlink(missing_ok=True)
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def joined(paths: Sequence[Path], key: Sequence[str]) -> dict[str, Any]:
    """Results files of parts of one run, as one; what is not a record is the first file's, sessions are all.

    Raises:
        UserError: one is no results file, was begun with other facts, or holds what another one holds.
    """
    whole, *others = [read(path) for path in paths]
    for path, other in zip(paths[1:], others, strict=True):
        changed = [name for name in whole["facts"] if whole["facts"][name] != other["facts"].get(name)]
        if changed:
            raise UserError(f"{path} was begun with another {changed[0]} than {paths[0]}: they are two runs")
        whole["records"] = whole["records"] + other["records"]
        whole["sessions"] = [*whole.get("sessions", []), *other.get("sessions", [])]
    seen = {tuple(record[name] for name in key) for record in whole["records"]}
    if len(seen) < len(whole["records"]):
        raise UserError(f"{', '.join(map(str, paths))} hold the same measurements: give each part once")
    return whole


def read(path: Path) -> dict[str, Any]:
    """A results file, for reports.

    Raises:
        UserError: not there, or not one.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] == _FORMAT and isinstance(value["records"], list):
            return dict(value)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(f"{path} is not a results file")
