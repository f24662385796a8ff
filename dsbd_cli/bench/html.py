"""The report's page: one self-contained HTML file that reads well on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from dsbd_cli.bench import published
from dsbd_cli.bench.findings import findings
from dsbd_cli.bench.html_style import CSS
from dsbd_cli.bench.plots import family, front
from dsbd_cli.bench.table import (
    COLUMNS,
    NA,
    energy_line,
    fixed,
    headings,
    interval,
    number,
    outcome_rows,
    row,
    size,
)

Run = Mapping[str, Any]


class Figure(NamedTuple):
    """A picture as a data URI, and how many panels it has."""

    uri: str
    panels: int


TITLES = {
    "pareto_speed": ("Quality against speed", "Up and to the right is better. Lines join the arms of DSBD, and "
                     "of beam sampling, that no other arm of their kind beats on both axes. Bars: 95 % intervals."),
    "pareto_energy": ("Quality against energy", "Up and to the right (fewer joules) is better."),
    "width": ("What beams buy", "Mean number of distinct beams per layer against speed, energy and quality."),
    "depth": ("Acceptance by depth", "Share of drafts accepted at each layer of the draft: where it falls low, "
              "longer drafts do not pay."),
}  # fmt: skip


def page(
    runs: Sequence[Run], figures: Mapping[str, Figure], answers: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """The whole page.

    Args:
        runs: summaries with their names.
        figures: by name.
        answers: results of each run, for examples.
    """
    names = ", ".join(dict.fromkeys(_dataset(run) for run in runs))
    parts = [f"<h1>{escape(names)}: decoding methods compared</h1>"]
    for run in runs:
        parts.append(_head(run, len(runs) > 1))
    for name in ("pareto_speed", "pareto_energy"):
        parts.append(_figure(name, figures, runs))
    parts += [_paper_tables(run, len(runs) > 1) for run in runs]
    parts += [_figure(name, figures, runs) for name in figures if not name.startswith("pareto")]
    for run, results in zip(runs, answers, strict=True):
        parts += [_outcomes(run), _examples(run, results)]
    parts += [_conditions(run) for run in runs]
    parts.append(_how())
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(names)}: decoding methods compared</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _dataset(run: Run) -> str:
    names = {"spider": "Spider", "squad": "SQuAD", "mt-bench": "MT-Bench"}
    data = run["data"]
    if data["kind"] == "jsonl":
        return str(data["label"])
    return f"{names[data['kind']]}{' (built-in sample)' if data['builtin'] else ''}"


def table(names: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[int] = ()) -> str:
    """A table that scrolls sideways in its own box; `marked` rows stand out."""
    head = "".join(f"<th>{escape(text)}</th>" for text in names)
    lines = []
    for place, cells in enumerate(rows):
        mark = ' class="mark"' if place in marked else ""
        lines.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _head(run: Run, several: bool) -> str:
    data = run["data"]
    warning = ""
    if data["builtin"]:
        warning = (
            '<p class="warn">Asked on the <b>built-in sample</b>, written for this project in the data set\'s '
            "layout. These are not results on the benchmark.</p>"
        )
    skipped = "; ".join(f"{count} left out: {reason}" for reason, count in data["skipped"].items())
    facts = [
        ("Data", f"{data['label']}; {data['items']} items asked{'; ' + skipped if skipped else ''}"),
        ("Score", f"{run['primary'][1]}{_judge(run)}"),
        ("Pair", _pair(run)),
        ("Machine", _machine(run)),
        ("Energy", energy_line(run).removeprefix("energy: ")),
        ("Baseline", run["baseline"] or "none"),
        ("Seed", str(run["seed"])),
    ]
    listing = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    arms = list(run["arms"].items())
    rows = [row(name, arm, run) for name, arm in arms]
    best = [place for place, (name, _) in enumerate(arms) if name == run["baseline"]]
    legend = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in COLUMNS[1:])
    title = f"<h2>{escape(run['name'])}</h2>" if several else ""
    return (
        f"{title}{warning}<dl>{listing}</dl>{findings(run)}<h2>Results</h2>"
        f"{table(headings(run), rows, best)}"
        f"<details><summary>What the columns mean</summary><ul>{legend}</ul></details>"
    )


def _judge(run: Run) -> str:
    if run["data"]["kind"] != "mt-bench":
        return ""
    return f", judge {run['judge']['model']}" if run["judge"] else ": n/a, no judge was given"


def _pair(run: Run) -> str:
    parts = []
    for role in ("target", "draft"):
        model = run["models"].get(role)
        parts.append(f"{role} " + ("none" if model is None else f"{model['name']} ({model['dtype']})"))
    return ", ".join(parts) + f"; prompts by {run['prompt_form']}"


def _machine(run: Run) -> str:
    session = run["sessions"][-1]
    devices = ", ".join(dict.fromkeys(session["devices"].values()))
    packages = ", ".join(f"{name} {version}" for name, version in session["packages"].items() if version)
    cores = f"{session['cores']} cores, {session['threads']} threads"
    more = f", {session['processes']} processes" if session.get("processes", 1) > 1 else ""
    return f"{devices} ({cores}{more}); {packages}; Python {session['python']}"


def _figure(name: str, figures: Mapping[str, Figure], runs: Sequence[Run]) -> str:
    if name not in figures:
        if name == "pareto_energy":
            return f"<h2>Quality against energy</h2><p>Not drawn: {escape(energy_line(runs[0]))}.</p>"
        return ""
    title, words = TITLES.get(
        name,
        (
            f"Ablation: {name.removeprefix('ablation_').replace('_', '-')}",
            "One line for each choice of the others.",
        ),
    )
    shape = "plot single" if figures[name].panels == 1 else "plot"
    return (
        f'<h2>{escape(title)}</h2><p>{escape(words)}</p><div class="wide"><img class="{shape}" alt="{escape(title)}" '
        f'src="{figures[name].uri}"></div>'
    )


def _paper_tables(run: Run, several: bool) -> str:
    """Tables in the form of the paper's Table 1 (cost at a quality) and Table 2 (memory)."""
    note = f" ({escape(run['name'])})" if several else ""
    shown = {
        name: arm for name, arm in run["arms"].items() if not arm["swept"] or name in on_front(run["arms"])
    }
    rows = []
    for name, arm in shown.items():
        against = arm["against_baseline"] or {}
        rows.append(
            [
                name,
                fixed(arm["score"]["value"]),
                fixed(arm["perplexity"]["value"], 2),
                number(arm["tokens_per_s"]["value"]),
                _ratio(against.get("speed"), name == run["baseline"]),
                number(arm["joules_per_token"]["value"]),
                _ratio(against.get("joules_per_token"), name == run["baseline"]),
            ]
        )
    names = ["method", run["primary"][1], "perplexity", "tokens/s", "x speed", "J/token", "x J/token"]
    one = table(names, rows)
    if published.applies(run):
        low, high = published.SPEED_UP
        saved_low, saved_high = published.ENERGY_SAVED
        one += (
            f"<p>The paper reports for DSBD against beam sampling: {low} to {high} times the speed, {saved_low} to "
            f"{saved_high} times less energy ({escape(published.SOURCE)}). Other hardware, other code: compare "
            "ratios, not seconds.</p>"
        )
    else:
        one += "<p>No figures of the paper stand beside these: pair or data are not the paper's.</p>"
    memory = [
        [name, size(arm["kv_bytes_peak"]), str(arm["kv_slots_peak"] or NA), size(arm["peak_bytes"]),
         fixed(arm["score"]["value"]), number(arm["tokens_per_s"]["value"])]
        for name, arm in shown.items()
        if arm["kv_bytes_peak"] is not None or arm["peak_bytes"] is not None
    ]  # fmt: skip
    two = ""
    if memory:
        two = f"<h2>Memory{note}</h2>" + table(
            [
                "method",
                "peak KV, both models",
                "KV slots, target",
                "peak of the allocator",
                "score",
                "tokens/s",
            ],
            memory,
        )
    return f"<h2>Cost at a quality{note}</h2>{one}{two}"


def _ratio(entry: Mapping[str, Any] | None, base: bool) -> str:
    return "1 (base)" if base and entry and entry["value"] is not None else interval(entry, 2)


def on_front(arms: Mapping[str, Run]) -> set[str]:
    """Names of the DSBD and beam arms that no other of their kind beats on both log-prob and tokens/s."""
    names = set()
    for group in ("beam", "dsbd"):
        points = {
            name: (arm["tokens_per_s"]["value"], arm["logprob_per_token"]["value"])
            for name, arm in arms.items()
            if family(arm["method"]) == group
        }
        known = {name: point for name, point in points.items() if None not in point}
        best = front(list(known.values()))
        names |= {name for name, point in known.items() if point in best}
    return names


def _outcomes(run: Run) -> str:
    names, rows = outcome_rows(run)
    if not rows or len(names) < 3:
        return ""
    return f"<h2>What became of the answers</h2>{table(names, rows)}"


def _examples(run: Run, results: Sequence[Mapping[str, Any]], count: int = 3) -> str:
    """A few items with every arm's answer, as they came."""
    items = list(dict.fromkeys(record["item"] for record in results))[:count]
    blocks = []
    for item in items:
        mine = [r for r in results if r["item"] == item and r["repeat"] == 0 and "=" not in r["arm"]]
        rows = []
        for record in mine:
            outcome = (record["score"] or {}).get("outcome") or ""
            text = "\n\n".join(turn["text"] for turn in record["turns"]).strip()
            rows.append(
                [record["arm"], text[:600] or "(empty)", outcome, record["turns"][-1]["finish_reason"]]
            )
        blocks.append(
            f"<details><summary>{escape(item)}</summary>"
            f'<div class="answers">{table(["arm", "answer", "outcome", "ended by"], rows)}</div></details>'
        )
    return f"<h2>Some answers</h2>{''.join(blocks)}" if blocks else ""


def _conditions(run: Run) -> str:
    """Settings of every arm, and every session's circumstances."""
    names = list(dict.fromkeys(name for arm in run["arms"].values() for name in arm["settings"]))
    rows = [
        [name, *(_word(arm["settings"].get(key, "")) for key in names)] for name, arm in run["arms"].items()
    ]
    sessions = [
        [str(number), s["started"], ", ".join(s["devices"].values()), s["dsbd"], s["commit"] or NA,
         NA if s.get("idle_watts") is None else f"{s['idle_watts']:.0f} W", " ".join(s["command"])]
        for number, s in enumerate(run["sessions"])
    ]  # fmt: skip
    rule = run["rule"] or {}
    rules = ", ".join(f"{key} {_word(entry)}" for key, entry in rule.items())
    heads = ["session", "started", "devices", "dsbd", "commit", "idle power", "command"]
    return (
        f"<h2>Settings and sessions: {escape(run['name'])}</h2>{table(['arm', *names], rows)}"
        f"<p>Scoring: {escape(rules)}.</p>{table(heads, sessions)}"
    )


def _word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _how() -> str:
    return (
        "<h2>How it was measured</h2><ul>"
        "<li>Methods are interleaved per item in an order shuffled by the seed; a warm-up answer per arm is not "
        "counted. The seed of an answer comes from the run's seed and the item, so order changes no result.</li>"
        "<li>Wall clock and energy window open and close after a device sync. tokens/s leaves prefill out, the "
        "same way for every method; joules are those of the whole call. Scoring is outside.</li>"
        "<li>Tokens are those of the returned answer, the end-of-text token counted, whatever else was "
        "decoded.</li>"
        "<li>Log-probabilities come from one teacher-forced forward of the target over each answer.</li>"
        "<li>Intervals: 95 %, percentile bootstrap over items (2,000 draws); ratios to the baseline are paired by "
        "item. Where all items score alike, Wilson's interval stands in.</li>"
        "<li>n/a means not known; it is never counted as 0.</li></ul>"
    )
