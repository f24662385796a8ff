"""The three steps in order, in one folder that remembers how far it came."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from dsbd_cli.counted import counted
from dsbd_cli.distill import batches, shards
from dsbd_cli.distill import draft as drafts
from dsbd_cli.distill import evaluate as evaluation
from dsbd_cli.distill import prompts as sources
from dsbd_cli.distill.cost import Costs
from dsbd_cli.distill.engine import Engine
from dsbd_cli.distill.log import RunLog, Step
from dsbd_cli.distill.sample import SampleOptions, sample
from dsbd_cli.distill.train import Trainer, TrainOptions
from dsbd_cli.distill.world import World
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_folder
from dsbd_cli.version import __version__

# Held-out sequences measured at the end, where no answers of the user's are watched.
HELD_SEQUENCES = 64


@dataclass(frozen=True)
class DistillOptions:
    """Everything a run needs besides the target; see `SampleOptions` and `TrainOptions`.

    Attributes:
        out: the draft's folder; `work` inside it holds shards and checkpoint, `log.jsonl` the log.
        keep: target layers the draft starts from; `start` replaces their weights by an earlier draft's.
        max_length, rows: longest sequence, and how many are sampled at once (None: as memory allows).
        watch: stored answers by name, logged on while training and evaluated on at the end.
        only: `sample` or `train` for one step alone.
    """

    out: Path
    keep: tuple[int, ...]
    start: Path | None = None
    share_embeddings: bool = False
    prompts: Path | None = None
    max_length: int = 768
    rows: int | None = None
    sample: SampleOptions = field(default_factory=SampleOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    watch: dict[str, Path] = field(default_factory=dict)
    only: str | None = None


def hardware(world: World) -> str:
    """The machine in words: accelerators, or the processor's cores."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        return name if world.size == 1 else f"{world.size} x {name}"
    return f"{platform.machine()} CPU, {counted(torch.get_num_threads(), 'thread')}"


def watch_sets(paths: dict[str, Path]) -> dict[str, shards.Sequences]:
    """Stored answers by set; a file without sets goes by its name."""
    found: dict[str, shards.Sequences] = {}
    for name, path in paths.items():
        whole = shards.load(path)
        parts = evaluation.by_set(whole)
        found |= parts if whole.meta.get("sets") else {name: whole}
    return found


def distill(
    target: Any, tokenizer: Any, ends: Sequence[int], options: DistillOptions, world: World,
    console: Console | None, command: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Run the steps that are still to do; returns the provenance record.

    Args:
        target: the target in float32; moved to the world's device here.
        ends: ids that end an answer.

    Raises:
        UserError, RunError: see the steps.
    """
    work = options.out / "work"
    make_folder(work, f"--out {options.out}")
    log = RunLog(options.out / "log.jsonl")
    view = console if world.first else None
    began = time.time()
    if world.first:
        log.write("start", command=list(command), hardware=hardware(world), keep=list(options.keep))
    draft = drafts.prune(target, options.keep).to(world.device).eval()
    if options.start is not None:
        drafts.start_from(draft, options.start)
    kind = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    target = target.to(world.device, kind).eval().requires_grad_(False)
    facts: dict[str, Any] = {}
    if options.only != "train":
        facts["sampled"] = _sample_step(target, tokenizer, ends, options, work, world, log, view)
    world.wait()
    if options.only == "sample":
        return facts
    sequences = shards.load_folder(work / "shards")
    watched = watch_sets(options.watch)
    with Step(view, "train") as step:
        step.say(
            f"{counted(len(sequences), 'sequence', form=',')}, "
            f"{counted(sequences.answer_tokens, 'answer token', form=',')}"
        )
        trainer = Trainer(target, draft, sequences, options.train, work, world, log, watched)
        if trainer.resume():
            step.say(f"going on from step {trainer.step}")
        result = trainer.run(step)
    if world.first:
        drafts.load_own_state(draft, result.pop("state"))
        drafts.save_draft(draft, options.out, options.share_embeddings, tokenizer)
        if options.share_embeddings:
            draft = drafts.load_shared_draft(
                options.out, target
            )  # as stored: what is measured is what is used
        if options.only is None:
            held = batches.split(len(sequences), options.train.hold_out, HELD_SEQUENCES, options.train.seed)[
                1
            ]
            answers = {"held out": sequences.take(held), **watched}
            facts["evaluation"] = _evaluate_step(target, draft.to(kind).eval(), answers, options, view)
        record = {
            "made_by": f"dsbd-cli {__version__}", "command": list(command), "hardware": hardware(world),
            "software": {
                "python": platform.python_version(), "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
            "keep": list(options.keep), "seeds": {"sample": options.sample.seed, "train": options.train.seed},
            "answer_tokens": sequences.answer_tokens, "sequences": len(sequences),
            "sampling": asdict(options.sample), "training": asdict(options.train), "result": result,
            **facts, "seconds": round(time.time() - began, 1),
        }  # fmt: skip
        drafts.write_json(options.out / "provenance.json", record)
        log.write("done", seconds=record["seconds"])
        facts = record
    world.wait()
    return facts


def fitting_rows(target: Any, size: int, device: torch.device) -> int:
    """Rows of `size` tokens whose keys and values take half of the free memory (on a CPU: 4 GB), within reason."""
    config = target.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = next(target.parameters()).element_size()
    row = 2 * config.num_hidden_layers * heads * head_dim * width * size
    if device.type == "cuda":
        return max(1, min(2048, torch.cuda.mem_get_info(device)[0] // 2 // row))
    return max(1, min(64, 4 * 10**9 // row))


def _sample_step(
    target: Any, tokenizer: Any, ends: Sequence[int], options: DistillOptions, work: Path, world: World,
    log: RunLog, view: Console | None,
) -> dict[str, Any]:  # fmt: skip
    form = sources.chat_form(tokenizer)
    encoded = []
    if options.prompts is not None:
        encoded = [sources.encode_prompt(tokenizer, p.text) for p in sources.read_prompts(options.prompts)]
    rows = options.rows or fitting_rows(target, options.max_length, world.device)
    engine = Engine(target, rows, options.max_length, ends, len(tokenizer))
    with Step(view, "sample") as step:
        facts = sample(engine, form, encoded, options.sample, work / "shards", world, log, step)
    del engine
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return facts


def _evaluate_step(
    target: Any,
    draft: Any,
    answers: dict[str, shards.Sequences],
    options: DistillOptions,
    view: Console | None,
) -> dict[str, Any]:
    found = {}
    with Step(view, "evaluate") as step:
        for name, part in answers.items():

            def tell(done: int, total: int, name: str = name) -> None:
                step.update(done, total, name)

            found[name] = evaluation.measure(target, draft, part, options.train.warp, tell)
    costs = Costs({"target": target, "draft": draft})
    predicted = evaluation.predictions(evaluation.merge(list(found.values())), costs)
    return {
        "sets": {name: evaluation.summary(figures) for name, figures in found.items()},
        "predicted": predicted,
        "milliseconds": {
            f"{name} {count}": round(ms, 3) for (name, count), ms in sorted(costs.known.items())
        },
    }


def parse_keep(keep: str | None, layers: int | None, total: int) -> tuple[int, ...]:
    """Layers to keep from `--keep 0,1,2,29` or `--layers 4`.

    Raises:
        UserError: both or not numbers.
    """
    if keep is not None and layers is not None:
        raise UserError("give --keep or --layers, not both")
    if keep is None:
        return tuple(drafts.choose_layers(total, layers if layers is not None else min(4, total)))
    try:
        return tuple(int(part) for part in keep.split(","))
    except ValueError:
        raise UserError(f"--keep {keep}: expected layer numbers with commas, such as 0,1,2,29") from None


def command_line() -> list[str]:
    return ["dsbd", *sys.argv[1:]]
