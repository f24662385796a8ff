"""One of the processes that hold a target together: decodes what a file asks for, the first writes the answers.

RANK=R WORLD_SIZE=N MASTER_ADDR=... MASTER_PORT=... python -m tests.decoding.forward.split_worker ASKED ANSWERS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from dsbd_cli import Decoder
from dsbd_cli.decoding import HfTreeModel
from dsbd_cli.errors import UserError
from dsbd_cli.settings import Settings


def answers(asked: dict[str, Any], processes: int) -> dict[str, Any]:
    """Token ids of every prompt by model and way; what was refused by model."""
    found: dict[str, Any] = {}
    for name, folder in asked["models"].items():
        try:
            decoder = Decoder.from_pair(
                folder, asked["draft"], device="cpu", dtype="float32", tensor_parallel=processes
            )
        except UserError as error:
            found[name] = str(error)
            continue
        ways: dict[str, Any] = {}
        for way, values in asked["ways"].items():
            settings = [Settings(seed=seed, **values) for seed in range(len(asked["prompts"]))]
            ways[way] = [
                [list(beam.token_ids) for beam in decoder.generate(prompt, one, energy=False).beams]
                for prompt, one in zip(asked["prompts"], settings, strict=True)
            ]
        together = decoder.generate_many(asked["prompts"], settings, batch=2)
        ways["batch"] = [[list(beam.token_ids) for beam in one.beams] for one in together]
        ways["device"] = on_the_device(decoder, asked["prompts"])
        ways["forward"] = decoder.describe()["target forward"]
        found[name] = ways
    # A seed that nobody gave is the same for all, or they would part.
    drawn = decoder.generate(asked["prompts"][0], Settings(max_new_tokens=4, prices="off"), energy=False)
    found["drawn"] = [drawn.seed, list(drawn.token_ids)]
    return found


def on_the_device(decoder: Decoder, prompts: list[str]) -> Any:
    """The same in iterations that verify beside the forwards and run ahead, as on a card; alone and together."""
    pair = decoder.pair
    decoder.target, decoder.draft = (
        HfTreeModel(one, vocab_size=pair.vocab_size, role=role, graphs=True)
        for role, one in (("target", pair.target), ("draft", pair.draft))
    )
    settings = [
        Settings(width=3, draft_width=4, gamma=2, max_new_tokens=12, seed=seed, forest="full")
        for seed in range(len(prompts))
    ]
    alone = [decoder.generate(*one, energy=False) for one in zip(prompts, settings, strict=True)]
    engine = decoder.describe()["engine"]
    together = list(decoder.generate_many(prompts, settings, batch=2))
    return [engine, [[list(beam.token_ids) for beam in one.beams] for one in [*alone, *together]]]


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    found = answers(asked, int(os.environ["WORLD_SIZE"]))
    Path(f"{sys.argv[2]}.{os.environ['RANK']}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
