"""A finished run in one line."""

from __future__ import annotations

from dsbd_cli.result import Result


def summary(result: Result) -> str:
    """`48 tokens in 4.2 s, 11.4 tok/s, ...`; what is unknown says n/a."""
    stats = result.stats
    parts = [
        f"{stats.new_tokens} tokens" + (f" in {stats.decode_s:.1f} s" if stats.decode_s is not None else ""),
        f"{number(stats.tokens_per_s, 1)} tok/s",
        f"{number(stats.layers_per_target_call)} layers/target call",
    ]
    if stats.acceptance_rate is not None:
        parts.append(f"acceptance {number(stats.acceptance_rate)}")
    if stats.mean_width is not None and max(stats.widths, default=1) > 1:
        parts.append(f"width {number(stats.mean_width, 1)} ({number(stats.mean_distinct_width, 1)} distinct)")
    parts.append(f"{number(stats.joules_per_token)} J/token")
    parts.append(f"ended by {result.finish_reason}")
    return ", ".join(parts)


def number(value: float | None, digits: int = 2) -> str:
    """A number to `digits` places; n/a for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"
