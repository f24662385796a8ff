"""The pair that a script measures, from its command line; and the circumstances, for results."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from benchmarks.inflate import add_sizes, compare, inflated, sizes_of
from benchmarks.kit.bandwidth import read_bytes
from dsbd_cli.bench.context import device_name
from dsbd_cli.decoder import Decoder
from dsbd_cli.loading import load_pair
from dsbd_cli.presets import DEFAULT_PRESET, load_preset
from dsbd_cli.settings import Settings
from dsbd_cli.version import __version__


def add_pair(parser: argparse.ArgumentParser) -> None:
    """The options that `load` reads."""
    group = parser.add_argument_group("the pair")
    group.add_argument(
        "--preset", default=DEFAULT_PRESET, help="pair and settings to start from (default %(default)s)"
    )
    group.add_argument("--target", help="folder, hub id, GGUF file or wheel: source, instead of the preset's")
    group.add_argument("--draft", help="likewise, or embedded:NAME, or `none`")
    group.add_argument("--device", default="auto", help="of both models (default auto)")
    group.add_argument("--dtype", default="auto", help="of both models (default auto)")
    group.add_argument("--inflate", action="store_true",
                       help="enlarge the target to the sizes below, same text (default 7B cost)")  # fmt: skip
    add_sizes(parser)


def load(options: argparse.Namespace) -> tuple[Decoder, Settings]:
    """The decoder and the preset's settings.

    Raises:
        UserError: a pair that cannot be loaded, or a target that cannot be enlarged.
    """
    preset = load_preset(options.preset)
    given: dict[str, Any] = {
        "target_device": options.device,
        "draft_device": options.device,
        "target_dtype": options.dtype,
        "draft_dtype": options.dtype,
    }
    if options.target:
        given["target"] = options.target
    if options.draft:
        given["draft"] = None if options.draft == "none" else options.draft
    spec = preset.pair.replace(**given)
    pair = load_pair(spec, need_draft=spec.draft is not None)
    if options.inflate:
        small = pair.target.model
        pair = inflated(pair, sizes_of(options))
        difference, scale = compare(small, pair.target.model, pair.tokenizer)
        print(
            f"enlarged: logits differ by at most {difference:.1e} on a scale of {scale:.1f}", file=sys.stderr
        )
    return Decoder(pair, preset.settings), preset.settings


@contextmanager
def endless(decoder: Decoder, wanted: bool = True) -> Iterator[None]:
    """Within, no token ends a text: every run has its full length."""
    kept = decoder.pair
    if wanted:
        decoder.pair = dataclasses.replace(kept, eos_ids=())
    try:
        yield
    finally:
        decoder.pair = kept


def facts(decoder: Decoder) -> dict[str, Any]:
    """What numbers depend on and must not change within one results file."""
    models = {"target": decoder.pair.target, "draft": decoder.pair.draft}
    return {
        "hardware": hardware(decoder.pair.target.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dsbd": __version__,
        "models": {
            role: None
            if one is None
            else {
                "name": one.name,
                "dtype": str(one.dtype).removeprefix("torch."),
                "layers": one.model.config.num_hidden_layers,
                "hidden": one.model.config.hidden_size,
                "read_bytes": read_bytes(one.model),
            }
            for role, one in models.items()
        },
    }


def hardware(device: torch.device) -> str:
    """The device as a results table names it."""
    name = device_name(str(device))
    return name if device.type != "cpu" else f"{name}, {torch.get_num_threads()} of {os.cpu_count()} threads"
