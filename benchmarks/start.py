"""From the command to the first token: medians over fresh processes, and a table of what the time goes to.

    python benchmarks/start.py --repeats 5
    python benchmarks/start.py --checkout ../main --repeats 5     # and another checkout, in turns

Wall clock and CPU seconds (user and system of the whole process): on a machine that others use, the latter say
more. Each repetition starts new processes; the first, which fills caches, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PROMPT = "Why is the sky blue?"
# Prints one JSON list of [stage, wall seconds, CPU seconds] on stderr; runs in older checkouts too.
STAGES = """
import gc, json, os, sys, time
gc.disable()
marks, clock, cpu = [], [time.perf_counter()], [0.0]
def mark(stage):
    now, used = time.perf_counter(), time.process_time()
    marks.append([stage, now - clock[0], used - cpu[0]])
    clock[0], cpu[0] = now, used
mark("interpreter")
from dsbd_cli.cli import main, options
main._mount_once()
mark("command line")
chosen = options.chosen_from({"seed": 1})
chosen.check()
mark("checks before torch")
try:
    from dsbd_cli.loading.ready import quick_torch
    quick_torch.import_torch()
except ImportError:
    pass
import torch
mark("import torch")
import dsbd_cli.decoder, dsbd_cli.loading.pair
from dsbd_cli.decoding import HfTreeModel, Layer, decode
mark("import the package")
spec, settings = chosen.resolve()
pair = None
try:
    from dsbd_cli.loading.ready import pair as ready
    pair = ready.load(spec)
except ImportError:
    pass
if pair is None:
    pair = dsbd_cli.loading.pair.load(spec)
mark("configs, tokenizer, weights")
decoder = dsbd_cli.decoder.Decoder(pair, settings)
gc.freeze(); gc.enable()
mark("forwards: weights packed")
decoder.ready(settings)
decoder.draft.require_tree()
mark("self-test")
for event in decoder.stream(sys.argv[1], settings):
    if isinstance(event, Layer):
        break
mark("prompt and first token")
print(json.dumps(marks), file=sys.stderr)
os._exit(0)
"""


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}


def command(checkout: Path, tokens: int) -> dict[str, float]:
    """Seconds of one `dsbd generate`: to the first byte of the answer, to the end, and CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    arguments = ["generate", PROMPT, "--seed", "1", "--max-new-tokens", str(tokens), "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dsbd_cli", *arguments],
        env=environment(checkout), cwd=checkout, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    first = time.perf_counter() - begin
    process.stdout.read()
    if process.wait() != 0:
        raise SystemExit(f"dsbd in {checkout} ended with code {process.returncode}")
    whole = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"first token": first, "whole command": whole, "CPU seconds": used}


def stages(checkout: Path) -> list[tuple[str, float, float]]:
    """(stage, wall seconds, CPU seconds) of one start, in order."""
    ran = subprocess.run(
        [sys.executable, "-c", STAGES, PROMPT],
        env=environment(checkout), cwd=checkout, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode != 0:
        raise SystemExit(ran.stderr)
    return [
        (str(name), float(wall), float(cpu)) for name, wall, cpu in json.loads(ran.stderr.splitlines()[-1])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="counted repetitions (default 5)")
    parser.add_argument("--tokens", type=int, default=1, help="--max-new-tokens of the command (default 1)")
    parser.add_argument("--checkout", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    places = [HERE, *([options.checkout.resolve()] if options.checkout else [])]
    commands: dict[Path, list[dict[str, float]]] = {place: [] for place in places}
    parts: dict[Path, list[list[tuple[str, float, float]]]] = {place: [] for place in places}
    for turn in range(options.repeats + 1):
        for place in places if turn % 2 else reversed(places):
            if options.checkout:
                command(place, options.tokens)  # each takes the place of what the other has remembered
            measured = command(place, options.tokens), stages(place)
            if turn:
                commands[place].append(measured[0])
                parts[place].append(measured[1])
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
          f"medians of {options.repeats}")  # fmt: skip
    for place in places:
        title = "this checkout" if place == HERE else "the other checkout"
        print(f"\n| {title} | wall s | CPU s |\n|---|---|---|")
        for at, (name, _, _) in enumerate(parts[place][0]):
            wall, cpu = (statistics.median(run[at][field] for run in parts[place]) for field in (1, 2))
            print(f"| {name} | {wall:.2f} | {cpu:.2f} |")
        found = {name: statistics.median(run[name] for run in commands[place]) for name in commands[place][0]}
        print(f"| **command to first token** | {found['first token']:.2f} | |")
        print(f"| **whole command** | {found['whole command']:.2f} | {found['CPU seconds']:.2f} |")
    if options.out:
        numbers = [
            {"commands": commands[place], "stages": parts[place], "this": place == HERE} for place in places
        ]
        options.out.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
