"""The batch forms of `dsbd generate`: --lines, and --input with --output."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dsbd_cli.batch import AUTO
from dsbd_cli.cli.options import Chosen
from dsbd_cli.cli.output import Out
from dsbd_cli.errors import UserError
from dsbd_cli.tally import NO_FOREST_PAYS, ratio
from dsbd_cli.ui.look import is_terminal, panel_stream
from dsbd_cli.wording import said

if TYPE_CHECKING:
    from dsbd_cli.result import Result

_MOST = 4096
# One prompt's own lines leave loading out, and are of one answer: the same words would look like another speed.
_MEANS = {
    "seconds": "of the whole run, loading included",
    "tokens_per_s_in_all": "all answers together, over those seconds",
}


def many(
    chosen: Chosen,
    lines: bool,
    source: Path | None,
    output: Path | None,
    tell: Callable[[str], None],
    *,
    json: bool,
    stats: bool,
    quiet: bool,
    batch: str,
    refuse: Mapping[str, bool],
) -> None:
    """Answer many prompts with one load of the pair.

    Raises:
        UserError: options that exclude each other, input that cannot be read, prompts refused (told last).
    """
    form = "--lines" if lines else "--input"
    if lines and (source is not None or output is not None):
        raise UserError("--lines reads stdin and writes stdout: leave out --input and --output")
    if not lines and (source is None or output is None):
        have, lack = ("--output", "--input") if source is None else ("--input", "--output")
        raise UserError(f"{have} needs {lack} (or use --lines with stdin and stdout)")
    for name, given in refuse.items():
        if given:
            raise UserError(f"{name} has no place beside {form}")
    for name, path in (("--input", source), ("--output", output)):
        if path == Path("-"):
            raise UserError(f"{name} - is no file: for stdin and stdout there is --lines")
    check_batch(batch)
    from dsbd_cli.batch.run import Refused

    begin, refused = time.monotonic(), None
    try:
        results = _from_stdin(chosen, tell, json, quiet, batch) if source is None or output is None else _from_file(
            chosen, source, output, tell, quiet, batch)  # fmt: skip
    except Refused as error:  # the others were answered, and count
        results, refused = error.results, error
    if lines and not results and refused is None:
        tell("stdin held no prompt: nothing was decoded")
    if stats:
        print_totals(results, time.monotonic() - begin)
    if refused is not None:
        raise refused


def check_batch(batch: str) -> None:
    """Refuse what is no number of prompts.

    Raises:
        UserError: neither `auto` nor a whole number from 1 to 4096.
    """
    if batch != AUTO and not (re.fullmatch("[0-9]{1,9}", batch) and 1 <= int(batch) <= _MOST):
        raise UserError(f"--batch must be auto or a whole number from 1 to {_MOST}, not {batch}")


def _from_stdin(
    chosen: Chosen, tell: Callable[[str], None], json: bool, quiet: bool, batch: str
) -> list[Result]:
    from dsbd_cli.batch.run import run_lines
    from dsbd_cli.cli.stdin import arriving_lines

    if chosen.team().shard.world > 1:
        raise UserError("--lines is for one process: under torchrun use --input and --output")
    decoder = chosen.load()
    for line in chosen.notes(decoder):
        tell(line)
    write = Out().write_json
    # At a terminal the answers themselves show how it goes, and a bar would stand among them.
    bar = not is_terminal(sys.stdout) and _bar(quiet)
    return run_lines(decoder, decoder.settings, arriving_lines, write, tell, json=json, batch=batch, bar=bar)


def _from_file(
    chosen: Chosen, source: Path, output: Path, tell: Callable[[str], None], quiet: bool, batch: str
) -> list[Result]:
    from dsbd_cli.batch.run import run_file

    return run_file(chosen, source, output, tell, bar=_bar(quiet), batch=batch)


def _bar(quiet: bool) -> bool:
    """Whether progress is drawn."""
    return not quiet and panel_stream() is sys.stderr


def print_totals(results: list[Result], seconds: float) -> None:
    """Sums and ratios over prompts, on stderr.

    Args:
        seconds: of the whole run, loading included.
    """
    stats = [result.stats for result in results]
    tokens = sum(one.new_tokens for one in stats)
    layers, calls = sum(one.layers for one in stats), sum(one.target_calls for one in stats)
    examined, accepted = sum(one.drafts_examined for one in stats), sum(one.drafts_accepted for one in stats)
    joules = [one.energy_j for one in stats]
    energy = None if None in joules else sum(one or 0.0 for one in joules)
    totals = {
        "prompts": len(results),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s_in_all": ratio(tokens, seconds),
        "layers_per_target_call": ratio(layers, calls),
        "acceptance_rate": ratio(accepted, examined),
        "energy_j": energy if joules else None,
        "joules_per_token": ratio(energy, tokens) if energy is not None and joules else None,
    }
    for name, value in totals.items():
        shown = "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else value
        what = f"  ({_MEANS[name]})" if name in _MEANS else ""
        print(f"{name:24} {shown}{what}", file=sys.stderr)
    undrafted = sum(NO_FOREST_PAYS in one.notes for one in stats)
    if undrafted:
        of = "" if undrafted == len(stats) else f" ({undrafted} of {len(stats)} prompts)"
        print(f"{'note':24} {said(NO_FOREST_PAYS)}{of}", file=sys.stderr)
