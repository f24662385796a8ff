"""What live panels cost the decoding thread: seconds spent on pictures / seconds decoding, at a pty of 100x30."""

from __future__ import annotations

import os
import sys
import threading
import time

from dsbd_cli import Decoder, Settings
from dsbd_cli.decoding import Finished
from dsbd_cli.ui.monitor import Monitor
from dsbd_cli.ui.painter import Painter


def run(decoder: Decoder, prompt: str, settings: Settings, panels: bool) -> tuple[float, float, int]:
    """(seconds on pictures, decode seconds inside the engine, pictures) of one answer."""
    master, slave = os.openpty()
    threading.Thread(target=_drain, args=(master,), daemon=True).start()
    decoder.settings = settings
    spent, drawn = 0.0, 0
    with os.fdopen(slave, "w") as screen:
        painter = Painter(screen, True) if panels else None
        monitor = Monitor(decoder, prompt)
        for event in decoder.stream(prompt, settings):
            if isinstance(event, Finished):
                if painter is not None:
                    painter.close()
                assert event.result.stats.decode_s is not None
                return spent, event.result.stats.decode_s, drawn
            if painter is not None:
                begin = time.perf_counter()
                monitor.see(event)
                if painter.ready:
                    painter.offer(monitor.snapshot().to_json())
                    drawn += 1
                spent += time.perf_counter() - begin
    raise AssertionError("a stream ends with Finished")


def _drain(master: int) -> None:
    while True:
        try:
            os.read(master, 1 << 16)
        except OSError:
            return


def main() -> None:
    decoder = Decoder.from_pair(sys.argv[1], sys.argv[2])
    settings = Settings(seed=1, max_new_tokens=120)
    prompt = "Write a short story about a lighthouse."
    run(decoder, prompt, settings, False)
    for panels in (False, True, False, True, False, True):
        spent, decode, drawn = run(decoder, prompt, settings, panels)
        print(f"panels {panels!s:5} decode {decode:.2f} s, pictures {drawn}, spent {1000 * spent:.1f} ms "
              f"= {spent / decode:.2%}")  # fmt: skip


if __name__ == "__main__":
    main()
