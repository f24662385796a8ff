"""The draft: some layers of the target under the target's own embeddings and head.

On disk it is an ordinary Hugging Face folder, or, with shared embeddings, `config.json` (with
`dsbd_shared_embeddings`) and `layers.int8.safetensors`: int8 rows with a float16 `.scale` each
(weight = int8 * scale), vectors in float16, and no embeddings or head, which the target lends.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.loading.quiet import quiet_transformers
from dsbd_cli.loading.shared import dequantised
from dsbd_cli.paths import replacing

LAYERS_FILE = "layers.int8.safetensors"
SHARED_KEY = "dsbd_shared_embeddings"


def choose_layers(total: int, count: int) -> list[int]:
    """`count` layers spread evenly from the first to the last: 4 of 30 gives 0, 10, 19, 29.

    Raises:
        UserError: count outside 1..total.
    """
    if not 1 <= count <= total:
        raise UserError(f"--layers {count}: the target has {counted(total, 'layer')}; choose 1 to {total}")
    return [round(place * (total - 1) / max(1, count - 1)) for place in range(count)]


def layer_list(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder's layer list and its dotted name.

    Raises:
        UserError: none is as long as the config says.
    """
    count = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise UserError(f"{model.config.model_type}: found no list of {counted(count, 'layer')} to keep some of")


def prune(target: Any, keep: Sequence[int]) -> Any:
    """A new model of the target's class with the target's layers `keep`, in that order; all else is copied.

    Raises:
        UserError: a layer the target does not have, or none.
    """
    total = target.config.num_hidden_layers
    if not keep or any(not 0 <= layer < total for layer in keep):
        raise UserError(f"--keep {','.join(map(str, keep))}: the target has layers 0 to {total - 1}")
    name, _ = layer_list(target)
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(keep)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[layer] for layer in keep]
    draft = type(target)(config)
    state = {}
    for key, value in target.state_dict().items():
        if key.startswith(f"{name}."):
            index, _, rest = key[len(name) + 1 :].partition(".")
            for place, layer in enumerate(keep):
                if layer == int(index):
                    state[f"{name}.{place}.{rest}"] = value
        else:
            state[key] = value
    draft.load_state_dict(state)
    return draft.to(next(target.parameters()).device, next(target.parameters()).dtype)


def shared_names(model: Any) -> set[str]:
    """Names of the parameters the target lends: input embeddings and head, as `loading.shared` takes them."""
    lent = {id(model.get_input_embeddings().weight)}
    head = model.get_output_embeddings()
    lent |= {id(p) for p in head.parameters()} if head is not None else set()
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in lent}


def own_state(model: Any) -> dict[str, torch.Tensor]:
    """The draft's own weights (what training changes), on the CPU in float32."""
    lent = shared_names(model)
    return {n: p.detach().float().cpu().clone() for n, p in model.named_parameters() if n not in lent}


def load_own_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Copy `own_state` weights back into a model made by `prune`."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in state.items():
            parameters[name].copy_(value)


def quantise(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices `[rows, columns]` as int8 with a float16 `.scale` `[rows, 1]`, vectors as float16."""
    packed = {}
    for name, value in state.items():
        if value.ndim < 2:
            packed[name] = value.half().contiguous()
            continue
        # The scale is rounded first, so that the integers are the best ones for the scale that is stored.
        scale = (value.abs().amax(-1) / 127).clamp(min=1e-7).half()
        packed[name] = (value / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8).contiguous()
        packed[f"{name}.scale"] = scale[:, None].contiguous()
    return packed


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON, whole or not at all."""
    with replacing(path) as draft:
        draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def save_draft(draft: Any, folder: Path, share_embeddings: bool, tokenizer: Any = None) -> None:
    """Write the draft's folder: ordinary, or sharing the target's embeddings (see the module's text)."""
    folder.mkdir(parents=True, exist_ok=True)
    if not share_embeddings:
        with quiet_transformers():
            draft.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        return
    with replacing(folder / LAYERS_FILE) as temporary:
        save_file(quantise(own_state(draft)), str(temporary))
    config = draft.config.to_dict()
    for name in ("_name_or_path", "_model_name_or_path"):  # a path of the machine it was made on
        config.pop(name, None)
    write_json(folder / "config.json", {**config, "architectures": [type(draft).__name__], SHARED_KEY: True})


def load_shared_draft(folder: Path, target: Any) -> Any:
    """A draft with shared embeddings, completed with its target's.

    Raises:
        UserError: the folder does not fit the target.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = dequantised(folder / LAYERS_FILE)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder}: not a draft with shared embeddings: {error}") from error
    # By the config's class, which knows what an architecture calls these.
    own = type(target.config).from_dict(config)
    if own.hidden_size != target.config.hidden_size:
        raise UserError(
            f"{folder}: its hidden size differs from the target's, so it cannot share its embeddings"
        )
    draft = prune(target, [0] * int(own.num_hidden_layers))
    missing = {n for n, _ in draft.named_parameters()} - set(state) - shared_names(draft)
    if missing:
        raise UserError(f"{folder}: {len(missing)} weights are missing, such as {min(missing)}")
    load_own_state(draft, state)
    return draft.eval()


def start_from(draft: Any, folder: Path) -> None:
    """Put an earlier draft's own weights into `draft`, to go on training it.

    Raises:
        UserError: no draft there, or one of other layers.
    """
    if not (folder / LAYERS_FILE).is_file():
        raise UserError(
            f"--from {folder}: holds no {LAYERS_FILE}; it must be a draft made with --share-embeddings"
        )
    state = dequantised(folder / LAYERS_FILE)
    own = own_state(draft)
    if {name: tensor.shape for name, tensor in own.items()} != {name: t.shape for name, t in state.items()}:
        raise UserError(f"--from {folder}: that draft has other layers; give the --keep it was made with")
    load_own_state(draft, state)
