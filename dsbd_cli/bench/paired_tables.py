"""Paired comparisons as a table: who is against whom, by how much, and whether that is more than chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsbd_cli.bench.cells import NA, interval
from dsbd_cli.bench.fronts import shown_arms
from dsbd_cli.bench.stats import MOST_NEEDED
from dsbd_cli.bench.table import Column, Table

Run = Mapping[str, Any]


def comparisons(run: Run, every: bool = True) -> Table:
    """The paired comparisons: against Hugging Face's beams first, then against the baseline.

    Args:
        every: with the swept arms that others beat.
    """
    found = [(entry["arm"], entry["base"], entry) for entry in run["against_hf"]]
    known = {(arm, base) for arm, base, _ in found}
    arms = run["arms"] if every else shown_arms(run)
    found += [
        (name, run["baseline"], arm["against_baseline"])
        for name, arm in arms.items()
        if arm["against_baseline"] and name != run["baseline"] and (name, run["baseline"]) not in known
    ]
    table = paired_table(found, run["primary"][1])
    left = len(run["arms"]) - len(arms)
    more = f" {left} swept arms that others beat are in the exported table only." if left else ""
    return replace(table, note=table.note + more)


def paired_table(found: Sequence[tuple[str, str, Mapping[str, Any]]], score: str) -> Table:
    """A row for each measure of each (arm, against, comparison); `score` = how the score is called."""
    measures = (("speed", "x tokens/s", None), ("joules_per_token", "x J/token", None), ("score", score, 3),
                ("f1", "F1", 3), ("logprob", "log-prob, nats/token", 3))  # fmt: skip
    columns = [
        Column("arm", "arm"),
        Column("against", "against"),
        Column("measure", "measure"),
        Column("difference", "ratio or difference", _difference, True),
        Column("items", "n"),
        Column("p", "p", p_value),
        Column("needed", "n needed", needed),
    ]
    rows = [
        [arm, base, words, {**entry[key], "places": places}, entry[key]["items"], entry[key]["p"],
         entry[key]["needed"]]
        for arm, base, entry in found
        for key, words, places in measures
        if entry[key]["value"] is not None
    ]  # fmt: skip
    note = (
        "Pairs of answers to the same item; a ratio is the median of the items' ratios, a difference the mean of "
        "their differences. p: Wilcoxon's signed-rank test, McNemar's exact test for yes/no scores, not adjusted "
        "for the number of rows. n needed: items that would show the difference found, if it is the true one, in "
        "80 of 100 such runs (paired t-test at 5 %)."
    )
    return Table("comparisons", "Paired comparisons", columns, rows, note)


def _difference(entry: Mapping[str, Any]) -> str:
    """A ratio, or with its places a difference and its sign."""
    return interval(entry, 2) if entry["places"] is None else signed(entry, entry["places"])


def signed(entry: Mapping[str, Any] | None, places: int) -> str:
    """A difference with its sign, and its interval."""
    if entry is None or entry["value"] is None:
        return NA
    text = f"{entry['value']:+.{places}f}"
    if entry["low"] is None:
        return text
    return f"{text} [{entry['low']:+.{places}f}, {entry['high']:+.{places}f}]"


def p_value(value: float | None) -> str:
    return NA if value is None else "<0.001" if value < 0.001 else f"{value:.3f}"


def needed(count: int | None) -> str:
    return NA if count is None else "over a million" if count >= MOST_NEEDED else f"{count:,}"
