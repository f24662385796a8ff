"""Numbers as text: cells of the end table and of the report, and the table itself."""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NA = "n/a"

# (heading, what it means); the cells come from `row`.
COLUMNS = (
    ("arm", "method, and what a sweep changed"),
    ("score", "mean over items with its 95 % interval (for SQuAD F1 beside it)"),
    ("log-prob", "mean raw target log-probability per token of the answers"),
    ("tok/s", "tokens of the returned answers over seconds of decoding, prefill left out"),
    ("x base", "tokens per second over the baseline's, paired by item, with its 95 % interval"),
    ("J/token", "joules per token of the whole call, prefill included"),
    ("layers/call", "committed layers per target call"),
    ("accepted", "drafts accepted of those examined"),
    ("width", "mean draws per layer (distinct sequences)"),
)


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, never an exponent for ordinary sizes; n/a for None."""
    if value is None:
        return NA
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if size >= 1e-3 else f"{value:.1e}"


def fixed(value: float | None, places: int = 3) -> str:
    """Fixed decimals; n/a for None."""
    return NA if value is None else f"{value:.{places}f}"


def interval(estimate: Mapping[str, Any] | None, places: int | None = None) -> str:
    """`value [low, high]`; the interval is left out where it is unknown."""
    if estimate is None or estimate["value"] is None:
        return NA
    show = number if places is None else lambda value: fixed(value, places)
    text = show(estimate["value"])
    if estimate["low"] is None:
        return text
    return f"{text} [{show(estimate['low'])}, {show(estimate['high'])}]"


def size(count: float | None) -> str:
    """Bytes with a binary unit."""
    if count is None:
        return NA
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def headings(summary: Mapping[str, Any]) -> list[str]:
    """Column headings for a run: SQuAD-like data have F1 beside the score."""
    names = [heading for heading, _ in COLUMNS]
    return [*names[:2], "F1", *names[2:]] if _has_f1(summary) else names


def _has_f1(summary: Mapping[str, Any]) -> bool:
    return any(arm["f1"] and arm["f1"]["value"] is not None for arm in summary["arms"].values())


def row(name: str, arm: Mapping[str, Any], summary: Mapping[str, Any]) -> list[str]:
    """The cells of one arm, in the order of `headings`."""
    against = arm["against_baseline"]
    base = summary["baseline"] == name
    width = arm["mean_width"]
    return [
        name,
        interval(arm["score"], 2 if summary["primary"][0] == "rating" else 3),
        *([interval(arm["f1"], 3)] if _has_f1(summary) else []),
        fixed(arm["logprob_per_token"]["value"]),
        interval(arm["tokens_per_s"]),
        "1 (base)" if base else interval(against["speed"], 2) if against else NA,
        number(arm["joules_per_token"]["value"]),
        fixed(arm["layers_per_target_call"], 2),
        NA if arm["acceptance_rate"] is None else f"{100 * arm['acceptance_rate']:.0f} %",
        NA if width is None else f"{width:.2f} ({arm['mean_distinct_width']:.2f})",
    ]


def outcome_rows(summary: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows) that tell what became of the answers; empty where nothing is scored by rule."""
    arms = {name: arm["outcomes"] for name, arm in summary["arms"].items() if arm["outcomes"]}
    order = ("correct", "wrong", "no_sql", "cut", "error", "timeout", "too_large", "data_fault",
             "rated", "rating missing", "unscored")  # fmt: skip
    seen = [name for name in order if any(name in counts for counts in arms.values())]
    names = {
        "no_sql": "no SQL found",
        "cut": "cut by limit",
        "too_large": "too large",
        "data_fault": "data fault",
    }
    rows = [[name, *(str(counts.get(key, 0)) for key in seen)] for name, counts in arms.items()]
    return ["arm", *(names.get(key, key) for key in seen)], rows


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


def summary_text(folder: Path, width: int | None = None) -> str:
    """The end of a bench on stdout: what was run, the table, and where the rest is.

    Args:
        width: columns of the terminal; None for a pipe, whose reader does its own wrapping.
    """

    def words(text: str) -> str:
        return (
            text
            if width is None
            else textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
        )

    out = io.StringIO()
    document = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    for run in document["runs"]:
        data = run["data"]
        out.write("\n" + words(f"{run['name']}: {data['label']}, {data['items']} items asked") + "\n")
        out.write(words(models_line(run)) + "\n")
        out.write(words(f"score = {run['primary'][1]}; {energy_line(run)}") + "\n\n")
        rows = [row(name, arm, run) for name, arm in run["arms"].items()]
        out.write(fitting_table(headings(run), rows, width) + "\n")
        names, counts = outcome_rows(run)
        if counts and len(names) > 2:
            out.write("\n" + fitting_table(names, counts, width) + "\n")
    out.write(f"\nreport: {folder / 'report.html'}\n")
    return out.getvalue()


def models_line(run: Mapping[str, Any]) -> str:
    """Target and draft with dtype, device and seed."""
    parts = []
    for role in ("target", "draft"):
        model = run["models"].get(role)
        parts.append(f"{role} {'none' if model is None else model['name'] + ' ' + model['dtype']}")
    session = run["sessions"][-1]
    devices = ", ".join(f"{key}: {value}" for key, value in session["devices"].items())
    return f"{', '.join(parts)}; {devices}; seed {run['seed']}"


def energy_line(run: Mapping[str, Any]) -> str:
    """How energy was measured, or why not."""
    energy = run.get("energy") or {}
    return f"energy: {energy.get('source') or 'n/a (' + str(energy.get('reason')) + ')'}"
