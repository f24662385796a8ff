"""`dsbd distill`: make a draft for a target, and measure one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make a draft model from the target alone, or measure one.", no_args_is_help=True)


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    target: Annotated[str | None, typer.Option(help="Target model: folder, hub id or GGUF file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the draft; a killed run goes on from it.")] = None,
    keep: Annotated[str | None, typer.Option(help="Target layers the draft starts from, such as 0,1,2,29.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers instead: the first ones and the last.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time for training.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps (instead of, or besides, --minutes).")] = None,
    tokens: Annotated[int | None, typer.Option(help="Answer tokens to sample.")] = None,
    sample_minutes: Annotated[float | None, typer.Option(help="Time for sampling.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Prompts to mix in: JSONL with `prompt`, or text lines.")] = None,
    share: Annotated[float, typer.Option(min=0, max=1, help="Part of the prompts taken from that file.")] = 0.3,
    share_embeddings: Annotated[
        bool, typer.Option("--share-embeddings", help="Leave the embeddings out; the target lends its own.")
    ] = False,
    start: Annotated[
        Path | None, typer.Option("--from", help="Go on training the draft in this folder (same --keep).")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run one step alone: sample or train.")] = None,
    watch: Annotated[
        list[Path] | None, typer.Option(help="Stored answers to log overlap on while training (not chosen by).")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Sequences sampled at once (default 2048 on a GPU, 64 else).")] = None,
    shard: Annotated[int | None, typer.Option(help="Sequences a shard file (default 8 x rows).")] = None,
    max_length: Annotated[int, typer.Option(help="Longest sequence in tokens.")] = 768,
    batch_tokens: Annotated[int | None, typer.Option(help="Padded tokens a training step and process.")] = None,
    rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-3,
    warmup: Annotated[int, typer.Option(help="Steps to the peak rate.")] = 100,
    optimizer: Annotated[str, typer.Option(help="muon or adamw.")] = "muon",
    finish: Annotated[float, typer.Option(min=0, max=1, help="Last part trained on the warped overlap too.")] = 0.3,
    compile_: Annotated[bool, typer.Option("--compile/--no-compile", help="torch.compile the layers.")] = False,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of sampling and training.")] = 0,
) -> None:
    """Sample from the target, train a draft on it, and measure the draft: three steps, each resumable."""
    if context.invoked_subcommand is not None:
        return
    from dataclasses import replace

    import torch
    from rich.console import Console
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dsbd_cli.distill.pipeline import DistillOptions, command_line, distill, parse_keep
    from dsbd_cli.distill.sample import SampleOptions
    from dsbd_cli.distill.train import TrainOptions
    from dsbd_cli.distill.world import join_world
    from dsbd_cli.errors import UserError

    if target is None or out is None:
        raise UserError("dsbd distill needs --target and --out")
    world = join_world(device)
    gpu = world.device.type == "cuda"
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    rows = rows or (2048 if gpu else 64)
    sampling = SampleOptions(
        tokens=tokens, minutes=sample_minutes, share=share, shard=shard or 8 * rows, seed=seed
    )
    training = TrainOptions(
        minutes=minutes, steps=steps, rate=rate, warmup=warmup, optimizer=optimizer, finish=finish,
        batch_tokens=batch_tokens or (65536 if gpu else 2048), seed=seed, compile=compile_,
    )  # fmt: skip
    options = DistillOptions(
        out=out, keep=parse_keep(keep, layers, model.config.num_hidden_layers), share_embeddings=share_embeddings,
        prompts=prompts, max_length=max_length, rows=rows, sample=sampling, train=replace(training),
        watch={path.name: path for path in watch or []}, only=only, start=start,
    )  # fmt: skip
    try:
        distill(model, tokenizer, options, world, Console(stderr=True), command_line())
    finally:
        world.close()


if __name__ == "__main__":
    app()
