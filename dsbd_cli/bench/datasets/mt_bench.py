"""MT-Bench in the official layout: question.jsonl, reference_answer/*.jsonl, judge_prompts.jsonl (Zheng et al.)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets.files import folder_of, read_jsonl, text_of
from dsbd_cli.bench.datasets.records import Dataset, MtBenchItem, made
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError

# Template names of the official file, by (has references, second turn).
PROMPTS = {
    (False, False): "single-v1",
    (True, False): "single-math-v1",
    (False, True): "single-v1-multi-turn",
    (True, True): "single-math-v1-multi-turn",
}


def load(data_dir: Path, *, label: str | None = None, builtin: bool = False) -> Dataset:
    """The questions with the judge's references and prompt templates.

    Raises:
        UserError: a missing or broken file, an entry without its fields.
    """
    folder = folder_of(data_dir, "mt_bench", "mt-bench")
    path = folder / "question.jsonl"
    if not path.is_file():
        raise UserError(f"{folder}: no question.jsonl (MT-Bench)")
    references = _references(folder)
    items = []
    for number, record in read_jsonl(path):
        where = f"{path}: line {number}"
        turns = record.get("turns")
        if (
            not isinstance(turns, list)
            or not turns
            or not all(isinstance(t, str) and t.strip() for t in turns)
        ):
            raise UserError(f"{where}: 'turns' must be a list of texts")
        if "question_id" not in record:
            raise UserError(f"{where}: no 'question_id'")
        name = str(record["question_id"])
        given = references.get(name, ())
        items.append(MtBenchItem(name, text_of(record, "category", where), tuple(turns), given))
    return made(
        "mt-bench",
        items,
        label or f"MT-Bench, {counted(len(items), 'question')}",
        path,
        empty=f"{path}: no questions",
        source=folder,
        builtin=builtin,
        extras={"judge_prompts": judge_prompts(folder / "judge_prompts.jsonl")},
    )


def judge_prompts(path: Path) -> dict[str, dict[str, str]]:
    """name -> {system, template} of the four single-answer templates; empty if the file is not there."""
    if not path.is_file():
        return {}
    found: dict[str, dict[str, str]] = {}
    for number, record in read_jsonl(path):
        if record.get("name") in PROMPTS.values():
            where = f"{path}: line {number}"
            found[record["name"]] = {
                "system": str(record.get("system_prompt") or ""),
                "template": text_of(record, "prompt_template", where),
            }
    missing = [name for name in PROMPTS.values() if name not in found]
    if missing:
        raise UserError(f"{path}: no template {', '.join(missing)}")
    return found


def _references(folder: Path) -> dict[str, tuple[str, ...]]:
    """Question id -> reference answers; of several files gpt-4.jsonl, the official one, is taken."""
    files = sorted(
        (folder / "reference_answer").glob("*.jsonl"), key=lambda p: (p.name != "gpt-4.jsonl", p.name)
    )
    if not files:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for number, record in read_jsonl(files[0]):
        try:
            turns: Any = record["choices"][0]["turns"]
            found[str(record["question_id"])] = tuple(str(turn) for turn in turns)
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{files[0]}: line {number}: no choices[0].turns or question_id") from None
    return found
