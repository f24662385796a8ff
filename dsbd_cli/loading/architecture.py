"""What a model's config says about serving it: its context, its window, and whether a tree mask works.

A tree is decoded with one additive mask over slots in any order (docs/design.md section 5). That is not
possible where distance is read off the cache order (ALiBi), where state is recurrent, or past a
sliding window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsbd_cli.errors import let_by

# Families whose position bias is computed from cache order, whatever their config says.
_ALIBI = {"bloom", "mpt", "jais"}
_RECURRENT = {
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
    "mamba", "mamba2", "minimax", "nemotron_h", "qwen3_next", "qwen3_5", "qwen3_5_moe", "recurrent_gemma",
    "rwkv", "xlstm", "zamba", "zamba2",
}  # fmt: skip
_OWN_MASK = {"gpt_neo", "openai-gpt", "ctrl", "xlnet", "transfo-xl", "reformer"}
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def tree_refusal(config: Any) -> str | None:
    """Why this architecture cannot serve tree methods, by name; None if it can."""
    kind = str(config.model_type)
    text = config.get_text_config()
    names = {kind, str(text.model_type)}
    if names & _ALIBI or _says_alibi(text):
        return f"{kind} uses ALiBi, whose distances follow the order of the cache"
    if names & _RECURRENT:
        return f"{kind} keeps recurrent state, which cannot branch"
    if names & _OWN_MASK:
        return f"{kind} builds its own causal mask and takes no other"
    if getattr(config, "is_encoder_decoder", False):
        return f"{kind} is an encoder-decoder model"
    strange = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION)
    if strange:
        return f"{kind} has layers of kind {strange[0]}, which a tree mask does not serve"
    if window_of(config) is not None and (name := _foreign_window(text)):
        return (
            f"the config has {name}={getattr(text, name)}, which {kind} does not know: transformers cuts its cache "
            "there and masks nothing (remove it from config.json)"
        )
    return None


def window_of(config: Any) -> int | None:
    """Tokens within which every layer still attends to everything; None if there is no window."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    sizes = []
    sliding = getattr(text, "sliding_window", None)
    if sliding and getattr(text, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds):
        sizes.append(int(sliding))
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk and (not kinds or "chunked_attention" in kinds):
        sizes.append(int(chunk))
    limit = max_positions_of(config)
    size = min(sizes, default=None)
    return None if size is None or (limit is not None and size >= limit) else size


def _foreign_window(text: Any) -> str | None:
    """The name of a window that the config's own class lacks, as in a config converted from another family."""
    try:
        known = type(text)()
    except Exception as error:  # a class from outside that cannot do without arguments
        let_by(error)
        return None
    names = ("sliding_window", "attention_chunk_size")
    return next((name for name in names if getattr(text, name, None) and not hasattr(known, name)), None)


def max_positions_of(config: Any) -> int | None:
    """The context limit, or None where the config names none."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def rope_border(config: Any) -> int | None:
    """The length at which rope factors change (longrope); None where they do not.

    (`dynamic` changes beyond `max_position_embeddings`, which is the context limit anyway.)
    """
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    parts = [ropes, *(part for part in ropes.values() if isinstance(part, dict))]
    borders = [
        part.get("original_max_position_embeddings")
        or getattr(text, "original_max_position_embeddings", None)
        for part in parts
        if part.get("rope_type") == "longrope"
    ]
    return min((int(border) for border in borders if border), default=None)


def head_rows(model: Any) -> int | None:
    """Rows of the head, padding included; None where there is none to look at."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    # (A quantized layer's `weight` is a method.)
    shape: Sequence[int] = getattr(weight, "shape", ())
    return int(shape[0]) if len(shape) == 2 else None


def input_rows(model: Any) -> int | None:
    """Token ids that the model has an embedding for; None where that cannot be seen."""
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "num_embeddings", None)
    return None if rows is None else int(rows)


def device_of(model: Any) -> Any:
    """Where a model wants its inputs: for offloaded weights where hooks run them, not where they lie."""
    for module in model.modules():
        place = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if place is not None:
            import torch

            return torch.device(place) if not isinstance(place, int) else torch.device("cuda", place)
    return model.device


def _says_alibi(text: Any) -> bool:
    attention = getattr(text, "attn_config", None)
    return bool(
        getattr(text, "alibi", False)
        or getattr(text, "use_alibi", False)
        or getattr(attention, "alibi", False)
        or getattr(text, "position_embedding_type", None) == "alibi"
    )
