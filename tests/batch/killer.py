"""Run as a program: batches cut off at random moments, again and again, must resume to the same bytes.

usage: killer.py TARGET DRAFT INPUT FOLDER KILLS WORLD. Every batch is a fork of this process, which
has loaded the pair once, so that a cut costs no start.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from dsbd_cli import Decoder, Settings
from dsbd_cli.batch.run import MEASURED, run_file
from dsbd_cli.errors import Stopped
from dsbd_cli.group import ALONE, Group, Team


class Loaded:
    """What `run_file` asks of the command line's choice, with the loading done."""

    def __init__(self, decoder: Decoder, settings: Settings) -> None:
        decoder.settings = settings
        self._decoder, self._settings = decoder, settings

    def resolve(self) -> tuple[Any, Settings]:
        return None, self._settings

    def notes(self, decoder: Decoder) -> list[str]:
        return decoder.notes

    def sources(self) -> dict[str, Any]:
        return {}

    def team(self) -> Team:
        return Team()

    def meet(self) -> Group:
        return ALONE

    def load(self, **_: Any) -> Decoder:
        return self._decoder


# Of the statistics, what does not depend on who else was decoded: forests follow the load.
_OWN = ("prompt_tokens", "new_tokens", "layers", "widths", "distinct_widths")


def unmeasured(path: Path) -> list[str]:
    """The records, less what is measured with a clock or a power meter or depends on who else was decoded.

    Sums round by how many nodes share a product, so numbers are compared to 5 digits.
    """
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "stats" in record:
            assert set(MEASURED) <= record["stats"].keys()
            record["stats"] = {name: record["stats"][name] for name in _OWN}
        for beam in record.get("beams", []):
            beam["logprob"], beam["score"] = round(beam["logprob"], 4), round(beam["score"], 4)
        lines.append(json.dumps(record))
    return lines


def batch(chosen: Loaded, source: Path, output: Path, rank: int, world: int, log: int) -> int:
    """Fork a process that runs the batch; its pid."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    try:
        run_file(chosen, source, output, lambda line: None, bar=False, batch="3")  # type: ignore[arg-type]
        os._exit(0)
    except (KeyboardInterrupt, Stopped):
        os._exit(130)
    except BaseException:
        os.write(log, traceback.format_exc().encode())
        os._exit(1)


def main() -> None:
    target, draft, source, folder, kills, world = sys.argv[1:]
    decoder = Decoder.from_pair(target, draft)
    chosen = Loaded(decoder, Settings(seed=5, max_new_tokens=16))
    whole, cut = Path(folder) / "whole.jsonl", Path(folder) / "cut.jsonl"
    began = time.monotonic()
    os.waitpid(batch(chosen, Path(source), whole, 0, 1, 2), 0)
    usual = time.monotonic() - began
    chance = random.Random(7)
    hurt = torn = resumed = 0
    while True:
        ranks = int(world) if hurt < int(kills) else 1
        pids = [batch(chosen, Path(source), cut, rank, ranks, 2) for rank in range(ranks)]
        if hurt < int(kills):
            time.sleep(chance.uniform(0.0, 0.7 * usual))
            for pid in pids:
                os.kill(pid, chance.choice([signal.SIGKILL, signal.SIGINT]))
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if set(codes) - {0, 130, -signal.SIGKILL, -signal.SIGINT}:
            sys.exit(f"a batch broke: {codes}")
        if hurt >= int(kills) and codes == [0]:
            break
        hurt += 1
        if cut.exists():
            resumed = max(resumed, len(cut.read_bytes().splitlines()))
            # A cut inside a line is rare by itself: make it happen.
            if chance.random() < 0.3 and ranks == 1 and cut.stat().st_size > 40:
                os.truncate(cut, cut.stat().st_size - chance.randint(1, 40))
                torn += 1
    same = unmeasured(whole) == unmeasured(cut)
    left = sorted(path.name for path in Path(folder).iterdir())
    print(json.dumps({"same": same, "hurt": hurt, "torn": torn, "resumed": resumed, "left": left}))


if __name__ == "__main__":
    main()
