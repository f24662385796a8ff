"""The built-in samples: small data in the official layouts, written for this project."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
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


def build_spider(build_dir: Path) -> Path:
    """The Spider sample with its databases built; complete or not there, whoever else builds it too."""
    final = build_dir / "spider"
    if final.is_dir():
        return final
    build_dir.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".spider-", dir=build_dir))
    try:
        for name in ("dev.json", "tables.json"):
            shutil.copyfile(source() / "spider" / name, part / name)
        for script in sorted((source() / "spider" / "database").glob("*/schema.sql")):
            db_id = script.parent.name
            (part / "database" / db_id).mkdir(parents=True)
            connection = sqlite3.connect(part / "database" / db_id / f"{db_id}.sqlite")
            connection.executescript(script.read_text(encoding="utf-8"))
            connection.commit()
            connection.close()
        part.chmod(0o755)
        try:
            os.replace(part, final)
        except OSError:
            if not final.is_dir():  # another process was first: its copy is the same
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return final
