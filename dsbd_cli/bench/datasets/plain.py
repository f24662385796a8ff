"""A user's own file: .txt, a prompt a line, or .jsonl of `prompt` (text or messages), `references` and `id`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets.files import read_jsonl, read_text
from dsbd_cli.bench.datasets.records import Dataset, PlainItem, made
from dsbd_cli.bench.scoring.squad import is_prose
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.messages import question_of


def load(path: Path) -> Dataset:
    """All lines of the file.

    Raises:
        UserError: a broken line, an unknown key, a prompt or references of the wrong form.
    """
    items = []
    for number, record in _lines_of(path) if path.suffix == ".txt" else read_jsonl(path):
        where = f"{path}: line {number}"
        unknown = sorted(set(record) - {"id", "prompt", "messages", "references"})
        if unknown:
            raise UserError(f"{where}: unknown key {unknown[0]!r} (known: id, prompt, messages, references)")
        name = str(record.get("id", f"line-{number}"))
        items.append(PlainItem(name, question_of(record, where), _texts(record.get("references"), where)))
    # Where most references are prose no answer ever matches one exactly: shared words are what can be counted.
    known = [all(map(is_prose, item.references)) for item in items if item.references]
    kind = "prose" if 2 * sum(known) > len(known) else "jsonl"
    return made(
        kind, items, f"{path.name}, {counted(len(items), 'prompt')}", path, empty=f"{path}: no prompts"
    )


def _lines_of(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, record) of a text file's lines; empty ones ask nothing."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            yield number, {"prompt": line.removesuffix("\r")}


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if texts == []:
        raise UserError(f"{where}: 'references' is an empty list: give at least one text, or leave it out")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: 'references' must be a text or a list of texts, or be left out")
    return tuple(texts)
