"""Any causal LM, one sequence at a time: the model's own generation steps, with whatever cache it keeps.

Serves `multinomial` where a tree of sequences is not possible: recurrent state, distances that are read off the
cache's order, masks of the model's own. Each step is what transformers' `generate` does: the model prepares
its inputs, runs, and says what the next step needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import LogitStore, Told
from dsbd_cli.decoding.forward.capture import OverlapClock
from dsbd_cli.decoding.forward.hf import context_limit
from dsbd_cli.decoding.forward.kernels import keep_logits
from dsbd_cli.decoding.tree.sequences import Node
from dsbd_cli.errors import let_by


class PathModel(Told):
    """One model over one sequence (`model.protocol.TreeModel`, for methods that keep one beam).

    Args:
        model: causal LM, in eval mode.
        vocab_size: ids from here on have probability 0.
        role, name: what errors call it.
        device: where its inputs go.
        max_positions: context limit, or None.

    Attributes:
        calls: forwards since the last `prefill`, that one left out.
        notes: what a user should know about how this model was run.
        slots_peak, bytes_peak, bytes_allocated: None: what it keeps is the model's own affair.
    """

    slots_peak: int | None = None
    bytes_peak: int | None = None
    bytes_allocated: int | None = None

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        role: str,
        name: str,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        self.model, self.role, self.name, self.device = model, role, name, device
        self.vocab_size = vocab_size
        self.max_positions = max_positions or context_limit(model)
        self.calls = 0
        self.notes: list[str] = []
        self.clock = OverlapClock()
        self.logits = LogitStore(f"the {role} model ({name})", model.dtype, vocab_size)
        self._ids: list[int] = []
        self._prompt = 0
        self._steps = _Steps(model, device)
        self._checked = False

    @property
    def max_depth(self) -> int | None:
        return None if self.max_positions is None else self.max_positions - self._prompt

    def require_tree(self) -> None:
        """Find out, once, whether the model runs with a cache."""
        if self._checked:
            return
        self._steps.cached = True
        self._steps.cached = cached = self._runs_cached()
        slow = "" if cached else ", without a cache: each token costs a forward over the whole text"
        self.notes = [f"{self.role}: decoded path by path with its own forward{slow}"]
        self._checked = True  # last: it may be interrupted

    def limit_for(self, prompt_tokens: int) -> int | None:
        return self.max_positions

    def begin(self, nodes: Iterable[Node]) -> None:
        """Nothing: no device works ahead."""

    def reads(self, node: Node) -> bool:
        return True

    def describe(self) -> str:
        """How this model is run: one sentence."""
        return "the model's own forward, path by path (transformers)"

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int], root: Node, *, top_n: int = 0, reuse: bool = True) -> None:
        """Start behind the prompt `ids`; nothing is taken over from the last one."""
        self.require_tree()
        self.logits.start(top_n)
        self.calls = 0
        self._ids, self._prompt = list(ids), len(ids)
        keep_logits(self.logits, [root], self._steps.begin(self._ids))

    @torch.inference_mode()
    def forward(self, nodes: Iterable[Node]) -> None:
        """Compute the one sequence that goes on."""
        wanted = list(dict.fromkeys(node for node in nodes if node not in self.logits))
        if not wanted:
            return
        (node,) = wanted
        self._ids.append(node.token)
        if len(self._ids) != self._prompt + node.depth:
            raise ValueError("one sequence, token by token")
        keep_logits(self.logits, [node], self._steps.extend(self._ids))
        self.calls += 1

    def retain(self, leaves: Iterable[Node]) -> None:
        self.logits.keep(set(leaves))

    @torch.inference_mode()
    def _runs_cached(self) -> bool:
        ids = [(7 * i + 3) % self.vocab_size for i in range(4)]
        try:
            self._steps.begin(ids[:3])
            self._steps.extend(ids)
        except Exception as error:  # whatever the modelling code makes of arguments it does not expect
            let_by(error)
            return False
        return True


class _Steps:
    """The steps of transformers' `generate` for one sequence.

    Attributes:
        cached: False: a forward over the whole text for each token.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        from transformers import GenerationMixin  # late: a tree needs none of it

        self._model, self._device, self.cached = model, device, True
        self._takes = set(inspect.signature(model.forward).parameters)
        # What this transformers hands to every model; many take it as further keywords.
        self._prepares = set(inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters)
        # By this transformers' name for it: XLM of 5.17 takes a `cache` of its own kind.
        self._cache = "cache" if "cache" in self._prepares else "past_key_values"
        self._kwargs: dict[str, Any] = {}

    def begin(self, ids: Sequence[int]) -> Tensor:
        """Logits [1, V'] behind a new sequence."""
        from transformers import DynamicCache

        tokens = torch.tensor([list(ids)], device=self._device)
        self._kwargs = {"use_cache": self.cached}
        if "attention_mask" in self._takes:
            self._kwargs["attention_mask"] = None if _no_mask_of_ones() else torch.ones_like(tokens)
        if "position_ids" in self._takes:
            self._kwargs["position_ids"] = torch.arange(len(ids), device=self._device)[None]
        supports = getattr(self._model, "_supports_default_dynamic_cache", None)
        if self.cached and (supports is None or supports()):
            self._kwargs[self._cache] = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        return self._run(tokens, None, first=True)

    def extend(self, ids: Sequence[int]) -> Tensor:
        """Logits behind the sequence, which is one token longer than at the last call."""
        if not self.cached:
            return self.begin(ids)
        return self._run(torch.tensor([list(ids)], device=self._device), 1, first=False)

    def _run(self, tokens: Tensor, new: int | None, first: bool) -> Tensor:
        options: dict[str, Any] = {}
        if "is_first_iteration" in self._prepares:
            options["is_first_iteration"] = first
        if "next_sequence_length" in self._prepares:
            options["next_sequence_length"] = new
        inputs = self._model.prepare_inputs_for_generation(tokens, **options, **self._kwargs)
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs = self._model._update_model_kwargs_for_generation(outputs, self._kwargs)
        logits: Tensor = outputs.logits[:, -1]
        return logits


@functools.cache
def _no_mask_of_ones() -> bool:
    """Whether this release of transformers leaves out a mask without padding.

    It does so since `_prefill` reads `_mask_length` instead; some models then build masks of another size.
    """
    from transformers import GenerationMixin  # late: seconds, and only this model needs it

    prefill = getattr(GenerationMixin, "_prefill", None)
    return prefill is not None and "_mask_length" in prefill.__code__.co_consts
