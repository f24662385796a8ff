"""`dsbd generate`: one prompt in, the answer on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dsbd_cli.cli.options import Chosen, decoding_options
from dsbd_cli.cli.output import Out, note
from dsbd_cli.errors import UserError

if TYPE_CHECKING:
    from dsbd_cli.decoding.events import Event
    from dsbd_cli.result import Result


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
) -> None:
    """Decode a prompt and print the answer.

    At a terminal the answer grows in live panels; in a pipe, or with --no-stream or --json, stdout
    holds only the answer.
    """
    text = read_prompt(prompt)
    decoder = chosen.load()
    tell: Callable[[str], None] = (lambda line: None) if quiet else note
    for line in decoder.pair.notes:
        tell(line)
    settings = decoder.settings
    live = sys.stdout.isatty() and not (json or no_stream or quiet or settings.num_return > 1)
    events = decoder.stream(text, settings)
    if live:
        from dsbd_cli.ui.panels import show

        result = show(events, decoder, text)
    else:
        stream = not (json or no_stream) and settings.num_return == 1
        result = plain(events, tell, stream=stream, show_tokens=show_tokens)
        write_answer(result, json=json, streamed=stream)
    if stats:
        print_stats(result)
    if settings.seed is None and not json:
        tell(f"seed {result.seed}")


def read_prompt(prompt: str | None) -> str:
    """The argument, else stdin less one trailing newline; at a terminal with neither: usage.

    Raises:
        UserError: nothing given at a terminal, or stdin that is not UTF-8.
    """
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UserError('no prompt: dsbd generate "your prompt", or pipe it in (dsbd generate --help)')
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"stdin is not UTF-8 text (byte {error.start}): convert it first, e.g. with iconv"
        ) from None
    return text.removesuffix("\n").removesuffix("\r")


def plain(
    events: Iterator[Event], tell: Callable[[str], None], *, stream: bool, show_tokens: bool = False
) -> Result:
    """Consume the events without panels: confirmed text to stdout if `stream`, notices to `tell`."""
    from dsbd_cli.decoding.events import Finished, Notice, Prefilled, Text

    out = Out()
    for event in events:
        if isinstance(event, Notice):
            tell(event.text)
        elif isinstance(event, Prefilled) and show_tokens:
            note("prompt tokens: " + " ".join(map(str, event.prompt_ids)))
        elif isinstance(event, Text) and stream:
            out.write(event.new)
        elif isinstance(event, Finished):
            return event.result
    raise AssertionError("a stream ends with Finished")


def write_answer(result: Result, *, json: bool, streamed: bool) -> None:
    """What is left for stdout: one JSON line, the n best as JSON strings, or the text; one newline."""
    import json as encoder

    out = Out()
    if json:
        out.write(result.to_json() + "\n")
    elif result.settings.num_return > 1:
        for beam in result.beams:
            out.write(encoder.dumps(beam.text, ensure_ascii=False) + "\n")
    else:
        out.write("\n" if streamed else result.text + "\n")


def print_stats(result: Result) -> None:
    """The statistics as `name value` lines on stderr; unknown values say n/a."""
    from dataclasses import asdict

    for name, value in asdict(result.stats).items():
        if name in ("widths", "distinct_widths"):
            continue
        shown = "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else value
        print(f"{name:24} {shown}", file=sys.stderr)
    print(f"{'finish_reason':24} {result.finish_reason}\n{'seed':24} {result.seed}", file=sys.stderr)
