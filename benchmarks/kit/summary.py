"""From records to a table: per arm rates with intervals, and ratios paired by prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dsbd_cli.bench import stats
from dsbd_cli.bench.stats import median

Record = Mapping[str, Any]
_AT_REST = "did not move"  # what `energy_probes` says of a counter over a window that is too short for it


def summarise(
    records: Sequence[Record], arms: Sequence[str], baselines: Sequence[str], bytes_read: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Arm -> its numbers, intervals as `{value, low, high, items}`.

    Args:
        records: one per (prompt, arm, repeat); repeats of a prompt are added up.
        arms: names, in the order of the table.
        baselines: arms that others are compared with, on the prompts that both have.
        bytes_read: `target` and `draft`, bytes of weights a forward.
    """
    by_arm = {arm: _by_prompt(record for record in records if record["arm"] == arm) for arm in arms}
    return {
        arm: _numbers(rows, bytes_read)
        | {
            "against": {
                base: _against(rows, by_arm[base]) for base in baselines if by_arm.get(base) and base != arm
            }
        }
        for arm, rows in by_arm.items()
        if rows
    }


_SUMS = ("new_tokens", "wall_s", "decode_s", "energy_j", "logprob", "target_calls", "draft_calls", "layers",
         "width_sum", "distinct_sum")  # fmt: skip
_MAXIMA = ("kv_bytes_peak", "peak_bytes")


def _by_prompt(records: Iterable[Record]) -> dict[str, dict[str, Any]]:
    """Prompt -> sums over repeats; None where any part is unknown. Peaks are maxima."""
    rows: dict[str, dict[str, Any]] = {}
    for record in records:
        row = rows.get(record["prompt"])
        values = {name: record.get(name) for name in (*_SUMS, *_MAXIMA)}
        if values["energy_j"] is None and _AT_REST in str(record.get("energy_reason")):
            values["energy_j"] = 0.0  # the counter moves in steps: a later window has it
        if row is None:
            rows[record["prompt"]] = values
            continue
        for name, value in values.items():
            known = value is not None and row[name] is not None
            row[name] = None if not known else max(row[name], value) if name in _MAXIMA else row[name] + value
    return rows


def _numbers(rows: Mapping[str, Mapping[str, Any]], bytes_read: Mapping[str, int]) -> dict[str, Any]:
    def column(name: str) -> list[float] | None:
        values = [row[name] for row in rows.values()]
        return None if any(value is None for value in values) else values

    def per(top: str, bottom: str) -> dict[str, Any] | None:
        a, b = column(top), column(bottom)
        if a is None or b is None:
            return None
        rate = stats.rate(a, b)  # of the sums, which have no interval that holds; the medians have
        return stats.Estimate(rate.of_sums, None, None, len(a)).to_dict()

    speeds = [row["new_tokens"] / row["decode_s"] for row in rows.values() if row["decode_s"]]
    target, draft, seconds = column("target_calls"), column("draft_calls"), column("decode_s")
    moved = None
    if target is not None and seconds is not None and sum(seconds) > 0:
        total = sum(target) * bytes_read["target"] + sum(draft or [0]) * bytes_read.get("draft", 0)
        moved = total / sum(seconds)
    return {
        "prompts": len(rows),
        "tokens": int(sum(row["new_tokens"] for row in rows.values())),
        "tokens_per_s": per("new_tokens", "decode_s"),
        "tokens_per_s_median": median(speeds).to_dict(),
        "tokens_per_s_with_prefill": per("new_tokens", "wall_s"),
        "joules_per_token": per("energy_j", "new_tokens"),
        "logprob_per_token": per("logprob", "new_tokens"),
        "layers_per_call": per("layers", "target_calls"),
        "mean_width": per("width_sum", "layers"),
        "mean_distinct_width": per("distinct_sum", "layers"),
        "bytes_per_s": moved,
        "kv_bytes_peak": _largest(rows, "kv_bytes_peak"),
        "peak_bytes": _largest(rows, "peak_bytes"),
    }


def _largest(rows: Mapping[str, Mapping[str, Any]], name: str) -> int | None:
    values = [row[name] for row in rows.values() if row[name] is not None]
    return max(values) if values else None


def _against(rows: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Ratios of speed (higher is faster), energy a token and key/value bytes (lower is better), prompt by prompt."""
    shared = [prompt for prompt in rows if prompt in base]

    def ratios(rate: Callable[[Mapping[str, Any]], float | None]) -> dict[str, Any]:
        pairs = [(rate(rows[prompt]), rate(base[prompt])) for prompt in shared]
        return median([mine / its for mine, its in pairs if mine is not None and its]).to_dict()

    return {
        "speed": ratios(lambda row: _over(row["new_tokens"], row["decode_s"])),
        "speed_with_prefill": ratios(lambda row: _over(row["new_tokens"], row["wall_s"])),
        "energy": ratios(lambda row: _over(row["energy_j"], row["new_tokens"])),
        "kv_bytes": ratios(lambda row: row["kv_bytes_peak"]),
    }


def _over(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom
