"""Which number format `auto` is on a CPU: what was measured of a model here, and what follows. No clock, no torch.

A format that rounds more is taken where forwards in it are clearly quicker. The verdict is kept beside the prices
(`store.py`), so the same command gives the same text next time; `slices.py` measures.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.loading import processor
from dsbd_cli.prices import store
from dsbd_cli.version import __version__

FORMAT = 1
# How many times as quick a format has to be to stand before one that rounds less: nearly equal ones would be
# chosen by the noise of the machine.
CLEARLY = 1.15
ONCE = "timing number formats on this machine (once a model; dsbd doctor shows it)"

Times = Mapping[str, Mapping[int, float]]


@dataclass(frozen=True)
class Verdict:
    """What `auto` is for one model on one machine.

    Attributes:
        dtype: the name of the number format.
        ms: by format and number of nodes, milliseconds of a forward over a slice of the model; empty where nothing
            was to be timed.
        origin: where it comes from, in words.
        busy: as in `table.Prices`.

    Raises:
        ValueError: times that are none, or of other formats than the chosen one.
    """

    dtype: str
    ms: Times
    origin: str
    busy: str = ""

    def __post_init__(self) -> None:
        if self.ms and self.dtype not in self.ms:
            raise ValueError(f"{self.dtype} was not timed")
        if not all(0 < one < math.inf for curve in self.ms.values() for one in curve.values()):
            raise ValueError("times are positive numbers of milliseconds")

    def describe(self) -> str:
        """One line for people."""
        parts = [
            f"{name} " + ", ".join(f"{ms:.3g} at {count}" for count, ms in sorted(curve.items()))
            for name, curve in self.ms.items()
        ]
        times = f"; ms of a slice by nodes: {'; '.join(parts)}" if parts else ""
        return f"{self.dtype}, {self.origin}{times}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ms = {name: {str(count): one for count, one in curve.items()} for name, curve in self.ms.items()}
        said = {"origin": self.origin, "busy": self.busy}
        return {"format": FORMAT, "dtype": self.dtype, "ms": ms, **said}

    @classmethod
    def from_dict(cls, values: Any) -> Verdict:
        """What `to_dict` wrote.

        Raises:
            ValueError: anything else.
        """
        try:
            if values["format"] != FORMAT or type(values["dtype"]) is not str:
                raise ValueError("it is of another kind or version")
            ms = {
                name: {int(count): float(one) for count, one in curve.items()}
                for name, curve in values["ms"].items()
            }
            return cls(values["dtype"], ms, str(values["origin"]), str(values.get("busy", "")))
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"no verdict ({type(error).__name__}: {error})") from None


KIND: store.Kind[Verdict] = store.Kind("number format", "times of number formats", Verdict.from_dict)


def quickest(ms: Times, clearly: float = CLEARLY) -> str:
    """The format to take, from times by format and number of nodes.

    How much quicker one is than another is the geometric mean over the numbers of nodes: decoding with small and
    with large forests counts alike.

    Args:
        ms: the formats in order, what rounds least first; of the same numbers of nodes.
        clearly: the factor by which a format must be quicker than each before it.
    """
    best, *others = ms
    for name in others:
        ratios = [math.log(ms[best][count] / ms[name][count]) for count in ms[name]]
        if sum(ratios) / len(ratios) >= math.log(clearly):
            best = name
    return best


def allowed() -> bool:
    """Whether anything may be measured at all."""
    return os.environ.get(store.VARIABLE) != store.OFF


def facts(
    *,
    name: str,
    weights: str,
    role: str,
    formats: Sequence[str],
    threads: int,
    versions: Mapping[str, str],
    code: str,
) -> dict[str, Any]:
    """What a verdict depends on.

    Args:
        name: the model's, for people. weights: stands for its files.
        role: `target` or `draft`, which may multiply in int8.
        formats: those to choose from, what rounds least first.
        threads: of torch. versions: of the libraries that compute.
        code: stands for the code that computes and times.
    """
    return {
        "number format": role,
        "name": name,
        "weights": weights,
        "formats": list(formats),
        "threads": threads,
        "dsbd": __version__,
        "code": code,
        **versions,
        "machine": platform.machine(),
        "flags": hashlib.sha256(processor.description().encode()).hexdigest()[:16],
        "compiled": [processor.compiler(), processor.level()] if processor.can_compile() else None,
    }


def still(kept: Mapping[str, Any], threads: int) -> bool:
    """Whether a pair that is remembered would get the formats that it has.

    Args:
        kept: by role, `facts` and `dtype` of a verdict that was followed; no `dtype` where there was none to follow.
        threads: of torch, now.
    """
    for one in kept.values():
        verdict = store.find(KIND, one["facts"])
        if verdict is None or verdict.dtype != one["dtype"] or one["facts"]["threads"] != threads:
            return False
    return True


def listed() -> Iterator[tuple[Path, dict[str, Any], Verdict]]:
    """Every verdict that is kept, with its file and facts, newest first."""
    return store.listed_of(KIND)


def forget(names: Sequence[str], *, force: bool = False) -> None:
    """Have models of these names timed anew when they are loaded next.

    Args:
        force: as for `store.found_or_measured`.

    Raises:
        OSError, RunError: a verdict cannot be removed or set aside.
    """
    for path, known, _ in listed():
        if known.get("name") in names:
            if force:
                path.unlink(missing_ok=True)
            else:
                store.set_aside(path)
