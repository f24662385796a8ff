"""Pairs of a known shape with random weights: for costs at sizes whose real weights are a download.

What they say is noise, and next to nothing of a draft is accepted; only costs can be read off them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from dsbd_cli.errors import UserError
from dsbd_cli.loading import LoadedModel, Pair
from dsbd_cli.loading.hardware import pick_device, pick_dtype
from dsbd_cli.loading.model import describe
from dsbd_cli.loading.source import Source


@dataclass(frozen=True)
class Shape:
    """One Llama's sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


# Llama 3.1 8B and Llama 3.2 1B, both with a context of 131,072 tokens; a toy pair to try things out.
SHAPES = {
    "8b": (Shape(4096, 14336, 32, 32, 8, 128256, False), Shape(2048, 8192, 16, 32, 8, 128256, True)),
    "toy": (Shape(64, 128, 2, 4, 2, 512, False), Shape(32, 64, 1, 2, 1, 512, True)),
}
CONTEXT = 131072


class Numbers:
    """A tokenizer for models whose tokens mean nothing: shows ids as numbers."""

    chat_template = None
    bos_token_id = eos_token_id = pad_token_id = 0

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """`5 17 3 `"""
        return "".join(f"{token} " for token in ids)


def random_pair(name: str, device: str, dtype: str, seed: int = 0) -> Pair:
    """The pair called `name` in `SHAPES`, built on the device.

    Raises:
        UserError: no such shape or device.
    """
    if name not in SHAPES:
        raise UserError(f"--shape {name}: known are {', '.join(SHAPES)}")
    place = pick_device(device, "target")
    kind = pick_dtype(dtype, place)
    target, draft = (
        _model(f"random-{name}-{role}", shape, place, kind, seed + number)
        for number, (role, shape) in enumerate(zip(("target", "draft"), SHAPES[name], strict=True))
    )
    return Pair(target, draft, Numbers(), (), target.vocab_rows)


def _model(name: str, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int) -> LoadedModel:
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=shape.tied,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return describe(model, Source(name, "folder"))
