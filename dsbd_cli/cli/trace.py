"""`dsbd trace`: replay what `dsbd generate --trace` recorded, or draw it as a page."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsbd_cli.cli.options import was_given
from dsbd_cli.cli.output import note
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.paths import make_parents, refuse_foreign, refuse_special, refuse_unwritable, write_whole

if TYPE_CHECKING:
    from dsbd_cli.trace.read import Trace


def trace(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="What `dsbd generate --trace FILE` wrote.")],
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page that shows the forests, and replay nothing.")
    ] = None,
    delay: Annotated[
        float,
        typer.Option(
            "--delay", min=0, max=60, help="Seconds between iterations when replaying at a terminal."
        ),
    ] = 0.3,
) -> None:
    """Show a recorded run: what was drafted, accepted, rejected and drawn anew, iteration by iteration."""
    from dsbd_cli.trace.read import read_trace

    if html is not None and was_given(context, "delay"):
        raise UserError("--delay has no effect beside --html, which replays nothing: leave it out")
    recorded = read_trace(file)
    try:
        _show(recorded, file, html, delay)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        # Lines that are JSON but that no dsbd wrote; to check each field beforehand would say no more.
        raise UserError(f"{file} is no whole trace of this release: record it again") from None


def _show(recorded: Trace, file: Path, html: Path | None, delay: float) -> None:
    if html is not None:
        if html.absolute() == file.absolute():
            raise UserError("--html would write over the trace itself: give it another name")
        refuse_unwritable(html, "--html")
        refuse_special(html, f"--html {html}", "name a file")
        from dsbd_cli.trace import PAGE
        from dsbd_cli.trace.page import page

        refuse_foreign(html, "--html", PAGE, "page of dsbd trace")
        make_parents(html, "--html")
        write_whole(html, page(recorded))
        note(f"{counted(len(recorded.iterations), 'iteration')} drawn: {html}")
        return
    from rich.console import Console

    from dsbd_cli.trace.replay import head, tail, trees
    from dsbd_cli.ui.look import is_terminal, unicode_terminal

    unicode = unicode_terminal(getattr(sys.stdout, "encoding", None)) or not is_terminal(sys.stdout)
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=not is_terminal(sys.stdout))
    console.print(head(recorded, unicode))
    for tree in trees(recorded, unicode):
        console.print(tree)
        if is_terminal(sys.stdout):
            time.sleep(delay)
    console.print(tail(recorded))
