"""One answer, measured: wall clock and energy around the whole call, tokens by one counter for all methods.

- The clock and the energy window open after a device sync and close after one; scoring, log-probabilities
  and tokenization of the prompt are outside.
- `wall_s` holds prefill; `decode_s` = `wall_s` - `prefill_s`, for every method alike. Prefill ends when the
  target knows the first token's distribution (for `generate`: when its first forward returns).
- Tokens are the ids of the returned answer, the EOS counted, nothing after it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsbd_cli.bench.arms import Arm
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.group import group_of

# Counts of the engine that are kept with each answer.
STATS = (
    "layers", "target_calls", "draft_calls", "drafts_examined", "drafts_accepted", "accepted_by_depth",
    "widths", "distinct_widths", "kv_slots_peak", "kv_bytes_peak", "notes",
)  # fmt: skip


@dataclass
class Answer:
    """One turn's answer and what it cost; unknown is None.

    Attributes:
        logprob: l(x) of the answer under the target, by one teacher-forced forward.
        logprob_engine: the same as the engine had it, for methods of ours.
        energy_j: joules of the whole call; energy_parts per device, 0.0 where a counter did not move.
        peak_bytes: peak of the allocator on the target's card.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    new_tokens: int
    wall_s: float
    prefill_s: float | None
    decode_s: float | None
    energy_j: float | None
    energy_parts: dict[str, float | None]
    energy_reason: str | None
    peak_bytes: int | None
    logprob: float | None = None
    logprob_engine: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Backend(Protocol):
    """What the runner needs of the models: `PairBackend`, or a double in tests."""

    def answer(self, arm: Arm, prompt_ids: Sequence[int], seed: int) -> Answer:
        """Decode and measure."""
        ...

    def logprob(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
        """l(x) by one teacher-forced forward."""
        ...

    def facts(self) -> dict[str, Any]:
        """Names, dtypes and weights of the models: part of the fingerprint."""
        ...

    def devices(self) -> list[str]:
        """Torch devices of the pair."""
        ...

    @property
    def meter(self) -> EnergyMeter:
        """The meter over the devices that hold the pair."""
        ...


class PairBackend:
    """A loaded pair."""

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        models = [decoder.pair.target, *([decoder.pair.draft] if decoder.pair.draft else [])]
        # A target may be spread over several cards.
        places = [weight.device for loaded in models for weight in loaded.model.parameters()]
        self._devices = [device for device in dict.fromkeys(places) if device.type != "meta"]
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
            for role, model in self.decoder.models().items()
        }

    def answer(self, arm: Arm, prompt_ids: Sequence[int], seed: int) -> Answer:
        import torch

        from dsbd_cli.bench.hf import synchronize
        from dsbd_cli.loading.quiet import quiet_transformers

        device = self.decoder.pair.target.device
        cuda = device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        run = self._hf if arm.hf else self._ours
        with quiet_transformers():
            for each in self._devices:
                synchronize(each)
            self.meter.start()
            begin = time.perf_counter()
            answer = run(arm, list(prompt_ids), seed)
            for each in self._devices:
                synchronize(each)
            answer.wall_s = time.perf_counter() - begin
            reading = self.meter.stop()
        if answer.prefill_s is not None:
            answer.decode_s = max(0.0, answer.wall_s - answer.prefill_s)
        answer.energy_j, answer.energy_parts = reading.joules, dict(reading.parts)
        answer.energy_reason = reading.reason
        answer.peak_bytes = int(torch.cuda.max_memory_allocated(device)) if cuda else None
        return answer

    def logprob(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
        from dsbd_cli.bench.hf import answer_logprob

        return answer_logprob(self.decoder.pair, prompt_ids, token_ids)

    def _ours(self, arm: Arm, ids: list[int], seed: int) -> Answer:
        result = self.decoder.generate(ids, dataclasses.replace(arm.settings, seed=seed), energy=False)
        stats = dataclasses.asdict(result.stats)
        return Answer(
            text=result.text,
            token_ids=list(result.token_ids),
            finish_reason=result.finish_reason,
            prompt_tokens=len(ids),
            new_tokens=len(result.token_ids),
            wall_s=0.0,
            prefill_s=result.stats.prefill_s,
            decode_s=None,
            energy_j=None,
            energy_parts={},
            energy_reason=None,
            peak_bytes=None,
            logprob_engine=result.beams[0].logprob if result.token_ids else None,
            stats={name: stats[name] for name in STATS},
        )

    def _hf(self, arm: Arm, ids: list[int], seed: int) -> Answer:
        from dsbd_cli.bench.hf import generate

        answer = generate(self.decoder.pair, arm, ids, seed, arm.settings.stop)
        return Answer(
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            prompt_tokens=len(ids),
            new_tokens=len(answer.token_ids),
            wall_s=0.0,
            prefill_s=answer.prefill_s,
            decode_s=None,
            energy_j=None,
            energy_parts={},
            energy_reason=None,
            peak_bytes=None,
            stats={"target_calls": answer.target_calls},
        )


def seed_of(seed: int, item: str, repeat: int, turn: int = 0) -> int:
    """The seed of one answer: from the run's seed, the item, the repeat and the turn, not from any order.

    All arms get the same one, so arms that share random numbers stay comparable item by item.
    """
    digest = hashlib.sha256(f"{seed}/{item}/{repeat}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
