"""A results file of speed.py as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.kit.phases import PARTS
from benchmarks.kit.summary import summarise

_COLUMNS = ("arm", "n", "tok/s", "+prefill", "J/tok", "logp/tok", "lay/call", "width", "distinct", "GB/s", "KV MB",
            "peak GB")  # fmt: skip


def table(summary: Mapping[str, Mapping[str, Any]], baselines: Sequence[str]) -> str:
    """The summary as aligned text: one line an arm, then ratios to the baselines."""
    lines = [list(_COLUMNS)]
    for arm, numbers in summary.items():
        lines.append([
            arm,
            str(numbers["prompts"]),
            show(numbers["tokens_per_s"]),
            show(numbers["tokens_per_s_with_prefill"], interval=False),
            show(numbers["joules_per_token"], interval=False),
            show(numbers["logprob_per_token"]),
            show(numbers["layers_per_call"], interval=False),
            show(numbers["mean_width"], interval=False),
            show(numbers["mean_distinct_width"], interval=False),
            _number(numbers["bytes_per_s"], 1e9),
            _number(numbers["kv_bytes_peak"], 1e6),
            _number(numbers["peak_bytes"], 1e9),
        ])  # fmt: skip
    text = [aligned(lines)]
    for base in baselines:
        rows = [[f"against {base}", "n", "speed", "with prefill", "J/tok", "KV bytes"]]
        for arm, numbers in summary.items():
            if base in numbers["against"]:
                ratios = numbers["against"][base]
                rows.append([arm, str(ratios["speed"]["items"]), show(ratios["speed"]),
                             show(ratios["speed_with_prefill"]), show(ratios["energy"]),
                             show(ratios["kv_bytes"])])  # fmt: skip
        if len(rows) > 1:
            text.append(aligned(rows))
    return "\n\n".join(text)


def show(estimate: Mapping[str, Any] | None, *, interval: bool = True) -> str:
    """`value [low, high]`, or `-` for unknown."""
    if estimate is None or estimate["value"] is None:
        return "-"
    text = f"{estimate['value']:.3g}"
    if interval and estimate["low"] is not None:
        text += f" [{estimate['low']:.3g}, {estimate['high']:.3g}]"
    return text


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest entry; the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _number(value: float | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3g}"


def summary_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a results file."""
    models = found["facts"]["models"]
    bytes_read = {role: one["read_bytes"] for role, one in models.items() if one is not None}
    return summarise(found["records"], list(found["arms"]), found["baselines"], bytes_read)


def report(found: Mapping[str, Any]) -> str:
    """A results file as text."""
    facts, sessions = found["facts"], found["sessions"]
    models = {role: one for role, one in facts["models"].items() if one is not None}
    lines = [
        f"{facts['hardware']}, torch {facts['torch']}, transformers {facts['transformers']}; {facts['prompts']}",
        *(f"{role}: {one['name']}, {one['dtype']}, {one['layers']} layers of {one['hidden']}, "
          f"{one['read_bytes'] / 1e9:.3g} GB a forward" for role, one in models.items()),
        "copy bandwidth, read + written: "
        + ", ".join(f"{session['copy_bytes_per_s'] / 1e9:.4g} GB/s" for session in sessions),
    ]  # fmt: skip
    text = ["\n".join(lines), table(summary_of(found), found["baselines"])]
    rows = [["ms an iteration", "n", "all", *PARTS, "verify + rest"]]
    for arm, inside in (found.get("breakdown") or {}).items():
        if inside:
            share = (
                (inside["verify"] + inside["rest"]) / inside["iteration_ms"]
                if inside["iteration_ms"]
                else 0.0
            )
            rows.append([arm, str(inside["iterations"]), f"{inside['iteration_ms']:.2f}",
                         *(f"{inside[part]:.2f}" for part in PARTS), f"{share:.1%}"])  # fmt: skip
    text += [aligned(rows)] if len(rows) > 1 else []
    names = (
        "waits",
        "device_synchronize",
        "copies_to_host",
        "copies_to_device",
        "graph_launches",
        "kernel_launches",
    )
    rows = [["profile, an iteration", "n", "wall ms", "busy", *(name.replace("_", " ") for name in names)]]
    for arm, seen in (found.get("profile") or {}).items():
        if seen:
            busy = f"{seen['busy_share']:.1%}" if "busy_share" in seen else "-"
            rows.append([arm, str(seen["iterations"]), f"{seen['wall_ms']:.2f}", busy,
                         *(f"{seen[name]:.2f}" if name in seen else "-" for name in names)])  # fmt: skip
    text += [aligned(rows)] if len(rows) > 1 else []
    notes = dict.fromkeys(note for record in found["records"] for note in record.get("notes") or ())
    text += ["\n".join(f"note: {note}" for note in notes)] if notes else []
    return "\n\n".join(text)
