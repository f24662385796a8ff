"""CTranslate2 (a C++ engine) on the same target, as an outside reference; optional: `pip install ctranslate2`.

Its beams are deterministic, its sampling has one beam. Prefill is timed by a call of its own that asks
for one token, right before the measured one.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.kit.ct2_worker import serve
from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.measure import Answer
from dsbd_cli.decoder import Decoder
from dsbd_cli.energy import EnergyMeter
from dsbd_cli.errors import RunError, UserError
from dsbd_cli.settings import Settings

METHODS = ("ct2-sample", "ct2-beam-search")


def arms(base: Settings) -> list[Arm]:
    """Its two methods as arms, with the preset's numbers."""
    carrier = {"ct2-sample": "multinomial", "ct2-beam-search": "beam"}
    return [Arm(name, name, base.merged({"method": carrier[name]})) for name in METHODS]


class CTranslate2:
    """The decoder's target, converted.

    Raises:
        UserError: the package is missing, or cannot convert this model.
    """

    def __init__(self, decoder: Decoder) -> None:
        try:
            import ctranslate2
        except ImportError:
            raise UserError(
                "CTranslate2 is not installed: pip install ctranslate2, or leave out --ct2"
            ) from None
        self._tokenizer, self._eos = decoder.pair.tokenizer, decoder.pair.eos_ids
        target = decoder.pair.target
        self._meter = EnergyMeter.for_devices([target.device])
        self._folder = tempfile.TemporaryDirectory()
        plain, converted = Path(self._folder.name) / "plain", Path(self._folder.name) / "converted"
        _save_plain(target.model, self._tokenizer, plain)
        try:
            ctranslate2.converters.TransformersConverter(str(plain)).convert(str(converted))
        except Exception as error:  # the converter raises whatever it met
            raise UserError(f"CTranslate2 cannot convert {target.name} ({error}): leave out --ct2") from None
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        wanted = str(target.dtype).removeprefix("torch.")
        place = target.device.type, target.device.index or 0
        self._worker = context.Process(
            target=serve, args=(other, str(converted), *place, wanted, torch.get_num_threads()), daemon=True
        )
        self._worker.start()
        #: What it really computes in: float32 where it does not offer the target's type.
        self.compute_type = self._reply()

    def _reply(self) -> Any:
        while not self._pipe.poll(1.0):
            if not self._worker.is_alive():
                raise RunError("CTranslate2's process has died")
        reply = self._pipe.recv()
        if isinstance(reply, Exception):
            raise RunError(f"CTranslate2 cannot run: {reply}")
        return reply

    def answer(self, arm: Arm, ids: Sequence[int], seed: int) -> Answer:
        """Decode and measure one prompt."""
        prefill_s = self._run(arm, ids, seed, 1)[1]
        self._meter.start()
        tokens, wall_s = self._run(arm, ids, seed, arm.settings.max_new_tokens)
        reading = self._meter.stop()
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(
            text=text,
            token_ids=tokens,
            finish_reason="eos" if tokens and tokens[-1] in self._eos else "length",
            prompt_tokens=len(ids),
            new_tokens=len(tokens),
            wall_s=wall_s,
            prefill_s=prefill_s,
            decode_s=max(0.0, wall_s - prefill_s),
            energy_j=reading.joules,
            energy_parts=dict(reading.parts),
            energy_reason=reading.reason,
            peak_bytes=None,
        )

    def _run(self, arm: Arm, ids: Sequence[int], seed: int, budget: int) -> tuple[list[int], float]:
        """(new token ids up to and with the EOS, seconds)."""
        settings, beams = arm.settings, arm.method == "ct2-beam-search"
        options: dict[str, Any] = {"beam_size": settings.width} if beams else {
            "sampling_temperature": settings.temperature or 1.0,
            "sampling_topk": settings.top_k if settings.temperature else 1,
            "sampling_topp": settings.top_p,
        }  # fmt: skip
        # Without an EOS of its own it would stop at the tokenizer's.
        end: Any = list(self._eos) or [self._tokenizer.convert_ids_to_tokens(0)]
        options |= {
            "max_length": budget,
            "end_token": end,
            "return_end_token": True,
            "include_prompt_in_result": False,
            "length_penalty": settings.length_penalty,
        }
        self._pipe.send((seed % 2**31, options, self._tokenizer.convert_ids_to_tokens(list(ids))))
        tokens, seconds = self._reply()
        return tokens, seconds


def _save_plain(model: Any, tokenizer: Any, folder: Path) -> None:
    """An ordinary checkpoint of a loaded model: whatever it was read from, and however it was fused."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    weights = {
        name: tensor.detach().cpu().clone().contiguous()
        for name, tensor in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
