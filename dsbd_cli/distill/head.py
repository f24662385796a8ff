"""The head that target and draft share, and what it reads."""

from __future__ import annotations

from typing import Any

import torch

from dsbd_cli.errors import UserError


def hidden_states(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Last hidden states `[rows, length, H]`, as the head reads them."""
    return getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False).last_hidden_state


def linear_head(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The head's weight and bias, once logits have been seen to be that and nothing more.

    Raises:
        UserError: the model does something else to its logits (scaling, capping).
    """
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    ids = torch.arange(1, 5, device=head.weight.device)[None]
    with torch.inference_mode():
        plain = model(input_ids=ids).logits.float()
        ours = torch.nn.functional.linear(hidden_states(model, ids), head.weight, bias).float()
    if plain.shape != ours.shape or (plain - ours).abs().max() > 0.02 * plain.std():
        raise UserError(
            f"{model.config.model_type}: its logits are more than a linear head; it cannot be distilled"
        )
    return head.weight.detach(), None if bias is None else bias.detach()
