"""Windows: what one arm is asked at a time where answers share their forwards, and what that cost in all."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.files import Key, Record
from dsbd_cli.bench.runner import Job

# A window holds this many batches: its last answers, which share their forwards with ever fewer, weigh little.
BATCHES = 8


@dataclass(frozen=True)
class Window:
    """Answers of one arm that are given together.

    Attributes:
        jobs: of `arm` and `repeat`, in the order of the items.
    """

    arm: Arm
    repeat: int
    jobs: tuple[Job, ...]

    @property
    def id(self) -> str:
        """The same for all arms that are asked the same items."""
        text = "\n".join(job.item.id for job in self.jobs)
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


def windows_of(jobs: Sequence[Job], done: Collection[Key], at_a_time: int, seed: int) -> Iterator[Window]:
    """The windows of a run: stretch by stretch of items, its arms in an order shuffled by the seed.

    Arms are asked the same stretches, so that their costs are pairs; items that only some arms are asked are
    stretches of their own. What is answered already is left out of its window.

    Args:
        jobs: all that are wanted. at_a_time: answers that share their forwards.
    """
    arms = {job.arm.name: job.arm for job in jobs}
    of: dict[tuple[str, int], dict[str, Job]] = {}
    for job in jobs:
        of.setdefault((job.item.id, job.repeat), {})[job.arm.name] = job
    alike: dict[tuple[int, frozenset[str]], list[dict[str, Job]]] = {}
    for (_, repeat), mine in of.items():
        alike.setdefault((repeat, frozenset(mine)), []).append(mine)
    for (repeat, asked), items in alike.items():
        for number, stretch in enumerate(_even(items, BATCHES * at_a_time)):
            order = [name for name in arms if name in asked]
            random.Random(f"{seed}/{number}/{repeat}").shuffle(order)
            for name in order:
                left = tuple(mine[name] for mine in stretch if mine[name].key not in done)
                if left:
                    yield Window(arms[name], repeat, left)


def _even(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """Stretches of about the same length, `most` at most: a short last one would cost more an answer."""
    count = -(-len(items) // most)
    edges = [round(place * len(items) / count) for place in range(count + 1)]
    for begin, end in itertools.pairwise(edges):
        yield items[begin:end]


def clocks(records: Sequence[Record]) -> list[Record]:
    """What has a clock of its own: the records themselves, or where answers share forwards their windows.

    A window stands as one record whose tokens, seconds (prefill included) and joules are those of all its
    answers together; every record carries them, so that a torn file loses none.
    """
    found: dict[tuple[Any, ...], Record] = {}
    alone = []
    for record in records:
        window = record.get("window")
        if window is None:
            alone.append(record)
            continue
        key = record["arm"], record["repeat"], record.get("session", 0), record.get("rank", 0), window["id"]
        found.setdefault(
            key,
            {
                **{name: record.get(name) for name in ("arm", "repeat", "session", "rank")},
                **{
                    name: window[name]
                    for name in ("answers", "at_a_time", "new_tokens", "wall_s", "energy_j")
                },
                "item": window["id"],
                "decode_s": window["wall_s"],
                "peak_bytes": window["peak_bytes"],
            },
        )
    return [*alone, *found.values()]


def shared(records: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How answers shared their forwards, for a report; None where each had a clock of its own."""
    sizes = {record["window"]["at_a_time"] for record in records if record.get("window")}
    return {"at_a_time": sorted(sizes)} if sizes else None
