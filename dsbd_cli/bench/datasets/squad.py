"""SQuAD in the official layouts: v1.1 / v2.0 JSON, or JSONL with one question a line (Rajpurkar et al.)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets.files import folder_of, read_json, read_jsonl, text_of
from dsbd_cli.bench.datasets.records import Dataset, SquadItem, made
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError

FILES = ("dev-v1.1.json", "dev-v2.0.json", "dev.jsonl", "dev.json", "validation.jsonl")
TRAINING = ("train-v1.1.json", "train-v2.0.json", "train.jsonl", "train.json")


def load(data_dir: Path, *, label: str | None = None, builtin: bool = False) -> Dataset:
    """The dev questions that have reference answers; those without are counted, never scored as 0.

    Raises:
        UserError: no file of a known name, a broken file, an entry without its fields, nothing usable.
    """
    folder = folder_of(data_dir, "squad")
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder}: none of {', '.join(FILES)} is there (SQuAD)")
    items, skipped = _items(path)
    return made(
        "squad",
        items,
        label or f"SQuAD {path.name}, {counted(len(items), 'question')}",
        path,
        empty=f"{path}: no question with reference answers",
        builtin=builtin,
        skipped=dict(skipped),
    )


def training(data_dir: Path) -> tuple[list[SquadItem], Path] | None:
    """The training questions beside the dev set and the file they are in; None where there is none.

    Raises:
        UserError: a broken file.
    """
    folder = folder_of(data_dir, "squad")
    path = next((folder / name for name in TRAINING if (folder / name).is_file()), None)
    return None if path is None else (_items(path)[0], path)


def _items(path: Path) -> tuple[list[SquadItem], Counter[str]]:
    """The questions with reference answers, and why others are left out."""
    items: list[SquadItem] = []
    skipped: Counter[str] = Counter()
    for where, title, context, entry in _lines(path) if path.suffix == ".jsonl" else _articles(path):
        references = _references(entry, where)
        if not references:
            skipped["unanswerable (v2.0)" if entry.get("is_impossible") else "no reference answers"] += 1
            continue
        question = text_of(entry, "question", where)
        items.append(SquadItem(text_of(entry, "id", where), context, question, references, title))
    return items, skipped


Entry = tuple[str, str, str, Mapping[str, Any]]


def _articles(path: Path) -> Iterator[Entry]:
    """(where, title, context, question entry) of the official nested layout."""
    document = read_json(path)
    if not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise UserError(f"{path}: must be an object with a list 'data' (SQuAD v1.1 or v2.0)")
    for a, article in enumerate(document["data"]):
        title = _title(article)
        for p, paragraph in enumerate(_list(article, "paragraphs", f"{path}: article {a}")):
            where = f"{path}: article {a}, paragraph {p}"
            if not isinstance(paragraph, dict):
                raise UserError(f"{where}: must be an object")
            context = text_of(paragraph, "context", where)
            for q, entry in enumerate(_list(paragraph, "qas", where)):
                if not isinstance(entry, dict):
                    raise UserError(f"{where}, question {q}: must be an object")
                yield f"{where}, question {q}", title, context, entry


def _lines(path: Path) -> Iterator[Entry]:
    for number, record in read_jsonl(path):
        where = f"{path}: line {number}"
        yield where, _title(record), text_of(record, "context", where), record


def _title(record: Any) -> str:
    value = record.get("title") if isinstance(record, dict) else None
    return value if isinstance(value, str) else ""


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
