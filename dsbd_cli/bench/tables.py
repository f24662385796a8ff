"""The tables of a report as data: the page, the terminal and the exported files show the same cells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsbd_cli.bench.cells import fixed, interval, percent, size
from dsbd_cli.bench.circumstances import outliers, sessions, settings, windows
from dsbd_cli.bench.fronts import shown_arms
from dsbd_cli.bench.paired_tables import comparisons
from dsbd_cli.bench.table import ARM, BASE, COUNT, Column, Table, estimate, figure, rounded

Run = Mapping[str, Any]


NAMES = ("results", "comparisons", "cost", "memory", "turns", "groups", "depth", "outcomes", "outliers", "windows",
         "settings", "sessions")  # fmt: skip


def tables(run: Run) -> Iterator[Table]:
    """All tables of a run that hold anything, in the order of the report."""
    makers = (
        results,
        comparisons,
        cost,
        memory,
        turns,
        groups,
        depths,
        outcomes,
        outliers,
        windows,
        settings,
        sessions,
    )
    for make in makers:
        table = make(run)
        if table.rows:
            yield table


def results(run: Run) -> Table:
    """The main table: one row an arm."""
    rating = run["primary"][0] == "rating"
    base = run["baseline"]
    f1 = any(arm["f1"] and arm["f1"]["value"] is not None for arm in run["arms"].values())

    def speed(entry: Any) -> str:
        return "1 (base)" if entry is BASE else interval(entry, 2)

    batch = run["batch"]
    seconds = "seconds, prefill included" if batch else "seconds of decoding, without prefill"
    each = "in the same window" if batch else "on the same item"
    columns = [
        ARM,
        COUNT,
        estimate("score", "score", 2 if rating else 3, f"mean {run['primary'][1]} over items"),
        *([estimate("f1", "F1", 3, "mean F1 over items")] if f1 else []),
        estimate("logprob", "log-prob, nats/token", 3, "raw target log-probability per token of the answers"),
        estimate("tokens_per_s", "tok/s", None, f"tokens of the answers over {seconds}"),
        *([figure("tokens_per_s_in_all", "tok/s in all", "tokens of all answers over the seconds of all windows")]
          if batch else []),
        Column("speed", "x base", speed, True, f"tokens per second over the baseline's {each}"),
        Column("speed_of_sums", "x base, sums", lambda v: "1 (base)" if v is BASE else fixed(v, 2),
               meaning="the same from the sums over all items, which long and disturbed answers dominate"),
        estimate("joules_per_token", "J/token", None, "joules per token of whole calls, with prefill"),
        rounded("layers_per_call", "layers/call", 2, "committed layers per target call"),
        Column("accepted", "accepted", percent, meaning="drafts accepted of those examined"),
        rounded("width", "width", 2, "mean draws per layer"),
        rounded("distinct_width", "distinct", 2, "mean distinct sequences per layer"),
    ]  # fmt: skip
    rows = []
    for name, arm in run["arms"].items():
        against = arm["against_baseline"]
        speed_entry = against["speed"] if against else None
        rows.append(
            [
                name,
                scored(arm),
                arm["score"],
                *([arm["f1"]] if f1 else []),
                arm["logprob_per_token"],
                arm["tokens_per_s"],
                *([arm["tokens_per_s"].get("of_sums")] if batch else []),
                BASE if name == base else speed_entry,
                BASE if name == base else (speed_entry or {}).get("of_sums"),
                arm["joules_per_token"],
                arm["layers_per_target_call"],
                arm["acceptance_rate"],
                arm["mean_width"],
                arm["mean_distinct_width"],
            ]
        )
    marked = [place for place, name in enumerate(run["arms"]) if name == base]
    note = (
        "Speeds and joules are medians over windows, log-probs over items, scores are means over items; brackets hold "
        "95 % intervals."
        if batch
        else "Speeds, joules and log-probs are medians over items, scores are means; brackets hold 95 % intervals."
    )
    return Table("results", "Results", columns, rows, note, marked)


def scored(arm: Run) -> str:
    """How many items the score rests on, of how many."""
    items = arm["items"]
    known = arm["score"]["items"]
    return str(items) if known in (0, items) else f"{known} of {items}"


def cost(run: Run) -> Table:
    """In the form of the paper's Table 1: what a quality costs."""
    columns = [
        Column("method", "method"),
        rounded("score", run["primary"][1], 3),
        rounded("perplexity", "perplexity", 2),
        figure("tokens_per_s", "tokens/s"),
        Column("speed", "x speed", lambda e: "1 (base)" if e is BASE else interval(e, 2), True),
        figure("joules_per_token", "J/token"),
        Column("joules", "x J/token", lambda e: "1 (base)" if e is BASE else interval(e, 2), True),
    ]
    rows = []
    for name, arm in shown_arms(run).items():
        against = arm["against_baseline"] or {}
        ratios = [against.get("speed"), against.get("joules_per_token")]
        if name == run["baseline"]:
            ratios = [BASE if ratio and ratio["value"] is not None else None for ratio in ratios]
        rows.append([name, arm["score"]["value"], arm["perplexity"].get("of_sums"),
                     arm["tokens_per_s"].get("of_sums"), ratios[0],
                     arm["joules_per_token"].get("of_sums"), ratios[1]])  # fmt: skip
    note = "Perplexity, tokens/s and J/token from the sums over all items; ratios are medians over "
    note += "windows." if run["batch"] else "items."
    return Table("cost", "Cost at a quality", columns, rows, note)


def memory(run: Run) -> Table:
    """In the form of the paper's Table 2."""
    columns = [
        Column("method", "method"),
        Column("kv_bytes_peak", "peak KV, both models", size),
        Column("kv_slots_peak", "KV slots, target"),
        Column("peak_bytes", "peak of the allocator", size),
        rounded("score", "score", 3),
        figure("tokens_per_s", "tokens/s"),
    ]
    rows = [
        [name, arm["kv_bytes_peak"], arm["kv_slots_peak"], arm["peak_bytes"], arm["score"]["value"],
         arm["tokens_per_s"]["value"]]
        for name, arm in shown_arms(run).items()
        if arm["kv_bytes_peak"] is not None or arm["peak_bytes"] is not None
    ]  # fmt: skip
    return Table("memory", "Memory", columns, rows)


def turns(run: Run) -> Table:
    """MT-Bench: each turn's mean with its n, and what is missing."""
    arms = {name: arm for name, arm in run["arms"].items() if arm["turns"]}
    if not run["judge"]:
        arms = {}
    count = max((len(arm["turns"]) for arm in arms.values()), default=0)
    columns = [ARM, estimate("score", "both turns", 2), Column("conversations", "n")]
    for turn in range(1, count + 1):
        columns += [
            estimate(f"turn_{turn}", f"turn {turn}", 2),
            Column(f"turn_{turn}_items", "n"),
            Column(f"turn_{turn}_missing", "missing"),
        ]
    rows = []
    for name, arm in arms.items():
        cells = [name, arm["score"], scored(arm)]
        for entry in [*arm["turns"], *[None] * (count - len(arm["turns"]))]:
            cells += [entry, entry["items"] if entry else None, entry["missing"] if entry else None]
        rows.append(cells)
    note = "A conversation counts for both turns only if the judge rated each of them."
    return Table("turns", "Ratings by turn", columns, rows, note)


def groups(run: Run) -> Table:
    """Score and speed of the plain arms by category (MT-Bench) or hardness (Spider)."""
    head = "category" if run["primary"][0] == "rating" else "hardness"
    columns = [
        Column("group", head),
        ARM,
        Column("items", "n"),
        estimate("score", run["primary"][1], 2 if run["primary"][0] == "rating" else 3),
        estimate("tokens_per_s", "tok/s"),
        estimate("speed", "x base", 2),
    ]
    plain = {name: arm for name, arm in run["arms"].items() if not arm["swept"] and arm["groups"]}
    names = list(dict.fromkeys(group for arm in plain.values() for group in arm["groups"]))
    rows = [
        [group, name, entry["items"], entry["score"], entry["tokens_per_s"],
         BASE if name == run["baseline"] else entry["speed"]]
        for group in names
        for name, arm in plain.items()
        if (entry := arm["groups"].get(group))
    ]  # fmt: skip
    return Table("groups", f"By {head}", columns, rows)


def depths(run: Run) -> Table:
    """Acceptance at each layer of the draft, with what it rests on."""
    plain = {n: arm for n, arm in run["arms"].items() if arm["acceptance_by_depth"] and not arm["swept"]}
    columns = [
        ARM,
        Column("layer", "layer of the draft"),
        estimate("accepted", "share accepted, median item", 2),
        rounded("accepted_of_sums", "of all drafts"),
        Column("items", "items"),
        Column("drafts", "drafts"),
    ]
    rows = [
        [name, layer, entry, entry.get("of_sums"), entry["items"], entry["examined"]]
        for name, arm in plain.items()
        for layer, entry in enumerate(arm["acceptance_by_depth"], 1)
    ]
    return Table("depth", "Acceptance by depth", columns, rows)


# Outcome -> its heading, in the order of the table.
OUTCOMES = {
    "correct": "correct", "wrong": "wrong", "no_sql": "no SQL found", "cut": "cut by limit", "error": "error",
    "timeout": "timeout", "too_large": "too large", "data_fault": "data fault", "rated": "rated",
    "rating missing": "rating missing", "unscored": "unscored",
}  # fmt: skip


def outcomes(run: Run) -> Table:
    """What became of the answers; empty where nothing is scored by rule."""
    arms = {name: arm["outcomes"] for name, arm in run["arms"].items() if arm["outcomes"]}
    seen = [name for name in OUTCOMES if any(name in counts for counts in arms.values())]
    rows = [[name, *(counts.get(key, 0) for key in seen)] for name, counts in arms.items()]
    columns = [ARM, *(Column(key, OUTCOMES[key]) for key in seen)]
    return Table("outcomes", "What became of the answers", columns, rows if len(seen) > 1 else [])
