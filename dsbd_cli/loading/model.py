"""Config, tokenizer and weights of one model, with errors a person can act on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError, first_line, let_by
from dsbd_cli.group import group_of
from dsbd_cli.loading import architecture, hub
from dsbd_cli.loading.hardware import NumberFormat
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.shapes import misfit
from dsbd_cli.loading.source import Source
from dsbd_cli.loading.spec import PairSpec


@dataclass
class LoadedModel:
    """A causal LM ready to run.

    Attributes:
        model: in eval mode, on `device`.
        name: short, for results.
        device, dtype: where and in what format it computes.
        int8_activations: as in `hardware.NumberFormat`.
        max_positions: context limit, or None.
        vocab_rows: rows of the head, padding included.
        tree_refusal: why the architecture cannot serve tree methods, or None.
        window: tokens within which its layers see everything (sliding windows), or None.
        source: what the user named.
        notes: what a user should know about its weights.
    """

    model: Any
    name: str
    device: torch.device
    dtype: torch.dtype
    max_positions: int | None
    vocab_rows: int
    tree_refusal: str | None
    window: int | None
    source: Source
    notes: list[str] = field(default_factory=list)
    int8_activations: bool = False

    @property
    def format(self) -> str:
        """The name of its number format."""
        return NumberFormat(self.dtype, self.int8_activations).name


def describe(model: Any, source: Source) -> LoadedModel:
    """The record of a model that is loaded, and in eval mode."""
    rows = architecture.head_rows(model) or model.config.get_text_config().vocab_size
    refusal = architecture.tree_refusal(model.config)
    if refusal is None and getattr(model, "_is_stateful", False):
        refusal = f"{model.config.model_type} keeps recurrent state, which cannot branch"
    return LoadedModel(
        model=model,
        name=source.name,
        device=architecture.device_of(model),
        dtype=model.dtype,
        max_positions=architecture.max_positions_of(model.config),
        vocab_rows=int(rows),
        tree_refusal=refusal,
        window=architecture.window_of(model.config),
        source=source,
    )


def same_model(one: LoadedModel, other: LoadedModel) -> bool:
    """Whether both compute the same: one module, or two with equal weights of equal classes."""
    if one.model is other.model:
        return True
    if type(one.model) is not type(other.model) or (one.dtype, one.device) != (other.dtype, other.device):
        return False
    if any(group_of(loaded.model).size > 1 for loaded in (one, other)):
        return False  # each process holds a part of the weights: nothing to compare
    pairs = [dict(loaded.model.named_parameters()) for loaded in (one, other)]
    shapes = [{name: weight.shape for name, weight in part.items()} for part in pairs]
    if shapes[0] != shapes[1] or any(weight.is_meta for part in pairs for weight in part.values()):
        return False
    # Different weights part at the first tensor.
    return all(torch.equal(weight, pairs[1][name]) for name, weight in pairs[0].items())


def load_config(place: Place, trust: bool) -> Any:
    """The model's config.

    Raises:
        UserError: unknown architecture, or remote code that was not allowed.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(place.path, trust_remote_code=trust, **place.options)
    except Exception as error:  # OSError, ValueError, KeyError, StrictDataclassError, ...
        raise _explained(error, place, "config") from None


def load_tokenizer(place: Place, trust: bool) -> Any:
    """The model's tokenizer.

    Raises:
        UserError: none there, or one that cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(place.path, trust_remote_code=trust, **place.options)
    except Exception as error:
        raise _explained(error, place, "tokenizer") from None


def load_weights(
    place: Place, config: Any, spec: PairSpec, device: torch.device, dtype: torch.dtype
) -> LoadedModel:
    """The model with its weights on `device`.

    Raises:
        UserError: weights that are missing, do not fit the config, or do not fit the device.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": spec.trust_remote_code}
    target = place.role == "target"
    if target and spec.device_map is not None:
        options["device_map"] = spec.device_map
    elif device.type != "cpu":
        options["device_map"] = {"": device}
    if target and spec.quantization is not None:
        options["quantization_config"] = _quantization(spec.quantization, dtype)
        options.setdefault("device_map", {"": device})
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place.path, output_loading_info=True, ignore_mismatched_sizes=True, **options, **place.options
        )
        model, info = loaded
    except torch.OutOfMemoryError:
        raise UserError(f"{place.role} {place.source.name} does not fit on {device}: try a smaller dtype, "
                        "--quantization 4bit, --device-map auto, or a smaller model") from None  # fmt: skip
    except Exception as error:
        raise _explained(error, place, "model") from None
    # transformers fills what a checkpoint lacks, or holds in another shape, with random numbers, and only warns.
    if misfits := sorted(info["mismatched_keys"]):
        name, stored, wanted = misfits[0]
        raise misfit(place, name, tuple(stored), tuple(wanted), len(misfits) - 1)
    real = dict(model.named_parameters())
    lacking = sorted(name for name in info["missing_keys"] if name in real)
    if lacking:
        raise UserError(f"{place.role} {place.source.name}: its weight files lack {len(lacking)} of {len(real)} "
                        f"tensors, {lacking[0]} first: fetch the checkpoint again")  # fmt: skip
    found = describe(model.eval(), place.source)
    if unused := sorted(info["unexpected_keys"]):
        found.notes.append(f"{place.role} {place.source.name}: its config does not use {counted(len(unused), 'tensor')}"
                           f" of its weight files ({unused[0]} first): is config.json of this model?")  # fmt: skip
    return found


def _quantization(name: str, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if name == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, bnb_4bit_quant_type="nf4")


def _explained(error: Exception, place: Place, what: str) -> UserError:
    """One line for what transformers says at length."""
    let_by(error)
    name = f"{place.role} {place.source.text}"
    if isinstance(error, UserError):
        return error
    said = str(error)
    if "trust_remote_code" in said:
        return UserError(f"{name} brings modelling code of its own: read it, then allow it with "
                         "--trust-remote-code")  # fmt: skip
    if "gated" in said.lower():
        return UserError(f"{name} is gated: accept its licence at https://huggingface.co/{place.path}, then set "
                         "HF_TOKEN to a token of that account")  # fmt: skip
    # What it says where none is named, and where `null` is; KeyError: an older one.
    nameless = "Unrecognized model in", "has model type `None`", "'model_type'"
    if said.startswith(nameless) or nameless[1] in said:
        return UserError(f"{name}: its config.json does not say what model it is (no model_type): fetch the checkpoint "
                         "again, or name the model's own folder")  # fmt: skip
    if "does not recognize this architecture" in said:
        kind = said.split("`")[1] if said.count("`") > 1 else "unknown"
        return UserError(f"{name}: the installed transformers does not know architecture {kind!r}")
    if "Unrecognized configuration class" in said:
        return UserError(f"{name} is not a causal language model")
    if variable := (hub.offline_variable() if not place.is_local else None):
        return UserError(f"{name}: part of its {what} is not in the local cache and {variable} is set")
    return UserError(f"{name}: its {what} cannot be loaded ({first_line(error)})")
