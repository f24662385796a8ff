"""What this processor can do, and whether code may be compiled for it: facts of the machine, no torch."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import sys
from pathlib import Path

from dsbd_cli.errors import UserError, let_by

# What code of ours may use, the least first; a switch below the machine's own hides the rest of it.
LEVELS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "amx")
SWITCH = "DSBD_CPU"
_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
# What the AMX forward needs (bfloat16 and int8 tiles, and AVX-512's conversions to bfloat16).
AMX = _AVX512 | {"amx_tile", "amx_int8", "amx_bf16", "avx512_bf16"}
_NEEDED = {
    "portable": frozenset[str](), "avx2": _AVX2, "avxvnni": _AVX2 | {"avx_vnni"}, "avx512": _AVX512,
    "avx512vnni": _AVX512 | {"avx512_vnni"}, "amx": AMX,
}  # fmt: skip


def level() -> str:
    """The highest of `LEVELS` that this processor has and DSBD_CPU allows.

    Raises:
        UserError: DSBD_CPU names none of them.
    """
    wanted = os.environ.get(SWITCH) or LEVELS[-1]
    if wanted not in LEVELS:
        raise UserError(f"{SWITCH}={wanted}: it is one of {', '.join(LEVELS)}")
    return levels(wanted)[-1]


def levels(most: str = LEVELS[-1]) -> list[str]:
    """Those of `LEVELS` up to `most` that this processor has; not always all below its highest."""
    found = flags()
    return [name for name in LEVELS[: LEVELS.index(most) + 1] if found >= _NEEDED[name]]


def build_flags(wanted: str | None = None) -> list[str]:
    """What the C compiler is told to use for a level (None: `level()`)."""
    wanted = wanted or level()
    if platform.machine() not in ("x86_64", "AMD64") or not flags():  # levels are x86's, and read on Linux
        return [] if os.environ.get(SWITCH) == "portable" else ["-march=native"]
    if wanted in ("portable", "amx"):
        return ["-march=native"] if wanted == "amx" else []
    # By name: the same code, and so the same numbers, wherever a level is the one used.
    return [*(f"-m{name.replace('_', '')}" for name in sorted(_NEEDED[wanted])), "-mtune=native"]


def kernels_wanted() -> bool:
    """Whether kernels of our own may be used at all (C and Triton); DSBD_NATIVE=0 says no."""
    return os.environ.get("DSBD_NATIVE") != "0"


def compiler() -> str | None:
    """The C compiler to call, or None; CC may have options behind it, or another program before it."""
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def can_compile() -> bool:
    """Whether C kernels are wanted and there is something to compile them with."""
    return kernels_wanted() and sys.platform != "win32" and compiler() is not None


def amx_likely() -> bool:
    """Whether the AMX forward can be used here, as far as that can be told without compiling anything."""
    return can_compile() and level() == "amx"


def bf16_likely() -> bool:
    """Whether products in bfloat16 are quick here, by AMX or by AVX-512's own."""
    return amx_likely() or ("avx512_bf16" in flags() and LEVELS.index(level()) >= LEVELS.index("avx512"))


def int8_likely() -> bool:
    """Whether products of 4-bit blocks with activations of 8 bits are quick here (`forward/native/int8.c`)."""
    return can_compile() and level() != "portable" and bool(flags())


def flags() -> set[str]:
    """What this processor says it can do, as Linux spells it; nothing where that cannot be read."""
    return set(description().partition(":")[2].split())


@functools.cache
def description() -> str:
    """What `-march=native` and `-mtune=native` depend on: a cache may be shared between machines.

    Once a process: a start asks several times, and the file has a part for each of a machine's cores.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError as error:
        let_by(error)
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
