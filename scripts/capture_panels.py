"""A picture of the live panels in the middle of a real answer: docs/panels.svg, by rich's recorder.

python scripts/capture_panels.py docs/panels.svg "Explain how rainbows form." --tokens 40
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console

from dsbd_cli import Decoder
from dsbd_cli.settings import Settings
from dsbd_cli.ui.frame import frame
from dsbd_cli.ui.monitor import Monitor


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--preset", default="smol")
    parser.add_argument("--tokens", type=int, default=40, help="take the picture after so many layers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=100)
    parser.add_argument("--height", type=int, default=30)
    options = parser.parse_args()
    decoder = Decoder.from_preset(options.preset)
    settings: Settings = decoder.settings.merged({"seed": options.seed, "max_new_tokens": 2 * options.tokens})
    decoder.settings = settings
    monitor = Monitor(decoder, options.prompt)
    for event in decoder.stream(options.prompt, settings):
        monitor.see(event)
        if monitor.tokens >= options.tokens:
            break
    console = Console(record=True, width=options.width, height=options.height, file=io.StringIO(),
                      force_terminal=True, color_system="256")  # fmt: skip
    console.print(frame(monitor.snapshot(), console, options.width, options.height))
    options.out.write_text(console.export_svg(title="dsbd generate"), encoding="utf-8")


if __name__ == "__main__":
    main()
