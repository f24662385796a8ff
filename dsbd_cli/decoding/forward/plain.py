"""Is a model, at this moment, exactly the modules that the fused forwards were written for?

A fused forward reads weights and runs none of the model's code, so whatever changes code has to be seen:
subclasses, adapters, hooks, replaced methods, parametrizations, patched classes. Types are compared, not
names, and every function that would run has to come from transformers or torch themselves.
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from dsbd_cli.group import Summed

FAMILIES = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
}
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Replaced on the instance, these change no forward.
_HARMLESS = {"generate", "prepare_inputs_for_generation", "loss_function", "save_pretrained", "push_to_hub"}
# Rotary modules that write their buffers at every forward.
_MOVING = {"dynamic", "longrope"}
_SAMPLES = 8


def why_not_plain(model: Any) -> str | None:
    """What makes `model` more, or other, than the plain modules of one of `FAMILIES`; None where nothing does."""
    if type(model).__name__ not in FAMILIES:
        return f"{type(model).__name__} is not one of {', '.join(sorted(FAMILIES))}"
    kinds = _kinds(type(model).__name__)
    own_type: Any = type(model)  # (compared as such, a type checker takes the model for one of these)
    if own_type is not kinds["CausalLM"]:
        return f"{type(model).__name__} is a class of its own"
    if reason := _changed_functions(kinds):
        return reason
    for role, module in _roles(model):
        if type(module) not in _allowed(role, kinds):
            return f"it holds a {type(module).__name__} where a plain {role} is expected"
    for module in model.modules():
        if reason := why_altered(module):
            return reason
    if names := _extra(model):
        return f"it holds modules that the family does not have ({names[0]})"
    if len(model.model.layers) != model.config.num_hidden_layers:
        return "its config leaves some of its layers out"
    for weight in model.parameters():
        if type(weight) is not nn.Parameter:
            return f"a weight is a {type(weight).__name__}"
    if len({weight.dtype for weight in model.parameters()}) != 1:
        return "its weights are of several dtypes"
    if _autocast():
        return "autocast is on"
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "hooks are set on all modules"
    return None


def why_altered(module: nn.Module) -> str | None:
    """What on this one instance makes it compute something else than its class says; None where nothing does."""
    for name in _HOOKS:
        for hook in getattr(module, name).values():
            if not _collects(hook):
                return f"a {type(module).__name__} has a forward hook"
    for name in _replaced(module):
        return f"{name} of a {type(module).__name__} is replaced"
    return None


def why_not_captured(model: Any) -> str | None:
    """What may change a model's computation without a trace: a capture would not follow it."""
    for module in model.modules():
        if type(module).__module__.startswith("peft."):
            return "its adapters may be switched"
        if reason := why_altered(module):
            return reason
    return None


def fingerprint(model: Any) -> tuple[Any, ...]:
    """Changes whenever something changes that a prepared forward relies on.

    Modules, their types, hooks, methods and numbers; the code they run; the config; addresses and versions of all
    weights, and a sample of their values, for a write through `.data` leaves no other trace. A few milliseconds for a
    model of hundreds of modules, and one copy to the host.
    """
    modules: list[Any] = []
    for module in model.modules():
        hooks = [id(hook) for name in _HOOKS for hook in getattr(module, name).values()]
        plain = [
            (name, value)
            for name, value in vars(module).items()
            if name != "training" and isinstance(value, (int, float, str, bool))
        ]
        replaced = [(name, id(vars(module)[name])) for name in _replaced(module)]
        modules.append((id(module), type(module), *hooks, *plain, *replaced))
    globally = [*torch_module._global_forward_hooks, *torch_module._global_forward_pre_hooks]
    weights = [*model.parameters(), *_still_buffers(model)]
    return (
        tuple(modules),
        tuple(globally),
        tuple((weight.data_ptr(), _version(weight), weight.dtype) for weight in weights),
        _sample(weights),
        tuple((name, repr(value)) for name, value in vars(model.config).items()),
        _autocast(),
        _code(model),
    )


def _code(model: Any) -> tuple[Any, ...]:
    """Every function that a forward may run (not its address, which another may get once it is gone)."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    classes = dict.fromkeys(base for kind in kinds for base in kind.__mro__ if base is not object)
    sources = dict.fromkeys(sys.modules.get(kind.__module__) for kind in classes)
    spaces = [vars(place) for place in (*classes, *sources, nn.functional) if place is not None]
    names = [
        getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules()
    ]
    functions = tuple(value for space in spaces for value in list(space.values()) if callable(value))
    return functions, tuple(map(_attention, dict.fromkeys(names)))


def _attention(name: str | None) -> Any:
    """What is registered as the attention of this name; None where nothing is."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS.get(name) if name in ALL_ATTENTION_FUNCTIONS else None


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _version(weight: Tensor) -> int:
    # Tensors made under inference mode, as by hooks that load weights when they are needed, count nothing.
    return -1 if weight.is_inference() else weight._version


def _still_buffers(model: Any) -> list[Tensor]:
    return [
        buffer for module in model.modules() if not _moves(module) for buffer in module.buffers(recurse=False)
    ]


def _moves(module: nn.Module) -> bool:
    """Whether a rotary module has factors that follow the length; its `rope_type` may go by kind of layer."""
    kinds = getattr(module, "rope_type", None)
    return bool(_MOVING & set(kinds.values() if isinstance(kinds, dict) else [kinds]))


def _sample(weights: list[Tensor]) -> bytes:
    """Some values of every weight, rows and columns apart, as bytes."""
    taken: dict[torch.device, list[Tensor]] = {}
    for weight in weights:
        if weight.is_meta or weight.numel() == 0 or not weight.is_floating_point():
            continue
        some = weight.detach()
        for dim in range(some.dim()):
            step = max(1, some.shape[dim] // _SAMPLES)
            some = some[(slice(None),) * dim + (slice(step // 2, None, step),)]
        taken.setdefault(weight.device, []).append(some.flatten().float())
    return b"".join(torch.cat(parts).cpu().numpy().tobytes() for parts in taken.values())


# What is expected.


@functools.cache
def _kinds(name: str) -> dict[str, type]:
    folder, prefix = FAMILIES[name]
    source = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    kinds = {
        "CausalLM": getattr(source, name),
        **{
            role: getattr(source, prefix + role)
            for role in ("Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
        },
    }
    return kinds | {"Linear": nn.Linear, "Embedding": nn.Embedding, "ModuleList": nn.ModuleList}


def _allowed(role: str, kinds: dict[str, type]) -> tuple[type, ...]:
    if role == "SiLU":
        from transformers.activations import SiLUActivation

        return (nn.SiLU, SiLUActivation)
    return (kinds[role],)


def _roles(model: Any) -> list[tuple[str, Any]]:
    """Every module that a forward runs through, with what it should be."""
    inner = getattr(model, "model", None)
    found: list[tuple[str, Any]] = [("Model", inner), ("Linear", getattr(model, "lm_head", None))]
    for name, role in (("embed_tokens", "Embedding"), ("norm", "RMSNorm"), ("rotary_emb", "RotaryEmbedding"),
                       ("layers", "ModuleList")):  # fmt: skip
        found.append((role, getattr(inner, name, None)))
    for layer in getattr(inner, "layers", ()):
        found.append(("DecoderLayer", layer))
        for name in ("input_layernorm", "post_attention_layernorm"):
            found.append(("RMSNorm", getattr(layer, name, None)))
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        found += [("Attention", attention), ("MLP", mlp), ("SiLU", getattr(mlp, "act_fn", None))]
        found += [
            ("Linear", getattr(attention, name, None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")
        ]
        found += [("Linear", getattr(mlp, name, None)) for name in ("gate_proj", "up_proj", "down_proj")]
        found += [
            ("RMSNorm", getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        ]
    return found


def _extra(model: Any) -> list[str]:
    """Names of submodules that `_roles` does not know."""
    known = {id(module) for _, module in _roles(model)}
    return [name for name, module in model.named_modules() if name and id(module) not in known]


# What runs.


def _collects(hook: Any) -> bool:
    """Whether a hook changes nothing that a fused forward computes.

    Transformers' own for `output_hidden_states` and the like, and our sums over processes, which those forwards
    run as well.
    """
    if isinstance(hook, Summed):
        return True
    return bool(getattr(hook, "__module__", "") == "transformers.utils.output_capturing")


@functools.cache
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None))) - _HARMLESS


def _replaced(module: nn.Module) -> list[str]:
    """Methods of its class that the instance has something else for."""
    own, kind = vars(module), cast(Any, type(module))
    return [
        name
        for name in own.keys() & _methods(kind)
        if getattr(own[name], "__func__", None) is not getattr(kind, name)
    ]


def _changed_functions(kinds: dict[str, type]) -> str | None:
    """What of the code that these classes run is not transformers' or torch's own."""
    for kind in kinds.values():
        for name in ("forward", "__call__"):
            if name in dir(kind) and not at_home(getattr(kind, name)):
                return f"{kind.__name__}.{name} is replaced"
    source = sys.modules[kinds["Model"].__module__]
    for name in ("apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"):
        if not at_home(getattr(source, name, None)):
            return f"{name} is replaced"
    return None


def why_other_attention(model: Any) -> str | None:
    """Whether the attention that the config names is somebody's own; None where it is transformers'."""
    name = getattr(model.config, "_attn_implementation", None)
    registered = _attention(name)
    if name in (None, "eager") or registered is None or at_home(registered):
        return None
    return f"its attention ({name}) is registered from outside"


def at_home(function: Any) -> bool:
    """Whether a function, and whatever it wraps, is code of transformers or torch; None passes."""
    while function is not None:
        function = getattr(function, "func", function)  # a partial
        code = getattr(function, "__code__", None)
        if code is None:  # a class's slot, or a kernel object
            home = str(getattr(type(function), "__module__", ""))
            return home.split(".")[0] in ("builtins", "kernels", "torch", "transformers")
        if not code.co_filename.startswith(_homes()):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


@functools.cache
def _homes() -> tuple[str, ...]:
    import transformers

    packages: list[Any] = [torch, transformers]
    return tuple(str(Path(package.__file__).parent) for package in packages)
