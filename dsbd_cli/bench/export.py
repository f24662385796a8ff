"""Tables as files for papers and programs: CSV with bare numbers, Markdown, and LaTeX (booktabs)."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.bench.files import Record, write_whole
from dsbd_cli.bench.table import Table
from dsbd_cli.bench.tables import NAMES
from dsbd_cli.paths import make_folder

FOLDER = "tables"
_SUFFIXES = (".csv", ".md", ".tex")
_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
}  # fmt: skip


def to_csv(table: Table) -> str:
    """Bare numbers; an estimate fills four columns: its value, both ends of its interval, its items."""
    heads: list[str] = []
    for column in table.columns:
        ends = [f"{column.key}_low", f"{column.key}_high"] if column.estimate else []
        heads += [column.key, *ends]
    lines = []
    for row in table.rows:
        cells: list[Any] = []
        for column, value in zip(table.columns, row, strict=True):
            if column.estimate:
                entry = value or {}
                cells += [entry.get(name) for name in ("value", "low", "high")]
            else:
                cells.append(value["value"] if isinstance(value, Mapping) else value)
        lines.append(["" if cell is None else cell for cell in cells])
    return _csv([heads, *lines])


def to_markdown(table: Table) -> str:
    """A pipe table with its title and note."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |\n"

    rule = "| " + " | ".join(["---", *["---:"] * (len(table.columns) - 1)]) + " |\n"
    note = f"\n{table.note}\n" if table.note else ""
    return f"### {table.title}\n\n{line(table.heads)}{rule}{''.join(map(line, table.texts()))}{note}"


def to_latex(table: Table) -> str:
    r"""A `table` environment for `\usepackage{booktabs}`."""

    def line(cells: Iterable[str]) -> str:
        return " & ".join(map(latex, cells)) + " \\\\\n"

    kinds = "l" + "r" * (len(table.columns) - 1)
    return (
        "% needs \\usepackage{booktabs}\n\\begin{table}\n\\centering\n"
        f"\\begin{{tabular}}{{{kinds}}}\n\\toprule\n{line(table.heads)}\\midrule\n"
        f"{''.join(map(line, table.texts()))}\\bottomrule\n\\end{{tabular}}\n"
        f"\\caption{{{latex(' '.join(filter(None, (table.title + '.', table.note))))}}}\n\\end{{table}}\n"
    )


def latex(text: str) -> str:
    """Text whose every character means itself."""
    return "".join(_LATEX.get(char, char) for char in _one_line(text))


def write_tables(folder: Path, named: Mapping[str, Sequence[Table]]) -> None:
    """CSV, Markdown and LaTeX of every table, in `folder/tables`.

    Args:
        named: tables of each run; the run's name begins the files' where there are several runs.
    """
    place = folder / FOLDER
    make_folder(place, str(place))
    for old in place.glob("*"):  # of an earlier report, which may have held more tables
        if old.suffix in _SUFFIXES and old.stem.split("-")[-1] in (*NAMES, "items"):
            old.unlink()
    for run, tables in named.items():
        front = f"{file_name(run)}-" if len(named) > 1 else ""
        for table in tables:
            for suffix, form in (("csv", to_csv), ("md", to_markdown), ("tex", to_latex)):
                write_whole(place / f"{front}{table.name}.{suffix}", form(table).encode("utf-8", "replace"))


def file_name(name: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^\w.-]+", "_", name).strip("._") or "run"


def items_csv(results: Sequence[Record]) -> str:
    """One line an answer, so that every figure can be drawn again elsewhere."""
    plain = ("item", "group", "arm", "repeat", "session", "new_tokens", "wall_s", "prefill_s", "decode_s", "energy_j",
             "logprob")  # fmt: skip
    counts = ("layers", "target_calls", "draft_calls", "drafts_examined", "drafts_accepted")
    fields = ("correct", "exact_match", "f1", "rating")
    marks = [mark for mark in fields if any(mark in (r["score"] or {}) for r in results)]
    lines: list[list[Any]] = [[*plain, *counts, *marks, "outcome"]]
    for record in results:
        turns = [turn["stats"] for turn in record["turns"] if turn["stats"]]
        sums = [
            sum(t[name] for t in turns) if turns and all(name in t for t in turns) else None
            for name in counts
        ]
        score = record["score"] or {}
        lines.append(
            [record.get(name) for name in plain] + sums + [score.get(name) for name in (*marks, "outcome")]
        )
    return _csv([["" if cell is None else cell for cell in line] for line in lines])


def _csv(lines: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def _one_line(text: str) -> str:
    return " ".join(text.split())
