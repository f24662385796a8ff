"""Whether weights fit their config, told from headers alone: before gigabytes are read for nothing."""

from __future__ import annotations

import copy
import json
import struct
from pathlib import Path
from typing import Any

import torch

from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError, let_by
from dsbd_cli.loading.checkpoint import weight_files
from dsbd_cli.loading.place import Place

Shape = tuple[int, ...]


def header_shapes(path: Path) -> dict[str, Shape]:
    """Shape of every tensor in a safetensors file that `check_weights` found whole."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def skeleton(config: Any, trust: bool) -> Any:
    """The model of a config without weights (on the meta device), or None where it cannot be built so."""
    from transformers import AutoModelForCausalLM

    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):  # how weights are stored, not what they are
        del plain.quantization_config
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(plain, trust_remote_code=trust)
    except Exception as error:  # it computes with its weights; loading tells what is wrong, if anything
        let_by(error)
        return None


def refuse_other_ends(place: Place, config: Any, trust: bool) -> None:
    """Raise if a local checkpoint's embedding or head is of another shape than its config says.

    Only these two are stored as they are by every architecture; the rest is compared once it is loaded.

    Raises:
        UserError: naming the tensor and both shapes.
    """
    if not place.is_local or getattr(config, "quantization_config", None) is not None:
        return
    files = [path for path in weight_files(place.folder, place.role) if path.suffix == ".safetensors"]
    model = skeleton(config, trust) if files else None
    if model is None:
        return
    shapes: dict[str, Shape] = {}
    for path in files:
        shapes |= header_shapes(path)
    ends = {
        id(end.weight)
        for end in (model.get_input_embeddings(), model.get_output_embeddings())
        if end is not None
    }
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if id(tensor) in ends and name in shapes and shapes[name] != tuple(tensor.shape):
            raise misfit(place, name, shapes[name], tuple(tensor.shape))


def misfit(place: Place, name: str, stored: Shape, wanted: Shape, more: int = 0) -> UserError:
    """The error for a tensor that does not fit."""
    others = (
        f" ({counted(more, 'more tensor')} {'does' if more == 1 else 'do'} not fit either)" if more else ""
    )
    return UserError(f"{place.role} {place.source.text}: tensor {name} is {list(stored)} in the weight file and "
                     f"{list(wanted)} by config.json{others}: are they of one model?")  # fmt: skip
