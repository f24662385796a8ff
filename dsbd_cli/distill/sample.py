"""Step 1: the target writes prompts of its own, answers them, and answers the user's prompts too."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsbd_cli.distill import shards
from dsbd_cli.distill.engine import Engine, Request
from dsbd_cli.distill.log import RunLog, Step
from dsbd_cli.distill.prompts import Form
from dsbd_cli.distill.world import World
from dsbd_cli.errors import UserError

# How answers are drawn: (share, temperature, top-k, top-p). Most as people decode, some wider, some colder.
DRAWS = ((0.65, 1.0, 10, 0.8), (0.2, 1.0, 50, 0.95), (0.15, 0.6, 10, 0.9))
QUESTION_DRAW = (1.0, 0, 0.95)


@dataclass(frozen=True)
class SampleOptions:
    """What to sample.

    Attributes:
        tokens, minutes: the budget of answer tokens and of time; whichever is spent first ends it.
        share: part of the prompts taken from the user's file.
        repeat: answers drawn for each prompt picked from the file (they share its prefill).
        question, answer, file_answer: budgets in tokens of a question, its answer, a file prompt's answer.
        shard: sequences in one file (None: four times the rows of the engine).
    """

    tokens: int | None = None
    minutes: float | None = None
    share: float = 0.3
    repeat: int = 4
    question: int = 64
    answer: int = 160
    file_answer: int = 96
    shard: int | None = None
    seed: int = 0


def _draws(count: int, rng: np.random.Generator) -> list[tuple[float, int, float]]:
    kinds = rng.choice(len(DRAWS), size=count, p=[share for share, *_ in DRAWS])
    return [DRAWS[kind][1:] for kind in kinds]


# Told now and then: the phase in words, and answer tokens written so far in this shard.
Tell = Callable[[str, int], None]


def _write(
    engine: Engine, requests: Sequence[Request], seed: int, tell: Callable[[int], None]
) -> tuple[list[list[int]], float]:
    """All continuations, in order of request, and the seconds it took."""
    began = time.monotonic()
    written: list[list[int]] = [[] for _ in requests]
    tokens = 0
    for ended, (index, line) in enumerate(engine.run(requests, seed), 1):
        written[index] = line
        tokens += len(line)
        if ended % 16 == 0:
            tell(tokens)
    return written, time.monotonic() - began


def sample_shard(
    engine: Engine, form: Form, prompts: Sequence[tuple[int, ...]], index: int, options: SampleOptions,
    tell: Tell = lambda phase, tokens: None,
) -> shards.Sequences:  # fmt: skip
    """Shard `index`: a pure function of the target, the prompts, the options and the index."""
    rng = np.random.default_rng([options.seed, index])
    seed = int(rng.integers(2**31))
    count = options.shard or 4 * engine.rows
    from_file = round(count * options.share) if prompts else 0
    own = count - from_file
    temperature, top_k, top_p = QUESTION_DRAW
    budget = options.question if form.suffix is not None else options.answer
    asks = [Request(form.header, budget, temperature, top_k, top_p) for _ in range(own)]
    questions, ask_seconds = _write(engine, asks, seed, lambda _: tell("questions", 0))
    eos = set(engine.eos.tolist())
    requests: list[Request] = []
    starts: list[int] = []
    rows: list[tuple[tuple[int, ...], int, int]] = []
    for line in questions:
        text = tuple(line[:-1] if line and line[-1] in eos else line)
        if form.suffix is None:
            rows.append((form.header + tuple(line), len(form.header), len(form.header)))
        elif text:
            requests.append(Request(form.header + text + form.suffix, options.answer))
            starts.append(len(form.header))
    if from_file:
        picked = rng.integers(len(prompts), size=-(-from_file // options.repeat))
        chosen = [prompts[i] for i in picked for _ in range(options.repeat)][:from_file]
        requests += [Request(prompt, options.file_answer) for prompt in chosen]
        starts += [len(prompt) for prompt in chosen]
    requests = [
        Request(r.prompt, r.max_new, *draw)
        for r, draw in zip(requests, _draws(len(requests), rng), strict=True)
    ]
    answers, seconds = _write(engine, requests, seed + 1, lambda tokens: tell("answers", tokens))
    for request, start, line in zip(requests, starts, answers, strict=True):
        if line:
            rows.append((request.prompt + tuple(line), start, len(request.prompt)))
    meta = {
        "seed": options.seed, "index": index, "share": options.share, "draws": DRAWS,
        "question_seconds": round(ask_seconds, 2), "answer_seconds": round(seconds, 2),
    }  # fmt: skip
    return shards.pack(rows, meta)


def sample(
    engine: Engine, form: Form, prompts: Sequence[tuple[int, ...]], options: SampleOptions, folder: Path,
    world: World, log: RunLog, step: Step,
) -> dict[str, Any]:  # fmt: skip
    """Write shards into `folder` until the budget is spent; shards already there count, with their time.

    Raises:
        UserError: no bound, or prompts that are all too long.
    """
    if options.tokens is None and options.minutes is None:
        raise UserError("sampling needs a bound: --tokens or --sample-minutes")
    fits = [p for p in prompts if len(p) + options.file_answer <= engine.size]
    if prompts and not fits:
        raise UserError("every prompt of the file is longer than --max-length leaves room for")
    total = made = 0
    earlier = 0.0
    began = time.monotonic()

    def progress(tokens: int) -> float:
        spent = (earlier + time.monotonic() - began) / (60 * options.minutes) if options.minutes else 0.0
        return max(spent, (total + tokens) * world.size / options.tokens if options.tokens else 0.0)

    def tell(phase: str, tokens: int) -> None:
        rate = (made + tokens) / max(time.monotonic() - began, 1e-9)
        whose = f" ({world.size} processes)" if world.size > 1 else ""
        note = f"{phase}, {(total + tokens) * world.size:,} answer tokens, {rate * world.size:,.0f} a second{whose}"
        step.update(progress(tokens), 1.0, note)

    index = world.rank
    while progress(0) < 1:
        path = folder / f"s{options.seed}-{index:05d}{shards.SUFFIX}"
        index += world.size
        if path.exists():
            part = shards.load(path)
            total += part.answer_tokens
            earlier += part.meta.get("seconds", 0.0)
            continue
        part_began = time.monotonic()
        part = sample_shard(engine, form, fits, index - world.size, options, tell)
        took = time.monotonic() - part_began
        part.meta["seconds"] = round(took, 2)
        shards.save(part, path)
        total, made = total + part.answer_tokens, made + part.answer_tokens
        log.write(
            "shard", rank=world.rank, index=part.meta["index"], sequences=len(part),
            answer_tokens=part.answer_tokens, seconds=round(took, 2),
            tokens_per_s=round(part.answer_tokens / took), question_seconds=part.meta["question_seconds"],
        )  # fmt: skip
    return {"answer_tokens": total, "sampled_now": made, "seconds": round(time.monotonic() - began, 1)}
