"""From results to the numbers of a report: one summary per arm, with intervals; unknown is null."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsbd_cli.bench import stats
from dsbd_cli.bench.files import Record
from dsbd_cli.bench.score import PRIMARY
from dsbd_cli.bench.stats import Estimate

Sums = dict[str, dict[str, float]]


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
    base = by_arm.get(baseline or "", [])
    return {
        "data": run["data"],
        "baseline": baseline,
        "primary": list(PRIMARY[kind]),
        "models": run["fingerprint"]["models"],
        "seed": run["fingerprint"]["seed"],
        "prompt_form": run["fingerprint"].get("prompt_form"),
        "rule": run["fingerprint"].get("rule"),
        "judge": run.get("judge"),
        "energy": run.get("energy"),
        "sessions": run["sessions"],
        "arms": {
            name: {**run["arms"][name], **summarize_arm(records, base, kind, run.get("energy") or {})}
            for name, records in by_arm.items()
        },
    }


def summarize_arm(
    records: Sequence[Record], base: Sequence[Record], kind: str, energy: Mapping[str, Any]
) -> dict[str, Any]:
    """All numbers of one arm; `base` = the baseline's results."""
    field, _, yes_no = PRIMARY[kind]
    tokens = sums_of(records, "new_tokens")
    # Speed is a ratio of sums: tokens of the returned answers over seconds of decoding.
    decoding = [r for r in records if r["new_tokens"] and r["decode_s"]]
    whole = [r for r in records if r["new_tokens"] and r["wall_s"]]
    metered = [r for r in records if r["new_tokens"] and r["energy_j"] is not None]
    spent = sum(r["energy_j"] for r in metered)
    known = [r for r in records if r["new_tokens"] and r["logprob"] is not None]
    metered = metered if spent > 0 else []
    logprob = over_items(known, "logprob", "new_tokens")
    outcomes = Counter((r["score"] or {}).get("outcome") or "unscored" for r in records)
    return {
        "items": len(tokens),
        "answers": len(records),
        "score": score_estimate(records, field, yes_no).to_dict(),
        "f1": score_estimate(records, "f1", False).to_dict() if kind in ("squad", "jsonl") else None,
        "outcomes": dict(outcomes) if set(outcomes) != {"unscored"} else None,
        "problems": sum(1 for r in records if r.get("problem")),
        "logprob_per_token": logprob.to_dict(),
        "perplexity": _mapped(logprob, lambda value: math.exp(-value)),
        "tokens_per_s": over_items(decoding, "new_tokens", "decode_s").to_dict(),
        "tokens_per_s_whole": over_items(whole, "new_tokens", "wall_s").to_dict(),
        "prefill_s": over_items([r for r in records if r["prefill_s"] is not None], "prefill_s").to_dict(),
        "new_tokens": over_items(records, "new_tokens").to_dict(),
        "joules_per_token": over_items(metered, "energy_j", "new_tokens").to_dict(),
        "watts": over_items([r for r in metered if r["wall_s"]], "energy_j", "wall_s").to_dict(),
        "energy_reason": None if metered else energy_reason(records, energy),
        "peak_bytes": max((r["peak_bytes"] for r in records if r["peak_bytes"] is not None), default=None),
        "finish_reasons": dict(Counter(turn["finish_reason"] for r in records for turn in r["turns"])),
        "against_baseline": against(records, base, field) if base else None,
        **engine_counts(records),
    }


def sums_of(records: Iterable[Record], name: str) -> dict[str, float]:
    """Item -> sum of a field over repeats."""
    sums: dict[str, float] = defaultdict(float)
    for record in records:
        sums[record["item"]] += record[name] or 0.0
    return dict(sums)


def over_items(records: Sequence[Record], part: str, whole: str | None = None) -> Estimate:
    """sum(part) / sum(whole) with items as the unit; without `whole` the mean per answer."""
    parts = sums_of(records, part)
    if whole is not None:
        wholes = sums_of(records, whole)
    else:
        wholes = {item: float(count) for item, count in Counter(r["item"] for r in records).items()}
    return stats.ratio(list(parts.values()), [wholes[item] for item in parts])


def score_estimate(records: Sequence[Record], field: str, yes_no: bool) -> Estimate:
    """Mean of a score over the items that have one; data faults and missing ratings are left out."""
    sums, counts = _scores(records, field)
    items = list(sums)
    values, weights = [sums[item] for item in items], [counts[item] for item in items]
    return stats.share(values, weights) if yes_no else stats.mean(values, weights)


def _scores(records: Iterable[Record], field: str) -> tuple[dict[str, float], dict[str, float]]:
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for record in records:
        value = (record["score"] or {}).get(field)
        if value is not None:
            sums[record["item"]] += float(value)
            counts[record["item"]] += 1
    return dict(sums), dict(counts)


def against(records: Sequence[Record], base: Sequence[Record], field: str) -> dict[str, Any]:
    """Paired comparison with the baseline, over the answers that both gave."""
    common = {(r["item"], r["repeat"]) for r in records} & {(r["item"], r["repeat"]) for r in base}
    mine = [r for r in records if (r["item"], r["repeat"]) in common]
    theirs = [r for r in base if (r["item"], r["repeat"]) in common]
    scores, counts = _scores(mine, field)
    base_scores, base_counts = _scores(theirs, field)
    items = [item for item in scores if item in base_scores]
    return {
        "speed": _paired(mine, theirs, "new_tokens", "decode_s").to_dict(),
        "speed_whole": _paired(mine, theirs, "new_tokens", "wall_s").to_dict(),
        "joules_per_token": _paired(mine, theirs, "energy_j", "new_tokens").to_dict(),
        "score": stats.paired_difference(
            [scores[i] / counts[i] for i in items], [base_scores[i] / base_counts[i] for i in items]
        ).to_dict(),
        "logprob": _logprob_gain(mine, theirs).to_dict(),
    }


def _logprob_gain(mine: Sequence[Record], theirs: Sequence[Record]) -> Estimate:
    """Mean over items of the difference in log-probability per token."""
    sides = []
    for records in (mine, theirs):
        known = [r for r in records if r["new_tokens"] and r["logprob"] is not None]
        tokens = sums_of(known, "new_tokens")
        sides.append({item: total / tokens[item] for item, total in sums_of(known, "logprob").items()})
    items = [item for item in sides[0] if item in sides[1]]
    return stats.paired_difference([sides[0][i] for i in items], [sides[1][i] for i in items])


def _paired(mine: Sequence[Record], theirs: Sequence[Record], part: str, whole: str) -> Estimate:
    def usable(records: Sequence[Record]) -> dict[str, Record]:
        return {
            f"{r['item']} {r['repeat']}": r for r in records if r[part] is not None and r[whole] is not None
        }

    one, two = usable(mine), usable(theirs)
    keys = [key for key in one if key in two]
    columns: list[list[float]] = []
    for side in (one, two):
        records = [side[key] for key in keys]
        for name in (part, whole):
            columns.append(list(sums_of(records, name).values()))
    if not keys:
        return stats.NONE
    return stats.paired_ratio(*columns)


def engine_counts(records: Sequence[Record]) -> dict[str, Any]:
    """Layers per target call, acceptance, widths: ratios of sums; null for arms that do not report them."""
    turns = [turn["stats"] for record in records for turn in record["turns"] if turn["stats"]]
    ours = [turn for turn in turns if turn.get("layers") is not None]

    def total(name: str) -> float:
        return sum(turn[name] for turn in ours)

    def ratio(part: float, whole: float) -> float | None:
        return part / whole if ours and whole else None

    widths = [width for turn in ours for width in turn["widths"]]
    distinct = [width for turn in ours for width in turn["distinct_widths"]]
    depth: list[list[int]] = []
    for turn in ours:
        for place, (examined, accepted) in enumerate(turn["accepted_by_depth"]):
            while len(depth) <= place:
                depth.append([0, 0])
            depth[place][0] += examined
            depth[place][1] += accepted
    calls = sum(turn["target_calls"] for turn in turns if turn.get("target_calls") is not None)
    made = sum(record["new_tokens"] or 0 for record in records)
    return {
        "layers_per_target_call": ratio(total("layers"), total("target_calls")) if ours else None,
        "tokens_per_target_call": made / calls if calls else None,
        "acceptance_rate": ratio(total("drafts_accepted"), total("drafts_examined")) if ours else None,
        "accepted_by_depth": depth or None,
        "mean_width": ratio(sum(widths), len(widths)),
        "mean_distinct_width": ratio(sum(distinct), len(distinct)),
        "kv_bytes_peak": max(
            (t["kv_bytes_peak"] for t in ours if t["kv_bytes_peak"] is not None), default=None
        ),
        "kv_slots_peak": max(
            (t["kv_slots_peak"] for t in ours if t["kv_slots_peak"] is not None), default=None
        ),
        "logprob_difference": _logprob_difference(records),
    }


def _logprob_difference(records: Sequence[Record]) -> float | None:
    """Largest difference per token between the engine's l(x) and the teacher-forced one."""
    pairs = [
        abs(turn["logprob"] - turn["logprob_engine"]) / turn["new_tokens"]
        for record in records
        for turn in record["turns"]
        if turn["logprob"] is not None and turn["logprob_engine"] is not None and turn["new_tokens"]
    ]
    return max(pairs, default=None)


def energy_reason(records: Sequence[Record], energy: Mapping[str, Any]) -> str:
    """Why an arm has no energy figure."""
    reasons = [turn["energy_reason"] for r in records for turn in r["turns"] if turn["energy_reason"]]
    return reasons[0] if reasons else str(energy.get("reason") or "no tokens were generated")


def with_ratings(
    results: Sequence[Record], ratings: Sequence[Record], judge: Mapping[str, Any] | None
) -> list[Record]:
    """MT-Bench results with the judge's ratings as their score: the mean over rated turns."""
    found: dict[tuple[str, str, int], dict[int, Record]] = defaultdict(dict)
    for rating in ratings:
        if judge is None or rating.get("judge") != judge.get("model"):
            continue
        found[rating["item"], rating["arm"], rating["repeat"]][rating["turn"]] = rating
    scored = []
    for record in results:
        turns = found.get((record["item"], record["arm"], record["repeat"]), {})
        values = [turn["value"] for turn in turns.values() if turn["value"] is not None]
        unread = sum(turn["value"] is None for turn in turns.values())
        score = None
        if turns:
            score = {
                "rating": sum(values) / len(values) if values else None,
                "outcome": "rated" if not unread else "rating missing",
                **{f"turn_{number + 1}": turn["value"] for number, turn in sorted(turns.items())},
            }
        scored.append({**record, "score": score})
    return scored


def _mapped(estimate: Estimate, function: Callable[[float], float]) -> dict[str, Any]:
    """An estimate through a falling function: the ends of the interval change places."""
    values = (estimate.value, estimate.high, estimate.low)
    value, low, high = (None if v is None else function(v) for v in values)
    return Estimate(value, low, high, estimate.items).to_dict()
