"""From results to the numbers of a report: one summary per arm, with intervals; unknown is null."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsbd_cli.bench import pairs, stats
from dsbd_cli.bench.engine_counts import engine_counts
from dsbd_cli.bench.files import Record
from dsbd_cli.bench.score import PRIMARY
from dsbd_cli.bench.sessions import Session, warnings
from dsbd_cli.bench.stats import Estimate
from dsbd_cli.bench.windows import clocks, shared
from dsbd_cli.tally import NO_FOREST_PAYS

# What people would use instead: the comparison that a reader comes for.
HF_BEAMS = ("hf-beam-sample", "hf-beam-search")
# What is told of answers that share a clock.
WINDOW = (
    "item",
    "repeat",
    "session",
    "rank",
    "at_a_time",
    "answers",
    "new_tokens",
    "wall_s",
    "energy_j",
    "peak_bytes",
)


def summarize(run: Mapping[str, Any], results: Sequence[Record], ratings: Sequence[Record]) -> dict[str, Any]:
    """The summary of a run's folder.

    Args:
        run: `run.json`.
        results, ratings: lines of the two files.
    """
    kind = run["data"]["kind"]
    rated = with_ratings(results, ratings, run.get("judge")) if kind == "mt-bench" else list(results)
    arms = [name for name in run["arms"] if any(r["arm"] == name for r in rated)]
    by_arm = {name: [r for r in rated if r["arm"] == name] for name in arms}
    baseline = run.get("baseline") if run.get("baseline") in by_arm else None
    field, _, yes_no = PRIMARY[kind]
    sessions = run["sessions"]

    def against(mine: Sequence[Record], name: str) -> dict[str, Any]:
        both = pairs.common(mine, by_arm[name])
        timed = pairs.common(clocks(mine), clocks(by_arm[name]))
        return pairs.compare(both, pairs.within_sessions(timed, sessions), field, yes_no)

    described = {}
    for name, records in by_arm.items():
        against_base = against(records, baseline) if baseline else None
        described[name] = {
            **run["arms"][name],
            **summarize_arm(records, kind, run.get("energy") or {}),
            "against_baseline": against_base,
            "groups": groups(records, by_arm.get(baseline or "", []), sessions, field, yes_no),
        }
    plain = [name for name in arms if name.split(":")[0] == "dsbd" and not run["arms"][name].get("swept")]
    return {
        "data": run["data"],
        "baseline": baseline,
        "primary": list(PRIMARY[kind]),
        "models": run["fingerprint"]["models"],
        "seed": run["fingerprint"]["seed"],
        "batch": shared(rated),
        "prompt_form": run["fingerprint"].get("prompt_form"),
        "rule": run["fingerprint"].get("rule"),
        "judge": run.get("judge"),
        "energy": run.get("energy"),
        "sessions": sessions,
        "warnings": [
            *_few(
                max((arm["items"] for arm in described.values()), default=0),
                scored=any(arm["score"]["value"] is not None for arm in described.values()),
            ),
            *warnings(sessions, (r.get("session", 0) for r in rated)),
            *_undrafted(described),
        ],
        "arms": described,
        "against_hf": [
            {"arm": arm, "base": base, **against(by_arm[arm], base)}
            for base in HF_BEAMS
            if base in by_arm
            for arm in plain
        ],
    }


def _few(items: int, *, scored: bool) -> list[str]:
    """A line about a run of so few items that nothing should be read into its scores."""
    if not 0 < items < stats.FEWEST_GRADED:
        return []
    quality = f"about quality (one answer moves a mean score by {100 / items:.0f} % of its scale), and about speed only"
    what = quality if scored else "about speed but"
    return [
        f"{items} item{'s' * (items > 1)}: too few to decide anything {what} what an interval shows; --limit and "
        "--data-dir take more"
    ]


def _undrafted(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line about the arms whose forests were left to prices, and never begun: they ran as plain decoding."""
    names = [
        name
        for name, arm in arms.items()
        if arm["drafted"] is False
        and arm["settings"].get("gamma")  # of dsbd and speculative alone
        and arm["settings"].get("forest") == "adaptive"
    ]
    return [f"{', '.join(names)}: {NO_FOREST_PAYS}"] if names else []


def summarize_arm(records: Sequence[Record], kind: str, energy: Mapping[str, Any]) -> dict[str, Any]:
    """All numbers of one arm for itself."""
    field = PRIMARY[kind][0]
    timed = clocks(records)
    whole = [r for r in timed if r["new_tokens"] and r["wall_s"]]
    metered = _metered(timed)
    known = [r for r in records if r["new_tokens"] and r["logprob"] is not None]
    logprob = over_items(known, "logprob", "new_tokens")
    outcomes = Counter((r["score"] or {}).get("outcome") or "unscored" for r in records)
    return {
        "items": len({r["item"] for r in records}),
        "answers": len(records),
        "score": score_estimate(records, field, bounded=kind != "mt-bench").to_dict(),
        "f1": score_estimate(records, "f1").to_dict() if kind in ("squad", "jsonl") else None,
        "turns": turn_scores(records) if kind == "mt-bench" else None,
        "outcomes": dict(outcomes) if set(outcomes) != {"unscored"} else None,
        "problems": sum(1 for r in records if r.get("problem")),
        "logprob_per_token": logprob.to_dict(),
        "perplexity": _mapped(logprob, lambda value: math.exp(-value)),
        "tokens_per_s": tokens_per_s(timed).to_dict(),
        "tokens_per_s_whole": over_items(whole, "new_tokens", "wall_s").to_dict(),
        "prefill_s": over_items([r for r in records if r["prefill_s"] is not None], "prefill_s").to_dict(),
        "new_tokens": over_items([r for r in records if r["new_tokens"] is not None], "new_tokens").to_dict(),
        "joules_per_token": joules_per_token(timed).to_dict(),
        "watts": energy_over_items([r for r in metered if r["wall_s"]], "wall_s").to_dict(),
        "energy_reason": None if metered else energy_reason(records, energy),
        "peak_bytes": max((r["peak_bytes"] for r in timed if r["peak_bytes"] is not None), default=None),
        "windows": [{name: r[name] for name in WINDOW} for r in timed if "answers" in r] or None,
        "finish_reasons": dict(Counter(turn["finish_reason"] for r in records for turn in r["turns"])),
        **engine_counts(records),
    }


def tokens_per_s(timed: Sequence[Record]) -> Estimate:
    """Tokens over seconds of decoding, of what has a clock of its own (`windows.clocks`)."""
    return over_items([r for r in timed if r["new_tokens"] and r["decode_s"]], "new_tokens", "decode_s")


def joules_per_token(timed: Sequence[Record]) -> Estimate:
    """Joules over tokens, of what has a clock of its own."""
    return energy_over_items(_metered(timed), "new_tokens")


def _metered(timed: Sequence[Record]) -> list[Record]:
    """What has a reading; none where the counter never moved."""
    found = [r for r in timed if r["new_tokens"] and r["energy_j"] is not None]
    return found if sum(r["energy_j"] for r in found) > 0 else []


def sums_of(records: Iterable[Record], name: str) -> dict[str, float]:
    """Item -> sum of a field over repeats."""
    sums: dict[str, float] = defaultdict(float)
    for record in records:
        sums[record["item"]] += record[name] or 0.0
    return dict(sums)


def over_items(records: Sequence[Record], part: str, whole: str | None = None) -> Estimate:
    """The median over items of part / whole, the ratio of sums beside it; without `whole`, per answer."""
    parts = sums_of(records, part)
    if whole is not None:
        wholes = sums_of(records, whole)
    else:
        wholes = {item: float(count) for item, count in Counter(r["item"] for r in records).items()}
    return stats.rate(list(parts.values()), [wholes[item] for item in parts])


def energy_over_items(records: Sequence[Record], whole: str) -> Estimate:
    """Joules over `whole`. A counter too coarse for single answers shows 0 for some: only sums are read then."""
    estimate = over_items(records, "energy_j", whole)
    if all(sums_of(records, "energy_j").values()):
        return estimate
    return Estimate(estimate.of_sums, None, None, estimate.items, estimate.of_sums)


def score_estimate(records: Sequence[Record], field: str, bounded: bool = True) -> Estimate:
    """Mean of a score over the items that have one; data faults and missing ratings are left out.

    Args:
        bounded: the score lies in 0..1.
    """
    values = item_scores(records, field)
    return stats.share(values) if bounded else stats.mean(values)


def item_scores(records: Sequence[Record], field: str) -> list[float]:
    """Each item's mean over repeats, of the items that have one."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in records:
        value = (record["score"] or {}).get(field)
        if value is not None:
            found[record["item"]].append(float(value))
    return [sum(of_item) / len(of_item) for of_item in found.values()]


def turn_scores(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Of each turn of MT-Bench: the estimate over items, and how many answers want a rating."""
    count = max((len(record["turns"]) for record in records), default=0)
    return [
        {
            **score_estimate(records, f"turn_{turn}", bounded=False).to_dict(),
            "missing": sum((r["score"] or {}).get(f"turn_{turn}") is None for r in records),
        }
        for turn in range(1, count + 1)
    ]


def groups(
    records: Sequence[Record], base: Sequence[Record], sessions: Sequence[Session], field: str, yes_no: bool
) -> dict[str, Any] | None:
    """Score, speed and speed-up of each category or hardness; None where items have none."""
    names = list(dict.fromkeys(r.get("group") for r in records))
    if names in ([], [None]):
        return None
    found = {}
    for name in sorted(names, key=lambda name: (_ORDER.get(str(name), 99), str(name))):
        mine = [r for r in records if r.get("group") == name]
        # Answers of several groups share a window's clock: there is none of one group.
        timed = [r for r in mine if not r.get("window")]
        both = pairs.common(timed, base)
        speed = pairs.compare(both, pairs.within_sessions(both, sessions), field, yes_no)["speed"]
        found[str(name or "unknown")] = {
            "items": len({r["item"] for r in mine}),
            "score": score_estimate(mine, field, bounded=field != "rating").to_dict(),
            "tokens_per_s": tokens_per_s(timed).to_dict(),
            "speed": {name: speed[name] for name in ("value", "low", "high", "items")} if base else None,
        }
    return found


# Spider's own order of hardness.
_ORDER = {"easy": 0, "medium": 1, "hard": 2, "extra": 3}


def energy_reason(records: Sequence[Record], energy: Mapping[str, Any]) -> str:
    """Why an arm has no energy figure."""
    reasons = [turn["energy_reason"] for r in records for turn in r["turns"] if turn["energy_reason"]]
    return reasons[0] if reasons else str(energy.get("reason") or "no tokens were generated")


def with_ratings(
    results: Sequence[Record], ratings: Sequence[Record], judge: Mapping[str, Any] | None
) -> list[Record]:
    """MT-Bench results with the judge's ratings as their score.

    The mean over turns stands only where every turn has its rating: first turns are the easier ones, and a
    conversation that is rated by half would count as if they were all.
    """
    found: dict[tuple[str, str, int], dict[int, Record]] = defaultdict(dict)
    for rating in ratings:
        if judge is None or rating.get("judge") != judge.get("model"):
            continue
        found[rating["item"], rating["arm"], rating["repeat"]][rating["turn"]] = rating
    scored = []
    for record in results:
        turns = found.get((record["item"], record["arm"], record["repeat"]), {})
        score = None
        if turns:
            values = [turns[n]["value"] if n in turns else None for n in range(len(record["turns"]))]
            known = [value for value in values if value is not None]
            complete = bool(values) and len(known) == len(values)
            score = {
                "rating": sum(known) / len(known) if complete else None,
                "outcome": "rated" if complete else "rating missing",
                **{f"turn_{number}": value for number, value in enumerate(values, 1)},
            }
        scored.append({**record, "score": score})
    return scored


def _mapped(estimate: Estimate, function: Callable[[float], float]) -> dict[str, Any]:
    """An estimate through a falling function: the ends of the interval change places."""
    values = (estimate.value, estimate.high, estimate.low, estimate.of_sums)
    value, low, high, of_sums = (None if v is None else function(v) for v in values)
    return Estimate(value, low, high, estimate.items, of_sums).to_dict()
