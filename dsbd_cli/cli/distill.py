"""`dsbd distill`: make a draft for a target from the target alone, and measure any draft.

One module, since most of it is the two commands' options.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsbd_cli.counted import counted

if TYPE_CHECKING:
    from dsbd_cli.distill.evaluate import TokenFigures
    from dsbd_cli.distill.metrics import Warp
    from dsbd_cli.distill.shards import Sequences
    from dsbd_cli.loading import Pair

ANSWERS = "answers.tokens.safetensors"
app = typer.Typer()


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Target: folder, hub id, GGUF file or wheel.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The draft's folder; a killed run goes on from it.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the draft, spread evenly (4).")] = None,
    keep: Annotated[
        str | None, typer.Option(help="Which of the target's layers instead, such as 0,10,20,29.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Time for training (30, unless --steps).")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of training, instead of a time.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Answer tokens to sample.")] = None,
    sample_minutes: Annotated[
        float | None, typer.Option(min=0, help="Time for sampling (half of --minutes, unless --tokens).")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts to mix in: JSONL with `prompt` or `messages`, or a text line each."),
    ] = None,
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the prompts taken from that file.")
    ] = 0.3,
    start: Annotated[
        Path | None, typer.Option("--from", help="Go on training the draft in this folder (same --keep).")
    ] = None,
    share_embeddings: Annotated[
        bool,
        typer.Option("--share-embeddings", help="Store no embeddings: the target lends its own (int8 rows)."),
    ] = False,
    only: Annotated[str | None, typer.Option(help="One step alone: sample or train.")] = None,
    watch: Annotated[
        list[Path] | None, typer.Option(help="Stored answers to follow while training, and to evaluate on.")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences sampled at once (by memory; at most GPU 2048, CPU 64)."),
    ] = None,
    shard: Annotated[
        int | None, typer.Option(min=1, help="Sequences a shard file (four times --rows).")
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer to a prompt of its own.")] = 160,
    max_length: Annotated[int, typer.Option(min=8, help="Longest sequence, prompt included.")] = 768,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens a step (by the width; at most GPU 65536, CPU 2048).")
    ] = None,
    rate: Annotated[float, typer.Option(min=0, max=1, help="Peak learning rate.")] = 2e-3,
    warmup: Annotated[int, typer.Option(min=0, help="Steps to the peak rate.")] = 100,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    finish: Annotated[
        float, typer.Option(min=0, max=1, help="Last part of training, on the warped overlap too.")
    ] = 0.5,
    compile_: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="torch.compile the layers (default: on a GPU)."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling and training.")] = 0,
) -> None:
    """Make a draft for TARGET from the target alone: sample, train, evaluate; each step resumes where it was.

    Sampling takes 15 minutes and training 30 where nothing else is said.
    """
    if context.invoked_subcommand is not None:
        return
    from rich.console import Console

    from dsbd_cli.cli.output import note
    from dsbd_cli.distill.log import ahead
    from dsbd_cli.distill.pipeline import DistillOptions, command_line, distill, parse_keep
    from dsbd_cli.distill.sample import SampleOptions
    from dsbd_cli.distill.train import TrainOptions
    from dsbd_cli.distill.world import World
    from dsbd_cli.errors import UserError
    from dsbd_cli.paths import refuse_no_folder

    if target is None or out is None:
        lack = [name for name, value in (("--target", target), ("--out", out)) if value is None]
        raise UserError(
            f"{' and '.join(lack)} {'is' if len(lack) == 1 else 'are'} missing: dsbd distill --target MODEL --out DIR "
            "makes a draft, dsbd distill evaluate measures one (see dsbd distill --help)"
        )
    if only not in (None, "sample", "train"):
        raise UserError(f"--only {only}: must be sample or train")
    if optimizer not in ("adamw", "muon"):
        raise UserError(f"--optimizer {optimizer}: must be adamw or muon")
    _refuse_unread(context, "share", prompts is None, "without --prompts")
    _refuse_unread(context, "tokens", only == "train", "with --only train")
    _refuse_unread(context, "sample_minutes", only == "train", "with --only train")
    refuse_no_folder(out, "--out")
    if minutes is None and steps is None:
        minutes = 30.0
    if tokens is None and sample_minutes is None:
        sample_minutes = minutes / 2 if minutes is not None else 15.0
    world = World(device)
    gpu = world.device.type == "cuda"
    pair = _load(target, None, world.device.type if world.size == 1 else "cpu", quiet=not world.first)
    # Activations grow with the width: 65,536 tokens at 576, the size this was tuned at.
    room = max(1024, int(65536 * min(1.0, 576 / pair.target.model.config.get_text_config().hidden_size)))
    options = DistillOptions(
        out=out, keep=parse_keep(keep, layers, pair.target.model.config.num_hidden_layers), start=start,
        share_embeddings=share_embeddings, prompts=prompts, max_length=max_length, rows=rows,
        sample=SampleOptions(
            tokens=tokens, minutes=sample_minutes, share=share, shard=shard, seed=seed,
            answer=answer_tokens,
        ),
        train=TrainOptions(
            minutes=minutes, steps=steps, rate=rate, warmup=warmup, optimizer=optimizer, finish=finish,
            batch_tokens=batch_tokens or (room if gpu else 2048), seed=seed,
            compile=gpu if compile_ is None else compile_,
        ),
        watch={path.name: path for path in watch or []}, only=only,
    )  # fmt: skip
    if world.first:  # nobody should learn by waiting that this is no matter of seconds
        note(ahead(only, (sample_minutes, tokens), (minutes, steps)))
    try:
        record = distill(
            pair.target.model,
            pair.tokenizer,
            pair.eos_ids,
            options,
            world,
            Console(stderr=True),
            command_line(),
        )
    finally:
        world.close()
    if world.first and "evaluation" in record:
        _print_report(record["evaluation"], out)


def _refuse_unread(context: typer.Context, name: str, unread: bool, why: str) -> None:
    """Refuse an option that was given where nothing reads it."""
    from dsbd_cli.cli.options import was_given
    from dsbd_cli.errors import UserError

    if unread and was_given(context, name):
        raise UserError(f"--{name.replace('_', '-')} has no effect {why}: leave it out")


@app.command(short_help="Measure a draft on its target's own answers.")
def evaluate(
    context: typer.Context,
    target: Annotated[str, typer.Option(help="Target: folder, hub id, GGUF file or wheel.")],
    draft: Annotated[str, typer.Option(help="Draft: the same, or embedded:NAME.")],
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts the target answers first: JSONL or a text line each.")
    ] = None,
    answers: Annotated[
        Path | None,
        typer.Option(help="Answers of the target's, stored before; the default beside an embedded draft."),
    ] = None,
    save_answers: Annotated[
        Path | None, typer.Option(help="Store the answers written for --prompts.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many answers of each set.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=1e-3, max=1e3, help="T of the decoding.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Top-k of the decoding, 0 = off.")] = 10,
    top_p: Annotated[float, typer.Option(min=1e-6, max=1, help="Top-p of the decoding, 1 = off.")] = 0.8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    width: Annotated[int, typer.Option(min=1, help="Beams of the prediction.")] = 4,
    draft_width: Annotated[int, typer.Option(min=1, help="Covered continuations of the prediction.")] = 4,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the answers.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Measure DRAFT on TARGET's own answers: overlap, coverage, and the speed-up they predict here."""
    from rich.console import Console

    from dsbd_cli.distill import evaluate as evaluation
    from dsbd_cli.distill import prompts as sources
    from dsbd_cli.distill import shards
    from dsbd_cli.distill.cost import Costs
    from dsbd_cli.distill.log import Step
    from dsbd_cli.distill.metrics import Warp
    from dsbd_cli.errors import UserError
    from dsbd_cli.paths import refuse_unwritable

    if prompts is not None and answers is not None:
        raise UserError("give --prompts or --answers, not both")
    for name in ("save_answers", "max_new_tokens", "seed"):
        _refuse_unread(context, name, prompts is None, "without --prompts")
    if save_answers is not None:
        refuse_unwritable(save_answers, "--save-answers")
        if save_answers.exists():
            raise UserError(
                f"--save-answers {save_answers} is there already: give another name, or remove it first"
            )
    if prompts is None and answers is None:
        answers = _stored_answers(draft)
    pair = _load(target, draft, device)
    assert pair.draft is not None
    warp = Warp(temperature, top_k, top_p)
    view = Console(stderr=True)
    with Step(view, "answers") as step:
        if answers is not None:
            whole = shards.load(answers)
        else:
            assert prompts is not None
            whole = evaluation.write_answers(
                pair.target.model, pair.tokenizer, sources.read_prompts(prompts), pair.eos_ids,
                evaluation.AnswerOptions(max_new_tokens, warp, seed), step.update,
            )  # fmt: skip
            if save_answers is not None:
                shards.save(whole, save_answers)
    figures = _measure(pair, whole, warp, limit, view)
    names = pair.target.name, pair.draft.name
    del pair  # room for the pair in the formats that decoding uses
    decoding = _load(target, draft, device, quiet=True, dtype="auto")
    assert decoding.draft is not None
    costs = Costs({"target": decoding.target.model, "draft": decoding.draft.model})
    predicted = evaluation.predictions(evaluation.merge(list(figures.values())), costs, width, draft_width)
    report = {
        "target": names[0], "draft": names[1],
        "sets": {name: evaluation.summary(found) for name, found in figures.items()},
        "predicted": predicted,
        "milliseconds": {f"{name} {count}": round(ms, 3) for (name, count), ms in sorted(costs.known.items())},
    }  # fmt: skip
    if json_:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        _print_report(report, None, width, draft_width)


def _load(target: str, draft: str | None, device: str, quiet: bool = False, dtype: str = "float32") -> Pair:
    from dsbd_cli.loading import PairSpec, load_pair
    from dsbd_cli.loading.progress import TerminalProgress, silent

    spec = PairSpec(
        target,
        draft,
        target_device=device,
        draft_device=device,
        target_dtype=dtype,
        draft_dtype=dtype,
    )
    if quiet:
        return load_pair(spec, need_draft=draft is not None, progress=silent)
    with TerminalProgress() as progress:
        return load_pair(spec, need_draft=draft is not None, progress=progress)


def _stored_answers(draft: str) -> Path:
    from dsbd_cli.errors import UserError
    from dsbd_cli.loading.source import parse_source

    folder = parse_source(draft, "draft").path
    if folder is None or not (folder / ANSWERS).is_file():
        raise UserError(f"draft {draft} has no stored answers beside it: give --prompts or --answers")
    return folder / ANSWERS


def _measure(
    pair: Pair, answers: Sequences, warp: Warp, limit: int | None, view: Any
) -> dict[str, TokenFigures]:
    from dsbd_cli.distill import evaluate as evaluation
    from dsbd_cli.distill.log import Step

    assert pair.draft is not None
    found = {}
    with Step(view, "evaluate") as step:
        for name, part in evaluation.by_set(answers).items():
            if limit is not None:
                part = part.take(range(min(limit, len(part))))

            def tell(done: int, total: int, name: str = name) -> None:
                step.update(done, total, name)

            found[name] = evaluation.measure(pair.target.model, pair.draft.model, part, warp, tell)
    return found


def _print_report(report: dict[str, Any], out: Path | None, width: int = 4, draft_width: int = 4) -> None:
    """The figures as two tables on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "set", "tokens", "overlap raw", "warped", "top-1", "cover 2", "4", "6", title="Draft against target"
    )
    for name, row in report["sets"].items():
        keys = ("raw", "warped", "agree", "cover_2", "cover_4", "cover_6")
        table.add_row(name, f"{row['tokens']:,}", *(f"{row[key]:.3f}" for key in keys))
    console.print(table)
    beams = counted(width, "beam")
    title = "Predicted from these and from forward times measured here"
    table = Table("gamma", "layers/call", "speed-up", f"{beams}: layers/call", "speed-up", title=title)
    for row in report["predicted"]:
        columns = ("one_layers", "one_speedup", "beam_layers", "beam_speedup")
        table.add_row(str(row["gamma"]), *(f"{row[key]:.2f}" for key in columns))
    console.print(table)
    console.print(
        f"One beam: speculation against plain sampling. {beams}: the cover rule with {draft_width} "
        "continuations, against beam sampling."
    )
    if out is not None:
        console.print(f"The draft is in {out}; how it was made, in {out / 'provenance.json'}.")


if __name__ == "__main__":  # for torchrun -m dsbd_cli.cli.distill, one process a GPU
    app()
