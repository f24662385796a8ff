"""Number formats of a pair that is being loaded: the ones asked for, or on a CPU what was found to be quickest here."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from dsbd_cli.errors import UserError
from dsbd_cli.loading import gguf_cache, hardware, processor
from dsbd_cli.loading.hardware import INT8, NumberFormat
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.progress import Progress
from dsbd_cli.loading.ready import key
from dsbd_cli.loading.stamp import files_stamp
from dsbd_cli.prices import formats, store

_LIBRARIES = ("torch", "transformers")


def pick(
    name: str,
    place: Place,
    config: Any,
    device: torch.device,
    *,
    coarse: bool,
    whole: bool,
    trust: bool,
    tell: Progress,
) -> tuple[NumberFormat, dict[str, Any] | None]:
    """The number format of a model, and what its verdict is kept under; None where none is wanted (`formats.still`).

    Where this machine and the weights leave a choice the formats are timed, once: the verdict is kept. Where it
    cannot be kept, or nothing may be measured, it is the rule's (`hardware.pick_dtype`): the first for now only.

    Args:
        name: what was asked for, perhaps `auto`.
        place, config: the model's; what a user should know is added to the notes of `place`.
        coarse: as for `hardware.pick_dtype`.
        whole: the weights are those of the checkpoint, in one process: no other format could be timed.
        trust: run modelling code that comes with a checkpoint.
        tell: told before anything is timed.

    Raises:
        UserError: 8-bit activations where there are none.
    """
    target = place.role == "target"
    if name == INT8:
        _require_int8(place.role, device, whole or not target)
        return NumberFormat(torch.float32, target), None  # a draft on a CPU multiplies in int8 anyway
    choice = hardware.choice(device, coarse, target and place.source.kind in ("gguf", "wheel"))
    rule = NumberFormat(hardware.pick_dtype(name, device, coarse))
    if name != "auto" or len(choice) < 2 or not whole or not formats.allowed():
        return rule, None
    facts = formats.facts(
        name=place.source.name,
        weights=_stamp(place, config),
        role=place.role,
        formats=[one.name for one in choice],
        threads=torch.get_num_threads(),
        versions={library: importlib.metadata.version(library) for library in _LIBRARIES},
        code=key.code_sum(),
    )

    def measure() -> formats.Verdict:
        from dsbd_cli.prices.slices import judge

        tell(formats.ONCE)
        return judge(place, config, choice, int8=place.role == "draft", trust=trust)

    verdict, notes = store.found_or_measured(formats.KIND, facts, measure)
    place.notes += notes
    if verdict is None or verdict.dtype not in facts["formats"]:
        return rule, {"facts": facts, "dtype": None}
    return NumberFormat.called(verdict.dtype), {"facts": facts, "dtype": verdict.dtype}


def _require_int8(role: str, device: torch.device, whole: bool) -> None:
    option = f"--{role}-dtype {INT8}"
    if device.type != "cpu":
        raise UserError(f"{option} is for CPUs, and the {role} is on {device}: choose bfloat16")
    if not whole:
        raise UserError(
            f"{option} goes with none of --quantization, --device-map and --tensor-parallel: choose bfloat16"
        )
    if not processor.int8_likely():
        raise UserError(
            f"{option} needs a C compiler and a processor with AVX2 (dsbd doctor): choose float32"
        )


def _stamp(place: Place, config: Any) -> str:
    """What stands for a model's weights; of the hub its commit, for files may still be fetched."""
    source = place.source
    if source.wheel is not None:
        return f"{gguf_cache.CONVERSION} {source.wheel.sha256}"
    if source.path is not None:
        return files_stamp(source.path)
    return f"{source.text} {getattr(config, '_commit_hash', None)}"
