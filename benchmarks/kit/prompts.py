"""Prompts as token ids, the same for every arm: from data sets, and cut or filled up to a length."""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsbd_cli.bench.datasets import load_dataset
from dsbd_cli.errors import UserError
from dsbd_cli.loading import Pair
from dsbd_cli.prompts import encode
from dsbd_cli.settings import Settings


@dataclass(frozen=True)
class Prompt:
    """`name` is unique within a run."""

    name: str
    ids: list[int]


def add_prompts(parser: argparse.ArgumentParser, count: int) -> None:
    """The options that `load_prompts` reads."""
    group = parser.add_argument_group("prompts")
    group.add_argument("--datasets", default="squad,spider", help="taken in turns (default %(default)s)")
    group.add_argument(
        "--data-dir", type=Path, help="folder in the official layouts (default: the built-in sample)"
    )
    group.add_argument(
        "--prompts", type=int, default=count, metavar="N", help="how many (default %(default)s)"
    )
    group.add_argument("--part", metavar="I/N",
                       help="only the I-th of N equal parts of them: one part a card, joined by --report")  # fmt: skip
    group.add_argument("--prompt-tokens", type=int, metavar="N",
                       help="cut each to N tokens, or fill it up with others before it")  # fmt: skip


def load_prompts(options: argparse.Namespace, pair: Pair, settings: Settings) -> tuple[list[Prompt], str]:
    """The prompts, one from each data set in turn, and what they are.

    Raises:
        UserError: unknown data set, missing or broken files.
    """
    names = options.datasets.replace(",", " ").split()
    share = -(-options.prompts // max(1, len(names)))
    columns: list[list[Prompt]] = []
    labels = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            data = load_dataset(name, options.data_dir, Path(folder)).select(share)
        labels.append(data.label)
        columns.append([_prompt(name, item, pair, settings) for item in data.items])
    rows = itertools.zip_longest(*columns)
    prompts = [prompt for row in rows for prompt in row if prompt is not None][: options.prompts]
    if options.prompt_tokens:
        prompts = fitted(prompts, options.prompt_tokens)
    if options.part:
        prompts = part_of(prompts, options.part)
    return prompts, " + ".join(labels)


def part_of(prompts: Sequence[Prompt], part: str) -> list[Prompt]:
    """Part `I/N` (I from 1) of the prompts, in order, none left out and none twice over all parts.

    Raises:
        UserError: not such a fraction.
    """
    number, _, count = part.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count) <= len(prompts)):
        raise UserError(f"--part {part}: write I/N with 1 <= I <= N <= {len(prompts)} prompts, such as 1/4")
    bounds = [len(prompts) * i // int(count) for i in (int(number) - 1, int(number))]
    return list(prompts[slice(*bounds)])


def fitted(prompts: Sequence[Prompt], length: int) -> list[Prompt]:
    """Every prompt at exactly `length` tokens: its end, and before it what the other prompts hold."""
    result = []
    for place, prompt in enumerate(prompts):
        ids = list(prompt.ids)
        others = itertools.cycle([*prompts[place + 1 :], *prompts[: place + 1]])
        while len(ids) < length:
            ids = next(others).ids + ids
        result.append(Prompt(prompt.name, ids[-length:]))
    return result


def _prompt(dataset: str, item: Any, pair: Pair, settings: Settings) -> Prompt:
    chat = bool(pair.tokenizer.chat_template)
    ids, _ = encode(item.messages([]) if chat else item.text([]), pair.tokenizer, settings, pair.vocab_size)
    return Prompt(f"{dataset}/{item.id}", ids)
