"""Does the tree mask serve this architecture? Asked once a load, answered by the model itself.

Custom masks have broken in minor releases without an error, so a list of names is
not enough: a handful of nodes is computed as a tree and as plain sequences, and compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding.forward.hf import SERVED_KINDS, layer_kinds
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import UserError
from dsbd_cli.loading.architecture import tree_refusal

_PREFIX = 5
# Rounding allowed, as a part of the largest logit.
_ROUNDING = 1e-4
# Where the dtype rounds more than that: as a part of what the path before a token changes at all.
_OF_CONTEXT = 0.25


def refuse_unserved(model: Any) -> None:
    """Refuse, by name, what is known not to be a tree of key/value slots.

    Raises:
        UserError: ALiBi, recurrent or chunked layers, encoder-decoder models, masks of their own.
    """
    config = model.config
    reason = tree_refusal(config)
    others = sorted(set(layer_kinds(config.get_text_config())) - SERVED_KINDS)
    if reason is None and others:
        reason = f"{config.model_type} has layers of kind {others[0]}"
    if reason is not None:
        raise UserError(f"{_name(model)}: {reason}, so tree decoding does not serve it; take another model")


def check_tree(tree: Any, model: Any, vocab_size: int) -> str | None:
    """Compare a tree forward with plain forwards of the model on two levels of two branches.

    Args:
        tree: `HfTreeModel` over `model`; what it holds is lost.

    Returns:
        None where they differ by no more than rounding, else what is wrong.
    """
    # Both branches end in the same token, so only attention tells the two leaves apart.
    ids = [(7 * i + 3) % vocab_size for i in range(_PREFIX + 3)]
    prompt, left, right, last = ids[:_PREFIX], *ids[_PREFIX:]
    root = Node(-1, None)
    branches = [Node(left, root), Node(right, root)]
    leaves = [Node(last, branch) for branch in branches]
    try:
        tree.prefill(prompt, root, reuse=False)
        tree.forward([*branches, *leaves])
        got = torch.stack(
            [tree.log_row(node) for pair in zip(branches, leaves, strict=True) for node in pair]
        )
        plain = _plain(model, [prompt + leaf.tokens() for leaf in leaves], vocab_size)
    except Exception as error:  # whatever the modelling code makes of arguments it does not expect
        return f"{type(error).__name__}: {error}"
    wrong = (got - plain).abs()
    context = (plain[1] - plain[3]).abs().mean()
    scale = max(1.0, float(plain.abs().max()))
    if not torch.isfinite(got).all() or not torch.isfinite(plain).all():
        return None  # decoding says so by itself, with the step and the dtype
    if wrong.max() > _ROUNDING * scale and wrong.mean() > _OF_CONTEXT * context:
        return f"off by {float(wrong.max()):.2g} in log-probability"
    return None


def _plain(model: Any, sequences: list[list[int]], vocab_size: int) -> Tensor:
    """Raw log-probabilities [4, V] after the last two tokens of both sequences, by an ordinary forward."""
    with torch.inference_mode():
        logits = model(torch.tensor(sequences, device=model.device), use_cache=False).logits
    return torch.log_softmax(logits[:, -2:, :vocab_size].float(), -1).flatten(0, 1)


def refusal(model: Any, detail: str) -> UserError:
    """The error for a model that fails `check_tree`."""
    return UserError(
        f"{_name(model)}: a tree of sequences does not compute like single sequences on {model.config.model_type} "
        f"({detail}), so tree decoding does not serve it; take another model"
    )


def _name(model: Any) -> str:
    return str(model.config.name_or_path or type(model).__name__)
