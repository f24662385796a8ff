"""Data sets of the Hugging Face hub: `--data-dir hub`, or `hub:OWNER/NAME`; fetched once, then cached."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets import mt_bench, sample, squad
from dsbd_cli.bench.datasets.records import Dataset
from dsbd_cli.errors import UserError

# Data set -> (repository, split) whose rows are known here.
KNOWN = {"squad": ("rajpurkar/squad", "validation"), "mt-bench": ("HuggingFaceH4/mt_bench_prompts", "train")}


def repository(data_dir: Path | None) -> str | None:
    """What `--data-dir` names on the hub: '' for the known one; None if it names a folder."""
    text = "" if data_dir is None else str(data_dir)
    if text == "hub" and not Path(text).is_dir():
        return ""
    return text[4:] if text.startswith("hub:") else None


def load(kind: str, name: str, cache: Path) -> Dataset:
    """The data set from the hub, or from the cache if it was fetched before.

    Raises:
        UserError: no such copy that can be scored, the `datasets` package is missing, or no hub answers.
    """
    from dsbd_cli.loading.cache import build_once

    if kind not in KNOWN:
        raise UserError(
            f"{kind} cannot come from the hub: its copies there hold no databases to run queries on; "
            "unpack the official archive and give --data-dir FOLDER"
        )
    repo, split = (name or KNOWN[kind][0]), KNOWN[kind][1]
    build = _build(kind, repo, split)
    folder = build_once(cache / "data" / f"{kind}-{re.sub(r'[^A-Za-z0-9.-]+', '-', repo)}", build, what=repo)
    label = f"{'SQuAD' if kind == 'squad' else 'MT-Bench'} from hub {repo}"
    return (squad if kind == "squad" else mt_bench).load(folder, label=label)


def _build(kind: str, repo: str, split: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        rows = _rows(repo, split)
        if kind == "squad":
            _write(folder / "dev.jsonl", ({key: row.get(key) for key in _SQUAD} for row in rows))
            return
        _write(folder / "question.jsonl", map(_question, rows))
        # The hub's copy holds no judge templates: those of this project.
        shutil.copyfile(sample.source() / "mt_bench" / "judge_prompts.jsonl", folder / "judge_prompts.jsonl")
        references = [row for row in rows if row.get("reference")]
        (folder / "reference_answer").mkdir()
        _write(folder / "reference_answer" / "hub.jsonl", map(_reference, references))

    return build


_SQUAD = ("id", "title", "context", "question", "answers")


def _question(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "question_id": row.get("prompt_id"),
        "category": row.get("category"),
        "turns": list(row.get("prompt") or []),
    }


def _reference(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question_id": row.get("prompt_id"), "choices": [{"turns": list(row["reference"])}]}


def _rows(repo: str, split: str) -> list[Mapping[str, Any]]:
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UserError("data from the hub needs the datasets package: pip install datasets") from None
    try:
        return list(datasets.load_dataset(repo, split=split))
    except Exception as error:  # the library, the hub client and the network raise many kinds
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{repo} cannot be fetched from the hub: {first[0]}") from None


def _write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
