"""C for CPUs (`kernels.c`, `simd.c`, `tiles.c`): compiled once into the cache folder, under a name that says for
which source and processor. Without a compiler, or with DSBD_NATIVE=0, the same steps are tensor operations.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from dsbd_cli.errors import first_line, let_by
from dsbd_cli.loading import hung, processor
from dsbd_cli.loading.cache import build_once, cache_root

_T = TypeVar("_T")
_FOLDER = Path(__file__).parent
_FLAGS = [
    "-O3", "-shared", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
_PATIENCE = 120.0  # seconds for a compiler, which takes a few


class Team(ctypes.Structure):
    """The threads that torch uses, for C: a pool of our own would fight with its for the cores."""

    _fields_ = [("parallel", ctypes.c_void_p), ("number", ctypes.c_void_p), ("count", ctypes.c_void_p),
                ("threads", ctypes.c_long)]  # fmt: skip


def team() -> Team:
    """What the process has; without `parallel` where this torch brings another kind of threads."""
    names = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"
    try:
        process = ctypes.CDLL(None)
        found = [ctypes.cast(getattr(process, name), ctypes.c_void_p).value for name in names]
    except (AttributeError, OSError, TypeError) as error:
        let_by(error)
        return Team(None, None, None, 1)
    return Team(found[0], found[1], found[2], torch.get_num_threads())


_failures: list[str] = []


def failure() -> str | None:
    """Why code that was wanted is not there, where something was to be compiled and could not be."""
    return _failures[0] if _failures else None


def compiled(make: Callable[[], _T]) -> _T | None:
    """What `make` builds and loads; None where that is not possible or not wanted."""
    if not processor.can_compile():
        return None
    try:
        return make()
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode("utf-8", "replace").strip()
        _failures.append(said.splitlines()[0] if said else f"it ended with {error.returncode}")
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        let_by(error)
        _failures.append(first_line(error))
    except Exception as error:
        let_by(error)
        # A cache that cannot be written is no reason not to decode.
        if not isinstance(error.__cause__, OSError):
            raise
        _failures.append(first_line(error))
    return None


def built(*sources: str, flags: Sequence[str] = (), level: str | None = None) -> Path:
    """The shared object built from the last of `sources` (files of this folder; those before it are included).

    Args:
        flags: of the compiler, further ones.
        level: of `processor.LEVELS`: what the code may use; None: `processor.level()`.

    Raises:
        OSError, subprocess.SubprocessError: no compiler, or one that refuses, or that hung (`loading.hung`).
    """
    try:
        compiler = shlex.split(processor.compiler() or "")
    except ValueError as error:
        raise FileNotFoundError(f"CC is no command ({error})") from None
    if not compiler:
        raise FileNotFoundError("no C compiler")
    texts = [(_FOLDER / name).read_text(encoding="utf-8") for name in sources]
    flags = [*processor.build_flags(level), *flags]
    everything = "\n".join([*texts, *_FLAGS, *flags, platform.machine(), processor.description()])
    folder = cache_root() / "native" / hashlib.sha256(everything.encode()).hexdigest()[:16]
    last = Path(sources[-1])

    def build(folder: Path) -> None:
        out = str(folder / last.with_suffix(".so"))
        command = [*compiler, *_FLAGS, *flags, "-o", out, str(_FOLDER / last), "-lm"]
        # Here, behind the lock: another process may just have waited for it.
        if (said := hung.remembered()) is not None:
            raise subprocess.SubprocessError(said)
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            hung.remember(_PATIENCE)
            raise subprocess.SubprocessError(f"{compiler[0]} had not ended after {_PATIENCE:g} s") from None
        hung.forget()

    return build_once(folder, build, what="the CPU kernels") / last.with_suffix(".so")
