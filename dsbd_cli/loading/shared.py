"""A draft that stores only its layers and takes embeddings and head from its target.

The folder holds `layers.int8.safetensors`: int8 rows, each with a float16 scale in `<name>.scale`
(weight = int8 * scale); tensors without a scale are taken as they are. Names are those of the causal
LM class, embeddings and head left out. `config.json` (with `dsbd_shared_embeddings: true`) is
optional: without one it is the target's config with as many layers as the file has.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from dsbd_cli.errors import UserError
from dsbd_cli.loading.checkpoint import check_weights
from dsbd_cli.loading.model import LoadedModel, describe, load_config
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.shapes import header_shapes, skeleton
from dsbd_cli.loading.source import SHARED_WEIGHTS

FLAG = "dsbd_shared_embeddings"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
# An embedding this small is built and thrown away for the target's.
_STAND_IN_ROWS = 8


def is_shared(config: Any) -> bool:
    """Whether a config says that the draft has no embeddings."""
    return bool(getattr(config, FLAG, False))


def dequantised(path: Path) -> dict[str, Tensor]:
    """Tensors of a `layers.int8.safetensors` in float32, by name."""
    stored = load_file(str(path))
    weights = {}
    for name, tensor in stored.items():
        if name.endswith(".scale"):
            continue
        scale = stored.get(name + ".scale")
        if scale is not None and scale.numel() != tensor.shape[0]:
            raise UserError(f"{path}: {name} has {tensor.shape[0]} rows and {scale.numel()} scales")
        # One scale a row, stored as [rows] or [rows, 1]; one pass over the weights, widened on the way.
        weights[name] = tensor.float() if scale is None else torch.mul(tensor, scale.float().reshape(-1, 1))
    return weights


def load_shared(
    place: Place, target: LoadedModel, device: torch.device, dtype: torch.dtype, trust: bool = False
) -> LoadedModel:
    """The draft on `device`, with its target's embedding and head.

    They are the target's own modules where device and dtype agree, copies otherwise.

    Raises:
        UserError: a broken file, or a draft made for another target.
    """
    from transformers import AutoModelForCausalLM

    width = target.model.get_input_embeddings().weight.shape[-1]
    config = examine(place, target.model.config, width, target.name, trust)
    draft = AutoModelForCausalLM.from_config(_small(config), trust_remote_code=trust)
    draft.load_state_dict(dequantised(place.folder / SHARED_WEIGHTS), strict=False)
    draft = draft.to(device=device, dtype=dtype)
    _borrow(draft, target, device, dtype)
    draft.config.get_text_config().vocab_size = target.vocab_rows
    draft.config.get_text_config().pad_token_id = config.get_text_config().pad_token_id
    return describe(draft.eval(), place.source)


def examine(place: Place, target_config: Any, width: int, target_name: str, trust: bool = False) -> Any:
    """The draft's config, found to fit the draft's file and its target; reads no weights.

    Args:
        width: of the target's embedding.

    Raises:
        UserError: a broken file, or a draft made for another target.
    """
    path = place.folder / SHARED_WEIGHTS
    check_weights(path, place.role)
    shapes = {name: shape for name, shape in header_shapes(path).items() if not name.endswith(".scale")}
    config = _config(place, target_config, shapes, trust)
    mine = config.get_text_config().hidden_size
    if mine != width:
        raise UserError(f"{place.role} {place.source.text} shares its target's embeddings, but is {mine} wide "
                        f"where {target_name} is {width}: it was made for another target")  # fmt: skip
    draft = skeleton(_small(config), trust)
    if draft is None:
        raise UserError(f"{place.role} {place.source.text}: no model can be built from its config")
    sizes = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    for name, shape in shapes.items():
        if name in sizes and shape != sizes[name]:
            raise UserError(f"{place.role} {path}: {name} is {list(shape)}, which does not fit its config "
                            f"({list(sizes[name])}): was the draft made for this target?")  # fmt: skip
    borrowed = _borrowed(draft)
    lacking = [name for name in sizes if name not in shapes and name not in borrowed]
    unknown = [name for name in shapes if name not in sizes]
    if lacking or unknown:
        what = f"lacks {lacking[0]}" if lacking else f"has {unknown[0]}, which its config does not know"
        raise UserError(f"{place.role} {path} {what}: was the draft made for this target?")
    return config


def _small(config: Any) -> Any:
    """The same with an embedding of a few rows, which is thrown away for the target's."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    text.vocab_size, text.pad_token_id = _STAND_IN_ROWS, None
    return small


def _config(place: Place, target_config: Any, weights: Collection[str], trust: bool) -> Any:
    if (place.folder / "config.json").is_file():
        return load_config(place, trust)
    config = copy.deepcopy(target_config)
    layers = 1 + max((int(found[1]) for name in weights if (found := _LAYER.search(name))), default=-1)
    if layers < 1:
        raise UserError(f"{place.role} {place.folder / SHARED_WEIGHTS} holds no layers")
    text = config.get_text_config()
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    text.num_hidden_layers = layers
    # Quantisation describes the target's stored weights, not these.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def _borrowed(draft: Any) -> set[str]:
    """Parameter names of embedding and head."""
    theirs = {id(draft.get_input_embeddings().weight), id(draft.get_output_embeddings().weight)}
    return {name for name, tensor in draft.named_parameters(remove_duplicate=False) if id(tensor) in theirs}


def _borrow(draft: Any, target: LoadedModel, device: torch.device, dtype: torch.dtype) -> None:
    embedding = target.model.get_input_embeddings()
    head = target.model.get_output_embeddings()
    tied = head.weight is embedding.weight
    if any(module.weight.device != device or module.weight.dtype != dtype for module in (embedding, head)):
        from accelerate.hooks import remove_hook_from_module

        embedding = remove_hook_from_module(copy.deepcopy(embedding)).to(device=device, dtype=dtype)
        head = remove_hook_from_module(copy.deepcopy(head)).to(device=device, dtype=dtype)
        if tied:
            head.weight = embedding.weight
    draft.set_input_embeddings(embedding)
    draft.set_output_embeddings(head)
