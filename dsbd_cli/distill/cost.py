"""Milliseconds of a forward over a few new tokens, measured here and now."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from dsbd_cli.distill.engine import cache_keyword

PREFIX = 128
REPEATS = 5


class Costs:
    """Forward times of models by name, measured on first use with `PREFIX` tokens already cached.

    Plain modelling code, no graphs: decoding here is faster on a GPU, and the ratio is what counts.
    """

    def __init__(self, models: dict[str, Any]) -> None:
        self.models = models
        self.known: dict[tuple[str, int], float] = {}

    def __call__(self, name: str, count: int) -> float:
        if (name, count) not in self.known:
            self.known[name, count] = self._measure(self.models[name], count)
        return self.known[name, count]

    @torch.inference_mode()
    def _measure(self, model: Any, count: int) -> float:
        from transformers import DynamicCache

        device = next(model.parameters()).device
        vocab = model.config.get_text_config().vocab_size
        ids = torch.randint(0, vocab, (1, PREFIX + count), generator=torch.Generator().manual_seed(0)).to(
            device
        )
        keyword = cache_keyword(model)
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :PREFIX], use_cache=True, **{keyword: cache})
        times = []
        for _ in range(REPEATS + 2):
            self._sync(device)
            began = time.perf_counter()
            model(input_ids=ids[:, PREFIX:], use_cache=True, **{keyword: cache})
            self._sync(device)
            times.append(1000 * (time.perf_counter() - began))
            cache.crop(-count)
        return statistics.median(times[2:])

    @staticmethod
    def _sync(device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
