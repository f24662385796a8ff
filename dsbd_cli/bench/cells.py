"""Numbers as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NA = "n/a"


def number(value: float | None, digits: int = 3) -> str:
    """Three significant digits, never an exponent for ordinary sizes; n/a for None."""
    if value is None:
        return NA
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}" if size < 1e7 else f"{value:.1e}"
    return f"{value:.{digits}g}" if size >= 1e-3 else f"{value:.1e}"


def fixed(value: float | None, places: int = 3) -> str:
    """Fixed decimals; n/a for None."""
    if value is None:
        return NA
    return f"{value:.{places}f}" if abs(value) < 1e7 else f"{value:.1e}"


def percent(value: float | None) -> str:
    return NA if value is None else f"{100 * value:.0f} %"


def interval(estimate: Mapping[str, Any] | None, places: int | None = None) -> str:
    """`value [low, high]`; the interval is left out where it is unknown."""
    if estimate is None or estimate["value"] is None:
        return NA
    show = number if places is None else lambda value: fixed(value, places)
    text = show(estimate["value"])
    if estimate["low"] is None:
        return text
    return f"{text} [{show(estimate['low'])}, {show(estimate['high'])}]"


def size(count: float | None) -> str:
    """Bytes with a binary unit."""
    if count is None:
        return NA
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def word(value: Any) -> str:
    """A setting or a count."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
