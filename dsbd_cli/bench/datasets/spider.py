"""Spider in the official layout: `dev.json`, `tables.json`, `database/DB/DB.sqlite` (Yu et al., EMNLP 2018)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets.files import folder_of, read_json, text_of
from dsbd_cli.bench.datasets.records import Dataset, SpiderItem, made
from dsbd_cli.bench.datasets.spider_prompt import Schema
from dsbd_cli.errors import UserError

TRAINING = ("train_spider.json", "train_others.json")

_SQLITE = b"SQLite format 3\0"


def load(data_dir: Path, *, label: str | None = None, builtin: bool = False) -> Dataset:
    """The dev questions whose databases are there.

    Raises:
        UserError: a missing or broken file, an entry without its fields, no usable question.
    """
    folder = folder_of(data_dir, "spider", "spider_data")
    for name in ("dev.json", "tables.json", "database"):
        if not (folder / name).exists():
            raise UserError(
                f"{folder}: no {name}; Spider's layout is dev.json, tables.json, database/DB/DB.sqlite"
            )
    schemas = _schemas(folder / "tables.json")
    dev = folder / "dev.json"
    skipped: Counter[str] = Counter()
    usable: dict[str, bool] = {}

    def there(db_id: str) -> bool:
        if db_id not in usable:
            usable[db_id] = _usable(_database(folder, db_id))
        if not usable[db_id]:
            skipped[f"database {db_id} is not there"] += 1
        return usable[db_id]

    items = list(_items(dev, schemas, there))
    return made(
        "spider",
        items,
        label or f"Spider dev, {len(items)} of {len(items) + skipped.total()} questions",
        dev,
        empty=f"{folder}: no question of dev.json has its database in {folder / 'database'}",
        source=folder,
        builtin=builtin,
        skipped=dict(skipped),
    )


def training(data_dir: Path) -> tuple[list[SpiderItem], Path] | None:
    """The training questions with a schema, and the file they are in; None where there is none.

    Their databases need not be there: worked examples are shown, not run.

    Raises:
        UserError: a broken file.
    """
    folder = folder_of(data_dir, "spider", "spider_data")
    path = next((folder / name for name in TRAINING if (folder / name).is_file()), None)
    if path is None:
        return None
    schemas = _schemas(folder / "tables.json")
    return list(_items(path, schemas, schemas.__contains__)), path


def _items(path: Path, schemas: Mapping[str, Schema], wanted: Callable[[str], bool]) -> Iterator[SpiderItem]:
    """The questions of a file on the wanted databases."""
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path}: must be a list of questions")
    folder = path.parent
    for index, entry in enumerate(entries):
        where = f"{path}: entry {index}"
        if not isinstance(entry, dict):
            raise UserError(f"{where}: must be an object")
        db_id = text_of(entry, "db_id", where)
        if not wanted(db_id):
            continue
        if db_id not in schemas:
            raise UserError(f"{where}: db_id {db_id!r} is not in {folder / 'tables.json'}")
        yield SpiderItem(
            id=f"{index:04d}-{db_id}",
            schema=schemas[db_id],
            question=text_of(entry, "question", where),
            gold=text_of(entry, "query", where),
            database=_database(folder, db_id),
            hardness=entry.get("hardness"),
        )


def _database(folder: Path, db_id: str) -> Path:
    return folder / "database" / db_id / f"{db_id}.sqlite"


def _schemas(path: Path) -> dict[str, Schema]:
    entries = read_json(path)
    if not isinstance(entries, list):
        raise UserError(f"{path}: must be a list of schemas")
    schemas: dict[str, Schema] = {}
    for index, entry in enumerate(entries):
        try:
            schema = Schema.from_official(entry)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise UserError(f"{path}: entry {index}: not a Spider schema ({_fault(error)})") from None
        schemas[schema.db_id] = schema
    return schemas


def _fault(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _usable(database: Path) -> bool:
    """Whether the database file is there; a file that is no database is an error."""
    try:
        with database.open("rb") as stream:
            head: Any = stream.read(len(_SQLITE))
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UserError(f"{database}: cannot be read ({error.strerror})") from None
    if head != _SQLITE:
        raise UserError(f"{database}: not an SQLite database (a Git LFS pointer, or a broken download?)")
    return True
