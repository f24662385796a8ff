"""Quality against speed: log-probability and scores of every family beside whole answers a second.

    python -m benchmarks.frontier --out DIR/quality.json --data-dir DATA --timed 0 --shots 0
    python -m benchmarks.frontier --out DIR/few-shot.json --data-dir DATA --timed 0
    python -m benchmarks.frontier --out DIR/default.json --data-dir DATA --limit 0 --shots 0
    python -m benchmarks.frontier --out DIR/7b.json --data-dir DATA --limit 0 --shots 0 --inflate ...
    python -m benchmarks.frontier --report DIR/default.json DIR/7b.json --quality DIR/quality.json \\
      --few-shot DIR/few-shot.json

Two passes, which one command or several make. Quality: `--limit` items of each data set, many at a time, once
for all arms of one law: a fixed width, or one that follows from the target alone, gives the text of plain beams
whatever is proposed (docs/design.md section 3). Speed: `--timed` items of each, one at a time, all arms in turn
on each prompt; layers a call are those of this pass. An enlarged target has the law of the small one, so that
quality is measured once for both.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.kit import pairs
from benchmarks.kit.arms import parse_arms
from benchmarks.kit.frontier import goals, law, of_target_alone, plot, table, whole
from benchmarks.kit.results import Results, read
from dsbd_cli.bench import context
from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.backend import PairBackend
from dsbd_cli.bench.datasets import load_dataset
from dsbd_cli.bench.datasets.shots import DEFAULT_SHOTS, load_shots
from dsbd_cli.bench.hf import call, config_of
from dsbd_cli.bench.logprobs import answer_logprob
from dsbd_cli.bench.measure import seed_of
from dsbd_cli.bench.plan import LINE_END
from dsbd_cli.bench.prompting import Prompter
from dsbd_cli.bench.score import Scorer
from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import DsbdError, UserError
from dsbd_cli.loading.quiet import quiet_transformers
from dsbd_cli.settings import Settings

KINDS = ("squad", "spider", "mt-bench")
# Of a time limit, so that there are speeds to go with what was judged.
_QUALITY = 0.55
# Every arm is on the first slice of items before any is on the next; each slice captures anew.
_SLICES = 2
_DEEP = "draft_width=24 gamma=6"
_SPARE = "draft_width=32 gamma=6 forest_nodes=96 lookup=8 forest=full"
# Beams that speeds are compared with, the corners of each family, and one that asks for more of the draft.
ARMS = f"""
multinomial
multinomial temperature=0
speculative
beam width=4
beam width=4 draws=distinct
beam width=8 draws=distinct
beam width=2 deterministic=true
beam width=4 deterministic=true
dsbd:cover width=2 draft_width=16
dsbd:cover width=4 draft_width=16
dsbd:cover width=4 {_DEEP}
dsbd:cover width=4 draft_width=16 threshold=0.9 min_width=2
dsbd:cover width=3 draws=distinct draft_width=16
dsbd:cover width=3 draws=distinct {_DEEP}
dsbd:cover width=4 draws=distinct {_DEEP}
dsbd:cover width=8 draws=distinct draft_width=16
dsbd:cover width=8 draws=distinct {_DEEP}
dsbd:cover width=8 draws=distinct {_SPARE}
dsbd:cover width=8 draws=distinct draft_width=16 threshold=0.95 min_width=2
dsbd:cover width=2 deterministic=true draft_width=16
dsbd:cover width=2 deterministic=true {_DEEP}
dsbd:cover width=3 deterministic=true {_DEEP}
dsbd:cover width=4 deterministic=true draft_width=16
dsbd:cover width=4 deterministic=true {_DEEP}
hf-beam-sample width=4
"""


@dataclass(frozen=True)
class Asked:
    """One prompt: `kind` is its data set, `stop` where a few-shot answer ends."""

    kind: str
    item: Any
    ids: list[int]
    stop: tuple[str, ...]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    pairs.add_pair(result)
    group = result.add_argument_group("what is measured")
    group.add_argument("--arms", default=ARMS, metavar="TABLE", help="as for benchmarks.speed")
    group.add_argument(
        "--data-dir", type=Path, help="folder in the official layouts (default: the built-in sample)"
    )
    group.add_argument("--datasets", default=",".join(KINDS), help="(default %(default)s)")
    group.add_argument(
        "--limit", type=int, default=100, help="items of each for quality (default %(default)s)"
    )
    group.add_argument("--timed", type=int, default=4, help="items of each for speed (default %(default)s)")
    group.add_argument(
        "--hf-limit", type=int, default=4, help="of those for Hugging Face (default %(default)s)"
    )
    group.add_argument(
        "--shots", type=int, help="worked examples (default 3 for SQuAD, 5 for Spider; 0: chat)"
    )
    group.add_argument(
        "--batch", type=int, default=32, help="prompts at a time for quality (default %(default)s)"
    )
    group.add_argument("--max-new-tokens", type=int, default=64, help="(default %(default)s)")
    group.add_argument("--seed", type=int, default=1)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument(
        "--time-limit", type=float, default=1e9, metavar="S", help="begin nothing after S seconds"
    )
    result.add_argument("--out", type=Path, help="results file (JSON), taken up again where it exists")
    result.add_argument(
        "--report",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="table, goals and plot (beside --out or the first)",
    )
    result.add_argument(
        "--quality",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="where the report's log-probs are from",
    )
    result.add_argument(
        "--few-shot", type=Path, nargs="+", default=[], metavar="FILE", help="where its scores are from"
    )
    return result  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.report:
            stem = options.out or options.report[0].with_suffix("")
            found = whole(*([read(path) for path in paths] for paths in (
                options.report, options.quality, options.few_shot)))  # fmt: skip
            text = "\n\n".join([table(found), *goals(found)])
            stem.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
            print(text)
            plot(found, stem.with_suffix(".svg"))
            return 0
        if options.out is None:
            raise UserError("--out is missing: name the results file")
        if options.threads:
            torch.set_num_threads(options.threads)
        with quiet_transformers():
            run(options)
        print(table(whole([read(options.out)])))
        return 0
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> None:
    """Both passes; what is done already is not done again."""
    begin = time.monotonic()
    decoder, settings = pairs.load(options)
    settings = settings.merged({"max_new_tokens": options.max_new_tokens})
    arms = parse_arms(options.arms, settings)
    asked = {kind: list(prompts(options, decoder, settings, kind)) for kind in options.datasets.split(",")}
    facts = pairs.facts(decoder) | {"shots": options.shots, "max_new_tokens": options.max_new_tokens,
                                    "seed": options.seed, "inflated": options.inflate}  # fmt: skip
    with Results(options.out, facts, ("pass", "arm", "kind", "item")) as results, Judge() as judge:
        devices = [str(decoder.pair.target.device)]
        session = context.session(devices, ["benchmarks/frontier.py", *sys.argv[1:]])
        results.parts["sessions"] = [*results.parts.get("sessions", []), session]
        results.parts["arms"] = {arm.name: arm.settings.to_dict() | {"run": arm.method} for arm in arms}
        measure = Measure(decoder, results, judge, options, begin)
        measure.quality(arms, {kind: each[: options.limit] for kind, each in asked.items()})
        measure.speed(arms, {kind: each[: options.timed] for kind, each in asked.items()})


def prompts(options: argparse.Namespace, decoder: Decoder, settings: Settings, kind: str) -> Iterator[Asked]:
    """The prompts of a data set, first turns only."""
    count = max(options.limit, options.timed)
    # Spider's databases are read when answers are scored: the folder outlives this function.
    build = Path(tempfile.mkdtemp(prefix="frontier-"))
    data = load_dataset(kind, options.data_dir, build)
    wanted = DEFAULT_SHOTS.get(kind, 0) if options.shots is None else options.shots
    shots = load_shots(kind, options.data_dir, build, wanted) if wanted and kind in DEFAULT_SHOTS else None
    own = dataclasses.replace(settings, raw=True) if shots else settings
    prompter = Prompter(
        decoder.pair.tokenizer, decoder.pair.vocab_size, decoder.target.max_positions, own, shots
    )
    for item in data.select(None).items:
        ids = prompter.ids(item, [])
        if prompter.fits(ids) and count > 0:
            count -= 1
            yield Asked(kind, item, ids, LINE_END if shots else ())


class Judge:
    """Scores of all data sets; SQL runs in a process of its own until this is closed."""

    def __init__(self) -> None:
        self._scorers = {kind: Scorer(kind) for kind in KINDS}

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        for scorer in self._scorers.values():
            scorer.__exit__()

    def of(self, asked: Asked, text: str, finish: str) -> bool | None:
        """Exact match or execution accuracy; None where there is neither."""
        found = self._scorers[asked.kind].score(asked.item, [text], [finish]) or {}
        verdict: bool | None = found.get("exact_match", found.get("correct"))
        return verdict


class Measure:
    """The two passes over one loaded pair."""

    def __init__(
        self, decoder: Decoder, results: Results, judge: Judge, options: argparse.Namespace, begin: float
    ) -> None:
        self._decoder, self._results, self._judge = decoder, results, judge
        self._options, self._begin = options, begin
        self._backend = PairBackend(decoder)
        self._broken: set[str] = set()

    def quality(self, arms: Sequence[Arm], asked: Mapping[str, Sequence[Asked]]) -> None:
        """One arm of every law on a slice of items before any is on the next: a run cut short compares all the same."""
        longest = max(map(len, asked.values()), default=0)
        size = max(1, -(-longest // _SLICES))
        laws = {law(arm.settings.to_dict() | {"run": arm.method}): arm for arm in reversed(arms)}
        ours = [arm for arm in arms if arm in laws.values()]
        for at in range(0, longest, size):
            slice_ = [one for each in asked.values() for one in each[at : at + size]]
            for number, arm in enumerate(ours, 1):
                todo = [one for one in slice_ if not self._has("quality", arm, one)]
                if arm.hf:  # a stop string needs a prompt at a time there
                    todo = [one for one in todo if not one.stop]
                if not todo or self._late(_QUALITY if self._options.timed else 1.0):
                    continue
                began = time.monotonic()
                with self._spared("quality", arm):
                    tokens = 0
                    for one, values in zip(todo, self._answers(arm, todo), strict=True):
                        self._add("quality", arm, one, values)
                        tokens += values["tokens"]
                    took = time.monotonic() - began
                    self._say(f"quality {number} of {len(ours)}, {arm.name}: {len(todo)} answers, {tokens} tokens in "
                              f"{took:.1f} s ({tokens / took:.0f} tokens/s)")  # fmt: skip

    def _answers(self, arm: Arm, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        if arm.hf:
            return self._hf_answers(arm, asked)
        settings, batch = [self._settings(arm, one) for one in asked], self._options.batch
        if not of_target_alone(arm.settings.to_dict()):
            batch = 1  # a width that looks at the forest: that of an answer alone
        elif arm.settings.method == "dsbd":
            settings = [dataclasses.replace(one, method="beam") for one in settings]
        found = self._decoder.generate_many([one.ids for one in asked], settings, batch=batch)
        return [
            {
                "logprob": result.beams[0].logprob,
                "tokens": len(result.token_ids),
                "correct": self._judge.of(one, result.text, result.finish_reason),
                "distinct": result.stats.mean_distinct_width,
            }
            for one, result in zip(asked, found, strict=True)
        ]

    def _hf_answers(self, arm: Arm, asked: Sequence[Asked]) -> list[dict[str, Any]]:
        """Hugging Face's batches padded on the left; l(x) by one forward an answer."""
        pair, size = self._decoder.pair, self._options.batch
        config = config_of(arm.method, arm.settings, pair)
        device, ends, found = pair.target.device, set(pair.eos_ids), []
        torch.manual_seed(self._options.seed)
        for at in range(0, len(asked), size):
            part = [one.ids for one in asked[at : at + size]]
            most = max(map(len, part))
            inputs = torch.tensor(
                [[config.pad_token_id] * (most - len(ids)) + ids for ids in part], device=device
            )
            seen = torch.tensor([[0] * (most - len(ids)) + [1] * len(ids) for ids in part], device=device)
            out = call(pair.target.model, inputs, seen, config)
            for one, row in zip(asked[at : at + size], out[:, most:].tolist(), strict=True):
                count = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
                text = self._decoder.detokenize([token for token in row[:count] if token not in ends])
                found.append(
                    {
                        "logprob": answer_logprob(pair, one.ids, row[:count]),
                        "tokens": count,
                        "correct": self._judge.of(one, text, "eos"),
                        "distinct": None,
                    }
                )
        return found

    def speed(self, arms: Sequence[Arm], asked: Mapping[str, Sequence[Asked]]) -> None:
        """One prompt at a time, every arm on it in turn, in an order that rotates."""
        limit = self._options.hf_limit
        turns = [
            (place, each[place])
            for place in range(max(map(len, asked.values()), default=0))
            for each in asked.values()
            if place < len(each)
        ]
        if not turns:
            return
        _, longest = max(turns, key=lambda turn: len(turn[1].ids))
        warm: set[str] = set()
        for number, (place, one) in enumerate(turns):
            for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
                if self._has("speed", arm, one) or (arm.hf and place >= limit) or self._late():
                    continue
                if arm.name in self._broken:
                    continue
                began = time.monotonic()
                with self._spared("speed", arm):
                    if arm.name not in warm:
                        # Caches grow to what the longest prompt needs, graphs are captured.
                        warm.add(arm.name)
                        self._answer(arm, longest)
                        self._say(f"speed, warm {len(warm)} of {len(arms)}, {arm.name}: "
                                  f"{time.monotonic() - began:.1f} s")  # fmt: skip
                    self._add("speed", arm, one, self._timed(arm, one))
            self._say(f"speed: {number + 1} of {len(turns)} prompts")

    def _answer(self, arm: Arm, one: Asked) -> Any:
        own = dataclasses.replace(arm, settings=self._settings(arm, one))
        return self._backend.answer(own, one.ids, self._seed(one))

    def _timed(self, arm: Arm, one: Asked) -> dict[str, Any]:
        answer = self._answer(arm, one)
        logprob = answer.logprob_engine
        if arm.hf:
            logprob = self._backend.logprob(one.ids, answer.token_ids)
        keep = ("layers", "target_calls", "draft_calls", "mean_distinct_width", "notes", "paths")
        return {
            "logprob": logprob, "tokens": answer.new_tokens, "seconds": answer.wall_s,
            "correct": self._judge.of(one, answer.text, answer.finish_reason),
            **{name: answer.stats.get(name) for name in keep},
        }  # fmt: skip

    @contextmanager
    def _spared(self, name: str, arm: Arm) -> Iterator[None]:
        """An arm that fails costs no other its turn: it is named, and not tried again."""
        try:
            yield
        except (DsbdError, RuntimeError, ValueError) as error:
            self._broken.add(arm.name)
            self._say(f"{name}, {arm.name} FAILED: {type(error).__name__}: {error}")
            self._results.parts.setdefault("failed", []).append([name, arm.name, str(error)])

    def _settings(self, arm: Arm, one: Asked) -> Settings:
        raw = bool(one.stop)
        return dataclasses.replace(arm.settings, stop=one.stop, raw=raw, seed=self._seed(one))

    def _seed(self, one: Asked) -> int:
        return seed_of(self._options.seed, one.item.id, 0)

    def _has(self, name: str, arm: Arm, one: Asked) -> bool:
        return self._results.has(**{"pass": name, "arm": arm.name, "kind": one.kind, "item": one.item.id})

    def _add(self, name: str, arm: Arm, one: Asked, values: Mapping[str, Any]) -> None:
        self._results.add({"pass": name, "arm": arm.name, "kind": one.kind, "item": one.item.id, **values})

    def _late(self, share: float = 1.0) -> bool:
        """Whether this share of the time limit is over."""
        return time.monotonic() - self._begin > share * self._options.time_limit

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:6.1f} s] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
