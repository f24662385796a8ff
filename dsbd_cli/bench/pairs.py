"""Two arms on the same items: paired estimates of speed, energy and quality, and the items that stand out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_cli.bench import stats
from dsbd_cli.bench.files import Record
from dsbd_cli.bench.sessions import Session, alike
from dsbd_cli.bench.stats import Estimate
from dsbd_cli.counted import counted

Pair = tuple[Record, Record]


@dataclass(frozen=True)
class Clocked:
    """Pairs whose clocks may be compared, and what is to be said about the others."""

    pairs: list[Pair]
    note: str | None = None


def common(mine: Sequence[Record], base: Sequence[Record]) -> list[Pair]:
    """Answers of both arms to the same item and repeat."""
    theirs = {(r["item"], r["repeat"]): r for r in base}
    return [(r, theirs[key]) for r in mine if (key := (r["item"], r["repeat"])) in theirs]


def within_sessions(pairs: Sequence[Pair], sessions: Sequence[Session]) -> Clocked:
    """The pairs whose answers were given in one session.

    Where there is none, as when an arm joins a finished run, pairs of sessions that are alike stand in.
    """
    same = [(one, two) for one, two in pairs if _place(one) == _place(two)]
    if same or not pairs:
        left = len({one["item"] for one, _ in pairs} - {one["item"] for one, _ in same})
        what = "window" if pairs and "answers" in pairs[0][0] else "item"
        note = (
            f"{counted(left, what)} left out of speed and energy: answered in two sessions" if left else None
        )
        return Clocked(same, note)

    def circumstances(record: Record) -> Session:
        number = record.get("session", 0)
        return sessions[number] if 0 <= number < len(sessions) else {}

    near = [(one, two) for one, two in pairs if alike(circumstances(one), circumstances(two))]
    if near:
        return Clocked(near, "speed and energy compare answers of different sessions on like machines")
    return Clocked([], "speed and energy are not compared: the sessions differ in devices, threads or load")


def _place(record: Record) -> tuple[Any, Any]:
    return record.get("session", 0), record.get("rank", 0)


def compare(pairs: Sequence[Pair], clocked: Clocked, field: str, yes_no: bool) -> dict[str, Any]:
    """Paired estimates of one arm against another, each with `needed` items and the p of a paired test.

    Args:
        pairs: for quality. clocked: for speed and energy; of answers that share a clock, their windows.
        field: of the score. yes_no: whether it is a yes/no outcome.
    """
    found = {
        "speed": _rate(clocked.pairs, "new_tokens", "decode_s"),
        "speed_whole": _rate(clocked.pairs, "new_tokens", "wall_s"),
        "joules_per_token": _rate(clocked.pairs, "energy_j", "new_tokens"),
        "score": _difference(*scores(pairs, field), yes_no, graded=field == "f1"),
        # Once, where it is the score itself.
        "f1": _difference(*scores([] if field == "f1" else pairs, "f1"), graded=True),
        "logprob": _difference(*_logprobs(pairs)),
    }
    return found | {"clocks": clocked.note}


def _rate(pairs: Sequence[Pair], part: str, whole: str) -> dict[str, Any]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for pair in pairs:
        values = [record[name] for record in pair for name in (part, whole)]
        if None not in values:
            for place, value in enumerate(values):
                sums[pair[0]["item"]][place] += value
    columns = list(zip(*sums.values(), strict=True)) or [()] * 4
    estimate, ratios = stats.paired_rate(*columns)
    if part == "energy_j" and not all(columns[0] + columns[2]):
        # A counter too coarse for single answers: only sums are read.
        estimate = Estimate(estimate.of_sums, None, None, estimate.items, estimate.of_sums)
        ratios = []
    by_item = {item: ratio for item, ratio in zip(sums, ratios, strict=False) if ratio is not None}
    names = list(by_item)
    return {
        **estimate.to_dict(),
        "unit": "window" if pairs and "answers" in pairs[0][0] else "item",
        "needed": stats.needed(estimate, ratio=True),
        "p": stats.signed_rank([_log(ratio) for ratio in by_item.values()]),
        "by_item": {item: float(f"{ratio:.4g}") for item, ratio in by_item.items()},
        "outliers": [
            {
                "item": names[place],
                "ratio": by_item[names[place]],
                **dict(zip(("part", "whole", "base_part", "base_whole"), sums[names[place]], strict=True)),
            }
            for place in stats.outliers(list(by_item.values()))
        ],
    }


def _log(ratio: float) -> float:
    # Equal clocks to the last digit are a tie and not a difference of rounding.
    return 0.0 if abs(ratio - 1) < 1e-12 else math.log(ratio)


def _difference(
    values: Sequence[float], base: Sequence[float], yes_no: bool = False, graded: bool = False
) -> dict[str, Any]:
    estimate = stats.paired_difference(values, base, yes_no, graded)
    whole = yes_no and set(values) | set(base) <= {0.0, 1.0}
    differences = [one - two for one, two in zip(values, base, strict=True)]
    return {
        **estimate.to_dict(),
        "needed": stats.needed(estimate),
        "p": stats.mcnemar(values, base) if whole else stats.signed_rank(differences),
    }


def scores(pairs: Sequence[Pair], field: str) -> tuple[list[float], list[float]]:
    """Mean score over repeats of each item that both have a score for: (mine, base)."""

    def of(record: Record) -> float | None:
        value = (record["score"] or {}).get(field)
        return None if value is None else float(value)

    return _means(pairs, lambda pair: [(of(record), 1.0) for record in pair])


def _logprobs(pairs: Sequence[Pair]) -> tuple[list[float], list[float]]:
    """Log-probability per token of each item: (mine, base)."""
    return _means(pairs, lambda pair: [(r["logprob"], float(r["new_tokens"] or 0)) for r in pair])


def _means(
    pairs: Sequence[Pair], read: Callable[[Pair], list[tuple[float | None, float]]]
) -> tuple[list[float], list[float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)
    for pair in pairs:
        (one, weight), (two, other) = read(pair)
        if one is not None and two is not None and weight and other:
            for place, value in enumerate((one, weight, two, other)):
                sums[pair[0]["item"]][place] += value
    return [s[0] / s[1] for s in sums.values()], [s[2] / s[3] for s in sums.values()]
