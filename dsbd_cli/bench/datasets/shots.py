"""Worked examples for few-shot prompts: chosen once by a fixed seed, never of the item's own article or database."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets import sample, spider, squad
from dsbd_cli.bench.datasets.prompts import Example
from dsbd_cli.errors import UserError

# How many are shown where nothing is said; other data sets have none.
DEFAULT_SHOTS = {"squad": 3, "spider": 5}
# Not the run's seed: two runs of different seeds ask the same prompts.
SEED = 1
# Characters; an example is read again before every answer, so short ones are taken where there are any.
SHORT = {"squad": 300, "spider": 450}


@dataclass(frozen=True)
class Shots:
    """The examples of a run.

    Attributes:
        count: how many each item gets.
        source: where they come from.
        pool: in the order they are taken; holds a few more than `count`, for items that must not see the first.
    """

    count: int
    source: str
    pool: tuple[Example, ...]

    def of(self, item: Any) -> tuple[Example, ...]:
        """The examples of one item: the first that share neither article nor database with it.

        Raises:
            UserError: there are not enough.
        """
        groups: frozenset[str] = getattr(item, "groups", frozenset())
        chosen = tuple(example for example in self.pool if not example.groups & groups)[: self.count]
        if len(chosen) < self.count:
            raise UserError(
                f"--shots {self.count}: {self.source} has {len(chosen)} worked examples that are not of the "
                f"article or database of item {item.id}"
            )
        return chosen

    def facts(self) -> dict[str, Any]:
        """What identifies them, for the run's fingerprint."""
        lines = [json.dumps([example.asked, example.answer]) for example in self.pool]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return {"count": self.count, "source": self.source, "sha256": digest}


def load_shots(kind: str, data_dir: Path | None, build_dir: Path, count: int) -> Shots:
    """Examples from the training data in `data_dir`, else from the built-in sample's items.

    Args:
        kind: `squad` or `spider`.
        data_dir: a folder, or None where the data are built in or from the hub.
        build_dir: where the sample's databases are built.

    Raises:
        UserError: a broken training file.
    """
    found = None
    if data_dir is not None:
        found = (squad if kind == "squad" else spider).training(data_dir)
    items: Sequence[Any]
    if found is None or not found[0]:
        items, source = sample.load(kind, build_dir).items, "the built-in sample"
    else:
        items, source = found[0], found[1].name
    return Shots(count, source, tuple(_pool(items, count, SHORT[kind])))


def _pool(items: Sequence[Any], count: int, short: int) -> list[Example]:
    """Examples in the order they are taken: short ones first, and one of each group before a second of any."""
    shuffled = random.Random(SEED).sample(items, len(items))
    candidates = [item.example() for item in shuffled]
    pool: list[Example] = []
    taken: Counter[str] = Counter()
    for example in _rounds(sorted(candidates, key=lambda each: len(each.asked) > short)):
        pool.append(example)
        taken.update(example.groups)
        if len(pool) - max(taken.values()) >= count:
            break
    return pool


def _rounds(examples: Iterable[Example]) -> Iterable[Example]:
    """The first example of every group, then the second ones, and so on."""
    left = list(examples)
    while left:
        seen: set[str] = set()
        later: list[Example] = []
        for example in left:
            if example.groups & seen:
                later.append(example)
            else:
                seen |= example.groups
                yield example
        left = later
