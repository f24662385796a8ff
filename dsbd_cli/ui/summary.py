"""A finished run in one line, what of it is unfinished, and why its beams are few."""

from __future__ import annotations

import sys

from dsbd_cli.counted import counted
from dsbd_cli.result import Result
from dsbd_cli.ui.look import columns_of
from dsbd_cli.wording import ending


def summary(result: Result, width: int | None = None) -> str:
    """`48 tokens in 4.2 s, 11.4 tok/s, ..., ended by itself`; what is unknown says n/a.

    Args:
        width: characters there are; what is least telling is left out until the line fits, down to
            the tokens and why the text ended. None: no limit.
    """
    stats = result.stats
    # (what it says, how soon it goes: highest first)
    parts = [(counted(stats.new_tokens, "token"), 0)]
    if stats.decode_s is not None:
        parts[0] = (f"{parts[0][0]} in {seconds(stats.decode_s)}", 0)
    parts.append((f"{number(stats.tokens_per_s, 1)} tok/s", 1))
    parts.append((f"{number(stats.layers_per_target_call)} layers/target call", 2))
    if stats.acceptance_rate is not None:
        parts.append((f"acceptance {number(stats.acceptance_rate)}", 4))
    if stats.mean_width is not None and max(stats.widths, default=1) > 1:
        parts.append(
            (f"width {number(stats.mean_width, 1)} ({number(stats.mean_distinct_width, 1)} distinct)", 5)
        )
    parts.append(
        (f"{number(stats.joules_per_token)} J/token", 3 if stats.joules_per_token is not None else 6)
    )
    parts.append((ending(result.finish_reason), 0))
    while width is not None and len(_line(parts)) > width and (least := max(rank for _, rank in parts)):
        parts = [part for part in parts if part[1] != least]
    return _line(parts)


def unfinished(result: Result) -> str | None:
    """Which of the beams did not end by themselves, and why; None where all did."""
    beams = result.beams
    cut = {place: beam for place, beam in enumerate(beams, start=1) if not beam.finished}
    if not cut:
        return None
    one = next(iter(cut.values()))  # a run cuts all that are unfinished at one place, for one reason
    tokens = len(one.token_ids)
    if len(beams) == 1:
        which = "the answer is"
    elif len(cut) == len(beams):
        which = f"all {len(beams)} beams are"
    elif len(cut) == 1:
        which = f"beam {min(cut)} of {len(beams)} is"
    else:
        which = f"beams {', '.join(map(str, cut))} of {len(beams)} are"
    if one.finish_reason == "length":
        return f"{which} unfinished: cut at max-new-tokens {tokens}"
    rule = result.settings.early_stopping
    return f"{which} unfinished: the run ended after {counted(tokens, 'token')} (early-stopping {rule})"


def few_beams(result: Result) -> str | None:
    """That fewer beams came than were asked for, with what leaves so few or gives more; None where all came."""
    settings, came = result.settings, len(result.beams)
    if came >= settings.num_return:
        return None
    why = ""  # the model alone
    if not settings.deterministic:
        if settings.draws == "iid":
            why = " (--draws distinct keeps more apart)"
        elif settings.top_k or settings.top_p < 1:
            why = " (top-k and top-p kept no more)"
    return f"--num-return {settings.num_return}: only {came} {'beam is' if came == 1 else 'beams are'} distinct{why}"


def room() -> int | None:
    """Characters of a note that fit on one line of the terminal on stderr; None elsewhere."""
    columns = columns_of(sys.stderr)
    return None if columns is None else max(1, columns - len("dsbd: "))


def seconds(value: float) -> str:
    """Seconds to a tenth; below one to a hundredth, so that a short answer takes no `0.0 s`."""
    return f"{value:.2f} s" if value < 1 else f"{value:.1f} s"


def number(value: float | None, digits: int = 2) -> str:
    """A number to `digits` places; n/a for None."""
    return "n/a" if value is None else f"{value:.{digits}f}"


def _line(parts: list[tuple[str, int]]) -> str:
    return ", ".join(text for text, _ in parts)
