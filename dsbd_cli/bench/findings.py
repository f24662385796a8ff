"""What a run's numbers say, as sentences of the report."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from dsbd_cli.bench.table import interval

Run = Mapping[str, Any]


def findings(run: Run) -> str:
    """What the numbers say, as sentences; only what an interval backs is called a difference."""
    base = run["baseline"]
    lines = [
        f"<li>{_finding(name, arm, base)}.</li>"
        for name, arm in run["arms"].items()
        if name != base
        and arm["against_baseline"]
        and not arm["swept"]
        and not arm["method"].startswith("hf-")
    ]
    if best := _best_swept(run):
        lines.append(best)
    few = run["data"]["items"] < 30
    caution = "<p>With so few items the intervals are wide: take this as a demonstration.</p>" if few else ""
    return f"<h2>In short</h2><ul>{''.join(lines)}</ul>{caution}" if lines else caution


def _finding(name: str, arm: Run, base: str) -> str:
    against = arm["against_baseline"]
    parts = []
    if against["speed"]["value"] is not None:
        parts.append(
            f"{interval(against['speed'], 2)} times the tokens/s of {escape(base)}{_doubt(against['speed'], 1)}"
        )
    for key, words in (("logprob", "log-prob per token"), ("score", "score")):
        entry = against[key]
        if entry["value"] is None:
            continue
        if entry["value"] == entry["low"] == entry["high"] == 0:
            parts.append(f"same {words} on every item")
        else:
            parts.append(f"{words} {_signed(entry)}{_doubt(entry, 0)}")
    if against["joules_per_token"]["value"] is not None:
        parts.append(f"{interval(against['joules_per_token'], 2)} times its joules per token")
    return f"<b>{escape(name)}</b>: " + "; ".join(parts)


def _signed(entry: Mapping[str, Any]) -> str:
    text = f"{entry['value']:+.3f}"
    return text if entry["low"] is None else f"{text} [{entry['low']:+.3f}, {entry['high']:+.3f}]"


def _doubt(entry: Mapping[str, Any], null: float) -> str:
    """A remark where the interval holds "no difference", or is not known."""
    if entry["low"] is None:
        return " (one item: no interval)"
    return " (no clear difference)" if entry["low"] <= null <= entry["high"] else ""


def _best_swept(run: Run) -> str | None:
    """The fastest of the swept DSBD arms that are at least as good as the baseline."""
    arms = [
        (name, arm)
        for name, arm in run["arms"].items()
        if arm["method"].startswith("dsbd") and arm["swept"] and arm["against_baseline"]
    ]
    good = [
        (arm["against_baseline"]["speed"]["value"], name, arm)
        for name, arm in arms
        if arm["against_baseline"]["speed"]["value"] is not None
        and _not_below(arm["against_baseline"]["logprob"])
        and _not_below(arm["against_baseline"]["score"])
    ]
    if not good:
        return (
            f"<li>None of the {len(arms)} swept DSBD arms has at least the baseline's quality.</li>"
            if arms
            else None
        )
    _, name, arm = max(good, key=lambda entry: entry[0])
    return (
        f"<li>Fastest of the {len(good)} (of {len(arms)}) swept DSBD arms whose log-prob and score are at least the "
        f"baseline's: {_finding(name, arm, run['baseline'])}. It was picked on these very items, which flatters "
        "it.</li>"
    )


def _not_below(entry: Mapping[str, Any]) -> bool:
    """At least as good, rounding aside; where there is no score there is nothing to fall below."""
    return entry["value"] is None or entry["value"] >= -1e-4
