"""What is measured of an answer: clock and energy around whole calls, tokens by one counter for all methods.

- The clock and the energy window open after a device sync and close after one; scoring, log-probabilities
  and tokenization of the prompt are outside.
- `wall_s` holds prefill; `decode_s` = `wall_s` - `prefill_s`, for every method alike. Prefill ends when the
  target knows the first token's distribution (for `generate`: when its first forward returns).
- Tokens are the ids of the returned answer, the EOS counted, nothing after it.
- Answers that share their forwards (`--batch`) have one clock and one energy window for all of them, prefill
  included; what a single one of them cost is unknown.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dsbd_cli.bench.arms import Arm
from dsbd_cli.energy import EnergyMeter


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
    wall_s: float | None
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


@dataclass(frozen=True)
class Cost:
    """What a call cost as a whole; unknown is None. `peak_bytes`: of the allocator on the target's card."""

    wall_s: float
    energy_j: float | None
    energy_parts: dict[str, float | None]
    energy_reason: str | None
    peak_bytes: int | None


class Backend(Protocol):
    """What the runner needs of the models: `backend.PairBackend`, or a double in tests."""

    def answer(self, arm: Arm, prompt_ids: Sequence[int], seed: int) -> Answer:
        """Decode and measure."""
        ...

    def logprob(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> float | None:
        """l(x) by one teacher-forced forward."""
        ...

    def at_a_time(self, batch: int | None) -> int:
        """How many answers share their forwards; None: as many as this machine does well."""
        ...

    def answer_many(
        self,
        arm: Arm,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        at_a_time: int,
        seen: Callable[[int], None],
    ) -> tuple[list[Answer], Cost]:
        """Decode prompts that share their forwards, and measure all of it; `seen` is told how many are done."""
        ...

    def logprobs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[float | None]:
        """l(x) of each answer by teacher-forced forwards."""
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


def seed_of(seed: int, item: str, repeat: int, turn: int = 0) -> int:
    """The seed of one answer: from the run's seed, the item, the repeat and the turn, not from any order.

    All arms get the same one, so arms that share random numbers stay comparable item by item.
    """
    digest = hashlib.sha256(f"{seed}/{item}/{repeat}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
