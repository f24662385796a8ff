"""Matrix tiles (AMX) for tests, on any x86 with a C compiler: the processor's own, or written out in plain C."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.decoding.forward import amx
from dsbd_cli.loading import processor

_FOLDER = Path(__file__).parent


@functools.cache
def library() -> Any:
    """`native/tiles.c` with this folder's `immintrin.h` for the instructions; None where it cannot be built."""
    if platform.machine() not in ("x86_64", "AMD64") or not processor.can_compile():
        return None
    header = hashlib.sha256((_FOLDER / "immintrin.h").read_bytes()).hexdigest()[:16]
    return amx.loaded("-O2", f"-DHEADER={header}", f"-I{_FOLDER}", "-Wno-psabi", level="amx")


@contextlib.contextmanager
def tiles() -> Iterator[None]:
    """Meanwhile this machine has matrix tiles."""
    if amx.library() is not None:
        yield
        return
    if library() is None:
        pytest.skip("matrix tiles need an x86, and a C compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amx, "library", library)
        patch.setattr(processor, "amx_likely", lambda: True)
        yield
