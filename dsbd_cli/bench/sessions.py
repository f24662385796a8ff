"""What the sessions of a run have in common: clocks of unlike circumstances are no pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsbd_cli.counted import counted
from dsbd_cli.others import BUSY, took

Session = Mapping[str, Any]
# What decides how fast a machine is; the load is looked at apart, since it is never quite the same.
DECISIVE = ("devices", "cpu", "cores", "threads", "processes", "cuda", "driver")
# Load average over usable cores, from where on a clock may tell of others' work too. It holds what the machine did in
# the minute before, so it counts only where others' share of the cores' time was not measured.
_LOADED = 0.5


def alike(one: Session, two: Session) -> bool:
    """Whether clocks of the two may be compared: same devices and threads, and about the same load."""
    return not differing([one, two]) and not _unlike(one, two)


def differing(sessions: Sequence[Session]) -> list[str]:
    """The decisive circumstances in which sessions differ, in words."""
    found = []
    for name in DECISIVE:
        values = [_word(session.get(name)) for session in sessions]
        if len(set(values)) > 1:
            found.append(f"{name} ({'; '.join(dict.fromkeys(values))})")
    return found


def warnings(sessions: Sequence[Session], used: Iterable[int]) -> list[str]:
    """What a reader of clocks must know: sessions that differ, and machines that were busy.

    Args:
        used: numbers of the sessions that results come from.
    """
    mine = {number: sessions[number] for number in sorted(set(used)) if 0 <= number < len(sessions)}
    found = []
    if other := differing(list(mine.values())):
        found.append(
            f"the answers were given in {len(mine)} sessions that differ in {', '.join(other)}: figures over all "
            "of them mix machines; pairs are taken within a session only"
        )
    for number, session in mine.items():
        if (words := busy(session)) is not None:
            found.append(f"session {number}: {words}")
    return found


def busy(session: Session) -> str | None:
    """What a reader of a session's clocks must know of others' work meanwhile; None for nothing."""
    if session.get("others") is not None:
        said = took(float(session["others"]))
        return None if said is None else f"{said}, so that its speeds are lower than an idle machine's"
    if _load(session) < _LOADED:
        return None
    return (
        f"it began at a load average of {session['load']:.1f} on {counted(_cores(session), 'core')} (what this "
        "machine did in the minute before, its own loading included); its speeds may be lower than an idle machine's"
    )


def _unlike(one: Session, two: Session) -> bool:
    """Whether others worked on the machine in one of two sessions and not in the other."""
    shares = [session.get("others") for session in (one, two)]
    if None not in shares:
        return abs(float(shares[0]) - float(shares[1])) >= BUSY  # type: ignore[arg-type]
    return abs(_load(one) - _load(two)) >= _LOADED


def _load(session: Session) -> float:
    """Load average at the start over cores; 0 where it is not known."""
    return float(session.get("load") or 0.0) / _cores(session)


def _cores(session: Session) -> int:
    return int(session.get("usable_cores") or session.get("cores") or 1)


def _word(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value.values()))
    return str(value)
