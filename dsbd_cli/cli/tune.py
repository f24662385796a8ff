"""`dsbd tune`: the quickest settings of this machine, this pair and a user's own prompts, as a preset."""

from __future__ import annotations

import json as encoder
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsbd_cli.cli.options import Chosen, decoding_options
from dsbd_cli.cli.output import Out, note
from dsbd_cli.cli.stdin import stdin_lines, text_waits
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_parents, refuse_special, refuse_unwritable, write_whole
from dsbd_cli.setting_text import told
from dsbd_cli.ui.look import columns_of, is_terminal, panel_stream

if TYPE_CHECKING:
    from dsbd_cli.prompts import Prompt
    from dsbd_cli.settings import Settings
    from dsbd_cli.tune.search import Outcome

# Prompts and tokens of an answer that are enough to tell settings apart; more only takes longer.
_PROMPTS, _TOKENS = 4, 64
_QUICK_PROMPTS, _QUICK_TOKENS = 2, 32
_EVERY = 16  # answers between two lines in a pipe


@decoding_options
def tune(
    chosen: Chosen,
    prompts: Annotated[
        str | None,
        typer.Argument(
            help="Your prompts: a .txt (one a line) or .jsonl file, or `-` for lines of stdin; a built-in sample if "
            "absent. The first four are used."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The preset to write, for --preset.")] = Path(
        "tuned.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Write over a preset that is there.")] = False,
    loss: Annotated[
        float,
        typer.Option(
            "--loss",
            min=0,
            help="Log-probability a token that may be given up for speed, by narrower layers; 0 keeps the law "
            "of the settings given.",
        ),
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials, prompts and tokens.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
) -> None:
    """Find the quickest settings for this machine, this pair and your prompts, and write a preset.

    What forwards cost and what the target accepts of the draft is measured, every setting predicted, and the
    most promising ones compared on real answers, in turns. Ratios are medians of answers to the same prompt.
    """
    chosen.check()
    spec, settings = chosen.resolve()
    if spec.tensor_parallel > 1:
        raise UserError(
            "tune compares times, which differ from process to process: leave --tensor-parallel out"
        )
    if settings.method not in ("dsbd", "speculative"):
        raise UserError(
            f"tune chooses forests, and {settings.method} drafts none of its own: give --method dsbd"
        )
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"--out {out}: a preset's name ends in .yaml")
    refuse_unwritable(out, "--out")
    refuse_special(out, f"--out {out}", "name a file")
    if out.exists() and not force:
        raise UserError(f"--out {out} is there already: give --force to write over it, or another name")
    if prompts not in (None, "-") and text_waits():
        note(f"stdin is not read: the prompts are those of {prompts} (give - instead to read stdin)")
    texts = _prompts(prompts, settings)[: _QUICK_PROMPTS if quick else _PROMPTS]
    decoder = chosen.load()
    for line in chosen.notes(decoder):
        note(line)

    from dsbd_cli.presets import Preset, to_yaml
    from dsbd_cli.tune.pair import PairBench
    from dsbd_cli.tune.search import tune as search

    bench = PairBench(decoder, texts, _QUICK_TOKENS if quick else _TOKENS, note)
    with _progress() as (tell, step):
        found = search(bench, settings, quick=quick, loss=loss, tell=tell, step=step)
    best = found.best
    origin = decoder.named(decoder.prices.measured().prices.origin)  # type: ignore[union-attr]
    why = {"preset": f"dsbd tune: {_verdict(found)}, on {counted(len(texts), 'prompt')}; prices: {origin}"}
    kept = chosen.without("seed")  # it was for the measuring: with it every answer of the preset would be one
    written = best.settings.merged({"seed": kept.resolve()[1].seed})
    text = to_yaml(Preset(out.stem, spec, written, why))
    make_parents(out, "--out")
    write_whole(out, text)
    if json:
        Out().write_json(encoder.dumps(_report(found, out, written), ensure_ascii=False) + "\n")
    else:
        stays = f"{_verdict(found)}\n" if best is found.base else ""
        given = _given(kept, text)
        line = f"{out}: {best.name()}{f'; as given: {given}' if given else ''}"
        Out().write(_table(found, columns_of(sys.stdout)) + stays + line + "\n")


def _given(chosen: Chosen, preset: str) -> str:
    """What the command line said and the preset keeps, less what the name of a trial tells."""
    from dsbd_cli.tune.search import NAMED

    held = {line.partition(":")[0] for line in preset.splitlines()}
    given = {name: value for name, value in {**chosen.spec, **chosen.settings}.items()
             if name in held and name not in NAMED}  # fmt: skip
    return ", ".join(told(name, value) for name, value in given.items())


def _verdict(found: Outcome) -> str:
    """What came of it, in words."""
    from dsbd_cli.tune.search import speed

    if found.best is not found.base:
        return f"{speed(found.best, found.base):.2f} times the speed of the settings it began with"
    if found.trials[0] is found.base:
        return "nothing was quicker than the settings it began with"
    return "no difference shown: the settings it began with stay"


def _prompts(source: str | None, settings: Settings) -> list[Prompt]:
    """The user's prompts, or the built-in sample.

    Raises:
        UserError: a file without prompts, one that cannot be read, or with messages where `settings` are raw.
    """
    # A pipe that holds nothing (a job without stdin) is no prompts given.
    if source is None and not is_terminal(sys.stdin) and (lines := _stdin_texts()):
        return list(lines)
    if source == "-":
        if not (lines := _stdin_texts()):
            raise UserError("stdin holds no prompt: a line each")
        return list(lines)
    if source is not None:
        from dsbd_cli.batch.items import read_items, refuse_raw
        from dsbd_cli.messages import is_blank

        items, _ = read_items(Path(source), option="")
        refuse_raw(items, settings, source)
        kept: list[Prompt] = [item.prompt for item in items if not is_blank(item.prompt)]
        if not kept:
            raise UserError(f"{source} holds no prompt")
        return kept
    from dsbd_cli.bench.datasets.sample import source as samples

    questions = (samples() / "mt_bench" / "question.jsonl").read_text(encoding="utf-8").splitlines()
    return [encoder.loads(line)["turns"][0] for line in questions]


def _stdin_texts() -> list[str]:
    """The lines of stdin that say something; told if one is most likely meant as JSON Lines."""
    from dsbd_cli.batch.items import json_note

    numbered = [(number, line) for number, line in enumerate(stdin_lines(), start=1) if line.strip()]
    looks = (json_note(*one, "stdin is read as texts; a .jsonl file takes {}") for one in numbered)
    if line := next(filter(None, looks), None):
        note(line)
    return [text for _, text in numbered]


def _report(found: Outcome, out: Path, written: Settings) -> dict[str, Any]:
    from dsbd_cli.tune.search import speed

    return {
        "preset": str(out),
        "best": written.to_dict(),
        "verdict": _verdict(found),
        "trials": [
            {
                "name": one.name(),
                "predicted_tokens_per_s": one.predicted,
                "tokens_per_s": one.measured,
                "ratio": speed(one, found.base),
                "logprob_per_token": one.logprob,
            }
            for one in found.trials
        ],
    }


def _table(found: Outcome, columns: int | None) -> str:
    """What was measured, the quickest first, in `columns` of a terminal."""
    from dsbd_cli.tune.search import speed

    rows = ["  ratio   tok/s  predicted  logp/tok  settings"]
    for one in found.trials:
        mark = "*" if one is found.best else " "
        rows.append(
            f"{mark} {speed(one, found.base):5.2f} {one.measured:7.1f} {one.predicted:10.1f} {one.logprob:9.3f}  "
            f"{one.name()}{' (as given)' if one is found.base else ''}"
        )
    if columns is not None:
        indent = " " * rows[0].index("settings")
        rows = [textwrap.fill(row, columns, subsequent_indent=indent, drop_whitespace=True) for row in rows]
    return "\n".join(rows) + "\n"


@contextmanager
def _progress() -> Iterator[tuple[Any, Any]]:
    """(tell, step): a bar at a terminal, a line now and then elsewhere; both on stderr."""
    if panel_stream() is not sys.stderr:

        def step(done: int, total: int) -> None:
            if done and (done % _EVERY == 0 or done == total):
                note(f"{done} of {counted(total, 'answer')}")

        yield note, step
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    # What is measured first has no count: the clock beside it says that it goes on.
    columns = TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[count]}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, count="")

        def tell(line: str) -> None:
            bar.update(task, description=line, refresh=True)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, count=f"{done}/{total}", refresh=True)

        yield tell, advance
