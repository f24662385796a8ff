"""Outside references: the same models under Hugging Face `generate`, one prompt at a time or in padded batches.

`hf-sample` sampling, `hf-beam-sample` beams with sampling, `hf-beam-search` beams without, `hf-assisted`
its speculative decoding with our draft. T, budget, EOS ids, length penalty and stop strings are ours; how
beams and T are combined is Hugging Face's (per beam, not on the joint), so their law is another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dsbd_cli.bench.arms import Arm
from dsbd_cli.decoding import without_planning
from dsbd_cli.loading import Pair
from dsbd_cli.settings import Settings
from dsbd_cli.text import Detokenizer, first_stop

_EARLY = {"first": True, "heuristic": False, "never": "never"}


@dataclass(frozen=True)
class HfAnswer:
    """`token_ids` up to and with the EOS; `prefill_s` ends when the target's first forward returns."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prefill_s: float | None
    target_calls: int


def generate(
    pair: Pair, arm: Arm, prompts: Sequence[Sequence[int]], seed: int, stop: Sequence[str]
) -> list[HfAnswer]:
    """Prompts through one call of `generate`, as `arm` says; shorter ones are padded on the left.

    `prefill_s` and `target_calls` are those of the call, and so the same for all of its answers.
    """
    model, settings = pair.target.model, arm.settings
    if settings.max_new_tokens == 0:  # which `generate` refuses
        return [HfAnswer("", [], "length", None, 0) for _ in prompts]
    device = pair.target.device
    config = config_of(arm.method, settings, pair)
    length = max(map(len, prompts))
    inputs = torch.full((len(prompts), length), config.pad_token_id, device=device)
    mask = torch.zeros_like(inputs)
    for row, ids in enumerate(prompts):
        inputs[row, length - len(ids) :] = torch.tensor(list(ids), device=device)
        mask[row, length - len(ids) :] = 1
    options: dict[str, Any] = {}
    if arm.method == "hf-assisted":
        assert pair.draft is not None
        options["assistant_model"] = pair.draft.model
    if stop:
        options["stopping_criteria"] = [_stops(pair, length, stop)]
    torch.manual_seed(seed)
    with _own_defaults(pair, arm), _first_call(model, device) as clock:
        clock.begin()
        output = call(model, inputs, mask, config, **options)
    rows = output[:, length:].tolist()
    return [_answer(pair, row, settings.max_new_tokens, stop, clock) for row in rows]


@torch.inference_mode()
def call(model: Any, inputs: torch.Tensor, mask: torch.Tensor, config: Any, **options: Any) -> torch.Tensor:
    """`model.generate`, as every reference runs it: [B, length + new tokens].

    With the attention kernels that our own prompts have: cuDNN's, which torch prefers on some cards, plans anew for
    each new shape, and that would count as Hugging Face's time.
    """
    with without_planning():
        output: torch.Tensor = model.generate(
            inputs, attention_mask=mask, generation_config=config, **options
        )
    return output


def config_of(method: str, settings: Settings, pair: Pair) -> Any:
    """`generate`'s settings for a method; nothing is inherited from the model's own."""
    from transformers import GenerationConfig

    eos = list(pair.eos_ids)
    pad = pair.tokenizer.pad_token_id
    values: dict[str, Any] = {
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": eos or None,
        "pad_token_id": pad if pad is not None else (eos[0] if eos else 0),
        "use_cache": True,
    }
    if method in ("hf-beam-sample", "hf-beam-search"):
        values |= {
            "num_beams": settings.width,
            "length_penalty": settings.length_penalty,
            "early_stopping": _EARLY[settings.early_stopping],
        }
    samples = method != "hf-beam-search" and settings.temperature > 0
    values["do_sample"] = samples
    if samples:
        values |= {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
    return GenerationConfig(**values)


def _stops(pair: Pair, prompt: int, stop: Sequence[str]) -> Any:
    """Stop strings as a criterion of our own: theirs misses one that ends inside an accepted block."""
    from transformers import StoppingCriteria

    detokenize = Detokenizer(pair.tokenizer)

    class Stops(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            found = [first_stop(detokenize(row), stop) is not None for row in input_ids[:, prompt:].tolist()]
            return torch.tensor(found, device=input_ids.device)

    return Stops()


@contextmanager
def _own_defaults(pair: Pair, arm: Arm) -> Iterator[None]:
    """Take the models' generation configs away for a while: penalties stored there would change the law."""
    from transformers import GenerationConfig

    models = [pair.target.model] + ([pair.draft.model] if pair.draft is not None else [])
    kept = [model.generation_config for model in models]
    for model in models:
        model.generation_config = GenerationConfig()
    if arm.method == "hf-assisted":
        draft = models[1].generation_config
        draft.num_assistant_tokens = max(1, arm.settings.gamma)
        draft.num_assistant_tokens_schedule = "constant"
        draft.assistant_confidence_threshold = 0.0
    try:
        yield
    finally:
        for model, config in zip(models, kept, strict=True):
            model.generation_config = config


class _Clock:
    """When the target's first forward was over, and how many there were."""

    def __init__(self) -> None:
        self.calls, self.first = 0, 0.0
        self._begin = 0.0

    def begin(self) -> None:
        self._begin = time.perf_counter()

    @property
    def prefill_s(self) -> float | None:
        return self.first - self._begin if self.calls else None


@contextmanager
def _first_call(model: Any, device: torch.device) -> Iterator[_Clock]:
    clock = _Clock()

    def hook(*_: Any) -> None:
        clock.calls += 1
        if clock.calls == 1:
            synchronize(device)
            clock.first = time.perf_counter()

    handle = model.register_forward_hook(hook)
    try:
        yield clock
    finally:
        handle.remove()


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _answer(pair: Pair, ids: list[int], budget: int, stop: Sequence[str], clock: _Clock) -> HfAnswer:
    """What `generate` returned, less the padding behind the EOS, with the reason it ended."""
    end = next((at for at, token in enumerate(ids) if token in pair.eos_ids), None)
    detokenize = Detokenizer(pair.tokenizer)
    calls = max(0, clock.calls - 1)
    # A stop string inside an accepted block may stand before an EOS of the same block.
    body = ids if end is None else ids[:end]
    at = first_stop(detokenize(body), stop) if stop else None
    if at is not None:
        return HfAnswer(
            detokenize(body)[:at], _until_stop(body, detokenize, stop), "stop", clock.prefill_s, calls
        )
    if end is not None:
        return HfAnswer(detokenize(body), ids[: end + 1], "eos", clock.prefill_s, calls)
    reason = "length" if len(ids) >= budget else "early_stop"
    return HfAnswer(detokenize(ids), ids, reason, clock.prefill_s, calls)


def _until_stop(ids: list[int], detokenize: Callable[[Sequence[int]], str], stop: Sequence[str]) -> list[int]:
    """The ids up to the token that completed a stop string; padding of ended beams goes with the rest."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if first_stop(detokenize(ids[:middle]), stop) is not None:
            high = middle
        else:
            low = middle + 1
    return ids[:low]
