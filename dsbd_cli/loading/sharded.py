"""A target that several processes hold together: each reads and keeps its heads and its part of the MLP.

Query, key, value, gate and up projections are split by outputs (whole key/value heads with their query
heads), the two that follow them by inputs, so that a layer needs two sums over the processes (Megatron-LM,
arXiv 1909.08053, section 3). Embeddings, norms and the head are whole on each; a fused forward computes its
part of the head's rows. docs/design.md section 10, several cards.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsbd_cli.errors import UserError, let_by
from dsbd_cli.group import Group, Summed, Team, join
from dsbd_cli.loading import hub
from dsbd_cli.loading.checkpoint import weight_files
from dsbd_cli.loading.model import LoadedModel, describe, load_weights
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.shapes import header_shapes, misfit, skeleton
from dsbd_cli.loading.spec import PairSpec

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")
# Numbers of a config that count a process's own.
_SHARED_OUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size")

# From the name of a weight to the whole of it, or to a part of one of its dimensions.
Read = Callable[[str, int, slice], Tensor]


def meet(spec: PairSpec) -> tuple[Group, PairSpec]:
    """Join the processes that hold the target with this one; the spec with the devices that this one takes.

    Raises:
        UserError: too few processes or cards, or a device that is not every process's own.
    """
    team = Team.of(spec.tensor_parallel)
    for role in ("target", "draft"):
        name = getattr(spec, f"{role}_device")
        if name not in ("auto", "cuda", "cpu"):
            raise UserError(f"--tensor-parallel gives every process a device of its own: leave out {role}-device "
                            f"{name}, or give cuda or cpu")  # fmt: skip
    cuda = torch.cuda.is_available() and spec.target_device != "cpu"
    if spec.target_device == "cuda" and not cuda:
        raise UserError("target device cuda is not there: torch sees no CUDA device (dsbd doctor lists them)")
    group = join(team, cuda=cuda)
    place = f"cuda:{team.shard.local}" if cuda else "cpu"
    draft = place if spec.draft_device in ("auto", "cuda") else spec.draft_device
    return group, spec.replace(target_device=place, draft_device=draft)


def refuse(config: Any, size: int, name: str) -> None:
    """Refuse, by name, a model that `size` processes cannot hold together.

    Raises:
        UserError: an architecture without a fused forward, quantized weights, sizes that do not divide.
    """
    kinds = list(getattr(config, "architectures", None) or ())
    if not kinds or kinds[0] not in FAMILIES:
        raise UserError(f"--tensor-parallel serves {', '.join(FAMILIES)}, and {name} is "
                        f"{kinds[0] if kinds else config.model_type}: try --device-map auto")  # fmt: skip
    if _window(config):
        raise UserError(f"--tensor-parallel does not serve layers that see a window only, as {name} has: try "
                        "--device-map auto")  # fmt: skip
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"--tensor-parallel does not serve quantized weights, as {name} has")
    for field, what in zip(_SHARED_OUT, ("query heads", "key/value heads", "MLP columns"), strict=True):
        count = getattr(config, field)
        if count % size:
            raise UserError(
                f"--tensor-parallel {size} does not divide the {count} {what} of {name}: give another number"
            )


def _window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))


def shard(model: Any, group: Group) -> Any:
    """This process's part of a model that lies here whole, on the same device; the model itself stays as it is.

    Raises:
        UserError: a model that cannot be split so.
    """
    name = str(model.config.name_or_path or model.config.model_type)
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    refuse(config, group.size, name)
    weights = dict(model.named_parameters(remove_duplicate=False))

    def read(name: str, dim: int, part: slice) -> Tensor:
        return weights[name].detach().narrow(dim, part.start, part.stop - part.start).clone()

    return _build(config, group, read, model.device, model.dtype, model.generation_config)


def load(
    place: Place, config: Any, spec: PairSpec, group: Group, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    """This process's part of a checkpoint; of safetensors no more than that is read.

    Raises:
        UserError: a model that cannot be split so, or weights that do not fit their config.
    """
    refuse(config, group.size, place.source.name)
    stored = _Stored(place, config, device, dtype)
    if stored.serves:
        from transformers import GenerationConfig

        try:
            options = GenerationConfig.from_pretrained(place.path, **place.options)
        except OSError as error:
            let_by(error)
            options = GenerationConfig.from_model_config(config)
        model = _build(config, group, stored.read, device, dtype, options)
        model.config.name_or_path = str(place.path)
    else:  # other names, other files: read whole by transformers, in main memory
        whole = load_weights(place, config, spec.replace(tensor_parallel=1), torch.device("cpu"), dtype)
        model = shard(whole.model, group).to(device)
    return describe(model, place.source)


class _Stored:
    """Weights of a checkpoint under the model's own names, read from safetensors part by part."""

    def __init__(self, place: Place, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        if not place.is_local:
            place = dataclasses.replace(place, path=hub.snapshot(place.path, **place.options))
        self._place, self._device, self._dtype = place, device, dtype
        self._files: dict[str, Any] = {}
        whole = skeleton(config, False)
        wanted = {} if whole is None else {
            name: tuple(weight.shape) for name, weight in whole.named_parameters()
        }  # fmt: skip
        shapes: dict[str, tuple[int, ...]] = {}
        for path in weight_files(place.folder, place.role):
            if path.suffix == ".safetensors":
                own = header_shapes(path)
                shapes |= own
                self._files |= dict.fromkeys(own, path)
        self.serves = bool(wanted) and wanted.keys() <= shapes.keys()
        if self.serves:
            for name, shape in wanted.items():
                if shapes[name] != shape:
                    raise misfit(place, name, shapes[name], shape)

    def read(self, name: str, dim: int, part: slice) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            rows = file.get_slice(name)
            found: Tensor = rows[part] if dim == 0 else rows[:, part]
            return found.to(self._device, self._dtype).contiguous()


def _build(
    config: Any, group: Group, read: Read, device: torch.device, dtype: torch.dtype, generation: Any
) -> Any:
    """A model of the process's own sizes, its weights read part by part."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for field in _SHARED_OUT:
        setattr(small, field, getattr(config, field) // group.size)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(small, dtype=dtype).eval()
    # What it computes from the config, and holds no weights.
    inner = model.model
    tied = model.lm_head.weight is inner.embed_tokens.weight
    inner.rotary_emb = type(inner.rotary_emb)(config=small).to(device)
    for name, empty in list(model.named_parameters()):
        linear = name.split(".")[-2]
        dim = 0 if linear in _BY_OUTPUTS else 1 if linear in _BY_INPUTS and empty.dim() == 2 else None
        length = empty.shape[dim or 0]
        begin = 0 if dim is None else group.rank * length
        weight = read(name, dim or 0, slice(begin, begin + length))
        if linear in _BY_INPUTS and empty.dim() == 1 and not group.first:
            weight = torch.zeros_like(weight)  # a bias counts once in the sum
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(weight, requires_grad=False))
    if tied:
        model.lm_head.weight = inner.embed_tokens.weight
    model.generation_config = copy.deepcopy(generation)
    for layer in inner.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.register_forward_hook(Summed(group))
    model.dsbd_group = group
    return model
