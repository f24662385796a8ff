"""What a run returns: the answer, the beams, and the numbers; the `--json` object is this record."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from dsbd_cli.settings import Settings


@dataclass(frozen=True)
class Beam:
    """One hypothesis.

    Attributes:
        logprob: l(x), raw target log-probability. score: logprob / length ** alpha.
        finished: whether it ended by itself, with an EOS or a stop string.
        finish_reason: as for `Result`.
    """

    text: str
    token_ids: list[int]
    logprob: float
    score: float
    finished: bool
    finish_reason: str


@dataclass
class Stats:
    """Counts and measures of one prompt; unknown is None, never 0.

    Attributes:
        new_tokens: length of the answer's `token_ids`.
        layers: committed layers. target_calls, draft_calls: forwards, prefill left out.
        drafts_examined, drafts_accepted: draft draws looked at (those under dead parents count as
            rejected, those after the last draw not at all), and accepted; for `cover` the target's draws
            (less those that ended a sequence undrafted), and those that the forest held.
        acceptance_rate: accepted / examined. Under `cover` no chance that a drafted token is accepted:
            compare rules by `layers_per_target_call`.
        accepted_by_depth: [layer of the forest] -> [examined, accepted].
        widths, distinct_widths: draws, and distinct sequences, of each committed layer.
        prefill_s, decode_s: seconds inside the engine, what consumes the events left out.
        tokens_per_s: new_tokens / decode_s: of this answer alone, also where others shared its forwards.
        kv_slots_peak: peak live slots of the target. kv_bytes_peak: peak live slots x bytes, target
            plus draft; kv_bytes_allocated: what the buffers hold.
        energy_j: joules of the decode window; energy_source says how measured, or why not.
        paths: which forward served each model and which engine ran, and why no other, and the prices that forests
            followed; a sentence each.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    layers: int = 0
    target_calls: int = 0
    draft_calls: int = 0
    layers_per_target_call: float | None = None
    drafts_examined: int = 0
    drafts_accepted: int = 0
    acceptance_rate: float | None = None
    accepted_by_depth: list[list[int]] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    mean_width: float | None = None
    distinct_widths: list[int] = field(default_factory=list)
    mean_distinct_width: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tokens_per_s: float | None = None
    kv_slots_peak: int | None = None
    kv_bytes_peak: int | None = None
    kv_bytes_allocated: int | None = None
    energy_j: float | None = None
    joules_per_token: float | None = None
    energy_source: str | None = None
    notes: list[str] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """The answer to one prompt.

    Attributes:
        text: the answer, without its EOS and cut before a stop string.
        token_ids: generated ids; ends with the EOS, or the token that completed a stop string.
        finish_reason: `eos`, `stop`, `length`, or `early_stop`: the stop rule held while the
            sequence was still unfinished.
        method, settings, seed: what was run; the seed is the one used, also when none was given.
        models: name, dtype and device of target and draft.
        beams: best first; as many as `num_return`.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    method: str
    settings: Settings
    seed: int
    models: dict[str, Any]
    beams: list[Beam]
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """Plain values, in the documented order."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {
            "settings": self.settings.to_dict(),
            "beams": [dataclasses.asdict(beam) for beam in self.beams],
            "stats": dataclasses.asdict(self.stats),
        }

    def to_json(self) -> str:
        """One line of valid JSON, non-ASCII kept readable; never NaN or Infinity."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)
