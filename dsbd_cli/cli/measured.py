"""What `dsbd doctor` says of what was measured on this machine: number formats, prices, the host's share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from dsbd_cli.again import AGAIN, naming
from dsbd_cli.counted import counted
from dsbd_cli.version import __version__


def formats(preset: str | None) -> list[str]:
    """Which number formats `auto` was found to be, for the models that were loaded on this CPU."""
    from dsbd_cli.prices.formats import listed

    return _current(
        (
            (
                facts,
                f"{facts.get('number format')} {facts.get('name')}{_threads(facts)}, "
                f"torch {facts.get('torch')}: {verdict.describe()}",
            )
            for _, facts, verdict in listed()
        ),
        lambda facts: _preset_of({facts.get("name")}, preset),
    )


def _threads(facts: dict[str, Any]) -> str:
    """With how many something was measured, where that was noted."""
    return f", {counted(facts['threads'], 'thread')}" if "threads" in facts else ""


def _preset_of(names: set[Any], preset: str | None) -> str | None:
    """A preset whose pair holds models of these names, `preset` before those that ship; None where none does."""
    from dsbd_cli.loading.source import parse_source
    from dsbd_cli.presets import DEFAULT_PRESET, list_presets, load_preset

    known = [(name, load_preset(name).pair) for name in (preset, DEFAULT_PRESET) if name is not None]
    for name, pair in (*known, *((one.name, one.pair) for one in list_presets())):
        if names and names <= {
            parse_source(text).name for text in (pair.target, pair.draft) if text is not None
        }:
            return name
    return None


def _current(
    found: Iterable[tuple[dict[str, Any], str]], preset_of: Callable[[dict[str, Any]], str | None]
) -> list[str]:
    """Lines of what this very program has measured, and how many are of others.

    Args:
        preset_of: from facts, whose preset measures it anew.
    """
    from dsbd_cli.loading.ready.key import code_sum

    lines, others = [], 0
    for facts, line in found:
        if facts.get("dsbd") == __version__ and facts.get("code") == code_sum():
            lines.append(naming(line, preset_of(facts)) if AGAIN in line else line)
        else:
            others += 1
    return [*lines, f"{others} more, by another version of dsbd: not used"] if others else lines


def prices(preset: str | None) -> list[str]:
    """What forwards were measured to cost, for the pairs that decoded here."""
    from dsbd_cli.prices.store import listed

    lines: list[tuple[dict[str, Any], str]] = []
    for facts, prices in listed():
        models = [facts[role] for role in ("target", "draft") if isinstance(facts.get(role), dict)]
        names = " + ".join(f"{one.get('name')} ({one.get('dtype')}, {one.get('device')})" for one in models)
        lines.append((facts, f"{names}{_threads(facts)}, torch {facts.get('torch')}: {prices.describe()}"))
    return _current(
        lines,
        lambda facts: _preset_of(
            {facts[role].get("name") for role in ("target", "draft") if isinstance(facts.get(role), dict)},
            preset,
        ),
    )


def host(preset: str | None) -> list[str]:
    """What the host's share of a batch was measured to cost beside a device."""
    from dsbd_cli.presets import DEFAULT_PRESET
    from dsbd_cli.prices.host import KIND
    from dsbd_cli.prices.store import listed_of

    return _current(
        (
            (facts, f"python {facts.get('python')}, torch {facts.get('torch')}: {prices.describe()}")
            for _, facts, prices in listed_of(KIND)
        ),
        lambda facts: preset or DEFAULT_PRESET,  # it holds for every pair, and any measures it
    )
