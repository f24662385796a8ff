"""The backend of a bench: a loaded pair that answers prompts, one by one or together, and what that cost."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.measure import Answer, Cost
from dsbd_cli.bench.methods import ONE_AT_A_TIME
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.group import group_of
from dsbd_cli.result import Result

if TYPE_CHECKING:
    from dsbd_cli.bench.hf import HfAnswer

T = TypeVar("T")
# Counts of the engine that are kept with each answer.
STATS = (
    "layers", "target_calls", "draft_calls", "drafts_examined", "drafts_accepted", "accepted_by_depth",
    "widths", "distinct_widths", "kv_slots_peak", "kv_bytes_peak", "notes",
)  # fmt: skip


class PairBackend:
    """A loaded pair."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        models = [decoder.pair.target, *([decoder.pair.draft] if decoder.pair.draft else [])]
        # A target may be spread over several cards.
        places = [weight.device for loaded in models for weight in loaded.model.parameters()]
        self._devices = [device for device in dict.fromkeys(places) if device.type != "meta"]
        # Arms often give one answer to a prompt: its forward is made once.
        self._forced: tuple[tuple[int, ...], dict[tuple[int, ...], float | None]] = (), {}
        self._meter = EnergyMeter.for_devices(self._devices, group_of(decoder.pair.target.model).cards)

    @property
    def meter(self) -> EnergyMeter:
        return self._meter

    def devices(self) -> list[str]:
        return [str(device) for device in self._devices]

    def facts(self) -> dict[str, Any]:
        from dsbd_cli.batch.run import weights

        # With tensor parallelism this process holds parts only: the models' names must do.
        split = group_of(self.decoder.pair.target.model).size > 1
        digests = {} if split else weights(self.decoder)
        return {
            role: None
            if model is None
            else {
                "name": model["name"],
                "dtype": model["dtype"],
                "device": model["device"].split(":")[0],
                "weights": digests.get(role),
            }
            | ({"vocab": model["vocab"]} if "vocab" in model else {})
            for role, model in self.decoder.models().items()
        }

    def answer(self, arm: Arm, prompt_ids: Sequence[int], seed: int) -> Answer:
        run = self._hf if arm.hf else self._ours
        answer, cost = self._measured(lambda: run(arm, list(prompt_ids), seed))
        answer.wall_s = cost.wall_s
        if answer.prefill_s is not None:
            answer.decode_s = max(0.0, cost.wall_s - answer.prefill_s)
        answer.energy_j, answer.energy_parts = cost.energy_j, cost.energy_parts
        answer.energy_reason, answer.peak_bytes = cost.energy_reason, cost.peak_bytes
        return answer

    def at_a_time(self, batch: int | None) -> int:
        from dsbd_cli.many import Batch

        with Batch(self.decoder, batch) as running:
            return running.size

    def answer_many(
        self,
        arm: Arm,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        at_a_time: int,
        seen: Callable[[int], None],
    ) -> tuple[list[Answer], Cost]:
        run = self._hf_many if arm.hf else self._our_many
        return self._measured(lambda: run(arm, [list(ids) for ids in prompts], seeds, at_a_time, seen))

    def logprob(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
        from dsbd_cli.bench.logprobs import answer_logprob

        prompt, answer = tuple(prompt_ids), tuple(token_ids)
        if prompt != self._forced[0]:
            self._forced = prompt, {}
        known = self._forced[1]
        if answer not in known:
            known[answer] = answer_logprob(self.decoder.pair, prompt, answer)
        return known[answer]

    def logprobs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[float | None]:
        from dsbd_cli.bench.logprobs import answer_logprobs

        return answer_logprobs(self.decoder.pair, prompts, answers)

    def _measured(self, run: Callable[[], T]) -> tuple[T, Cost]:
        """What a call gives, and what it cost, with a device sync on both sides."""
        import torch

        from dsbd_cli.bench.hf import synchronize
        from dsbd_cli.loading.quiet import quiet_transformers

        device = self.decoder.pair.target.device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        with quiet_transformers():
            for each in self._devices:
                synchronize(each)
            self.meter.start()
            begin = time.perf_counter()
            value = run()
            for each in self._devices:
                synchronize(each)
            wall = time.perf_counter() - begin
            reading = self.meter.stop()
        peak = int(torch.cuda.max_memory_allocated(device)) if cuda else None
        return value, Cost(wall, reading.joules, dict(reading.parts), reading.reason, peak)

    def _ours(self, arm: Arm, ids: list[int], seed: int) -> Answer:
        result = self.decoder.generate(ids, dataclasses.replace(arm.settings, seed=seed), energy=False)
        return _from_result(result, len(ids), result.stats.prefill_s)

    def _our_many(
        self,
        arm: Arm,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        at_a_time: int,
        seen: Callable[[int], None],
    ) -> list[Answer]:
        settings = [dataclasses.replace(arm.settings, seed=seed) for seed in seeds]
        answers: list[Answer] = []
        for result in self.decoder.generate_many(prompts, settings, batch=at_a_time):
            answers.append(_from_result(result, len(prompts[len(answers)]), None))
            seen(len(answers))
        return answers

    def _hf(self, arm: Arm, ids: list[int], seed: int) -> Answer:
        from dsbd_cli.bench.hf import generate

        (answer,) = generate(self.decoder.pair, arm, [ids], seed, arm.settings.stop)
        return _from_hf(answer, len(ids), answer.prefill_s)

    def _hf_many(
        self,
        arm: Arm,
        prompts: Sequence[list[int]],
        seeds: Sequence[int],
        at_a_time: int,
        seen: Callable[[int], None],
    ) -> list[Answer]:
        """Padded batches of prompts of about the same length, each with the seed of its first prompt."""
        from dsbd_cli.bench.hf import generate

        size = 1 if arm.method in ONE_AT_A_TIME else at_a_time
        order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]), reverse=True)
        found: dict[int, Answer] = {}
        for begin in range(0, len(order), size):
            places = order[begin : begin + size]
            batch = [prompts[place] for place in places]
            given = generate(self.decoder.pair, arm, batch, seeds[places[0]], arm.settings.stop)
            for place, answer in zip(places, given, strict=True):
                found[place] = _from_hf(answer, len(prompts[place]), None)
            seen(len(found))
        return [found[place] for place in range(len(prompts))]


def _from_result(result: Result, prompt_tokens: int, prefill_s: float | None) -> Answer:
    """An answer of ours, before it is known what it cost."""
    stats = dataclasses.asdict(result.stats)
    return _uncosted(
        text=result.text,
        token_ids=list(result.token_ids),
        finish_reason=result.finish_reason,
        prompt_tokens=prompt_tokens,
        prefill_s=prefill_s,
        logprob_engine=result.beams[0].logprob if result.token_ids else None,
        stats={name: stats[name] for name in STATS},
    )


def _from_hf(answer: HfAnswer, prompt_tokens: int, prefill_s: float | None) -> Answer:
    """Hugging Face's answer, before it is known what it cost."""
    return _uncosted(
        text=answer.text,
        token_ids=answer.token_ids,
        finish_reason=answer.finish_reason,
        prompt_tokens=prompt_tokens,
        prefill_s=prefill_s,
        # Of a batch all its forwards are every answer's.
        stats={"target_calls": answer.target_calls},
    )


def _uncosted(*, token_ids: list[int], **known: Any) -> Answer:
    return Answer(
        token_ids=token_ids,
        new_tokens=len(token_ids),
        wall_s=None,
        decode_s=None,
        energy_j=None,
        energy_parts={},
        energy_reason=None,
        peak_bytes=None,
        **known,
    )
