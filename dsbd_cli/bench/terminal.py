"""The end of a bench at a terminal: the tables in its width, and where the rest is."""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.bench import tables
from dsbd_cli.bench.table import Table
from dsbd_cli.counted import counted
from dsbd_cli.wording import said


def text_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Plain text columns, as wide as they need; the first to the left, the rest to the right."""
    widths = [max(len(line[i]) for line in [list(names), *map(list, rows)]) for i in range(len(names))]

    def line(cells: Sequence[str]) -> str:
        first = cells[0].ljust(widths[0])
        return "  ".join([first, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]).rstrip()

    return "\n".join([line(names), "  ".join("-" * width for width in widths), *map(line, rows)])


def fitting_table(names: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """`text_table` in `width` columns: without intervals, then in blocks below each other, if need be."""
    table = text_table(names, rows)
    if width is None or _breadth(table) <= width:
        return table
    short = [[cells[0], *(_INTERVAL.sub("", cell) for cell in cells[1:])] for cells in rows]
    blocks: list[list[int]] = []
    for column in range(1, len(names)):
        wider = [*(blocks[-1] if blocks else []), column]
        if blocks and _breadth(text_table(*_picked(names, short, wider))) <= width:
            blocks[-1] = wider
        else:
            blocks.append([column])
    return "\n\n".join(text_table(*_picked(names, short, block)) for block in blocks)


_INTERVAL = re.compile(r" \[[^]]*\]")


def _picked(
    names: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    """The first column and these."""
    keep = [0, *columns]
    return [names[i] for i in keep], [[cells[i] for i in keep] for cells in rows]


def _breadth(table: str) -> int:
    return max(map(len, table.split("\n")))


def in_width(text: str, width: int | None) -> str:
    """Words in lines of `width`; None for a pipe, whose reader does its own wrapping."""
    if width is None:
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def summary_text(folder: Path, width: int | None = None) -> str:
    """The end of a bench on stdout: what was run, the table, and where the rest is.

    Args:
        width: columns of the terminal; None for a pipe.
    """
    out = io.StringIO()
    document = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for run in document["runs"]:
        data = run["data"]
        out.write(
            "\n"
            + in_width(f"{run['name']}: {data['label']}, {counted(data['items'], 'item')} asked", width)
            + "\n"
        )
        out.write(in_width(models_line(run), width) + "\n")
        score = f"score = {run['primary'][1]}; " if has_scores(run) else ""
        out.write(in_width(score + energy_line(run), width) + "\n")
        if run["batch"]:
            out.write(in_width(batch_line(run), width) + "\n")
        for warning in run["warnings"]:
            out.write(in_width(f"note: {said(warning)}", width) + "\n")
        for table in (tables.results(run), tables.turns(run), tables.outcomes(run)):
            if table.rows:
                out.write("\n" + table_text(table, width) + "\n")
        if run["baseline"]:
            out.write("\n" + in_width(_legend(tables.results(run)), width) + "\n")
    out.write(f"\nreport: {folder / 'report.html'}\n")
    return out.getvalue()


def _legend(results: Table) -> str:
    """What the columns beside the speeds say, which a head of two words cannot; the report explains all of them."""
    told = [
        f"{column.head}: {column.meaning}" for column in results.columns if column.head.startswith("x base")
    ]
    return f"{'; '.join(told)}. The report says what every column means."


def table_text(table: Table, width: int | None) -> str:
    return fitting_table(table.heads, table.texts(), width)


def models_line(run: Mapping[str, Any]) -> str:
    """Target and draft with dtype, device and seed."""
    parts = []
    for role in ("target", "draft"):
        model = run["models"].get(role)
        parts.append(f"{role} {'none' if model is None else model['name'] + ' ' + model['dtype']}")
    session = run["sessions"][-1]
    devices = ", ".join(f"{key}: {value}" for key, value in session["devices"].items())
    return f"{', '.join(parts)}; {devices}; seed {run['seed']}"


def batch_line(run: Mapping[str, Any]) -> str:
    """How many answers shared their forwards, and what figures then are."""
    sizes = " or ".join(map(str, run["batch"]["at_a_time"]))
    processes = max(session.get("processes", 1) for session in run["sessions"])
    each = f", of each of {processes} processes" if processes > 1 else ""
    return (
        f"throughput: up to {sizes} answers shared their forwards; speed and energy are those of whole windows of "
        f"answers, prefill included{each}"
    )


def has_scores(run: Mapping[str, Any]) -> bool:
    """Whether any answer has a score; none has where there are no references, and no judge."""
    return any(arm["score"]["value"] is not None for arm in run["arms"].values())


def energy_line(run: Mapping[str, Any]) -> str:
    """How energy was measured, or why not."""
    energy = run.get("energy") or {}
    return f"energy: {energy.get('source') or 'n/a (' + str(energy.get('reason')) + ')'}"
