"""Prices on disk: one small file a machine and pair in the cache folder, written once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from dsbd_cli.errors import RunError, UserError
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.paths import refuse_special, write_whole
from dsbd_cli.prices.table import Prices

_WAIT = 60.0  # seconds for another process that measures; it takes about two


class Kept(NamedTuple):
    """Prices and what to say about them; None where they could not be kept, and so were not measured."""

    prices: Prices | None
    notes: tuple[str, ...] = ()


def folder() -> Path:
    """Where measured prices are kept. Not created."""
    return cache_root() / "prices"


def path_of(facts: Mapping[str, Any]) -> Path:
    """The file for these facts: machine, models, number formats, versions."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:24]}.json"


def read(path: Path) -> Prices:
    """The prices in a file.

    Raises:
        ValueError: the file holds none, or is damaged.
        OSError: there is no such file, or it cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not isinstance(values, dict):
        raise ValueError("no table of prices")
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
        raise UserError(f"prices {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"prices {path} is damaged ({error}): leave the option out to measure anew") from None


def kept(facts: Mapping[str, Any]) -> Prices | None:
    """The prices on disk for `facts`, if there are some that can be read."""
    return _usable(path_of(facts), [])


def kept_or_measured(facts: Mapping[str, Any], measure: Callable[[], Prices], *, again: bool = False) -> Kept:
    """The prices for `facts`: those on disk, else measured now and kept.

    Of processes that start together one measures and the others wait for its file, so all decide alike. Where
    nothing can be written nothing is measured: numbers that are new in each run would change texts.

    Args:
        facts: plain values that a price depends on; they are written beside the prices.
        measure: takes seconds.
        again: measure even if there are some.
    """
    path = path_of(facts)
    notes: list[str] = []
    if not again and (found := _usable(path, notes)) is not None:
        return Kept(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{path}.lock")
        lock.acquire(timeout=_WAIT)
    except (OSError, Timeout):
        return Kept(None, tuple(notes))
    try:
        # Another process may have been quicker.
        if not again and (found := _usable(path, [])) is not None:
            return Kept(found)
        prices = measure()
        write_whole(
            path, json.dumps({"facts": dict(facts), "prices": prices.to_dict()}, indent=1, default=str) + "\n"
        )
        return Kept(prices, tuple(notes))
    except RunError:
        return Kept(None, tuple(notes))
    finally:
        lock.release()


def _usable(path: Path, notes: list[str]) -> Prices | None:
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (ValueError, OSError):
        notes.append(f"the prices in {path} were damaged: measured anew")
        return None


def listed() -> Iterator[tuple[dict[str, Any], Prices]]:
    """Facts and prices of every whole file in the cache folder, newest first."""
    files = folder().glob("*.json") if folder().is_dir() else ()
    for path in sorted(files, key=lambda path: -path.stat().st_mtime):
        try:
            prices, facts = read(path), json.loads(path.read_bytes()).get("facts")
        except (ValueError, OSError):
            continue
        if isinstance(facts, dict):
            yield facts, prices
