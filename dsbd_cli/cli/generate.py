"""`dsbd generate`: one prompt in, the answer on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsbd_cli.batch import AUTO
from dsbd_cli.cli.options import Chosen, decoding_options
from dsbd_cli.cli.output import Out, StdoutError, figures, note, print_answer
from dsbd_cli.cli.stdin import read_prompt, text_waits
from dsbd_cli.errors import UserError
from dsbd_cli.group import joined
from dsbd_cli.idle import draws_nothing
from dsbd_cli.paths import refuse_foreign, refuse_unwritable
from dsbd_cli.trace import RECORD
from dsbd_cli.ui.look import is_terminal, panel_stream
from dsbd_cli.ui.summary import few_beams, unfinished
from dsbd_cli.wording import said

if TYPE_CHECKING:
    from dsbd_cli.decoding import Event
    from dsbd_cli.result import Result

BATCH = "Many prompts"


@decoding_options
def generate(
    chosen: Chosen,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; from stdin if absent or `-`.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object with beams and statistics.")] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the statistics to stderr afterwards.")
    ] = False,
    show_tokens: Annotated[
        bool, typer.Option("--show-tokens", help="Print the prompt's token ids to stderr.")
    ] = False,
    no_stream: Annotated[bool, typer.Option("--no-stream", help="Print the answer only when done.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No panels, notes or progress.")] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Record every iteration here, for `dsbd trace`.")
    ] = None,
    lines: Annotated[
        bool,
        typer.Option(
            "--lines",
            help="Every line of stdin is a prompt; one line of output each: a JSON string, or with --json the "
            "whole object.",
            rich_help_panel=BATCH,
        ),
    ] = False,
    input: Annotated[
        Path | None,
        typer.Option(
            "--input",
            help="Prompts from a file, together with --output: .txt (one a line) or .jsonl (objects with prompt or "
            "messages).",
            rich_help_panel=BATCH,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            help="JSON Lines of the results of --input, in its order; the same command again goes on where "
            "it stopped. Under torchrun the prompts are shared out.",
            rich_help_panel=BATCH,
        ),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="N|auto",
            help="How many of them are decoded at a time: a number, auto (what this machine does well; the default), "
            "or 1. An answer does not depend on it.",
            rich_help_panel=BATCH,
        ),
    ] = None,
) -> None:
    """Decode a prompt and print the answer.

    At a terminal the answer grows in live panels; in a pipe, or with --no-stream or --json, stdout
    holds only the answer.
    """
    tell: Callable[[str], None] = (lambda line: None) if quiet else note
    team = chosen.team()
    if lines or input is not None or output is not None:
        from dsbd_cli.cli.batch import many

        if lines and prompt is not None and _is_file(prompt):
            raise UserError(f"--lines reads its prompts from stdin: dsbd generate --lines < {prompt}")
        refuse = {"a PROMPT": prompt is not None, "--trace": trace is not None, "--show-tokens": show_tokens}
        at_once = AUTO if batch is None else batch
        many(
            chosen,
            lines,
            input,
            output,
            tell,
            json=json,
            stats=stats,
            quiet=quiet,
            batch=at_once,
            refuse=refuse,
        )
        return
    if team.size > 1 and team.shard.world > 1:
        raise UserError(
            f"one prompt is for one team of {team.size} processes: for several, --input and --output"
        )
    if batch is not None:
        raise UserError("--batch is for many prompts: give --lines, or --input with --output")
    # Before stdin is read: whoever types a prompt there should not do so in vain.
    chosen.check()
    if trace is not None:
        refuse_unwritable(trace, "--trace")
        refuse_foreign(trace, "--trace", RECORD, "trace")
    text = read_prompt(prompt) if team.first else ""
    if prompt not in (None, "-") and text_waits():
        tell("stdin is not read: the prompt is the argument (leave it out, or give -, to read stdin)")
    if prompt is not None and _is_file(prompt):
        tell(f"{prompt} is a file, and its name is the prompt: dsbd generate < {prompt} reads it")
    decoder = chosen.load(quiet=quiet)
    text = joined().agreed(text)
    for line in chosen.notes(decoder):
        tell(line)
    settings = decoder.settings
    events: Iterable[Event] = decoder.stream(text, settings)
    with contextlib.ExitStack() as stack:
        if trace is not None and team.first:
            from dsbd_cli.trace.record import record

            events = stack.enter_context(record(events, trace, decoder, text))
        few: str | None = None
        if not (json or no_stream or quiet or settings.num_return > 1 or show_tokens) and at_terminal():
            from dsbd_cli.ui.panels import show

            result = show(events, decoder, text)
        else:
            stream = not (json or no_stream) and settings.num_return == 1
            notes: list[str] = []

            def hear(line: str) -> None:
                notes.append(line)
                tell(line)

            result = plain(events, hear, stream=stream, keep=not json, show_tokens=show_tokens, wrap=True)
            notes += [] if (few := few_beams(result)) is None else [few]
            write_answer(result, notes, json=json, streamed=stream)
            if not json and (cut := unfinished(result)) is not None:
                tell(cut)
        if stats:
            print_stats(result)
        if few is not None:
            tell(few)
        if settings.seed is None and not json and not draws_nothing(settings):
            tell(f"seed {result.seed}")


def _is_file(text: str) -> bool:
    """Whether a prompt is the name of a file that is there."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def at_terminal() -> bool:
    """Whether panels can be drawn and the answer is for a person's eyes."""
    return is_terminal(sys.stdout) and panel_stream() is not None


def plain(
    events: Iterable[Event],
    tell: Callable[[str], None],
    *,
    stream: bool,
    keep: bool = False,
    show_tokens: bool = False,
    wrap: bool = False,
) -> Result:
    """Consume the events without panels: confirmed text to stdout if `stream`, notices to `tell`.

    A run that is cut short ends its line; what it had confirmed is printed then, if not before
    (`keep`). With `wrap` lines end between words at a terminal.
    """
    from dsbd_cli.decoding import Finished, Notice, Prefilled, Text

    out, confirmed = Out(wrap=wrap), ""
    try:
        for event in events:
            if isinstance(event, Notice):
                tell(event.text)
            elif isinstance(event, Prefilled) and show_tokens:
                note("prompt tokens: " + " ".join(map(str, event.prompt_ids)))
            elif isinstance(event, Text):
                confirmed += event.new
                if stream:
                    out.write(event.new)
            elif isinstance(event, Finished):
                out.finish()
                return event.result
    except (OSError, StdoutError):
        raise  # stdout itself is what failed
    except BaseException:
        if confirmed and (stream or keep):
            out.finish()
            out.write("\n" if stream else confirmed + "\n")
        raise
    raise AssertionError("a stream ends with Finished")


def write_answer(result: Result, notes: Sequence[str], *, json: bool, streamed: bool) -> None:
    """What is left for stdout: one JSON line, the n best as JSON strings, or the text; one newline.

    Args:
        notes: what stderr is told of this prompt, which its JSON holds too.
    """
    import json as encoder

    out = Out()
    if json:
        record = result.to_dict() | ({"notes": list(notes)} if notes else {})
        out.write_json(encoder.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    elif result.settings.num_return > 1:
        for beam in result.beams:
            out.write_json(encoder.dumps(beam.text, ensure_ascii=False) + "\n")
    elif streamed:
        out.write("\n")
    else:
        print_answer(result.text)


def print_stats(result: Result) -> None:
    """The statistics as `name value` lines on stderr; unknown values say n/a."""
    from dataclasses import asdict

    from dsbd_cli.setting_text import describe

    stats = asdict(result.stats)
    lines = [f"{'method':24} {describe(vars(result.settings))}"]
    notes = {"notes": "; ".join(map(said, stats.pop("notes"))) or "none"}
    depths = [f"{accepted}/{examined}" for examined, accepted in stats.pop("accepted_by_depth")]
    deep = {"accepted_by_depth": " ".join(depths) or None}
    for name, value in [*stats.items(), *deep.items(), *stats["paths"].items(), *notes.items()]:
        if name in ("widths", "distinct_widths", "paths"):
            continue
        shown = "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else value
        lines.append(f"{name:24} {shown}")
    lines += [f"{'finish_reason':24} {result.finish_reason}", f"{'seed':24} {result.seed}"]
    figures(lines)
