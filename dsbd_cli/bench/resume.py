"""Where a run was cut: the item whose answers would be split over two sessions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsbd_cli.bench.files import Record
from dsbd_cli.bench.runner import Job

Place = tuple[str, int]


def cut_items(results: Sequence[Record], jobs: Sequence[Job], arms: Collection[str]) -> set[Place]:
    """(item, repeat) that a session was at when it was cut: asked of some of its arms, and not of all.

    Its answers are given again in one session, since clocks of two sessions are no pair. A process asks item
    by item, so at most the last one of each is meant: arms that joined later leave items incomplete too.

    Args:
        jobs: what is to be run now. arms: names that the run knew before.
    """
    last = {(r.get("session", 0), r.get("rank", 0)): (r["item"], r["repeat"]) for r in results}
    given: dict[Place, set[str]] = {}
    for record in results:
        given.setdefault((record["item"], record["repeat"]), set()).add(record["arm"])
    wanted: dict[Place, set[str]] = {}
    for job in jobs:
        if job.arm.name in arms:
            wanted.setdefault((job.item.id, job.repeat), set()).add(job.arm.name)
    return {place for place in last.values() if wanted.get(place, set()) - given[place]}
