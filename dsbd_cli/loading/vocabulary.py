"""A draft that proposes the first ids alone, so that the rest of its head is never read.

Of a small draft the head is the largest part (28 of 45 million weights of the embedded one), and byte-pair vocabularies
are in order of how frequent a pair was in a large corpus. (Measured: a ranking from 1.6 million tokens that the target
wrote itself loses more than that order.) Whatever a draft proposes from is what verification is told, so the output's
distribution does not change (docs/design.md section 3); a token that is left out is one that the draft misses. On a CPU
only: on a GPU a head costs next to nothing beside what a launch does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dsbd_cli.loading.architecture import head_rows, input_rows
from dsbd_cli.loading.ready.llama import linear_of

# Rows are multiplied in blocks: a border inside one would save nothing.
_BLOCK = 64


class Choice(NamedTuple):
    """What a draft proposes.

    Attributes:
        ids: int64, ascending, a multiple of 64 of them; None: all that its head has.
        notes: what its user should know.
    """

    ids: np.ndarray | None
    notes: list[str]


def choose(draft: Any, wanted: int, *, most: int | None = None, eos_ids: Sequence[int] = ()) -> Choice:
    """The ids that a draft is to propose.

    Args:
        draft: causal LM on its device; None: the pair has none.
        wanted: how many, rounded up to whole blocks of 64; 0: all.
        most: ids that are tokens at all; None: all of its head.
        eos_ids: always among them: what can't be proposed ends no drafted branch.
    """
    if not wanted or (draft is not None and draft.device.type != "cpu"):
        return Choice(None, [])
    rows = None if draft is None else head_rows(draft)
    if rows is not None:
        rows = min(number for number in (rows, input_rows(draft), most) if number is not None)
    count = -(-wanted // _BLOCK) * _BLOCK
    if draft is None:
        why = "there is no draft"
    elif rows is None or _head_name(draft) is None:
        why = "its head is no plain layer"
    elif count >= rows:
        why = f"its head has {rows} ids"
    else:
        ends = sorted({one for one in eos_ids if one < rows})
        others = [one for one in range(count) if one not in ends][: count - len(ends)]
        return Choice(np.array(sorted([*ends, *others]), np.int64), [])
    return Choice(None, [f"draft-vocab {wanted} changes nothing: {why}"])


def narrowed(model: Any, ids: np.ndarray) -> Any:
    """The same model with the rows `ids` of its head; it shares all other weights, and `model` stays what it is."""
    head, rows = model.get_output_embeddings(), torch.from_numpy(ids)
    weight, bias = (
        None if one is None else nn.Parameter(one.detach()[rows], requires_grad=False)
        for one in (head.weight, head.bias)
    )
    assert weight is not None
    twin = copy.copy(model)
    twin._modules = model._modules | {_head_name(model): linear_of(weight, bias)}
    return twin


def _head_name(model: Any) -> str | None:
    """The attribute under which a model holds its head, where that is a plain linear layer."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return None
    return next((name for name, module in model._modules.items() if module is head), None)
