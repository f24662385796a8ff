"""The frontier as a table and as a picture: quality of each arm beside the speed of its whole answers."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.bench.fronts import front
from dsbd_cli.bench.stats import Estimate, mean, rate, share

Found = Mapping[str, Any]


def family(arm: Mapping[str, Any]) -> str:
    """What an arm is a point of."""
    run = str(arm["run"])
    if run.startswith("hf-"):
        return "Hugging Face"
    if run in ("multinomial", "speculative"):
        return "one sequence"
    name = "beams alone" if run == "beam" else "dsbd"
    if arm["deterministic"]:
        return f"{name}, deterministic"
    kind = "distinct" if arm["draws"] == "distinct" else "iid"
    return f"{name}, {kind}" + (", dynamic" if arm["threshold"] is not None else "")


def summary(found: Found) -> dict[str, dict[str, Any]]:
    """By arm: log-prob a token, scores by data set, tokens a second, layers a call.

    Quality is that of the quality pass, or of the timed answers where there was none.
    """
    records: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in found["records"]:
        records[record["arm"], record["pass"]].append(record)
    rows = {}
    for arm in found["arms"]:
        timed = records[arm, "speed"]
        judged = records[arm, "quality"] or timed
        real = [one for one in judged if one["tokens"] and one["logprob"] is not None]
        called = [one for one in timed if one.get("layers") and one.get("target_calls")]
        rows[arm] = {
            "logprob": mean([one["logprob"] / one["tokens"] for one in real]),
            "layers": sum(one["layers"] for one in called) / sum(one["target_calls"] for one in called)
            if called
            else None,
            "draft_calls": sum(one["draft_calls"] or 0 for one in called)
            / sum(one["target_calls"] for one in called)
            if called
            else None,
            "speed": rate([one["tokens"] for one in timed], [one["seconds"] for one in timed]),
        } | {
            kind: share([float(one["correct"]) for one in judged if one["kind"] == kind and one["correct"] is not None])
            for kind in ("squad", "spider")
        }  # fmt: skip
    return rows


def table(found: Sequence[Found]) -> str:
    """Markdown: quality of the first file, layers and speeds of all."""
    first, rows = found[0], [summary(one) for one in found]
    names = [_name(one) for one in found]
    head = ["arm", "n", "log-prob a token", "SQuAD exact match", "Spider execution", "layers a call"]
    head += ["draft calls a call", *(f"tok/s, {name} (n)" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for arm in first["arms"]:
        row = rows[0][arm]
        cells = [arm, str(row["logprob"].items), _interval(row["logprob"], 3), _interval(row["squad"], 3),
                 _interval(row["spider"], 3), _number(row["layers"], 2), _number(row["draft_calls"], 1)]  # fmt: skip
        speeds = [one.get(arm, {}).get("speed") for one in rows]
        cells += [
            f"{_number(one.of_sums, 0)} ({one.items})" if one is not None and one.items else "n/a"
            for one in speeds
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(found: Sequence[Found], path: Path) -> None:
    """A panel a file: log-prob against whole-answer tokens/s, and the front; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed (--report draws it elsewhere)", file=sys.stderr)
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "dsbd"
    figure, axes = pyplot.subplots(
        1, len(found), figsize=(6.2 * len(found), 5.0), squeeze=False, layout="constrained"
    )
    quality = summary(found[0])
    for panel, one in zip(axes[0], found, strict=True):
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for arm, row in summary(one).items():
            speed, logprob = row["speed"].of_sums, quality.get(arm, row)["logprob"].value
            if speed and logprob is not None:
                points[family(one["arms"][arm])].append((speed, logprob))
        for name in sorted(points):
            xs, ys = zip(*sorted(points[name]), strict=True)
            panel.plot(xs, ys, "o", label=name)
        best = front([point for each in points.values() for point in each])
        if best:
            panel.plot(*zip(*best, strict=True), color="#888888", linewidth=0.8, zorder=0)
        panel.set_xlabel("tokens/s, whole answers, one prompt at a time")
        panel.set_ylabel("log-probability a token")
        panel.set_title(_name(one), fontsize=10)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.25)
        if points:
            panel.legend(fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    print(path)


def _name(found: Found) -> str:
    facts = found["facts"]
    cost = "7B-cost target" if facts.get("inflated") else "default pair"
    return f"{cost}, {facts['hardware']}"


def _interval(one: Estimate, digits: int) -> str:
    if one.value is None:
        return "n/a"
    if one.low is None or one.high is None:
        return f"{one.value:.{digits}f}"
    return f"{one.value:.{digits}f} [{one.low:.{digits}f}, {one.high:.{digits}f}]"


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"
