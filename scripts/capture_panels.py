"""Records the live panels of a real run into docs/panels.svg: capture_panels.py TARGET DRAFT [TOKENS]."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from dsbd_cli import Decoder, Settings
from dsbd_cli.decoding.events import Finished
from dsbd_cli.ui.frame import frame
from dsbd_cli.ui.monitor import Monitor
from dsbd_cli.ui.snapshot import Snapshot

WIDTH, HEIGHT = 100, 30
PROMPT = "Write a short story about a lighthouse."
OUT = Path(__file__).parents[1] / "docs" / "panels.svg"


def svg(shot: Snapshot) -> str:
    """One picture as SVG."""
    console = Console(file=io.StringIO(), width=WIDTH, height=HEIGHT, record=True, force_terminal=True)
    console.print(frame(shot, console, WIDTH, HEIGHT), end="")
    return console.export_svg(title="dsbd generate")


def main() -> None:
    decoder = Decoder.from_pair(sys.argv[1], sys.argv[2])
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 60
    settings = Settings(seed=1, max_new_tokens=4 * tokens)
    decoder.settings = settings
    monitor = Monitor(decoder, PROMPT)
    for event in decoder.stream(PROMPT, settings):
        if isinstance(event, Finished) or monitor.tokens >= tokens:
            break
        monitor.see(event)
    OUT.write_text(svg(monitor.snapshot()), encoding="utf-8")


if __name__ == "__main__":
    main()
