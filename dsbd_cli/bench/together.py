"""The loop of a bench whose answers share their forwards: window by window, measured as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.files import Record
from dsbd_cli.bench.measure import Answer, Cost
from dsbd_cli.bench.progress import BenchProgress
from dsbd_cli.bench.runner import LOGPROBS, WARM_UP_TOKENS, Job, Runner
from dsbd_cli.bench.windows import Window
from dsbd_cli.counted import counted


class TogetherRunner(Runner):
    """A `Runner` that answers windows: the throughput of each arm, and the same scores."""

    def warm_up_many(self, arms: Sequence[Arm], jobs: Sequence[Job], at_a_time: int) -> None:
        """A batch per arm, not counted.

        On a card one of whole answers with the longest prompt in it, since buffers that grow are captured anew;
        on a CPU two short answers.
        """
        card = any(device.startswith("cuda") for device in self.backend.devices())
        items = {job.item.id: job.item for job in jobs}
        prompts = [self.prompter.ids(item, []) for item in items.values()]
        longest = max(range(len(prompts)), key=lambda place: len(prompts[place]))
        count = min(at_a_time, len(prompts)) if card else min(2, len(prompts))
        batch = [prompts[longest], *(ids for place, ids in enumerate(prompts) if place != longest)][:count]
        for arm in arms:
            arm = self.effective(arm)
            whole = arm.settings.max_new_tokens
            budget = whole if card else min(WARM_UP_TOKENS, whole)
            short = dataclasses.replace(arm.settings, max_new_tokens=budget)
            self.backend.answer_many(
                dataclasses.replace(arm, settings=short),
                batch,
                [self.seed] * count,
                at_a_time,
                lambda _: None,
            )

    def run_windows(
        self,
        windows: Sequence[Window],
        at_a_time: int,
        write: Callable[[Sequence[Record]], None],
        progress: BenchProgress,
        common: Mapping[str, Any],
    ) -> None:
        """Give the answers of `windows`; `write` gets those of a window once all of them are there."""
        for number, window in enumerate(windows, 1):
            where = f"{window.arm.name}, window {number} of {len(windows)}"
            records = self.answers(window, at_a_time, partial(_tell, progress, where))
            records = [record | dict(common) for record in records]
            write(records)
            for record in records:
                progress.step(record)

    def answers(self, window: Window, at_a_time: int, tell: Callable[[str], None]) -> list[Record]:
        """The results of a window: turn by turn, every job's answer of a turn sharing the forwards.

        Args:
            tell: is told what is done now.
        """
        arm = self.effective(window.arm)
        turns: list[list[Answer]] = [[] for _ in window.jobs]
        problems: list[str | None] = [None] * len(window.jobs)
        costs: list[Cost] = []
        for turn in range(max(job.item.turns for job in window.jobs)):
            asked: dict[int, list[int]] = {}
            for place, job in enumerate(window.jobs):
                if problems[place] is None and turn < job.item.turns:
                    ids, problems[place] = self.prompt(job, turns[place])
                    if problems[place] is None:
                        asked[place] = ids
            if not asked:
                break
            seeds = [self.seed_of(window.jobs[place], turn) for place in asked]
            tell("")
            seen = partial(_seen, tell, len(window.jobs))
            given, cost = self.backend.answer_many(arm, list(asked.values()), seeds, at_a_time, seen)
            tell(LOGPROBS)
            logprobs = self.backend.logprobs(list(asked.values()), [answer.token_ids for answer in given])
            for place, answer, logprob in zip(asked, given, logprobs, strict=True):
                answer.logprob, answer.energy_reason = logprob, cost.energy_reason
                turns[place].append(answer)
            costs.append(cost)
        facts = window_facts(window, turns, costs, at_a_time)
        return [
            self.record(job, mine, problem) | {"window": facts}
            for job, mine, problem in zip(window.jobs, turns, problems, strict=True)
        ]


def window_facts(
    window: Window, turns: Sequence[Sequence[Answer]], costs: Sequence[Cost], at_a_time: int
) -> Record:
    """What a window cost in all, as every record of it carries it; a sum with an unknown part is unknown."""
    joules = [cost.energy_j for cost in costs]
    peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
    return {
        "id": window.id,
        "answers": len(window.jobs),
        "at_a_time": at_a_time,
        "new_tokens": sum(answer.new_tokens for mine in turns for answer in mine),
        "wall_s": sum(cost.wall_s for cost in costs),
        "energy_j": None if None in joules else sum(joule for joule in joules if joule is not None),
        "peak_bytes": max(peaks, default=None),
    }


def _tell(progress: BenchProgress, where: str, what: str) -> None:
    progress.stage(f"{where}: {what}" if what else where)


def _seen(tell: Callable[[str], None], count: int, done: int) -> None:
    tell(f"{done} of {counted(count, 'answer')}")
