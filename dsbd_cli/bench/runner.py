"""The loop of a bench: every item through every arm, interleaved, measured, scored and on disk at once."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.datasets.records import Item
from dsbd_cli.bench.files import Key, Record
from dsbd_cli.bench.measure import Answer, Backend, seed_of
from dsbd_cli.bench.progress import BenchProgress
from dsbd_cli.bench.prompting import Prompter
from dsbd_cli.bench.score import Scorer

WARM_UP_TOKENS = 12
# A stage that no clock of an answer holds, and that takes its time on a CPU.
LOGPROBS = "its log-probability, by the target alone"


@dataclasses.dataclass(frozen=True)
class Job:
    """One answer to give: an item, an arm, a repeat."""

    item: Item
    arm: Arm
    repeat: int

    @property
    def key(self) -> Key:
        return self.item.id, self.arm.name, self.repeat


def schedule(items: Sequence[Item], arms: Sequence[Arm], repeats: int, seed: int) -> Iterator[Job]:
    """All jobs: item by item, the arms of an item in an order shuffled by the seed.

    Interleaving spreads what changes over time (clocks, heat, neighbours) over all arms alike.
    """
    for repeat in range(repeats):
        for item in items:
            order = list(arms)
            random.Random(f"{seed}/{item.id}/{repeat}").shuffle(order)
            for arm in order:
                yield Job(item, arm, repeat)


class Runner:
    """Runs jobs on a backend.

    Args:
        backend: the models.
        prompter: items to token ids.
        scorer: answers to scores.
        seed: the run's seed.
        raw_stops: stop strings for plain-text prompts, unless the settings name some.
    """

    def __init__(
        self, backend: Backend, prompter: Prompter, scorer: Scorer, seed: int, raw_stops: tuple[str, ...] = ()
    ) -> None:
        self.backend, self.prompter, self.scorer, self.seed = backend, prompter, scorer, seed
        self._stops = raw_stops if prompter.form == "plain text" else ()

    def effective(self, arm: Arm) -> Arm:
        """The arm as it is run: with the data set's stop strings where prompts are plain text."""
        if not self._stops or arm.settings.stop:
            return arm
        return dataclasses.replace(arm, settings=dataclasses.replace(arm.settings, stop=self._stops))

    def warm_up(self, arms: Sequence[Arm], item: Item) -> None:
        """One answer per arm, not counted: first calls pay for kernels, graphs and allocators.

        Short on a CPU; whole on a card, where every new number of nodes may be recorded anew.
        """
        ids = self.prompter.ids(item, [])
        card = any(device.startswith("cuda") for device in self.backend.devices())
        for arm in arms:
            arm = self.effective(arm)
            whole = arm.settings.max_new_tokens
            budget = whole if card else min(WARM_UP_TOKENS, whole)
            short = dataclasses.replace(arm.settings, max_new_tokens=budget)
            self.backend.answer(dataclasses.replace(arm, settings=short), ids, self.seed)

    def run(
        self,
        jobs: Sequence[Job],
        write: Callable[[Record], None],
        progress: BenchProgress,
        common: Mapping[str, Any],
    ) -> None:
        """Give the answers of `jobs`; `write` gets each result as soon as it is there."""
        for job in jobs:
            record = self.result(job, progress.stage) | dict(common)
            write(record)
            progress.step(record)

    def result(self, job: Job, stage: Callable[[str], None] = lambda text: None) -> Record:
        """One result: all turns of an item through an arm, with sums over the turns; `stage` is told what is done."""
        where = f"{job.arm.name} on {job.item.id}"
        arm = self.effective(job.arm)
        turns: list[Answer] = []
        problem = None
        while problem is None and len(turns) < job.item.turns:
            ids, problem = self.prompt(job, turns)
            if problem is None:
                stage(where)
                answer = self.backend.answer(arm, ids, self.seed_of(job, len(turns)))
                stage(f"{where}: {LOGPROBS}")
                answer.logprob = self.backend.logprob(ids, answer.token_ids)
                turns.append(answer)
        return self.record(job, turns, problem)

    def prompt(self, job: Job, turns: Sequence[Answer]) -> tuple[list[int], str | None]:
        """The prompt behind these turns, and why it cannot be asked; None where it can."""
        ids = self.prompter.ids(job.item, [answer.text for answer in turns])
        if turns and not self.prompter.fits(ids):
            return ids, f"turn {len(turns) + 1} does not fit: {len(ids)} prompt tokens"
        return ids, None

    def seed_of(self, job: Job, turn: int) -> int:
        return seed_of(self.seed, job.item.id, job.repeat, turn)

    def record(self, job: Job, turns: Sequence[Answer], problem: str | None) -> Record:
        """The result of these turns, scored."""
        score = None
        if len(turns) == job.item.turns:
            score = self.scorer.score(job.item, [t.text for t in turns], [t.finish_reason for t in turns])
        return {
            "item": job.item.id,
            "arm": job.arm.name,
            "repeat": job.repeat,
            "group": group_of(job.item),
            **totals(turns),
            "score": score,
            "problem": problem,
            "turns": [turn.to_dict() for turn in turns],
        }


def group_of(item: Item) -> str | None:
    """What the data set sorts its items by: MT-Bench's category, Spider's hardness."""
    group = getattr(item, "category", None) or getattr(item, "hardness", None)
    return None if group is None else str(group)


def totals(turns: Sequence[Answer]) -> dict[str, Any]:
    """Sums over the turns of one item; a sum with an unknown part is unknown."""

    def total(name: str) -> Any:
        values = [getattr(turn, name) for turn in turns]
        return None if not values or None in values else sum(values)

    # An answer of no tokens has no log-probability, and adds none.
    logprobs = [turn.logprob for turn in turns if turn.new_tokens]
    peaks = [turn.peak_bytes for turn in turns if turn.peak_bytes is not None]
    # A counter that did not move within one short window is 0 there, not unknown: only sums are read.
    parts = [value for turn in turns for value in turn.energy_parts.values()]
    energy = None if not parts or None in parts else sum(value for value in parts if value is not None)
    return {
        "new_tokens": total("new_tokens"),
        "wall_s": total("wall_s"),
        "prefill_s": total("prefill_s"),
        "decode_s": total("decode_s"),
        "energy_j": energy,
        "logprob": None if not logprobs or None in logprobs else sum(lp for lp in logprobs if lp is not None),
        "peak_bytes": max(peaks, default=None),
    }
