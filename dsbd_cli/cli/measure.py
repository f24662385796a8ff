"""`dsbd doctor --measure`: what depends on the machine's speed, measured anew for the pair of a preset."""

from __future__ import annotations

from dsbd_cli.cli.output import note
from dsbd_cli.errors import RunError, UserError


def measure_anew(preset: str, *, force: bool) -> None:
    """Choose number formats anew for a preset's pair, and measure its prices; say what is kept instead.

    Args:
        force: what is measured on a busy machine takes the place of what a calm moment gave, too.

    Raises:
        UserError: no such preset, a pair without a draft, or a cache folder that cannot be written.
    """
    from dsbd_cli.cli.options import Chosen
    from dsbd_cli.loading import hung
    from dsbd_cli.loading.source import parse_source
    from dsbd_cli.prices import formats

    chosen = Chosen(preset, {}, {"method": "dsbd"})
    chosen.check()
    spec, _ = chosen.resolve()
    lost = UserError("the cache folder cannot be written, so what is measured would be lost: set DSBD_CACHE to a "
                     "folder that can")  # fmt: skip
    try:
        formats.forget([parse_source(text).name for text in (spec.target, spec.draft) if text is not None],
                       force=force)  # fmt: skip
    except (OSError, RunError):
        raise lost from None
    hung.forget()
    decoder = chosen.load()
    found = decoder.prices.measured(again=True, force=force)
    if found.prices is None:
        raise lost
    for line in (*decoder.pair.passing, *found.notes):
        note(decoder.named(line))
