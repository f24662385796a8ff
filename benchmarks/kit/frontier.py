"""The frontier as a table, in words and as a picture: quality of each arm beside the speed of its whole answers."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.bench.fronts import front
from dsbd_cli.bench.stats import Estimate, mean, rate, share

Found = Mapping[str, Any]
# Of two log-probs a token that count as one quality.
CLOSE = 0.01
_BEAMS = ("beam", "dsbd")


@dataclass(frozen=True)
class Whole:
    """Results files of one question.

    Attributes:
        speed: one for each target or machine.
        quality: records of the quality pass, by law and data set; where there are none, those of the timed answers.
        scores: likewise, of few-shot prompts.
    """

    speed: Sequence[Found]
    quality: Mapping[Hashable, Sequence[Mapping[str, Any]]]
    scores: Mapping[Hashable, Sequence[Mapping[str, Any]]]


def whole(speed: Sequence[Found], quality: Sequence[Found] = (), few_shot: Sequence[Found] = ()) -> Whole:
    """The files of a report; without files of quality, those of speed tell it."""
    judged = _by_law(quality or speed, "quality")
    if not quality:
        judged = _by_law(speed[:1], "speed") | judged
    return Whole(speed, judged, _by_law(few_shot, "quality") if few_shot else judged)


def _by_law(files: Sequence[Found], name: str) -> dict[Hashable, list[Mapping[str, Any]]]:
    by: dict[Hashable, dict[tuple[str, str], Mapping[str, Any]]] = defaultdict(dict)
    for found in files:
        for record in found["records"]:
            if record["pass"] == name and record["arm"] in found["arms"]:
                # Two arms of one law give one text: each item counts once.
                by[law(found["arms"][record["arm"]])].setdefault((record["kind"], record["item"]), record)
    return {key: list(each.values()) for key, each in by.items()}


def of_target_alone(arm: Mapping[str, Any]) -> bool:
    """Whether a width is fixed or follows from the target alone, so that proposals change no text."""
    rule = arm["width_rule"]
    return arm["threshold"] is None or rule == "distinct" or (rule == "auto" and arm["draws"] == "distinct")


def law(arm: Mapping[str, Any]) -> Hashable:
    """What arms of one law have in common: quality is measured once for them.

    Args:
        arm: its settings, and as `run` its method's name on the command line.
    """
    same = [arm[name] for name in ("temperature", "top_k", "top_p", "length_penalty", "early_stopping")]
    if str(arm["run"]).startswith("hf-"):
        return ("hf", arm["run"], arm["width"], *same)
    if arm["method"] not in _BEAMS:
        return ("one sequence", *same)
    key = ("beams", arm["width"], arm["deterministic"], arm["draws"], arm["kv"], *same)
    if arm["threshold"] is None:
        return key
    key += (arm["threshold"], arm["min_width"])
    if of_target_alone(arm):
        return key
    forest = [
        arm[name] for name in ("method", "verify", "draft_width", "gamma", "forest", "forest_nodes", "lookup")
    ]
    return (*key, *forest)


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


def summary(found: Found, whole: Whole) -> dict[str, dict[str, Any]]:
    """By arm of a file: log-prob a token, scores by data set, tokens a second, layers a call."""
    timed: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in found["records"]:
        if record["pass"] == "speed":
            timed[record["arm"]].append(record)
    rows = {}
    for arm, settings in found["arms"].items():
        own, key = timed[arm], law(settings)
        judged, scored = whole.quality.get(key, ()), whole.scores.get(key, ())
        real = [one for one in judged if one["tokens"] and one["logprob"] is not None]
        called = [one for one in own if one.get("layers") and one.get("target_calls")]
        calls = sum(one["target_calls"] for one in called)
        rows[arm] = {
            "logprob": mean([one["logprob"] / one["tokens"] for one in real]),
            "layers": sum(one["layers"] for one in called) / calls if calls else None,
            "draft_calls": sum(one["draft_calls"] or 0 for one in called) / calls if calls else None,
            "speed": rate([one["tokens"] for one in own], [one["seconds"] for one in own]),
        } | {
            kind: share([float(one["correct"]) for one in scored if one["kind"] == kind and one["correct"] is not None])
            for kind in ("squad", "spider")
        }  # fmt: skip
    return rows


def table(whole: Whole) -> str:
    """Markdown: quality of each arm's law; layers a call and speeds of all files."""
    rows = [summary(one, whole) for one in whole.speed]
    names = [_name(one) for one in whole.speed]
    head = ["arm", "n", "log-prob a token", "SQuAD exact match", "Spider execution", "layers a call"]
    head += ["draft calls a call", *(f"tok/s, {name} (n)" for name in names)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for arm, row in rows[0].items():
        layers = [_number(one[arm]["layers"], 2) for one in rows if arm in one]
        cells = [arm, str(row["logprob"].items), _interval(row["logprob"], 3), _interval(row["squad"], 3),
                 _interval(row["spider"], 3), " / ".join(layers), _number(row["draft_calls"], 1)]  # fmt: skip
        speeds = [one.get(arm, {}).get("speed") for one in rows]
        cells += [
            f"{_number(one.of_sums, 0)} ({one.items})" if one is not None and one.items else "n/a"
            for one in speeds
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def goals(whole: Whole) -> list[str]:
    """What the frontier says at two qualities, that of Hugging Face's beams of 4 and that of our iid draws of 4: a
    paragraph a file and quality. Equal quality is a log-prob a token of at most `CLOSE` below."""
    return [
        text
        for found in whole.speed
        for name, is_reference, least in (
            ("Hugging Face's beams of 4 (deterministic W 4, the same text)", _deterministic_4, 3.0),
            ("iid draws of 4", _iid_4, 3.6),
        )
        if (text := _goal(found, whole, name, is_reference, least))
    ]


def _deterministic_4(arm: Mapping[str, Any]) -> bool:
    return arm["run"] in _OURS and arm["width"] == 4 and arm["deterministic"]


def _iid_4(arm: Mapping[str, Any]) -> bool:
    fixed = arm["threshold"] is None and not arm["deterministic"]
    return arm["run"] in _OURS and arm["width"] == 4 and arm["draws"] == "iid" and fixed


_OURS = ("beam", "dsbd:cover")


def _goal(
    found: Found, whole: Whole, name: str, is_reference: Callable[[Mapping[str, Any]], bool], least: float
) -> str:
    arms, rows = found["arms"], summary(found, whole)
    values = [rows[arm]["logprob"].value for arm in arms if is_reference(arms[arm])]
    known = [value for value in values if value is not None]
    if not known:
        return ""
    as_good = {
        arm: row
        for arm, row in rows.items()
        if row["logprob"].value is not None and row["logprob"].value >= known[0] - CLOSE
    }
    drafting = {arm: row for arm, row in as_good.items() if arms[arm]["method"] == "dsbd" and row["layers"]}
    floor = known[0] - CLOSE
    lines = [f"**{_name(found)}, at the quality of {name}** (log-prob {known[0]:.3f}, at least {floor:.3f}):"]
    if not drafting:
        return f"{lines[0]} no arm of dsbd was timed there."
    most = max(drafting, key=lambda arm: float(drafting[arm]["layers"]))
    layers = float(drafting[most]["layers"])
    lines.append(f"most layers a call {layers:.2f} ({most}; {drafting[most]['logprob'].value:.3f}), asked for {least}: "
                 f"{'reached' if layers >= least else 'not reached'}.")  # fmt: skip
    quick = max(drafting, key=lambda arm: drafting[arm]["speed"].of_sums or 0.0)
    speed = drafting[quick]["speed"].of_sums or 0.0
    lines.append(f"Fastest: {quick}, {speed:.0f} tokens/s ({drafting[quick]['logprob'].value:.3f}),")
    beams = {arm: row for arm, row in as_good.items() if arms[arm]["run"] == "beam" and row["speed"].of_sums}
    if beams:
        best = max(beams, key=lambda arm: float(beams[arm]["speed"].of_sums))
        other = float(beams[best]["speed"].of_sums)
        lines.append(f"{speed / other:.2f} times the fastest of our own beams as good ({best}, {other:.0f}), asked "
                     f"for 2.5: {'reached' if speed >= 2.5 * other else 'not reached'}.")  # fmt: skip
        twins = [arm for arm in beams if law(arms[arm]) == law(arms[quick])]
        if twins and twins[0] != best:
            twin = float(beams[twins[0]]["speed"].of_sums)
            lines.append(f"{speed / twin:.2f} times the beams of its own law ({twin:.0f}).")
    else:
        lines.append("no beams as good were timed.")
    theirs = [arm for arm in rows if str(arms[arm]["run"]).startswith("hf-") and rows[arm]["speed"].of_sums]
    for arm in theirs:
        quality = rows[arm]["logprob"].value
        lines.append(f"{speed / float(rows[arm]['speed'].of_sums):.1f} times {arm} "
                     f"({rows[arm]['speed'].of_sums:.0f}; {_number(quality, 3)}).")  # fmt: skip
    return " ".join(lines)


def plot(whole: Whole, path: Path) -> None:
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
        1, len(whole.speed), figsize=(6.2 * len(whole.speed), 5.0), squeeze=False, layout="constrained"
    )
    for panel, one in zip(axes[0], whole.speed, strict=True):
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for arm, row in summary(one, whole).items():
            speed, logprob = row["speed"].of_sums, row["logprob"].value
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
