"""What the engine counted, per arm: layers, acceptance and widths, with intervals over items."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dsbd_cli.bench import stats
from dsbd_cli.bench.files import Record
from dsbd_cli.bench.stats import Estimate


def engine_counts(records: Sequence[Record]) -> dict[str, Any]:
    """Layers per target call, acceptance, widths: ratios of sums; null for arms that do not report them."""
    by_item: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        for turn in record["turns"]:
            if turn["stats"] and turn["stats"].get("layers") is not None:
                by_item[record["item"]].append(turn["stats"])
    ours = [turn for turns in by_item.values() for turn in turns]

    def over(
        part: Callable[[Record], float],
        whole: Callable[[Record], float],
        least: float = 0,
        most: float = math.inf,
    ) -> Estimate:
        totals = [(sum(map(part, turns)), sum(map(whole, turns))) for turns in by_item.values()]
        return stats.rate([part for part, _ in totals], [whole for _, whole in totals], least, most)

    turns = [turn["stats"] for record in records for turn in record["turns"] if turn["stats"]]
    calls = sum(turn["target_calls"] for turn in turns if turn.get("target_calls") is not None)
    made = sum(record["new_tokens"] or 0 for record in records)
    layers = over(lambda t: t["layers"], lambda t: t["target_calls"])
    width = over(lambda t: sum(t["widths"]), lambda t: len(t["widths"]), least=1)
    distinct = over(lambda t: sum(t["distinct_widths"]), lambda t: len(t["distinct_widths"]), least=1)
    accepted = over(lambda t: t["drafts_accepted"], lambda t: t["drafts_examined"], most=1)
    by_depth = []
    for depth in range(max((len(turn["accepted_by_depth"]) for turn in ours), default=0)):
        estimate = over(partial(_at_depth, depth, 1), partial(_at_depth, depth, 0), most=1)
        examined = sum(_at_depth(depth, 0, turn) for turn in ours)
        by_depth.append({**estimate.to_dict(), "examined": examined})
    drafted = sum((turn.get("draft_calls") or 0) + (turn.get("drafts_examined") or 0) for turn in ours)
    return {
        "drafted": drafted > 0 if ours else None,
        "layers_per_target_call": layers.of_sums,
        "layers_per_call": layers.to_dict(),
        "layers_by_item": _layers_by_item(by_item),
        "tokens_per_target_call": made / calls if calls else None,
        "acceptance_rate": accepted.of_sums,
        "acceptance_by_depth": by_depth or None,
        "mean_width": width.of_sums,
        "mean_distinct_width": distinct.of_sums,
        "distinct_width": distinct.to_dict(),
        "kv_bytes_peak": max(
            (t["kv_bytes_peak"] for t in ours if t["kv_bytes_peak"] is not None), default=None
        ),
        "kv_slots_peak": max(
            (t["kv_slots_peak"] for t in ours if t["kv_slots_peak"] is not None), default=None
        ),
        "logprob_difference": _logprob_difference(records),
    }


def _at_depth(depth: int, column: int, turn: Record) -> int:
    """Drafts of one turn at a layer of the draft: examined (column 0), accepted (1)."""
    counts = turn["accepted_by_depth"]
    return int(counts[depth][column]) if depth < len(counts) else 0


def _layers_by_item(turns_of: Mapping[str, Sequence[Record]]) -> dict[str, float]:
    """Layers per target call of each item, to four digits."""
    sums = {
        item: (sum(turn["layers"] for turn in turns), sum(turn["target_calls"] for turn in turns))
        for item, turns in turns_of.items()
    }
    return {item: float(f"{layers / calls:.4g}") for item, (layers, calls) in sums.items() if calls}


def _logprob_difference(records: Sequence[Record]) -> float | None:
    """Largest difference per token between the engine's l(x) and the teacher-forced one."""
    found = [
        abs(turn["logprob"] - turn["logprob_engine"]) / turn["new_tokens"]
        for record in records
        for turn in record["turns"]
        if turn["logprob"] is not None and turn["logprob_engine"] is not None and turn["new_tokens"]
    ]
    return max(found, default=None)
