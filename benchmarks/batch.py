"""Throughput by batch size: whole runs over a file of prompts, beside one by one and beside Hugging Face.

    python -m benchmarks.batch --input FILE [--limit N] [--sizes 1,2,4,...] [--methods dsbd,beam] [--hf 8,32]
        [--rounds N] [--json OUT] [--inflate ...]
    python -m benchmarks.batch --plot IMAGE OUT...

FILE holds a JSON string or an object with `prompt` a line (`dsbd generate --input`). Every arm decodes all
prompts, prefill included, in turns with the other methods at its batch size, captures made before; printed
are medians of tokens a second over the rounds. `one` is a prompt at a time. Hugging Face gets padded
batches with the same settings.
"""

from __future__ import annotations

import argparse
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
from dsbd_cli.bench.hf import call, config_of
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import kernel_names
from dsbd_cli.errors import DsbdError
from dsbd_cli.loading.quiet import quiet_transformers
from dsbd_cli.prices import Acceptance, Prices, Shape, best_iteration, distinct_beams, expected_layers
from dsbd_cli.settings import Settings


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    pairs.add_pair(result)
    result.add_argument("--input", type=Path, help="prompts, as for dsbd generate --input")
    result.add_argument("--plot", type=Path, help="draw what --json wrote, of one machine, instead")
    result.add_argument(
        "found", nargs="*", type=Path, help="for --plot; of an arm in several, the last one counts"
    )
    result.add_argument("--limit", type=int, default=256, help="of them (default %(default)s)")
    result.add_argument(
        "--few", type=int, default=32, help="prompts for arms of at most 2 at a time and for Hugging Face"
    )
    result.add_argument("--sizes", default="1,2,4,8,16,32,64", help="batch sizes (default %(default)s)")
    result.add_argument("--methods", default="dsbd,beam", help="(default %(default)s)")
    result.add_argument("--one", action="store_true", help="one prompt at a time as well")
    result.add_argument("--hf", default="", help="batch sizes of Hugging Face's beam sampling")
    result.add_argument("--max-new-tokens", type=int, default=128)
    result.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="settings of all arms"
    )
    result.add_argument("--rounds", type=int, default=1)
    result.add_argument("--json", type=Path, help="write every figure here")
    return result


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.plot is not None:
        plot([json.loads(path.read_text()) for path in options.found], options.plot)
        return 0
    if options.input is None:
        parser().error("--input is missing")
    quiet_transformers()
    try:
        decoder, base = pairs.load(options)
        items, _ = read_items(options.input)
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    prompts = [item.prompt for item in items][: options.limit]
    given = dict(pair.split("=", 1) for pair in options.set)
    from dsbd_cli.setting_text import parse_setting

    base = base.merged({"max_new_tokens": options.max_new_tokens})
    base = base.merged({name: parse_setting(name, value) for name, value in given.items()})
    methods = options.methods.split(",")
    groups = [[(method, "one", 0) for method in methods]] if options.one else []
    sizes = [int(size) for size in options.sizes.split(",") if size]
    groups += [[(method, f"batch {size}", size) for method in methods] for size in sizes]
    groups += [[("hf-beam-sample", f"batch {size}", int(size))] for size in options.hf.split(",") if size]
    runs: list[dict[str, Any]] = []
    longest = sorted(prompts, key=lambda prompt: -len(json.dumps(prompt)))  # buffers do not grow later
    for group in groups:  # captures are those of one batch size
        for arm in group:
            run(decoder, base, arm, longest[: max(2, min(arm[2], options.few))])
        for number in range(options.rounds):
            turn = group[number % len(group) :] + group[: number % len(group)]
            for arm in turn:
                few = arm[2] <= 2 or arm[0].startswith("hf")
                mine = prompts[: options.few] if few else prompts
                runs.append(run(decoder, base, arm, mine) | {"round": number})
                print(json.dumps(runs[-1]), flush=True)
                if options.json:
                    record = {"facts": pairs.facts(decoder), "attention": kernel_names(),
                              "settings": base.to_dict(), "runs": runs, "prices": prices_of(decoder, base)}  # fmt: skip
                    options.json.write_text(json.dumps(record, indent=1))
    arms = [arm for group in groups for arm in group]
    print(f"{'method':16} {'at a time':10} {'tokens/s':>9} {'s an answer':>11}")
    for method, name, _ in arms:
        mine_ = [one for one in runs if (one["method"], one["arm"]) == (method, name)]
        rate = statistics.median(one["tokens"] / one["seconds"] for one in mine_)
        each = statistics.median(one["latency_s"] for one in mine_)
        print(f"{method:16} {name:10} {rate:9.1f} {each:11.3f}")
    return 0


def run(
    decoder: Decoder, base: Settings, arm: tuple[str, str, int], prompts: Sequence[Any]
) -> dict[str, Any]:
    """One whole run of one arm: tokens, seconds, and the median time of an answer."""
    method, name, size = arm
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    more: dict[str, Any] = {}
    if method.startswith("hf"):
        tokens, latencies = hf(decoder, base, prompts, size)
    else:
        settings = [base.merged({"method": method, "seed": item_seed(1, i)}) for i in range(len(prompts))]
        if size:
            results = list(decoder.generate_many(prompts, settings, batch=size))
        else:
            results = [decoder.generate(*one, energy=False) for one in zip(prompts, settings, strict=True)]
        tokens = sum(result.stats.new_tokens for result in results)
        latencies = [(one.stats.prefill_s or 0) + (one.stats.decode_s or 0) for one in results]
        calls = sum(result.stats.target_calls for result in results)
        pipelines = decoder.buffers.pipelines.values() if size and decoder.buffers else ()
        more = {"forests": [one.forest_shape for one in pipelines if one is not None]}
        more |= {"layers_per_call": sum(result.stats.layers for result in results) / max(1, calls),
                "first": results[0].text[:60], "paths": results[0].stats.paths.get("engine")}  # fmt: skip
    seconds = time.perf_counter() - begin
    return {"method": method, "arm": name, "prompts": len(prompts), "tokens": tokens, "seconds": seconds,
            "tokens_per_s": tokens / seconds, "latency_s": statistics.median(latencies)} | more  # fmt: skip


def prices_of(decoder: Decoder, settings: Settings) -> dict[str, Any] | None:
    """The table that the batches went by; None where none was measured."""
    if decoder.buffers is None or not decoder.target.captured:
        return None
    prices = decoder.prices.captured(settings, lambda: Prices.assumed(0.0, 0.0))
    return None if prices is None else prices.to_dict()


def limit(prices: Prices, settings: dict[str, Any], method: str, requests: int) -> float:
    """Layers a second if the device worked all the time and prompts cost nothing."""
    width = int(settings["width"])
    known = Acceptance.assumed(distinct_beams(width), settings["gamma"], settings["draft_width"])
    shape = Shape(0, 1)
    if method == "dsbd":
        shape = best_iteration(
            prices, known, requests=requests, width=width, max_gamma=settings["gamma"],
            max_draft_width=settings["draft_width"], host_ms=(0.0, 0.0, 0.0, 0.0),
        )  # fmt: skip
    gamma, inside = shape
    ms = prices.target(requests * (width + gamma * inside))
    if gamma and prices.draft is not None:
        ms += prices.draft(requests * 2 * width) + (gamma - 1) * prices.draft(requests * inside)
    return 1000 * requests * expected_layers(gamma, known.beams, inside, known) / ms


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens a second and seconds an answer by batch size, with what the price table allows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    latest: dict[tuple[str, int], dict[str, list[float]]] = {}
    for record in records:
        found: dict[tuple[str, int], dict[str, list[float]]] = {}
        for one in record["runs"]:
            if one["arm"] != "one":
                arm = found.setdefault((one["method"], int(one["arm"].split()[1])), {"rate": [], "each": []})
                arm["rate"].append(one["tokens_per_s"])
                arm["each"].append(one["latency_s"])
        latest |= found
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    table = next((record["prices"] for record in reversed(records) if record.get("prices")), None)
    methods = list(dict.fromkeys(method for method, _ in latest))
    for method in methods:
        sizes = sorted(size for name, size in latest if name == method)
        rate, each = (
            [statistics.median(latest[method, size][what]) for size in sizes] for what in ("rate", "each")
        )
        (line,) = left.plot(sizes, rate, marker="o", label=method)
        right.plot(sizes, each, marker="o", color=line.get_color(), label=method)
        if table is not None and not method.startswith("hf"):
            prices, settings = Prices.from_dict(table), records[-1]["settings"]
            most = [limit(prices, settings, method, size) for size in sizes]
            left.plot(sizes, most, linestyle=":", color=line.get_color(), label=f"{method}: device alone")
    for axes, what in ((left, "tokens/s, whole runs"), (right, "s an answer (median)")):
        axes.set(xscale="log", xlabel="prompts at a time", ylabel=what, ylim=(0, None))
        ticks = sorted({size for _, size in latest})
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


def hf(decoder: Decoder, settings: Settings, prompts: Sequence[Any], size: int) -> tuple[int, list[float]]:
    """Hugging Face's beam sampling in batches padded on the left: tokens of the answers, seconds of each."""
    pair = decoder.pair
    model = pair.target.model
    config = config_of("hf-beam-sample", settings.merged({"method": "beam"}), pair)
    device, pad = pair.target.device, config.pad_token_id
    tokens, latencies = 0, []
    torch.manual_seed(1)
    for at in range(0, len(prompts), size):
        begin = time.perf_counter()
        ids = [
            decoder.plan(prompt, settings.merged({"method": "beam"})).ids
            for prompt in prompts[at : at + size]
        ]
        most = max(map(len, ids))
        inputs = torch.tensor([[pad] * (most - len(one)) + one for one in ids], device=device)
        seen = torch.tensor([[0] * (most - len(one)) + [1] * len(one) for one in ids], device=device)
        out = call(model, inputs, seen, config)[:, most:].tolist()
        ends = set(pair.eos_ids)
        for row in out:
            tokens += next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        latencies += [time.perf_counter() - begin] * len(ids)
    return tokens, latencies


if __name__ == "__main__":
    sys.exit(main())
