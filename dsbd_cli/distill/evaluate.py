"""Step 3: how often the draft will be right, on answers of the target's own, and what that is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from dsbd_cli.distill import shards
from dsbd_cli.distill.engine import Engine, Request
from dsbd_cli.distill.metrics import COVERAGE_COUNTS, Warp, token_figures
from dsbd_cli.distill.prompts import Prompt, encode_prompt
from dsbd_cli.errors import UserError

MAX_GAMMA = 6
CHUNK_ROWS = 512


@dataclass(frozen=True)
class AnswerOptions:
    """How the target answers the evaluation prompts: drawn as it will be decoded."""

    max_new: int = 64
    warp: Warp = field(default_factory=Warp)
    seed: int = 0
    rows: int = 32


def write_answers(
    target: Any, tokenizer: Any, prompts: Sequence[Prompt], ends: Sequence[int], options: AnswerOptions,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> shards.Sequences:  # fmt: skip
    """The target's answers to `prompts`, with the sets and ids of the prompts in the metadata.

    Raises:
        UserError: a prompt longer than the model's context allows.
    """
    encoded = [encode_prompt(tokenizer, prompt.text) for prompt in prompts]
    size = max(len(prompt) for prompt in encoded) + options.max_new + 1
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit is not None and size > limit:
        longest = max(range(len(encoded)), key=lambda i: len(encoded[i]))
        name, length = prompts[longest].id or longest, len(encoded[longest])
        raise UserError(
            f"prompt {name} has {length} tokens; with its answer that is more than the target's {limit}"
        )
    rows = min(options.rows, len(encoded))
    engine = Engine(target, rows, size, ends, len(tokenizer))
    warp = options.warp
    requests = [Request(p, options.max_new, warp.temperature, warp.top_k, warp.top_p) for p in encoded]
    answers: dict[int, list[int]] = {}
    for index, line in engine.run(requests, options.seed):
        answers[index] = line
        tell(len(answers), len(requests))
    rows_of = [(p + tuple(answers[i]), len(p), len(p)) for i, p in enumerate(encoded)]
    meta = {
        "sets": [p.group for p in prompts], "ids": [p.id for p in prompts], "seed": options.seed,
        "max_new": options.max_new, **asdict(warp), "dtype": str(next(target.parameters()).dtype)[6:],
    }  # fmt: skip
    return shards.pack(rows_of, meta)


@dataclass
class TokenFigures:
    """Per-token figures over sequences: `values[name]` is `[tokens]`, `run[i]` tokens of sequence i follow on."""

    values: dict[str, np.ndarray]
    run: np.ndarray

    def mean(self, name: str) -> float:
        return float(self.values[name].mean())

    def layers(self, passes: np.ndarray, gamma: int) -> float:
        """Expected layers a target call: 1 + sum over d <= gamma of the product of d successive passes.

        Read off the sequences, so that easy and hard stretches count as they come; a product that runs
        past the end of its answer stops there.
        """
        end = np.repeat(np.cumsum(self.run), self.run)
        place = np.arange(len(passes))
        total, product = np.ones(len(passes)), np.ones(len(passes))
        for depth in range(gamma):
            inside = place + depth < end
            product = np.where(inside, product * passes[np.minimum(place + depth, len(passes) - 1)], 0.0)
            total += product
        return float(total.mean())


@torch.inference_mode()
def measure(
    target: Any, draft: Any, answers: shards.Sequences, warp: Warp,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> TokenFigures:  # fmt: skip
    """Teacher-forced figures of the draft at every answer token, each sequence on its own (no padding)."""
    values: dict[str, list[np.ndarray]] = {}
    runs = []
    for index in range(len(answers)):
        ids = torch.from_numpy(answers.sequence(index))[None].to(next(target.parameters()).device)
        first = int(answers.answer[index])
        keep = ids.shape[1] - first + 1
        target_logits = target(input_ids=ids, logits_to_keep=keep).logits[0, :-1].float()
        other = next(draft.parameters()).device
        draft_logits = (
            draft(input_ids=ids.to(other), logits_to_keep=keep).logits[0, :-1].float().to(ids.device)
        )
        vocab = min(target_logits.shape[-1], draft_logits.shape[-1])
        for begin in range(0, keep - 1, CHUNK_ROWS):
            part = slice(begin, begin + CHUNK_ROWS)
            figures = token_figures(target_logits[part, :vocab], draft_logits[part, :vocab], warp)
            for name, found in figures.items():
                values.setdefault(name, []).append(found.cpu().numpy())
        runs.append(keep - 1)
        tell(index + 1, len(answers))
    return TokenFigures({name: np.concatenate(parts) for name, parts in values.items()}, np.array(runs))


def by_set(answers: shards.Sequences) -> dict[str, shards.Sequences]:
    """Answers by the set their prompts came from, in order of appearance; ids stay with them."""
    sets = answers.meta.get("sets") or ["answers"] * len(answers)
    ids = answers.meta.get("ids") or [str(i) for i in range(len(answers))]
    found: dict[str, shards.Sequences] = {}
    for name in dict.fromkeys(sets):
        chosen = [i for i in range(len(answers)) if sets[i] == name]
        rows = [(answers.sequence(i).tolist(), int(answers.start[i]), int(answers.answer[i])) for i in chosen]
        found[name] = shards.pack(rows, {"ids": [ids[i] for i in chosen]})
    return found


def merge(parts: Sequence[TokenFigures]) -> TokenFigures:
    """All tokens of several sets together."""
    names = parts[0].values
    return TokenFigures(
        {name: np.concatenate([p.values[name] for p in parts]) for name in names},
        np.concatenate([p.run for p in parts]),
    )


def summary(figures: TokenFigures) -> dict[str, float]:
    """Means over tokens, rounded, and how many tokens they are over."""
    names = ["raw", "warped", "agree", *(f"cover_{m}" for m in COVERAGE_COUNTS), "kl"]
    return {**{name: round(figures.mean(name), 4) for name in names}, "tokens": int(figures.run.sum())}


def predictions(
    figures: TokenFigures, cost: Callable[[str, int], float], width: int = 4, draft_width: int = 4
) -> list[dict[str, float]]:
    """Layers a target call and speed-up for gamma 1 to 6, from per-token figures and measured forwards.

    `one`: one beam, drafts accepted by overlap (textbook speculation), against plain sampling.
    `beam`: `width` beams under the `cover` rule, against beam sampling of that width: all `width` draws
    must lie among `draft_width` covered tokens. Speed-up = layers * t_target(beam) / (t_target(forest)
    + gamma * t_draft), docs/design.md section 3.

    Args:
        cost: milliseconds of a forward of `target` or `draft` over that many tokens.
    """
    count = min(COVERAGE_COUNTS, key=lambda m: abs(m - draft_width))
    passes = {"one": figures.values["warped"], "beam": figures.values[f"cover_{count}"].clip(0, 1) ** width}
    rows = []
    for gamma in range(1, MAX_GAMMA + 1):
        row: dict[str, float] = {"gamma": gamma}
        for kind, beams, drafted in (("one", 1, 1), ("beam", width, draft_width)):
            layers = figures.layers(passes[kind], gamma)
            call = cost("target", beams + gamma * drafted) + gamma * cost("draft", drafted)
            row[f"{kind}_layers"] = round(layers, 3)
            row[f"{kind}_speedup"] = round(layers * cost("target", beams) / call, 3)
        rows.append(row)
    return rows
