"""Calling an unmodified Hugging Face causal LM over a tree: which keywords, which mask, which layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer

_FULL, _SLIDING = "full_attention", "sliding_attention"
SERVED_KINDS = frozenset({_FULL, _SLIDING})


class HfForward:
    """One forward of a causal LM on tree nodes; hides what differs between families and releases.

    Args:
        model: a causal LM in eval mode. Its own attention implementation is used as it stands.
    """

    relative_node_cost = 0.03
    int8 = False
    int8_activations = False
    reads_length = False
    slot_unit = 1
    takes_spans = False
    between: Callable[[], None] | None = None

    def __init__(self, model: Any) -> None:
        self.model = model
        self.dtype = model.dtype
        config = model.config.get_text_config()
        names = set(inspect.signature(model.forward).parameters)
        # transformers 5.24 renamed it; both releases are served.
        self._cache = "cache" if "cache" in names else "past_key_values"
        self._keep = next((name for name in ("logits_to_keep", "num_logits_to_keep") if name in names), None)
        self._kinds = layer_kinds(config)
        self._window = int(config.sliding_window) if _SLIDING in self._kinds else 0

    def describe(self) -> str:
        """One line for people."""
        return "the model's own forward (transformers)"

    def needs_no_mask(self, begin: int) -> bool:
        """Its masks are always given."""
        return False

    def __call__(
        self, cache: KVBuffer, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int = 0
    ) -> Tensor:
        """Logits [K, V'] of the nodes named by `keep`.

        Args:
            cache: `slots` and `used` are set for this forward.
            ids, positions: int64 [N].
            mask: additive [N, used].
            keep: indices of the nodes whose logits are wanted (int64 [K]); an int n: the last n, 0: all.
        """
        options: dict[str, Any] = {
            "input_ids": ids[None],
            "position_ids": positions[None],
            self._cache: cache,
            "use_cache": True,
            "return_dict": True,
        }
        if self._keep is not None:
            options[self._keep] = keep
        assert mask is not None  # `needs_no_mask` says so
        options["attention_mask"] = self._masks(cache, positions, mask)
        logits: Tensor = self.model(**options).logits[0]
        if self._keep is None and not (isinstance(keep, int) and keep == 0):
            logits = logits[-keep:] if isinstance(keep, int) else logits[keep]
        return logits

    def _masks(self, cache: KVBuffer, positions: Tensor, mask: Tensor) -> Any:
        """`mask` as the model takes it: one, or one for each kind of layer it has."""
        masks = {_FULL: mask[None, None]}
        if self._window:
            # In a window layer a node sees the slots whose positions are less than `window` behind its own.
            behind = positions[:, None] - cache.note(positions)[None, :]
            masks[_SLIDING] = mask.masked_fill(behind >= self._window, torch.finfo(mask.dtype).min)[
                None, None
            ]
        if len(self._kinds) == 1:
            return masks[self._kinds[0]]
        return {kind: masks[kind] for kind in self._kinds}


def layer_kinds(config: Any) -> list[str]:
    """The kinds of attention layer of a text config, each once, as `layer_types` spells them."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return list(dict.fromkeys(kinds))
    window = getattr(config, "sliding_window", None)
    return [_SLIDING if window and getattr(config, "use_sliding_window", True) else _FULL]


def context_limit(model: Any) -> int | None:
    """Tokens that the model has positions for, or None where its config names no limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit and limit > 0 else None  # XLNet says -1
