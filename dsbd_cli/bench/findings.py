"""What a run's numbers say, as sentences: first what a reader came for, quality as plainly as speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from typing import Any

from dsbd_cli.bench.cells import fixed
from dsbd_cli.bench.paired_tables import needed
from dsbd_cli.bench.stats import FEWEST, MOST_NEEDED

Run = Mapping[str, Any]
Show = Callable[..., str]
NAMES = {"hf-beam-sample": "Hugging Face's sampled beams", "hf-beam-search": "Hugging Face's beam search"}


def findings(run: Run) -> str:
    """The section "In short"; only what an interval backs is called a difference."""
    base = run["baseline"]
    lines = [f"<li>{line}</li>" for line in _against_hf(run)]
    lines += [
        f"<li>{sentence(name, base, arm['against_baseline'], run)}</li>"
        for name, arm in run["arms"].items()
        if name != base
        and arm["against_baseline"]
        and not arm["swept"]
        and not arm["method"].startswith("hf-")
    ]
    if best := _best_swept(run):
        lines.append(f"<li>{best}</li>")
    many = len(lines) > 4
    caution = (
        "<p>Each interval is for itself: of twenty differences that do not exist, about one looks clear.</p>"
        if many
        else ""
    )
    return f"<h2>In short</h2><ul class='short'>{''.join(lines)}</ul>{caution}"


def _against_hf(run: Run) -> list[str]:
    """DSBD against what people would use instead; or how to come by it."""
    if run["against_hf"]:
        # Variants of dsbd stand in the table of comparisons.
        first = run["against_hf"][0]["arm"]
        return [
            sentence(entry["arm"], entry["base"], entry, run, NAMES.get(entry["base"]))
            for entry in run["against_hf"]
            if entry["arm"] == first
        ]
    if not any(arm["method"].startswith("dsbd") for arm in run["arms"].values()):
        return []
    return [
        "Hugging Face's beams were not run here, so nothing is said against them: add <code>hf-beam-sample</code> or "
        "<code>hf-beam-search</code> to <code>--methods</code>, and the same command adds them to this run."
    ]


def sentence(name: str, base: str, entry: Run, run: Run, base_name: str | None = None) -> str:
    """One comparison: speed, then quality, then energy, each with a verdict, its n and what would settle it."""
    other = escape(base_name or base, quote=False)
    qualities = (("score", run["primary"][1]), ("f1", "F1"), ("logprob", "log-prob (nats per token)"))
    shown: list[tuple[str, Show]] = [("speed", partial(_speed, note=entry["clocks"]))]
    shown += [(key, partial(_quality, what=what)) for key, what in qualities]
    shown.append(("joules_per_token", _joules))
    known = [(entry[key], show) for key, show in shown if entry[key]["value"] is not None]
    counts = {(one["items"], one.get("unit", "item")) for one, _ in known}
    # Said once where all rest on as many items.
    n = next(iter(counts))[0] if len(counts) == 1 else None
    parts = [show(one, n=n) for one, show in known]
    if entry["speed"]["value"] is None:
        parts.insert(0, f"speed is not compared ({escape(entry['clocks'] or 'no clock')})")
    if entry["score"]["value"] is None:
        parts.append(f"{escape(run['primary'][1])} is not known")
    head = "" if n is None else f" (n = {n})"
    return f"<b>{escape(name)}</b> against <b>{other}</b>{head}: " + "; ".join(parts) + "."


def _speed(entry: Mapping[str, Any], note: str | None, n: int | None) -> str:
    verdict = _verdict(entry, 1.0, "<b>faster</b>", "<b>slower</b>", "no difference in speed shown")
    text = f"{verdict}, {fixed(entry['value'], 2)} times the tokens/s{_basis(entry, 2, '', n)}"
    sums = entry.get("of_sums")
    # Both stand here where they would lead to different words.
    if sums is not None and not 0.87 < sums / entry["value"] < 1.15:
        text += f", {fixed(sums, 2)} times by the sums over all items"
    if note:
        text += f" ({escape(note)})"
    return text + _outlying(entry) + _power(entry, 1.0)


def _outlying(entry: Mapping[str, Any]) -> str:
    found = entry.get("outliers") or []
    if not found:
        return ""
    shown = ", ".join(f"{escape(o['item'])} ({o['ratio']:.3g} times)" for o in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"; standing out: {shown}{more}"


def _quality(entry: Mapping[str, Any], what: str, n: int | None) -> str:
    what = escape(what)
    if entry["differing"] == 0:
        each = "the one item" if entry["items"] == 1 else f"each of {entry['items']} items"
        return f"the <b>same</b> {what} on {each}"
    verdict = _verdict(
        entry, 0.0, f"<b>better</b> {what}", f"<b>worse</b> {what}", f"no difference in {what} shown"
    )
    return f"{verdict}, {entry['value']:+.3f}{_basis(entry, 3, '+', n)}{_power(entry, 0.0)}"


def _joules(entry: Mapping[str, Any], n: int | None) -> str:
    if entry["low"] is None and entry["items"] >= FEWEST:  # a counter too coarse for single answers
        return f"{fixed(entry['value'], 2)} times the joules per token by the sums over all items, without an interval"
    verdict = _verdict(
        entry, 1.0, "<b>more</b> energy", "<b>less</b> energy", "no difference in energy shown"
    )
    return f"{verdict}, {fixed(entry['value'], 2)} times the joules per token{_basis(entry, 2, '', n)}"


def _verdict(entry: Mapping[str, Any], null: float, above: str, below: str, neither: str) -> str:
    if entry["low"] is None or entry["low"] <= null <= entry["high"]:
        return neither
    return above if entry["low"] > null else below


def _basis(entry: Mapping[str, Any], places: int, sign: str, n: int | None) -> str:
    """The interval, or why there is none, and n where it was not said yet."""
    of = " windows" if entry.get("unit") == "window" else ""
    own = f"n = {entry['items']}{of}" if n is None else ""
    if entry["low"] is None:
        why = "too few for an interval" if entry["items"] < FEWEST else "too few differ for an interval"
        return f" ({', '.join(filter(None, (own, why)))})"
    return f" [{entry['low']:{sign}.{places}f}, {entry['high']:{sign}.{places}f}]" + (
        f" ({own})" if own else ""
    )


def _power(entry: Mapping[str, Any], null: float) -> str:
    """Where no difference was shown: how many items would show one of this size."""
    count = entry["needed"]
    if count is None or entry["low"] is None or not entry["low"] <= null <= entry["high"]:
        return ""
    about = needed(count) if count >= MOST_NEEDED else f"about {needed(count)}"
    return f"; {about} {entry.get('unit', 'item')}s would show a difference of this size"


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
    if not arms:
        return None
    if not good:
        return f"None of the {len(arms)} swept DSBD arms has at least the baseline's log-prob and score."
    _, name, arm = max(good, key=lambda entry: entry[0])
    return (
        f"Fastest of the {len(good)} (of {len(arms)}) swept DSBD arms whose log-prob and score are at least the "
        f"baseline's: {sentence(name, run['baseline'], arm['against_baseline'], run)} It was picked on these very "
        "items, which flatters it."
    )


def _not_below(entry: Mapping[str, Any]) -> bool:
    """At least as good, rounding aside; where there is no score there is nothing to fall below."""
    return entry["value"] is None or entry["value"] >= -1e-4
