"""What this processor can do, and whether code may be compiled for it: facts of the machine, no torch."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

# What the AMX forward needs (bfloat16 and int8 tiles, and AVX-512's conversions to bfloat16).
AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16", "avx512_bf16"})


def kernels_wanted() -> bool:
    """Whether kernels of our own may be used at all (C and Triton); DSBD_NATIVE=0 says no."""
    return os.environ.get("DSBD_NATIVE") != "0"


def compiler() -> str | None:
    """The C compiler to call, or None."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def can_compile() -> bool:
    """Whether C kernels are wanted and there is something to compile them with."""
    return kernels_wanted() and sys.platform != "win32" and compiler() is not None


def amx_likely() -> bool:
    """Whether the AMX forward can be used here, as far as that can be told without compiling anything."""
    return can_compile() and flags() >= AMX


def flags() -> set[str]:
    """What this processor says it can do, as Linux spells it; nothing where that cannot be read."""
    return set(description().partition(":")[2].split())


def description() -> str:
    """What `-march=native` depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
