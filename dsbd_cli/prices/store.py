"""What was measured, on disk: a small file each in the cache folder, written once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from filelock import FileLock, Timeout

from dsbd_cli.again import AGAIN
from dsbd_cli.errors import RunError, UserError, let_by, suppressed
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.paths import refuse_special, write_whole
from dsbd_cli.prices.table import Prices

VARIABLE = (
    "DSBD_PRICES"  # `off`: nothing is measured; a file: the prices in it; nothing or `auto`: measured ones
)
AUTO, OFF = "auto", "off"
_ASIDE = "measure anew"  # stands in a file that only `found_or_measured` looks at any more
_WAIT = 60.0  # seconds for another process that measures; it takes about two


class Plain(Protocol):
    """What can be kept."""

    @property
    def origin(self) -> str:
        """Where it comes from, in words."""

    @property
    def busy(self) -> str:
        """Why the machine is taken to have been busy when it was measured; empty where it was not."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""


T = TypeVar("T", bound=Plain)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """One kind of what is kept.

    Attributes:
        name: the key of its values in a file; `what` it is called in notes.
        read: values as `to_dict` gave them to the thing itself; ValueError for anything else.
    """

    name: str
    what: str
    read: Callable[[Any], T]


PRICES: Kind[Prices] = Kind("prices", "prices", Prices.from_dict)


class Kept(NamedTuple):
    """Prices and what to say about them; None where they could not be kept, and so were not measured."""

    prices: Prices | None
    notes: tuple[str, ...] = ()


def folder() -> Path:
    """Where what was measured is kept. Not created."""
    return cache_root() / "prices"


def can_keep() -> bool:
    """Whether anything can be written there; where not, nothing is measured."""
    there = next(place for place in (folder(), *folder().parents) if place.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def path_of(facts: Mapping[str, Any]) -> Path:
    """The file for these facts: machine, models, number formats, versions."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.json"


def _values(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, dict):
        raise ValueError("it holds no table")
    return values


def read(path: Path) -> Prices:
    """The prices in a file.

    Raises:
        ValueError: the file holds none, or is damaged.
        OSError: there is no such file, or it cannot be read.
    """
    values = _values(path)
    return Prices.from_dict(values.get("prices", values))


def read_given(path: Path) -> Prices:
    """The prices in a file that a user names.

    Raises:
        UserError: it is not there, or does not hold prices.
    """
    refuse_special(path, f"prices {path}", "name a file that `dsbd doctor --measure` or `dsbd tune` wrote")
    try:
        return read(path)
    except OSError as error:
        let_by(error)
        raise UserError(f"prices {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"prices {path} is damaged ({error}): leave the option out to measure anew") from None


def kept(facts: Mapping[str, Any]) -> Prices | None:
    """The prices on disk for `facts`, if there are some that can be read."""
    return find(PRICES, facts)


def set_aside(path: Path) -> None:
    """Have what a file holds measured anew when it is asked for next.

    Raises:
        RunError: it cannot be written.
    """
    with suppressed(OSError, ValueError):  # nothing there to set aside
        values = _values(path)
        write_whole(path, json.dumps(values | {_ASIDE: True}, indent=1) + "\n")


def kept_or_measured(
    facts: Mapping[str, Any], measure: Callable[[], Prices], *, again: bool = False, force: bool = False
) -> Kept:
    """`found_or_measured` for prices."""
    return Kept(*found_or_measured(PRICES, facts, measure, again=again, force=force))


def find(kind: Kind[T], facts: Mapping[str, Any]) -> T | None:
    """What is on disk for `facts`, if it can be read."""
    return _usable(kind, path_of(facts), [])


def found_or_measured(
    kind: Kind[T],
    facts: Mapping[str, Any],
    measure: Callable[[], T],
    *,
    again: bool = False,
    force: bool = False,
) -> tuple[T | None, tuple[str, ...]]:
    """What is on disk for `facts`, else measured now and kept; and notes.

    Of processes that start together one measures and the others wait for its file, so all decide alike. Where
    nothing can be written nothing is measured: numbers that are new in each run would change texts.

    Args:
        facts: plain values that it depends on; they are written beside it.
        measure: takes seconds.
        again: measure even if it is there. Where the machine is busy now and was not then, what is there stays:
            other programs only ever make things slower, and not all alike.
        force: then too the new one is kept.
    """
    path = path_of(facts)
    notes: list[str] = []
    if not again and (found := _usable(kind, path, notes)) is not None:
        return found, ()
    lock = FileLock(f"{path}.lock")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_WAIT)
        except (OSError, Timeout) as error:
            let_by(error)
            return None, tuple(notes)
        # Another process may have been quicker.
        if not again and (found := _usable(kind, path, [])) is not None:
            return found, ()
        before = _usable(kind, path, [], aside=True)
        found, said = _better(kind, before, measure(), again, force)
        values = {"facts": dict(facts), kind.name: found.to_dict()}
        write_whole(path, json.dumps(values, indent=1, default=str) + "\n")
        return found, (*notes, *said)
    except RunError:
        return None, tuple(notes)
    finally:
        lock.release()


def _better(kind: Kind[T], before: T | None, now: T, again: bool, force: bool) -> tuple[T, tuple[str, ...]]:
    """Which of both is to be kept, and what to say to somebody who had it measured anew."""
    if not now.busy or (before is None and not again):
        return now, ()
    why = f"the machine was busy ({now.busy}): the {kind.what}"
    if before is None or before.busy or force:
        return now, (f"{why} measured now may be off; {AGAIN} does it anew",)
    stay = f"{why} {before.origin} stay; {AGAIN} does it anew (--force keeps a busy machine's too)"
    return before, (stay,)


def _usable(kind: Kind[T], path: Path, notes: list[str], *, aside: bool = False) -> T | None:
    """What a file holds, if it can be read; what is set aside only where that is asked for."""
    try:
        values = _values(path)
        found = kind.read(values.get(kind.name))
        return None if values.get(_ASIDE) and not aside else found
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        let_by(error)
        notes.append(f"the {kind.what} in {path} were damaged: measured anew")
        return None


def _written(path: Path) -> float:
    """When; a file that another process has removed meanwhile is an old one."""
    try:
        return path.stat().st_mtime
    except OSError as error:
        let_by(error)
        return 0.0


def listed() -> Iterator[tuple[dict[str, Any], Prices]]:
    """Facts and prices of every whole file in the cache folder, newest first."""
    return ((facts, prices) for _, facts, prices in listed_of(PRICES))


def listed_of(kind: Kind[T]) -> Iterator[tuple[Path, dict[str, Any], T]]:
    """File, facts and the thing itself of every whole file of a kind in the cache folder, newest first."""
    for path in sorted(folder().glob("*.json"), key=_written, reverse=True):
        try:
            values = _values(path)
            found, facts = kind.read(values.get(kind.name)), values.get("facts")
            if values.get(_ASIDE):
                continue
        except (ValueError, OSError) as error:
            let_by(error)
            continue
        if isinstance(facts, dict):
            yield path, facts, found
