"""A bench without weights: a backend whose answers, clocks and joules are known beforehand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.measure import Answer, Cost
from dsbd_cli.bench.plan import Options, Plan, make_plan
from dsbd_cli.bench.prompting import Prompter
from dsbd_cli.cli.options import Chosen
from dsbd_cli.energy import EnergyMeter

SPEED = {"multinomial": 20.0, "beam": 10.0, "speculative": 30.0, "specinfer": 25.0, "dsbd": 15.0}


class BytesTokenizer:
    """One id per byte; no template."""

    chat_template = None
    bos_token_id = 0
    eos_token_id = 1
    all_special_tokens = ()
    added_tokens_decoder: dict[int, object] = {}  # noqa: RUF012

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": [3 + byte for byte in text.encode("utf-8")]}


class FakeBackend:
    """Answers from the seed alone.

    Args:
        say: (arm, seed) -> text; by default a query of the sample or nonsense, by the seed.
        stop_after: raise `error` instead of the answer that comes after so many.
    """

    def __init__(
        self, say: Any = None, stop_after: int | None = None, error: BaseException | None = None
    ) -> None:
        self.say, self.stop_after, self.error = say, stop_after, error or KeyboardInterrupt()
        self.calls: list[tuple[str, int, int]] = []
        self.windows: list[tuple[str, int, int]] = []
        self.name, self.per_token = "fake", 0.0
        self.meter = EnergyMeter([])

    def answer(self, arm: Arm, prompt_ids: Sequence[int], seed: int) -> Answer:
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise self.error
        self.calls.append((arm.name, seed, arm.settings.max_new_tokens))
        tokens = random.Random(seed).randint(5, 20)
        settings = arm.settings
        decode = tokens / SPEED.get(settings.method, 12.0)
        if arm.swept:  # plain arms keep round numbers
            decode *= (
                1 - 0.02 * settings.draft_width + 0.1 * (settings.threshold or 0) + 0.03 * settings.width
            )
        width = settings.width if settings.method in ("beam", "dsbd") else 1
        self.per_token = -0.6 + 0.05 * max(1, width // 2)
        ours = not arm.hf
        stats: dict[str, Any] = {"target_calls": tokens // 2}
        if ours:
            stats = {
                "layers": tokens,
                "target_calls": tokens // 2,
                "draft_calls": tokens,
                "drafts_examined": 3 * tokens,
                "drafts_accepted": tokens,
                "accepted_by_depth": [[tokens, tokens // 2], [tokens // 2, tokens // 4]],
                "widths": [width] * tokens,
                "distinct_widths": [max(1, width // 2)] * tokens,
                "kv_slots_peak": 100,
                "kv_bytes_peak": 1000,
                "notes": [],
            }
        text = (
            self.say(arm, seed)
            if self.say
            else random.Random(seed).choice(["SELECT 1", "no idea", "SELECT x"])
        )
        return Answer(
            text=text,
            token_ids=list(range(3, 3 + tokens)),
            finish_reason="eos",
            prompt_tokens=len(prompt_ids),
            new_tokens=tokens,
            wall_s=decode + 0.5,
            prefill_s=0.5,
            decode_s=decode,
            energy_j=None,
            energy_parts={"fake": None},
            energy_reason="fake: nothing to read",
            peak_bytes=None,
            logprob_engine=self.per_token * tokens if ours else None,
            stats=stats,
        )

    def logprob(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
        return self.per_token * len(token_ids)

    def at_a_time(self, batch: int | None) -> int:
        return batch or 3

    def answer_many(
        self, arm: Arm, prompts: Sequence[Sequence[int]], seeds: Sequence[int], at_a_time: int, seen: Any
    ) -> tuple[list[Answer], Cost]:
        """The same texts; a window lasts as long as its answers one by one over how many share a forward."""
        self.windows.append((arm.name, len(prompts), at_a_time))
        answers = [self.answer(arm, ids, seed) for ids, seed in zip(prompts, seeds, strict=True)]
        wall = sum(answer.wall_s or 0.0 for answer in answers) / at_a_time
        for count, answer in enumerate(answers, 1):
            answer.wall_s = answer.prefill_s = answer.decode_s = None
            seen(count)
        return answers, Cost(wall, 2.0 * len(answers), {"fake": 2.0}, None, 7)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[float | None]:
        return [self.logprob(*pair) for pair in zip(prompts, answers, strict=True)]

    def facts(self) -> dict[str, Any]:
        model = {"name": self.name, "dtype": "float32", "device": "cpu", "weights": "0"}
        return {"target": model, "draft": model}

    def devices(self) -> list[str]:
        return ["cpu"]


def prompter(plan: Plan, limit: int | None = None, tokenizer: Any = None) -> Prompter:
    return Prompter(tokenizer or BytesTokenizer(), 259, limit, plan.settings, plan.shots)


def plan(out: Path, dataset: str = "spider", settings: dict[str, Any] | None = None, **options: Any) -> Plan:
    chosen = Chosen(None, {"target": "t", "draft": "d"}, {"max_new_tokens": 32, **(settings or {})})
    options = {"limit": 4, "methods": "beam,dsbd", **options}
    return make_plan(Options(dataset=dataset, out=out, **options), chosen)
