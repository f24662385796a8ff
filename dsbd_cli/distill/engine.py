"""Batched sampling from a target at full speed: static rows, one CUDA graph a step, refilled as they end.

One engine serves questions, answers and evaluation. On a GPU a step (forward, warp, draw, bookkeeping)
is one graph replay; every few steps the host harvests the rows that ended and refills them. On a CPU
the same code runs eagerly.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dsbd_cli.distill import attention
from dsbd_cli.distill.attention import RowCache
from dsbd_cli.errors import RunError, UserError

# Draws are made among this many most probable tokens at most (a wider top-k is cut to it).
WINDOW = 64
HARVEST_EVERY = 8
PREFILL_TOKENS = 65536
CHUNK = 128


@dataclass(frozen=True)
class Request:
    """One continuation to write: prompt tokens, budget, and how to draw (0 and 1 mean off)."""

    prompt: tuple[int, ...]
    max_new: int
    temperature: float = 1.0
    top_k: int = 10
    top_p: float = 0.8
    tag: int = 0


def top_window(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest entries of each row, best first; exact.

    A row's winners lie in the `count` chunks with the largest maxima, so wide rows are reduced to chunk
    maxima in one pass over memory before anything is sorted.
    """
    rows, vocab = logits.shape
    if vocab % CHUNK or vocab // CHUNK <= 2 * count:
        return logits.topk(min(count, vocab), dim=-1)
    chunks = logits.reshape(rows, vocab // CHUNK, CHUNK)
    best = chunks.amax(-1).topk(count, dim=-1, sorted=False).indices
    inside = chunks.gather(1, best[:, :, None].expand(-1, -1, CHUNK)).flatten(1)
    values, where = inside.topk(count, dim=-1)
    return values, best.gather(1, where // CHUNK) * CHUNK + where % CHUNK


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """One token a row: warp as decoding does, row by row, then draw by the Gumbel-max rule.

    Args:
        logits: `[B, V]`; temperature, top_k, top_p: `[B]`; noise: `[B, WINDOW]` uniform in (0, 1).
    """
    values, ids = top_window(logits, min(WINDOW, logits.shape[-1]))
    values = values.float() / temperature[:, None]
    rank = torch.arange(values.shape[1], device=values.device)
    values = values.masked_fill(rank >= top_k[:, None], float("-inf"))
    probs = values.softmax(-1)
    values = values.masked_fill(probs.cumsum(-1) - probs >= top_p[:, None], float("-inf"))
    gumbel = -torch.log(-torch.log(noise[:, : values.shape[1]].clamp(1e-20, 1 - 1e-7)))
    return ids.gather(1, (values + gumbel).argmax(-1, keepdim=True)).squeeze(1)


class Engine:
    """Writes continuations with `model`, `rows` at a time, each at most `size` tokens with its prompt.

    Args:
        model: a causal language model, moved to its device and dtype already.
        eos: ids that end a continuation (kept as its last token).
        vocab: ids from here on are padding of the head and never drawn.

    Raises:
        UserError: the model's attention cannot run on static rows (checked against a plain forward).
    """

    def __init__(self, model: Any, rows: int, size: int, eos: Sequence[int], vocab: int) -> None:
        attention.register()
        # A view of the same weights with a config of its own: the caller's attention stays as it was.
        self.model = model
        self.device = next(model.parameters()).device
        dtype = next(model.parameters()).dtype
        self.plain = model.config._attn_implementation
        self.vocab = vocab
        self.rows, self.size = rows, size
        self.cache = RowCache(model.config.num_hidden_layers, rows, size, self.device, dtype)
        self.keyword = cache_keyword(model)
        make: dict[str, Any] = {"device": self.device}
        self.eos = torch.tensor(list(eos), dtype=torch.long, **make)
        self.current = torch.zeros(rows, dtype=torch.long, **make)
        self.count = torch.zeros(rows, dtype=torch.long, **make)
        self.limit = torch.zeros(rows, dtype=torch.long, **make)
        self.done = torch.ones(rows, dtype=torch.bool, **make)
        self.written = torch.zeros(rows, size, dtype=torch.long, **make)
        self.temperature = torch.ones(rows, **make)
        self.top_k = torch.full((rows,), WINDOW, dtype=torch.long, **make)
        self.top_p = torch.ones(rows, **make)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._use_rows(self._self_check)

    def _use_rows(self, work: Callable[[], None]) -> None:
        """Run `work` with the model attending over rows, and give its own attention back after."""
        self.model.set_attn_implementation(attention.NAME)
        try:
            with torch.inference_mode(), attention.using(self.cache):
                work()
        finally:
            self.cache.prefill = None
            self.model.set_attn_implementation(self.plain)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self.model(
            input_ids=ids, position_ids=positions, use_cache=True, return_dict=True, logits_to_keep=1,
            **{self.keyword: self.cache},
        )  # fmt: skip
        return out.logits[:, -1]

    def _self_check(self) -> None:
        """Rows of different lengths must give the logits of a plain forward, or this model is not for us."""
        count, length = min(2, self.rows), min(9, self.size - 1)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocab, (count, length), generator=generator).to(self.device)
        self.model.set_attn_implementation(self.plain)
        expected = torch.stack(
            [self.model(input_ids=ids[r : r + 1, : length - r]).logits[0, -1] for r in range(count)]
        )
        self.model.set_attn_implementation(attention.NAME)
        keep = torch.arange(count, device=self.device)
        self._prefill(ids[:, : length - 1], keep, keep)
        self.cache.lengths.zero_()
        self.cache.lengths[:count] = length - 1 - keep
        self.current[:count] = ids[keep, length - 1 - keep]
        got = self._forward(self.current[:, None], self.cache.lengths[:, None])[:count]
        scale = expected.float().std() + 1e-6
        error = ((got - expected).float().abs().max() / scale).item()
        if not error < (1e-2 if got.dtype == torch.float32 else 0.5):
            raise UserError(
                f"{self.model.config.model_type}: attention over static rows differs from the model's own "
                f"({error:.2g} of the logits' deviation); this architecture cannot be sampled here"
            )

    def _prefill(self, ids: torch.Tensor, rows: torch.Tensor, sources: torch.Tensor) -> None:
        """Write the keys and values of prompts `ids[sources]` into `rows`, from slot 0."""
        self.cache.prefill = (rows, sources)
        positions = torch.arange(ids.shape[1], device=self.device)[None].expand(ids.shape[0], -1)
        self._forward(ids, positions)
        self.cache.prefill = None

    def _step(self) -> None:
        """Advance every row that is not done by one token (captured once on a GPU)."""
        logits = self._forward(self.current[:, None], self.cache.lengths[:, None])
        logits = logits[:, : self.vocab]
        noise = torch.rand(self.rows, WINDOW, device=self.device)
        token = draw(logits, self.temperature, self.top_k, self.top_p, noise)
        alive = ~self.done
        token = torch.where(alive, token, self.current)
        slot = torch.where(alive, self.count, self.size - 1)
        self.written.scatter_(1, slot[:, None], token[:, None])
        self.count += alive
        self.cache.lengths += alive
        self.current.copy_(token)
        self.done |= (token[:, None] == self.eos).any(-1) | (self.count >= self.limit)

    def _capture(self) -> None:
        """Warm up and record `_step`; the state of the rows is put back afterwards."""
        state = [self.current, self.count, self.done, self.written, self.cache.lengths]
        saved = [copy.deepcopy(t) for t in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._step()
        for tensor, value in zip(state, saved, strict=True):
            tensor.copy_(value)

    def _fill(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """Start `requests` in `rows`; requests with the same prompt share one prefill."""
        order = sorted(range(len(rows)), key=lambda i: (len(requests[i].prompt), requests[i].prompt))
        start = 0
        while start < len(order):
            prompts: dict[tuple[int, ...], int] = {}
            stop = start
            while stop < len(order):
                prompt = requests[order[stop]].prompt
                width = -(-len(prompt) // 32) * 32
                if prompts and prompt not in prompts and (len(prompts) + 1) * width > PREFILL_TOKENS:
                    break
                prompts.setdefault(prompt, len(prompts))
                stop += 1
            chosen = order[start:stop]
            width = min(self.size, max(len(p) for p in prompts))
            ids = torch.zeros(len(prompts), width, dtype=torch.long)
            for prompt, place in prompts.items():
                ids[place, : len(prompt)] = torch.tensor(prompt)
            at = torch.tensor([rows[i] for i in chosen]).to(self.device)
            sources = torch.tensor([prompts[requests[i].prompt] for i in chosen]).to(self.device)
            self._prefill(ids.to(self.device), at, sources)
            start = stop
        at = torch.tensor(list(rows)).to(self.device)

        def column(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(self.device)

        # The last prompt token is fed again by the first step: it writes the same keys and gives the logits.
        self.cache.lengths[at] = column([len(r.prompt) - 1 for r in requests], torch.long)
        self.current[at] = column([r.prompt[-1] for r in requests], torch.long)
        self.count[at] = 0
        self.limit[at] = column([r.max_new for r in requests], torch.long)
        self.temperature[at] = column([r.temperature for r in requests], torch.float)
        self.top_k[at] = column([r.top_k if 0 < r.top_k < WINDOW else WINDOW for r in requests], torch.long)
        self.top_p[at] = column([r.top_p for r in requests], torch.float)
        self.done[at] = False

    def run(self, requests: Sequence[Request], seed: int) -> Iterator[tuple[int, list[int]]]:
        """Yield `(index of the request, tokens written)` as continuations end.

        The same requests, seed and machine give the same tokens. The global random state is re-seeded.

        Raises:
            UserError: a prompt is empty or does not fit with its budget.
        """
        for request in requests:
            if not request.prompt or len(request.prompt) + request.max_new > self.size:
                raise UserError(
                    f"a prompt of {len(request.prompt)} tokens with a budget of {request.max_new} does not fit "
                    f"in {self.size}; shorten it or raise --max-length"
                )
        torch.manual_seed(seed)
        self.done.fill_(True)
        owner: list[int | None] = [None] * self.rows
        waiting = 0
        running = 0
        found: list[tuple[int, list[int]]] = []

        def refill() -> None:
            nonlocal waiting, running
            free = [r for r in range(self.rows) if owner[r] is None][: len(requests) - waiting]
            if not free:
                return
            self._fill(free, requests[waiting : waiting + len(free)])
            for row in free:
                owner[row] = waiting
                waiting += 1
            running += len(free)

        def steps() -> None:
            nonlocal running
            refill()
            if self.device.type == "cuda" and self.graph is None:
                self._capture()
            for _ in range(HARVEST_EVERY):
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self._step()
            ended = self.done.tolist()
            rows = [r for r in range(self.rows) if owner[r] is not None and ended[r]]
            if not rows:
                return
            at = torch.tensor(rows, device=self.device)
            tokens, counts = self.written[at].tolist(), self.count[at].tolist()
            for row, line, count in zip(rows, tokens, counts, strict=True):
                index = owner[row]
                assert index is not None
                found.append((index, line[:count]))
                owner[row] = None
            running -= len(rows)

        while waiting < len(requests) or running:
            found.clear()
            self._use_rows(steps)
            if len(found) == 0 and running == 0 and waiting >= len(requests):
                raise RunError("sampling stopped with rows unaccounted for")
            yield from found


def cache_keyword(model: Any) -> str:
    """What the model's forward calls its cache: it was renamed between transformers 5.17 and 5.24."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
