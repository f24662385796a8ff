"""What the model is given beside token ids: nothing that would change the text is passed over in silence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding import at_home
from dsbd_cli.errors import UserError, let_by
from dsbd_cli.loading.architecture import tree_refusal, window_of

_CACHES = ("past_key_values", "cache", "cache_params")
# How a forward is run, not what it computes.
_HARMLESS = {"attention_mask", "position_ids", "cache_position", "logits_to_keep", "num_logits_to_keep", "use_cache",
             "return_dict", *_CACHES}  # fmt: skip

# Tokens, and as many of padding, that tell whether a model ignores padding.
_PROBE = 8


def check_model(model: Any) -> None:
    """Refuse models whose own `generate` computes more than their forward says.

    Raises:
        UserError: encoder-decoder models, virtual tokens, replaced input preparation, adapters by row.
    """
    if model.config.is_encoder_decoder:
        raise UserError(f"{type(model).__name__} is no decoder-only model")
    prepare = vars(model).get("prepare_inputs_for_generation")
    whole = type(model).prepare_inputs_for_generation
    if prepare is not None and getattr(prepare, "__func__", None) is not whole:
        raise UserError(
            "prepare_inputs_for_generation is replaced (prompt, prefix or p-tuning): virtual tokens are not "
            "offered; merge the adapter, or call generate without custom_generate"
        )
    if not at_home(whole):
        raise UserError(
            f"{type(model).__name__} prepares its inputs with code of its own, which dsbd_cli.generate does not run"
        )
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            words = getattr(hook, "keywords", {})
            if "alora_offsets" in words:
                raise UserError("activated LoRA (alora) is not offered: where it begins depends on the text")
            if len(words.get("adapter_names") or ()) > 1:
                raise UserError("adapter_names for several rows are not offered: one prompt a call")


def prompts(model: Any, input_ids: Tensor, kwargs: Mapping[str, Any], every: int) -> list[list[int]]:
    """The token ids of each prompt, padding left out.

    Args:
        input_ids: int64 [B, L].
        kwargs: what else `generate` would hand to the model.
        every: rows that transformers made of each prompt; the first of them is taken.

    Raises:
        UserError: an input that changes the text and is not offered.
    """
    if kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise UserError("dsbd_cli.generate needs input_ids (inputs_embeds are not offered)")
    for name in _CACHES:
        _refuse_filled(name, kwargs.get(name))
    for name, value in kwargs.items():
        if name not in _HARMLESS and value is not None:
            raise UserError(f"{name} is not offered: only input_ids and a padding attention_mask are read")
    mask = _padding(model, input_ids, kwargs.get("attention_mask"))
    _check_positions(input_ids, mask, kwargs.get("position_ids"), kwargs.get("cache_position"))
    kept = mask.bool()
    return [input_ids[row][kept[row]].tolist() for row in range(0, input_ids.shape[0], every)]


def _refuse_filled(name: str, cache: Any) -> None:
    if cache is None:
        return
    if "Quant" in type(cache).__name__:
        raise UserError(f"a {type(cache).__name__} is not offered: keys and values keep the model's dtype")
    if not hasattr(cache, "get_seq_length") or _filled(cache):
        raise UserError(f"{name} that holds tokens already is not offered: give all tokens as input_ids")


def _filled(cache: Any) -> bool:
    try:
        return int(cache.get_seq_length()) > 0
    except ValueError:  # only recurrent layers, which have no length
        return any(getattr(layer, "is_initialized", False) for layer in getattr(cache, "layers", ()))


def _padding(model: Any, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """The mask as int64 [B, L] of 0 and 1; it may only hide tokens before the last."""
    if mask is None:
        return torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask has the shape {list(mask.shape)} and input_ids {list(input_ids.shape)}: give one entry "
            "for each token of the prompts"
        )
    mask = mask.to(input_ids.device)
    if not ((mask == 0) | (mask == 1)).all():
        raise UserError("attention_mask must hold 0 and 1 only")
    mask = mask.long()
    if not mask[:, -1].all():
        raise UserError("padding on the right is not offered: set padding_side='left' in the tokenizer")
    gaps = bool((mask[:, 1:] < mask[:, :-1]).any())
    if gaps and not _closes_gaps(model):
        raise UserError(
            f"attention_mask with gaps inside a prompt is not offered for {type(model).__name__} (transformers makes "
            "one where pad_token_id stands in a prompt: give attention_mask)"
        )
    return mask


def _closes_gaps(model: Any) -> bool:
    """Whether a hidden token is as good as none: not where order in the cache counts (windows, recurrent state)."""
    by_position = "position_ids" in inspect.signature(model.forward).parameters
    return by_position and window_of(model.config) is None and tree_refusal(model.config) is None


def _check_positions(ids: Tensor, mask: Tensor, positions: Any, cache_position: Any) -> None:
    """Positions must be those that follow from the padding."""
    if positions is not None:
        usual = (mask.cumsum(-1) - 1).to(positions.device)
        where = mask.bool().to(positions.device)
        if positions.shape != usual.shape:  # transformers makes them of an attention_mask, and cuts that
            raise UserError(
                f"attention_mask (or position_ids) has the shape {list(positions.shape)} and input_ids "
                f"{list(ids.shape)}: give one entry for each token of the prompts"
            )
        if not (positions == usual)[where].all():
            raise UserError("position_ids other than those of the padding are not offered (packed prompts)")
    if cache_position is not None and cache_position.tolist() != list(range(ids.shape[1])):
        raise UserError("cache_position is not offered")


@torch.inference_mode()
def check_padding(model: Any, input_ids: Tensor, mask: Any, new: int) -> None:
    """Refuse padding that the model does not ignore: here each prompt is decoded without it.

    Recurrent state and learned positions may run over it. The last few tokens of the row with the most padding
    are computed with and without it; `model` is in eval mode. Sparse attention may choose it for one of its keys.

    Args:
        new: tokens to be generated.

    Raises:
        UserError: the model's logits depend on padding.
    """
    if mask is None or bool((mask != 0).all()):
        return
    keys = getattr(model.config.get_text_config(), "index_topk", None)
    if keys is not None and input_ids.shape[1] + new > keys:
        raise _not_ignored(model)
    row = int((mask != 0).sum(-1).argmin())
    kept = (mask[row] != 0).to(input_ids.device)
    end = input_ids[row][kept][-_PROBE:]
    pads = min(_PROBE, int((~kept).sum()))
    padded = torch.cat([input_ids[row][~kept][:pads], end])
    seen = torch.cat([torch.zeros(pads, dtype=torch.long), torch.ones(len(end), dtype=torch.long)]).to(
        end.device
    )
    try:
        alone, beside = (_last_logits(model, *pair) for pair in ((end, torch.ones_like(end)), (padded, seen)))
    except (
        Exception
    ) as error:  # what the modelling code makes of a mask; its own `generate` would say the same
        let_by(error)
        return
    # Rounding is below both, and what padding does to a model that reads it is far above.
    allowed = 0.02 if alone.dtype in (torch.float32, torch.float64) else 0.25
    alone, beside = alone.float(), beside.float()
    if float((alone - beside).abs().mean()) > allowed * float(alone.std()):
        raise _not_ignored(model)


def _not_ignored(model: Any) -> UserError:
    return UserError(
        f"{type(model).__name__} does not ignore padding, so its text depends on the other prompts of a batch: "
        "give one prompt a call"
    )


def _last_logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """[V'] behind one sequence whose first tokens `mask` may hide, as the model's own `generate` would begin."""
    takes = inspect.signature(model.forward).parameters
    options = {"attention_mask": mask[None], "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[None]}
    given = {name: value for name, value in options.items() if name in takes}
    inputs = model.prepare_inputs_for_generation(ids[None], use_cache=False, **given)
    logits: Tensor = model(**inputs, return_dict=True).logits[0, -1]
    return logits
