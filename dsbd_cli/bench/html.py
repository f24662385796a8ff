"""The report's page: one self-contained HTML file that reads well on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from dsbd_cli.bench import circumstances, published, tables
from dsbd_cli.bench.cells import word
from dsbd_cli.bench.findings import findings
from dsbd_cli.bench.html_style import CSS
from dsbd_cli.bench.paired_tables import comparisons
from dsbd_cli.bench.table import Table
from dsbd_cli.bench.terminal import batch_line, energy_line, has_scores
from dsbd_cli.counted import counted
from dsbd_cli.wording import ending, said

Run = Mapping[str, Any]


class Figure(NamedTuple):
    """A picture as a data URI, and how many panels it has."""

    uri: str
    panels: int


TITLES = {
    "pareto_speed": ("Quality against speed", "Up and to the right is better. Coloured lines join the arms of DSBD, "
                     "and of beam sampling, that no other arm of their kind beats on both axes; the dashed one those "
                     "that none of all arms beats. Bars: 95 % intervals."),
    "pareto_energy": ("Quality against energy", "Up and to the right (fewer joules) is better. Bars: 95 % intervals."),
    "speed_ups": ("Speed-ups one by one", "Pale dots are items (with --batch windows of them), the mark beneath is "
                  "their median with its 95 % interval; the line is the baseline."),
    "layers": ("Layers a call, item by item", "How many layers one target call commits, prefill left out: plain "
               "decoding commits one. Pale dots are items, the mark beneath is their median with its 95 % interval."),
    "width": ("What beams buy", "Distinct beams per layer against speed, energy and quality. Bars: 95 % intervals."),
    "depth": ("Acceptance by depth", "Share of drafts accepted at each layer of the draft: where it falls low, "
              "longer drafts do not pay. Bars: 95 % intervals over items; the legend counts the drafts at each layer."),
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
    parts += [_comparisons(run, len(runs) > 1) for run in runs]
    parts += [_paper_tables(run, len(runs) > 1) for run in runs]
    parts += [_figure(name, figures, runs) for name in figures if not name.startswith("pareto")]
    for run, results in zip(runs, answers, strict=True):
        parts += [_section(tables.depths(run), run, len(runs) > 1)]
        parts += [_section(tables.outcomes(run), run, len(runs) > 1), _examples(run, results)]
    parts += [_conditions(run, len(runs) > 1) for run in runs]
    parts.append(_how(any(run["batch"] for run in runs)))
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
    if data["kind"] not in names:
        return str(data["label"])
    return f"{names[data['kind']]}{' (built-in sample)' if data['builtin'] else ''}"


def grid(names: Sequence[str], rows: Sequence[Sequence[str]], marked: Sequence[int] = ()) -> str:
    """A table that scrolls sideways in its own box, and says so where it may; `marked` rows stand out."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in names)
    lines = []
    for place, cells in enumerate(rows):
        mark = ' class="mark"' if place in marked else ""
        first, *others = cells
        body = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        lines.append(f'<tr{mark}><th scope="row">{escape(first)}</th>{body}</tr>')
    # Of more columns than this, some lie beyond the edge of a desk's screen too.
    many = " many" if len(names) > 10 else ""
    hint = ""
    if len(names) > 3:
        words = f"scroll sideways for all {len(names)} columns"
        hint = f'<p class="hint{many}" aria-hidden="true">{words} \u2192</p>'
    return (
        f'{hint}<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def shown(table: Table) -> str:
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return grid(table.heads, table.texts(), table.marked) + note


def _section(table: Table, run: Run, several: bool) -> str:
    """A table under its heading; nothing where it is empty."""
    if not table.rows:
        return ""
    title = f"{table.title} ({run['name']})" if several else table.title
    return f"<h2>{escape(title)}</h2>{shown(table)}"


def _comparisons(run: Run, several: bool) -> str:
    made = (comparisons(run, every=False), circumstances.outliers(run), tables.turns(run), tables.groups(run))
    return "".join(_section(table, run, several) for table in made)


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
        (
            "Data",
            f"{data['label']}; {counted(data['items'], 'item')} asked{'; ' + skipped if skipped else ''}",
        ),
        ("Score", f"{run['primary'][1]}{_judge(run)}"),
        ("Pair", _pair(run)),
        ("Machine", _machine(run)),
        *([("Batch", batch_line(run))] if run["batch"] else []),
        ("Energy", energy_line(run).removeprefix("energy: ")),
        ("Baseline", run["baseline"] or "none"),
        ("Seed", str(run["seed"])),
    ]
    listing = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    results = tables.results(run)
    legend = "".join(
        f"<li><b>{escape(column.head)}</b>: {escape(column.meaning)}</li>"
        for column in results.columns
        if column.meaning
    )
    title = f"<h2>{escape(run['name'])}</h2>" if several else ""
    for note in map(said, run["warnings"]):
        warning += f'<p class="warn">{escape(note[0].upper() + note[1:])}.</p>'
    return (
        f"{title}{warning}{findings(run)}<h2>Results</h2>{shown(results)}"
        f"<details><summary>What the columns mean</summary><ul>{legend}</ul></details><dl>{listing}</dl>"
    )


def _judge(run: Run) -> str:
    if run["data"]["kind"] != "mt-bench":
        return "" if has_scores(run) else ": n/a, no answer has one"
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
    cores = f"{counted(session['cores'], 'core')}, {counted(session['threads'], 'thread')}"
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
        f"<h2>{escape(title)}</h2><p>{escape(words)}</p>"
        '<p class="hint" aria-hidden="true">scroll sideways for the whole picture \u2192</p>'
        f'<div class="wide" tabindex="0"><img class="{shape}" alt="{escape(title)}" src="{figures[name].uri}"></div>'
    )


def _paper_tables(run: Run, several: bool) -> str:
    """Tables in the form of the paper's Table 1 (cost at a quality) and Table 2 (memory)."""
    cost = _section(tables.cost(run), run, several)
    if published.applies(run):
        low, high = published.SPEED_UP
        saved_low, saved_high = published.ENERGY_SAVED
        cost += (
            f"<p>The paper reports for DSBD against beam sampling: {low} to {high} times the speed, {saved_low} to "
            f"{saved_high} times less energy ({escape(published.SOURCE)}). Other hardware, other code: compare "
            "ratios, not seconds.</p>"
        )
    else:
        cost += "<p>No figures of the paper stand beside these: pair or data are not the paper's.</p>"
    return cost + _section(tables.memory(run), run, several)


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
                [
                    record["arm"],
                    text[:600] or "(empty)",
                    outcome,
                    ending(record["turns"][-1]["finish_reason"]),
                ]
            )
        blocks.append(
            f"<details><summary>{escape(item)}</summary>"
            f'<div class="answers">{grid(["arm", "answer", "outcome", "end"], rows)}</div></details>'
        )
    return f"<h2>Some answers</h2>{''.join(blocks)}" if blocks else ""


def _conditions(run: Run, several: bool) -> str:
    """Settings of every arm, and every session's circumstances."""
    rules = ", ".join(f"{key} {word(entry)}" for key, entry in (run["rule"] or {}).items())
    return (
        f"{_section(circumstances.settings(run), run, several)}<p>Scoring: {escape(rules)}.</p>"
        f"{_section(circumstances.sessions(run), run, several)}"
    )


_TOGETHER = (
    "<li>Answers shared their forwards (<code>--batch</code>): what one answer cost is not known, what a window of "
    "them cost is. Each window goes through all arms in an order shuffled by the seed; its clock and energy hold "
    "prefill. The text of an answer of ours does not depend on its company. Hugging Face's methods got padded "
    "batches of prompts of about the same length.</li>"
    "<li>For speed and joules the window is the unit, and the median is over windows.</li>"
)


def _how(together: bool) -> str:
    return (
        f"<h2>How it was measured</h2><ul>{_TOGETHER if together else ''}"
        "<li>Methods are interleaved per item in an order shuffled by the seed; a warm-up answer per arm is not "
        "counted. The seed of an answer comes from the run's seed and the item, so order changes no result.</li>"
        "<li>Wall clock and energy window open and close after a device sync. tokens/s leaves prefill out, the "
        "same way for every method; joules are those of the whole call. Scoring is outside.</li>"
        "<li>Tokens are those of the returned answer, the end-of-text token counted, whatever else was "
        "decoded.</li>"
        "<li>Log-probabilities come from one teacher-forced forward of the target over each answer.</li>"
        "<li>The item is the unit: repeats are added up first. Below 3 items no interval is given.</li>"
        "<li>Speeds, joules, log-probs, layers and shares of drafts: the median over items, with the interval between "
        "order statistics (Hettmansperger and Sheather), which supposes nothing; for 3 to 5 items Student's t, on "
        "logarithms. The ratio of sums stands beside it without an interval.</li>"
        "<li>Scores: the mean over items; yes/no with Jeffreys' interval, F1 with a Bayesian bootstrap that holds half "
        "an observation at 0 and at 1, ratings with Student's t, and none where all agree.</li>"
        "<li>Differences are paired by item: the share of items that differ times their mean difference; yes/no "
        "outcomes by Jeffreys' rule for won, lost and tied.</li>"
        "<li>All are 95 % intervals, and cover 93 to 97 % in simulations of 3 to 100 items. Two answers are a pair for "
        "speed and energy only if one session gave both.</li>"
        "<li>n/a means not known; it is never counted as 0.</li></ul>"
    )
