"""How cost grows: with the width, with gamma, with the prompt's length, with the nodes of a forward.

All points of a curve are measured in turns, several rounds; a point's value is the median. No token ends
a text, so every point decodes the same number of tokens. Prints a table with the steepest growth of each
series, writes JSON (taken up again where it exists) and, with matplotlib, plots beside it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks.kit import pairs
from benchmarks.kit.growth import report
from benchmarks.kit.plots import draw
from benchmarks.kit.prompts import Prompt, add_prompts, fitted, load_prompts
from benchmarks.kit.results import Results, read
from benchmarks.kit.shapes import SHAPES, random_pair
from dsbd_cli.bench import context
from dsbd_cli.bench.arms import Arm, build_arms
from dsbd_cli.bench.backend import PairBackend
from dsbd_cli.bench.hf import synchronize
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import HfTreeModel, Trie
from dsbd_cli.errors import DsbdError, UserError
from dsbd_cli.settings import Settings

CURVES = ("width", "gamma", "prompt", "nodes")
# A node forward is short: this many make one measurement.
_FORWARDS = 12


@dataclass(frozen=True)
class Point:
    """One point: `arm` decodes (None: bare forwards of model `series` over `x` nodes)."""

    curve: str
    series: str
    x: int
    ids: tuple[int, ...]
    arm: Arm | None = None


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    pairs.add_pair(result)
    result.add_argument(
        "--shape", choices=list(SHAPES), help="random weights of this shape instead of a pair"
    )
    add_prompts(result, 8)
    group = result.add_argument_group("what is measured")
    group.add_argument("--curves", default=",".join(CURVES), help="(default %(default)s)")
    for name, values, what in (
        ("widths", "1,2,4,8,16", "W (and W_S)"),
        ("gammas", "1,2,3,4,5,6,7,8", "drafted layers"),
        ("lengths", "128,256,512,1024,2048,4096,7168", "prompt tokens"),
        ("nodes", "1,2,4,8,16,24,32,48,64", "nodes of one forward"),
    ):
        group.add_argument(
            f"--{name}", type=numbers, default=numbers(values), metavar="N,N", help=f"{what} ({values})"
        )
    group.add_argument("--prompt-length", type=int, default=256, metavar="N",
                       help="prompt tokens of all other curves (default %(default)s)")  # fmt: skip
    group.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="(default %(default)s)")
    group.add_argument("--rounds", type=int, default=3, metavar="N", help="over all points (default 3)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads")
    group.add_argument("--time-limit", type=float, metavar="S", help="begin no point after S seconds")
    result.add_argument("--out", type=Path, help="results file; plots go beside it")
    result.add_argument(
        "--report", type=Path, metavar="FILE", help="table and plots of a results file, run nothing"
    )
    return result


def numbers(text: str) -> list[int]:
    """Positive whole numbers from `1,2,4`."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError("numbers must be positive")
    return sorted(set(values))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        if options.report is None and options.out is None:
            raise UserError("--out is missing: name the results file")
        if options.threads:
            torch.set_num_threads(options.threads)
        found = read(options.report) if options.report else run(options)
        print(report(found))
        for path in draw(found, (options.report or options.out).with_suffix("")):
            print(path)
        return 0
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what `options` ask for; the results file's contents."""
    begin = time.monotonic()
    if options.shape:
        decoder = Decoder(random_pair(options.shape, options.device, options.dtype))
        settings, prompts = decoder.settings, _noise(decoder.pair.vocab_size)
    else:
        decoder, settings = pairs.load(options)
        prompts, _ = load_prompts(options, decoder.pair, settings)
    settings = settings.merged(
        # A point of a curve is a width and a gamma, used in full.
        {"max_new_tokens": options.max_new_tokens, "seed": 0, "forest": "full"}
    )
    points, left_out = plan(options, decoder, settings, prompts)
    facts = pairs.facts(decoder) | {
        "max_new_tokens": options.max_new_tokens, "prompt_length": options.prompt_length,
    }  # fmt: skip
    with Results(options.out, facts, ("curve", "series", "x", "round")) as results, pairs.endless(decoder):
        session = context.session([str(decoder.pair.target.device)], ["benchmarks/curves.py", *sys.argv[1:]])
        results.parts["sessions"] = [*results.parts.get("sessions", []), session]
        results.parts["left_out"] = left_out
        # Round -1 warms up: caches grow, graphs are captured.
        for number in range(-1, options.rounds):
            for point in points:
                name = {"curve": point.curve, "series": point.series, "x": point.x, "round": number}
                if results.has(**name):
                    continue
                if options.time_limit and time.monotonic() - begin > options.time_limit:
                    print("time limit reached", file=sys.stderr)
                    return results.whole()
                took = time.monotonic()
                values = measure(decoder, point)
                took = time.monotonic() - took
                print(f"[{time.monotonic() - begin:6.1f} s] round {number}: {point.curve} {point.series} {point.x} "
                      f"({took:.1f} s)", file=sys.stderr, flush=True)  # fmt: skip
                if number >= 0:
                    results.add(name | values)
        return results.whole()


def plan(
    options: argparse.Namespace, decoder: Decoder, settings: Settings, prompts: Sequence[Prompt]
) -> tuple[list[Point], list[str]]:
    """The points, and what was left out because the context does not hold it."""
    chosen = options.curves.replace(",", " ").split()
    unknown = [name for name in chosen if name not in CURVES]
    if unknown:
        raise UserError(f"--curves: no curve {unknown[0]!r}; known: {', '.join(CURVES)}")
    if decoder.draft is None:
        raise UserError("the curves need a draft: leave out --draft none")
    found = {
        "width": lambda: _widths(options.widths, settings),
        "gamma": lambda: _gammas(options.gammas, settings),
        "prompt": lambda: _lengths(options.lengths, settings),
        "nodes": lambda: iter([(s, x, None, None) for x in options.nodes for s in ("target", "draft")]),
    }
    limits = [model.max_positions for model in (decoder.target, decoder.draft) if model.max_positions]
    room = min(limits, default=1 << 30)
    points, left_out = [], []
    for curve in chosen:
        for series, x, arm, length in found[curve]():
            length = length or options.prompt_length
            if length + options.max_new_tokens > room:
                left_out.append(f"{curve} {series} {x}: the context holds {room} tokens")
                continue
            points.append(Point(curve, series, x, tuple(fitted(prompts, length)[0].ids), arm))
    return points, left_out


_Planned = tuple[str, int, Arm | None, int | None]


def _widths(widths: Sequence[int], settings: Settings) -> Iterator[_Planned]:
    for width in widths:
        yield "beam", width, _arm("beam", settings, width=width), None
        yield (
            "dsbd",
            width,
            _arm("dsbd:cover", settings, width=width, draft_width=width, threshold=None),
            None,
        )


def _gammas(gammas: Sequence[int], settings: Settings) -> Iterator[_Planned]:
    for gamma in gammas:
        yield "speculative", gamma, _arm("speculative", settings, gamma=gamma), None
        yield "dsbd", gamma, _arm("dsbd:cover", settings, gamma=gamma, threshold=None), None


def _lengths(lengths: Sequence[int], settings: Settings) -> Iterator[_Planned]:
    for length in lengths:
        yield "multinomial", length, _arm("multinomial", settings), length
        yield "beam", length, _arm("beam", settings), length
        yield "dsbd", length, _arm("dsbd:cover", settings, threshold=None), length


def _arm(method: str, settings: Settings, **given: Any) -> Arm:
    (arm,), _ = build_arms([method], settings, given, [])
    return arm


def measure(decoder: Decoder, point: Point) -> dict[str, Any]:
    """The values of one point; `error` where the device's memory does not hold it."""
    try:
        if point.arm is None:
            model = decoder.target if point.series == "target" else decoder.draft
            assert model is not None
            return {"forward_ms": forward_ms(model, point.ids, point.x)}
        answer = PairBackend(decoder).answer(point.arm, point.ids, 0)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return {"error": "out of memory"}
    calls = max(1, answer.stats["target_calls"])
    assert answer.decode_s is not None
    return {
        "iteration_ms": 1e3 * answer.decode_s / calls,
        "prefill_s": answer.prefill_s,
        "tokens_per_s": answer.new_tokens / answer.decode_s,
        "layers_per_call": answer.stats["layers"] / calls,
        "kv_bytes": answer.stats["kv_bytes_peak"],
        "peak_bytes": answer.peak_bytes,
    }


def forward_ms(model: HfTreeModel, ids: Sequence[int], nodes: int) -> float:
    """Median milliseconds of a forward over `nodes` new nodes, best entries of each row on the host included."""
    trie = Trie(lambda node: None, (), 1 << 30)
    model.prefill(ids, trie.root, top_n=16, reuse=False)
    seconds = []
    for _ in range(_FORWARDS):
        fresh = [trie.child(trie.root, token) for token in range(nodes)]
        synchronize(model.device)
        begin = time.perf_counter()
        model.forward(fresh)
        synchronize(model.device)
        seconds.append(time.perf_counter() - begin)
        model.retain([trie.root])
        trie.root.children = {}
    return 1e3 * sorted(seconds)[len(seconds) // 2]


def _noise(vocab: int) -> list[Prompt]:
    """Random tokens, enough that no two stretches of a long prompt are alike."""
    draw = random.Random(0)
    return [Prompt("noise", [draw.randrange(vocab) for _ in range(1 << 16)])]


if __name__ == "__main__":
    sys.exit(main())
