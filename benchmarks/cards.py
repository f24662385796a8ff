"""Two cards, or more, beside one: the same texts, whole answers in turns, and prompts dealt out.

    torchrun --nproc-per-node 2 -m benchmarks.cards --input FILE [--check N] [--limit N] [--prompts N] [--json OUT]
        [--inflate ...]

FILE holds a JSON string or an object with `prompt` or `messages` a line (`dsbd generate --input`). One start of all
processes does it, each holding the whole target and its part of it: (1) the first `--check` prompts by every method,
by one process and by all together: do they say the same? (Give --dtype float32.) (2) whole answers to `--limit`
prompts, one process and all together in turns, prompt by prompt; (3) `--prompts` prompts decoded in batches by one
process, then dealt out to all, in turns: tokens a second by the median of five, and whether the answers are the
same. What is not wanted is 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.kit import pairs
from dsbd_cli.batch.items import item_seed, read_items
from dsbd_cli.batch.shard import Shard, dealt
from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import DsbdError
from dsbd_cli.group import Group, Team, depart, join
from dsbd_cli.loading.model import describe
from dsbd_cli.loading.quiet import quiet_transformers
from dsbd_cli.loading.sharded import shard

WAYS: dict[str, dict[str, Any]] = {
    "beam": {"method": "beam"},
    "dsbd": {"method": "dsbd"},
    "deterministic": {"method": "dsbd", "deterministic": True, "width": 3},
}

_ROUNDS = 5  # of prompts dealt out


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    pairs.add_pair(result)
    result.add_argument("--input", type=Path, required=True, help="prompts, as for dsbd generate --input")
    result.add_argument("--check", type=int, default=0, help="prompts whose tokens are compared")
    result.add_argument("--limit", type=int, default=0, help="prompts for whole answers in turns")
    result.add_argument("--prompts", type=int, default=0, help="prompts for batches")
    result.add_argument("--batch", type=int, help="of those at a time (default: what the machine does well)")
    result.add_argument("--methods", default="beam,dsbd", help="for the times (default %(default)s)")
    result.add_argument("--max-new-tokens", type=int, default=128)
    result.add_argument("--json", type=Path, help="write every figure here")
    return result


class Cards:
    """One pair: whole in every process, and its target split over all of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        size = Shard.from_env().world
        self.team = Team.of(size)
        cuda = torch.cuda.is_available() and options.device != "cpu"
        self.group: Group = join(self.team, cuda=cuda)
        options.device = f"cuda:{self.team.shard.local}" if cuda else "cpu"
        self.one, settings = pairs.load(options)
        pair = self.one.pair
        split = describe(shard(pair.target.model, self.group), pair.target.source)
        target = dataclasses.replace(split, name=f"{pair.target.name}-split")
        self.all = Decoder(dataclasses.replace(pair, target=target), settings)
        self.settings = settings.merged({"max_new_tokens": options.max_new_tokens})

    def wait(self) -> None:
        """Until all are here."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.group.least(0)

    def answer(self, decoder: Decoder, prompt: Any, way: str, index: int) -> tuple[list[int], float]:
        """Tokens of an answer and its seconds, prefill included."""
        settings = self.settings.merged(WAYS[way] | {"seed": item_seed(1, index)})
        begin = time.perf_counter()
        result = decoder.generate(prompt, settings, energy=False)
        return list(result.token_ids), time.perf_counter() - begin

    def both(self, prompt: Any, way: str, index: int) -> list[tuple[list[int], float]]:
        """The answer of one process, while the others wait, and of all together."""
        self.wait()
        mine: tuple[list[int], float] = ([], 0.0)
        if self.group.first:
            mine = self.answer(self.one, prompt, way, index)
        self.wait()
        return [mine, self.answer(self.all, prompt, way, index)]

    def check(self, prompts: Sequence[Any], ways: Sequence[str]) -> dict[str, Any]:
        """How many prompts are answered alike, by way."""
        found: dict[str, Any] = {}
        for way in ways:
            pairs_ = [self.both(prompt, way, i) for i, prompt in enumerate(prompts)]
            parted = [i for i, ((one, _), (all_, _)) in enumerate(pairs_) if one != all_]
            found[way] = {"alike": len(prompts) - len(parted), "prompts": len(prompts), "parted": parted}
        return found

    def check_batch(self, prompts: Sequence[Any], way: str) -> dict[str, Any]:
        """How many prompts are answered alike in batches of 8."""
        settings = [self.settings.merged(WAYS[way] | {"seed": item_seed(1, i)}) for i in range(len(prompts))]

        def run(decoder: Decoder) -> list[list[int]]:
            return [list(one.token_ids) for one in decoder.generate_many(prompts, settings, batch=8)]

        self.wait()
        mine = run(self.one) if self.group.first else []
        self.wait()
        ours = run(self.all)
        return {"alike": sum(map(list.__eq__, mine, ours)), "prompts": len(prompts)}

    def times(self, prompts: Sequence[Any], ways: Sequence[str]) -> dict[str, Any]:
        """Whole answers a second in turns, and the ratio; prompts met before are not counted."""
        for way in ways:  # captures
            for i, prompt in enumerate(prompts[:2]):
                self.both(prompt, way, i)
        taken: dict[str, list[list[tuple[list[int], float]]]] = {way: [] for way in ways}
        for i, prompt in enumerate(prompts):
            for way in ways:
                taken[way].append(self.both(prompt, way, i))
        found: dict[str, Any] = {}
        for way, answers in taken.items():
            rates = [
                sum(len(one[at][0]) for one in answers) / max(1e-9, sum(one[at][1] for one in answers))
                for at in (0, 1)
            ]
            each = [
                (len(all_) / all_s) / max(1e-9, len(one) / one_s)
                for (one, one_s), (all_, all_s) in answers
                if one and all_ and one_s > 0
            ]
            found[way] = {
                "one_tokens_per_s": rates[0], "all_tokens_per_s": rates[1],
                "ratio": rates[1] / max(1e-9, rates[0]),
                "median_ratio": statistics.median(each) if each else None,
                "alike": sum(one[0] == all_[0] for one, all_ in answers), "prompts": len(answers),
                "each": [[[len(ids), seconds] for ids, seconds in pair] for pair in answers],
                "tokens": [sum(len(one[at][0]) for one in answers) for at in (0, 1)],
                "paths": self.all.describe(),
            }  # fmt: skip
        return found

    def dealt(self, prompts: Sequence[Any], way: str, batch: int | None) -> dict[str, Any]:
        """All prompts by one process, then dealt out to all of them, whole pairs each."""

        def run(indices: Sequence[int]) -> dict[int, list[int]]:
            settings = [self.settings.merged(WAYS[way] | {"seed": item_seed(1, i)}) for i in indices]
            results = self.one.generate_many([prompts[i] for i in indices], settings, batch=batch)
            return {i: list(one.token_ids) for i, one in zip(indices, results, strict=True)}

        everyone = range(len(prompts))
        own = [i for i in everyone if dealt(i, self.group.size) == self.group.rank]
        run(own[: batch or 64])  # captures, and prices that are measured once
        seconds: list[list[float]] = [[], []]
        answers: dict[int, list[int]] = {}
        for _ in range(_ROUNDS):
            for taken, mine in zip(seconds, (list(everyone) if self.group.first else [], own), strict=True):
                self.wait()
                begin = time.perf_counter()
                answers = run(mine) if mine else {}
                self.wait()
                taken.append(time.perf_counter() - begin)
                if len(mine) == len(prompts):
                    whole = answers
        parts = self.gathered(answers)
        if not self.group.first:
            return {}
        tokens = [sum(map(len, whole.values())), sum(map(len, parts.values()))]
        rates = [count / statistics.median(taken) for count, taken in zip(tokens, seconds, strict=True)]
        return {
            "one_tokens_per_s": rates[0], "all_tokens_per_s": rates[1], "ratio": rates[1] / rates[0],
            "seconds": seconds, "tokens": tokens, "prompts": len(prompts), "batch": batch,
            "alike": sum(parts[i] == whole[i] for i in everyone),
        }  # fmt: skip

    def gathered(self, answers: dict[int, list[int]]) -> dict[int, list[int]]:
        """Everybody's answers together."""
        from torch import distributed

        found: list[Any] = [None] * self.group.size
        cpu = torch.tensor(list(json.dumps({str(i): ids for i, ids in answers.items()}).encode()))
        length = -self.group.least(-len(cpu))
        padded = torch.nn.functional.pad(cpu, (0, length - len(cpu)), value=32)
        found = [torch.empty_like(padded) for _ in range(self.group.size)]
        distributed.all_gather(found, padded)
        merged = [json.loads(bytes(one.tolist())) for one in found]
        return {int(i): ids for one in merged for i, ids in one.items()}


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    quiet_transformers()
    try:
        cards = Cards(options)
        items, _ = read_items(options.input)
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    prompts = [item.prompt for item in items]
    methods = options.methods.split(",")
    found: dict[str, Any] = {"facts": pairs.facts(cards.one), "processes": cards.group.size}

    def keep(name: str, values: Any) -> None:
        if cards.group.first:
            found[name] = values
            print(json.dumps({name: values}), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=1))

    if options.check:
        keep("same_text", cards.check(prompts[: options.check], list(WAYS)))
        keep("same_text_batch", cards.check_batch(prompts[: options.check], "dsbd"))
    if options.limit:
        keep("whole_answers", cards.times(prompts[: options.limit], methods))
    if options.prompts:
        for way in methods:
            keep(f"dealt_{way}", cards.dealt(prompts[: options.prompts], way, options.batch))
    depart(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
