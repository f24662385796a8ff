"""Does the tree mask serve this architecture? Asked once a load, answered by the model itself.

Custom masks have broken in minor releases without an error, so a list of names is
not enough: a handful of nodes is computed as a tree and as plain sequences, and compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsbd_cli.decoding.forward.hf import SERVED_KINDS, HfForward, layer_kinds
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import UserError, first_line, let_by
from dsbd_cli.loading.architecture import tree_refusal

_PREFIX = 5
WHAT_WORKS = "method multinomial decodes it path by path"
# Rounding allowed, as a part of the largest logit: of a fused forward, and of the model's own, whose router of
# experts may turn by a hair.
_ROUNDING, _OWN_ROUNDING = 1e-4, 1e-3
# Where the dtype rounds more than that: as a part of what the path before a token changes at all.
_OF_CONTEXT = 0.25


class Verdict(NamedTuple):
    """What the self-test said of a model, kept for its next load (`loading.ready`).

    Attributes:
        refused: how many forwards disagreed with the model's own before one agreed.
        forward: what that one says of itself; where another stands in its place, the test is run again.
        notes: what the user was told of those that disagreed.
        in_vain: those of them about a number format that was asked for.
    """

    refused: int
    forward: str
    notes: list[str]
    in_vain: Sequence[str] = ()


def refuse_unserved(model: Any, name: str) -> None:
    """Refuse, by name, what is known not to be a tree of key/value slots.

    Args:
        name: as the user knows it; a config's own is where its files were found, in a cache perhaps.

    Raises:
        UserError: ALiBi, recurrent or chunked layers, encoder-decoder models, masks of their own.
    """
    config = model.config
    reason = tree_refusal(config)
    others = sorted(set(layer_kinds(config.get_text_config())) - SERVED_KINDS)
    if reason is None and others:
        reason = f"{config.model_type} has layers of kind {others[0]}"
    if reason is not None:
        raise UserError(f"{name}: {reason}, so a tree of sequences does not serve it; {WHAT_WORKS}")


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
        tree.start(prompt, root, 0, reuse=False)
        tree.forward([*branches, *leaves])
        got = torch.stack(
            [tree.log_row(node) for pair in zip(branches, leaves, strict=True) for node in pair]
        )
        plain = _plain(model, [prompt + leaf.tokens() for leaf in leaves], vocab_size, tree.device)
    except Exception as error:  # whatever the modelling code makes of arguments it does not expect
        let_by(error)
        return f"{type(error).__name__}: {first_line(error)}"
    if got.isnan().any() or plain.isnan().any():
        return None  # decoding says so by itself, with the step and the dtype
    # A token that the model masks has a logit of -inf in both.
    masked = got.isneginf() & plain.isneginf()
    got, plain = got.masked_fill(masked, 0.0), plain.masked_fill(masked, 0.0)
    wrong = (got - plain).abs()
    context = (plain[1] - plain[3]).abs().mean()
    scale = max(1.0, float(plain.abs().max()))
    rounding = _OWN_ROUNDING if isinstance(tree._forward, HfForward) else _ROUNDING
    if wrong.max() > rounding * scale and (_exact(tree, model) or wrong.mean() > _OF_CONTEXT * context):
        return f"off by {float(wrong.max()):.2g} in log-probability"
    return None


def _exact(tree: Any, model: Any) -> bool:
    """Whether this forward has no reason to differ by more than float32 rounds."""
    tf32 = model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32
    rounds = tf32 or tree._forward.int8 or tree._forward.int8_activations
    return model.dtype in (torch.float32, torch.float64) and not rounds


def _plain(model: Any, sequences: list[list[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Raw log-probabilities [4, V] after the last two tokens of both sequences, by ordinary forwards.

    One sequence at a time, as decoding runs them: a hook may be made for one.
    """
    rows = []
    for ids in sequences:
        with torch.inference_mode():
            logits = model(torch.tensor([ids], device=device), use_cache=False).logits
        rows.append(torch.log_softmax(logits[0, -2:, :vocab_size].float(), -1))
    return torch.cat(rows)


def refusal(model: Any, name: str, detail: str) -> UserError:
    """The error for a model that fails `check_tree`; `name` as for `refuse_unserved`."""
    return UserError(
        f"{name}: a tree of sequences does not compute like single sequences on {model.config.model_type} "
        f"({detail}); {WHAT_WORKS}"
    )
