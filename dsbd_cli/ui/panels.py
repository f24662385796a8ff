"""`dsbd generate` at a terminal: live panels while decoding, the plain answer when done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dsbd_cli.counted import counted
from dsbd_cli.decoding import Event, Finished
from dsbd_cli.errors import Stopped
from dsbd_cli.result import Result
from dsbd_cli.tally import NO_FOREST_PAYS
from dsbd_cli.ui.look import panel_stream, unicode_terminal
from dsbd_cli.ui.monitor import Monitor
from dsbd_cli.ui.painter import Painter
from dsbd_cli.ui.summary import room, summary
from dsbd_cli.wording import said

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder


def show(events: Iterable[Event], decoder: Decoder, prompt_text: str) -> Result:
    """Consume the events under live panels; then print the answer to stdout and a summary to stderr.

    Args:
        events: `decoder.stream(...)`.
        decoder: for names, text of beams and KV numbers.
        prompt_text: shown collapsed in the title.

    Raises:
        Stopped: Ctrl-C. It, and whatever decoding raises, comes after the terminal is given back and
            the text so far is printed.
    """
    from dsbd_cli.cli.output import note, print_answer

    stream = panel_stream()
    if stream is None:
        raise ValueError("no terminal to draw on: ask `panel_stream` first")
    monitor = Monitor(decoder, prompt_text)
    painter = Painter(stream, unicode_terminal(getattr(stream, "encoding", None)))
    result = None
    try:
        result = _draw(events, monitor, painter)
    except KeyboardInterrupt:
        raise Stopped(f"stopped after {counted(monitor.tokens, 'token')}") from None
    finally:
        painter.close()
        for line in monitor.notes:
            note(line)
        if result is None and monitor.tokens:
            # Ctrl-C, or a run that broke: what there is of an answer stays.
            print_answer(monitor.confirmed + monitor.contested())
    print_answer(result.text)
    note(summary(result, room()))
    if NO_FOREST_PAYS in result.stats.notes:
        note(said(NO_FOREST_PAYS))
    return result


def _draw(events: Iterable[Event], monitor: Monitor, painter: Painter) -> Result:
    # A long prompt is read for a while: what decodes, and how, is known before it.
    painter.offer(monitor.snapshot().to_json())
    for event in events:
        if isinstance(event, Finished):
            return event.result
        monitor.see(event)
        if painter.ready:
            painter.offer(monitor.snapshot().to_json())
    raise AssertionError("a stream ends with Finished")
