"""SQuAD in the official layouts: v1.1 / v2.0 JSON, or JSONL with one question a line (Rajpurkar et al.)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets.files import folder_of, read_json, read_jsonl, text_of, unique
from dsbd_cli.bench.datasets.records import Dataset, SquadItem
from dsbd_cli.bench.datasets.squad_prompt import build_messages, build_prompt
from dsbd_cli.errors import UserError

__all__ = ["build_messages", "build_prompt", "load"]

FILES = ("dev-v1.1.json", "dev-v2.0.json", "dev.jsonl", "dev.json", "validation.jsonl")


def load(data_dir: Path, *, label: str | None = None, builtin: bool = False) -> Dataset:
    """The dev questions that have reference answers; those without are counted, never scored as 0.

    Raises:
        UserError: no file of a known name, a broken file, an entry without its fields, nothing usable.
    """
    folder = folder_of(data_dir, "squad")
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder}: none of {', '.join(FILES)} is there (SQuAD)")
    raw = list(_lines(path) if path.suffix == ".jsonl" else _articles(path))
    items: list[SquadItem] = []
    skipped: Counter[str] = Counter()
    for where, context, entry in raw:
        references = _references(entry, where)
        if not references:
            skipped["unanswerable (v2.0)" if entry.get("is_impossible") else "no reference answers"] += 1
            continue
        question = text_of(entry, "question", where)
        items.append(SquadItem(text_of(entry, "id", where), context, question, references))
    if not items:
        raise UserError(f"{path}: no question with reference answers")
    unique([item.id for item in items], path)
    return Dataset(
        kind="squad",
        label=label or f"SQuAD {path.name}, {len(items)} questions",
        builtin=builtin,
        source=str(path),
        items=tuple(items),
        total=len(items),
        skipped=dict(skipped),
    )


def _articles(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(where, context, question entry) of the official nested layout."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise UserError(f"{path}: must be an object with a list 'data' (SQuAD v1.1 or v2.0)")
    for a, article in enumerate(document["data"]):
        for p, paragraph in enumerate(_list(article, "paragraphs", f"{path}: article {a}")):
            where = f"{path}: article {a}, paragraph {p}"
            if not isinstance(paragraph, dict):
                raise UserError(f"{where}: must be an object")
            context = text_of(paragraph, "context", where)
            for q, entry in enumerate(_list(paragraph, "qas", where)):
                if not isinstance(entry, dict):
                    raise UserError(f"{where}, question {q}: must be an object")
                yield f"{where}, question {q}", context, entry


def _lines(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for number, record in read_jsonl(path):
        where = f"{path}: line {number}"
        yield where, text_of(record, "context", where), record


def _list(record: Any, key: str, where: str) -> list[Any]:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, list):
        raise UserError(f"{where}: {key!r} must be a list")
    return value


def _references(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Distinct references in order: `[{text, ...}]` or `{text: [...]}`; empty texts are none."""
    answers = entry.get("answers")
    if isinstance(answers, dict):
        texts = answers.get("text")
    elif isinstance(answers, list):
        texts = [answer.get("text") if isinstance(answer, dict) else None for answer in answers]
    else:
        texts = None if answers is not None else []
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: 'answers' must hold texts")
    return tuple(dict.fromkeys(text for text in texts if text.strip()))
