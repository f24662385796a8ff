"""The built-in samples: small data in the official layouts, written for this project."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from importlib import resources
from pathlib import Path

from dsbd_cli.bench.datasets import mt_bench, spider, squad
from dsbd_cli.bench.datasets.records import Dataset

_FOLDERS = {"spider": "spider", "squad": "squad", "mt-bench": "mt_bench"}
_LABELS = {
    "spider": "built-in sample in Spider's layout ({} questions, not the benchmark)",
    "squad": "built-in sample in SQuAD's layout ({} questions, not the benchmark)",
    "mt-bench": "built-in sample in MT-Bench's layout ({} questions, not the benchmark)",
}


def load(kind: str, build_dir: Path) -> Dataset:
    """The sample of one data set. Spider's databases are built from SQL text into `build_dir`."""
    folder = source() / _FOLDERS[kind]
    if kind == "spider":
        folder = build_spider(build_dir)
        dataset = spider.load(folder, label="", builtin=True)
    else:
        dataset = (squad if kind == "squad" else mt_bench).load(folder, label="", builtin=True)
    label = _LABELS[kind].format(dataset.total)
    return Dataset(**{**vars(dataset), "label": label, "source": "built in"})


def source() -> Path:
    """The folder of the samples inside the package."""
    return Path(str(resources.files("dsbd_cli"))) / "assets" / "samples"


def sample_folder() -> Path:
    """Where the sample's databases are built: in the cache, under a name that changes with their text."""
    from dsbd_cli.loading.cache import cache_root

    texts = [path.read_bytes() for path in sorted((source() / "spider").rglob("*")) if path.is_file()]
    return cache_root() / f"sample-{hashlib.sha256(b''.join(texts)).hexdigest()[:12]}"


def build_spider(build_dir: Path) -> Path:
    """The Spider sample with its databases built; whole or not there, whoever else builds it too."""
    from dsbd_cli.loading.cache import build_once

    return build_once(build_dir / "spider", _build_spider, what="the sample's databases")


def _build_spider(folder: Path) -> None:
    for name in ("dev.json", "tables.json"):
        shutil.copyfile(source() / "spider" / name, folder / name)
    for script in sorted((source() / "spider" / "database").glob("*/schema.sql")):
        db_id = script.parent.name
        (folder / "database" / db_id).mkdir(parents=True)
        connection = sqlite3.connect(folder / "database" / db_id / f"{db_id}.sqlite")
        connection.executescript(script.read_text(encoding="utf-8"))
        connection.commit()
        connection.close()
