"""Reading data files: every fault is one line that names file, place and what is wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.paths import refuse_special
from dsbd_cli.settings import broken

_LFS = b"version https://git-lfs"


def read_text(path: Path) -> str:
    """A UTF-8 file's text (a BOM is dropped)."""
    refuse_special(path, str(path), "name a file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if raw.startswith(_LFS):
        raise UserError(f"{path}: a Git LFS pointer, not the data: fetch the real file (git lfs pull)")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start})") from None


def read_json(path: Path) -> Any:
    """One JSON document."""
    return _parsed(read_text(path), str(path), lines=True)


def read_jsonl(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, object) of each non-empty line."""
    records = []
    # Not splitlines: a text may hold characters that it takes for line ends.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        record = _parsed(line, f"{path}: line {number}")
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number}: must be an object, not {type(record).__name__}")
        records.append((number, record))
    return records


def _parsed(text: str, where: str, *, lines: bool = False) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        line = f" line {error.lineno}:" if lines else ""
        raise UserError(f"{where}:{line} not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets too deep
        raise UserError(f"{where}: not JSON that can be read ({error})") from None
    # Only an escape can bring one into UTF-8 text.
    if "\\ud" in text.lower() and broken(json.dumps(value, ensure_ascii=False)):
        raise UserError(f"{where}: holds half a surrogate pair, which is no text: mend its encoding")
    return value


def text_of(record: Mapping[str, Any], key: str, where: str) -> str:
    """A field that must be a non-empty text."""
    value = record.get(key)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {key!r} must be a text that is not empty")
    return value


def unique(ids: list[str], path: Path) -> None:
    """Refuse two items of one id: their results could not be told apart."""
    seen: set[str] = set()
    for name in ids:
        if name in seen:
            raise UserError(f"{path}: id {name!r} appears twice")
        seen.add(name)


def folder_of(data_dir: Path, *names: str) -> Path:
    """The data set's own folder: `data_dir/NAME` if there is one, else `data_dir` itself."""
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: no such folder (--data-dir)")
    return next((data_dir / name for name in names if (data_dir / name).is_dir()), data_dir)
