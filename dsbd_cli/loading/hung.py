"""A C compiler that hung is remembered in the cache folder, so that only one start in a day waits for it. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import time
from pathlib import Path

from dsbd_cli.again import AGAIN
from dsbd_cli.errors import RunError, let_by, suppressed
from dsbd_cli.loading import processor
from dsbd_cli.loading.cache import cache_root
from dsbd_cli.paths import write_whole

_A_DAY = 24 * 60 * 60.0


def remembered() -> str | None:
    """What is known of the compiler in use, in words; None where it may be called."""
    try:
        values = json.loads(_path().read_bytes())
        when, seconds = float(values["when"]), float(values["seconds"])
        if not 0 <= time.time() - when < _A_DAY:
            return None
        told = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        let_by(error)
        return None
    return (
        f"{processor.compiler()} had not ended after {seconds:g} s ({told}; it is tried again a day later, or by "
        f"{AGAIN})"
    )


def remember(seconds: float) -> None:
    """The compiler in use was stopped after so many seconds. A cache that cannot be written remembers nothing."""
    values = {"compiler": processor.compiler(), "when": time.time(), "seconds": seconds}
    with suppressed(OSError, RunError):
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_whole(_path(), json.dumps(values) + "\n")


def forget() -> None:
    """The compiler in use is called again by whoever needs it."""
    with suppressed(OSError):
        _path().unlink(missing_ok=True)


def _path() -> Path:
    """Of this compiler, as it is installed now, on this kind of processor: caches are shared between machines."""
    command = processor.compiler() or ""
    written = 0
    with suppressed(OSError, ValueError, IndexError):
        program = shutil.which(shlex.split(command)[0])
        written = 0 if program is None else os.stat(program).st_mtime_ns
    text = "\n".join([command, str(written), platform.machine(), processor.description()])
    return cache_root() / "native" / f"hung-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
