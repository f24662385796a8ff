"""Speed of all methods and of outside references on one pair: interleaved, warmed up, paired by prompt.

Every prompt is given to every arm before the next prompt, in an order that rotates. Printed at the end:
tokens a second, joules a token, log-probability (teacher-forced, so one yardstick for all), layers a target
call, bytes moved against a measured copy, where an iteration's time goes, and memory. docs/speed.md says
what each number means. The results file is taken up again where it exists.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.kit import ct2, llamacpp, pairs
from benchmarks.kit.arms import DEFAULT_ARMS, parse_arms
from benchmarks.kit.bandwidth import copy_bandwidth
from benchmarks.kit.phases import breakdown
from benchmarks.kit.profiler import profile
from benchmarks.kit.prompts import Prompt, add_prompts, load_prompts
from benchmarks.kit.report import report, summary_of
from benchmarks.kit.results import Results, joined, write
from dsbd_cli.bench import context
from dsbd_cli.bench.arms import Arm
from dsbd_cli.bench.backend import PairBackend
from dsbd_cli.bench.measure import Answer, seed_of
from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import DsbdError, UserError
from dsbd_cli.loading.quiet import quiet_transformers

BASELINES = "hf-beam-sample,beam,multinomial"
_KEY = ("prompt", "arm", "repeat")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"default arms:{DEFAULT_ARMS.replace(chr(10), chr(10) + '  ')}",
    )  # fmt: skip
    pairs.add_pair(result)
    add_prompts(result, 20)
    group = result.add_argument_group("what is measured")
    group.add_argument("--arms", default=DEFAULT_ARMS, metavar="TABLE",
                       help="lines, or parts between `;`, of METHOD name=value ...; or a file of them")  # fmt: skip
    group.add_argument("--baselines", default=BASELINES, help="arms to compare with (default %(default)s)")
    group.add_argument(
        "--hf-limit", type=int, metavar="N", help="outside references on the first N prompts only"
    )
    group.add_argument("--ct2", action="store_true", help="CTranslate2 too (must be installed)")
    group.add_argument("--llamacpp", action="store_true",
                       help="llama.cpp too, on the target's GGUF file (xllamacpp must be installed)")  # fmt: skip
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="(default %(default)s)")
    group.add_argument(
        "--fixed-length", action="store_true", help="no token ends a text: all answers full length"
    )
    group.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="rounds over all prompts (default 1)"
    )
    group.add_argument("--warmup", type=int, default=2, metavar="N", help="prompts an arm before it counts")
    group.add_argument("--breakdown", type=int, default=3, metavar="N",
                       help="prompts of a pass of its own for where time goes; 0 for none (default 3)")  # fmt: skip
    group.add_argument("--profile", action="store_true",
                       help="a pass under torch.profiler: host synchronisations and busy time")  # fmt: skip
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument(
        "--time-limit", type=float, metavar="S", help="begin no prompt that may end after S seconds"
    )
    result.add_argument("--out", type=Path, help="results file (JSON)")
    result.add_argument(
        "--report", type=Path, metavar="FILE", nargs="+",
        help="print the tables of a results file, or of all parts of a run; run nothing (--out: write them as one)",
    )  # fmt: skip
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.report:
            whole = joined(options.report, _KEY)
            whole["summary"] = summary_of(whole)
            if options.out is not None:
                write(options.out, whole)
            print(report(whole))
            return 0
        if options.out is None:
            raise UserError("--out is missing: name the results file")
        if options.threads:
            torch.set_num_threads(options.threads)
        return run(options)
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> int:
    """Measure what `options` ask for, and print the report."""
    begin = time.monotonic()
    decoder, settings = pairs.load(options)
    settings = settings.merged({"max_new_tokens": options.max_new_tokens})
    arms = [
        arm for arm in parse_arms(options.arms, settings) if decoder.draft is not None or not arm.needs_draft
    ]
    prompts, label = load_prompts(options, decoder.pair, settings)
    facts = pairs.facts(decoder) | {
        "prompts": label,
        "prompt_tokens": options.prompt_tokens,
        "max_new_tokens": options.max_new_tokens,
        "fixed_length": options.fixed_length,
        "seed": options.seed,
    }
    with (
        Results(options.out, facts, _KEY) as results,
        quiet_transformers(),
        pairs.endless(decoder, options.fixed_length),
    ):
        bench = Bench(decoder, results, options, begin)
        if options.ct2:
            arms += ct2.arms(settings)
            engine = ct2.CTranslate2(decoder)
            bench.outside |= dict.fromkeys(ct2.METHODS, engine)
            bench.versions["ct2_compute_type"] = engine.compute_type
        if options.llamacpp:
            longest = max(len(prompt.ids) for prompt in prompts)
            peer = llamacpp.LlamaCpp(decoder, longest + options.max_new_tokens + 8)
            arms += llamacpp.arms(settings)
            bench.outside |= dict.fromkeys(llamacpp.METHODS, peer)
            bench.versions["xllamacpp"] = peer.version
        bench.note_circumstances(arms)
        bench.warm_up(arms, prompts)
        bench.look_inside(arms, prompts)
        bench.measure(arms, prompts)
        results.parts["summary"] = summary_of(results.whole())
        results.save()
        print(report(results.whole()))
    return 0


class Bench:
    """The passes over one loaded pair."""

    def __init__(self, decoder: Decoder, results: Results, options: argparse.Namespace, begin: float) -> None:
        self._decoder, self._results, self._options, self._begin = decoder, results, options, begin
        self._backend = PairBackend(decoder)
        #: Engines beside ours, by the method that each serves, and what the session says of them.
        self.outside: dict[str, ct2.CTranslate2 | llamacpp.LlamaCpp] = {}
        self.versions: dict[str, str] = {}

    def note_circumstances(self, arms: Sequence[Arm]) -> None:
        """Machine, versions, command, copy bandwidth, arms."""
        parts = self._results.parts
        self.say(f"{self._results.facts['hardware']}: measuring its copy bandwidth")
        session = context.session(self._backend.devices(), ["benchmarks/speed.py", *sys.argv[1:]])
        session["copy_bytes_per_s"] = copy_bandwidth(self._decoder.pair.target.device)
        session |= self.versions
        parts["sessions"] = [*parts.get("sessions", []), session]
        parts["arms"] = parts.get("arms", {}) | {
            arm.name: arm.settings.to_dict() | {"run": arm.method} for arm in arms
        }
        parts["baselines"] = self._options.baselines.replace(",", " ").split()

    def warm_up(self, arms: Sequence[Arm], prompts: Sequence[Prompt]) -> None:
        """The longest prompts through every arm, so that caches are grown and graphs captured."""
        longest = sorted(prompts, key=lambda prompt: -len(prompt.ids))[: self._options.warmup]
        for arm in arms:
            self.say(f"warm-up: {arm.name}")
            # References capture nothing by size: one prompt warms their kernels.
            for prompt in longest[:1] if _outside(arm) else longest:
                self._answer(arm, prompt, 0)

    def look_inside(self, arms: Sequence[Arm], prompts: Sequence[Prompt]) -> None:
        """The passes with clocks and with the profiler; what they time is not counted elsewhere."""
        own = [arm for arm in arms if not _outside(arm)]
        for arm in own if self._options.breakdown else []:
            found = breakdown(
                self._decoder, arm, [p.ids for p in prompts[: self._options.breakdown]], self._options.seed
            )
            self._results.parts.setdefault("breakdown", {})[arm.name] = found
        for arm in own if self._options.profile else []:
            self.say(f"profile: {arm.name}")
            found = profile(self._decoder, arm, prompts[0].ids, self._options.seed)
            self._results.parts.setdefault("profile", {})[arm.name] = found

    def measure(self, arms: Sequence[Arm], prompts: Sequence[Prompt]) -> None:
        """Every prompt through every arm, arms in turn."""
        limit = self._options.hf_limit
        slowest = 0.0
        for repeat in range(self._options.repeats):
            for place, prompt in enumerate(prompts):
                due = [
                    arm
                    for arm in (*arms[place % len(arms) :], *arms[: place % len(arms)])
                    if not (_outside(arm) and limit is not None and place >= limit)
                    and not self._results.has(prompt=prompt.name, arm=arm.name, repeat=repeat)
                ]
                begin = time.monotonic()
                if self._options.time_limit and begin + slowest - self._begin > self._options.time_limit:
                    self.say(f"time limit: stopped before prompt {place + 1} of {len(prompts)}")
                    return
                for arm in due:
                    answer = self._answer(arm, prompt, repeat)
                    answer.logprob = self._backend.logprob(prompt.ids, answer.token_ids)
                    self._results.add(record_of(prompt, arm, repeat, answer))
                if due:
                    slowest = max(slowest, time.monotonic() - begin)
                    self.say(f"prompt {place + 1} of {len(prompts)}: {len(prompt.ids)} tokens")

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self._begin:6.1f} s] {text}", file=sys.stderr, flush=True)

    def _answer(self, arm: Arm, prompt: Prompt, repeat: int) -> Answer:
        seed = seed_of(self._options.seed, prompt.name, repeat)
        if arm.method in self.outside:
            return self.outside[arm.method].answer(arm, prompt.ids, seed)
        return self._backend.answer(arm, prompt.ids, seed)


def _outside(arm: Arm) -> bool:
    return arm.hf or arm.method in (*ct2.METHODS, *llamacpp.METHODS)


def record_of(prompt: Prompt, arm: Arm, repeat: int, answer: Answer) -> dict[str, Any]:
    """One line of results: the answer without its text, and lists as sums."""
    values = answer.to_dict()
    stats = values.pop("stats")
    for name in ("text", "energy_parts"):
        values.pop(name)
    if "widths" in stats:
        stats["width_sum"], stats["distinct_sum"] = (
            sum(stats.pop("widths")),
            sum(stats.pop("distinct_widths")),
        )
    return {"prompt": prompt.name, "arm": arm.name, "repeat": repeat, **values, **stats}


if __name__ == "__main__":
    sys.exit(main())
