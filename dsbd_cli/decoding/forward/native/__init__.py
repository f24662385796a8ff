"""The small steps of a CPU forward as compiled C (`kernels.c`), where the system has a C compiler.

Compiled once into the cache folder, under a name that says for which source and processor; without a
compiler, or with DSBD_NATIVE=0, the same steps are tensor operations.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dsbd_cli.loading.cache import build_once, cache_root

_T = TypeVar("_T")
_FOLDER = Path(__file__).parent
_FLAGS = [
    "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math",
]  # fmt: skip
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}
_LARGEST_HEAD = 1024
# From so many rows on, waking other threads costs less than they save (28 microseconds a row of 49,152).
_SHARED_ROWS = 12


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
    except (AttributeError, OSError, TypeError):
        return Team(None, None, None, 1)
    return Team(found[0], found[1], found[2], torch.get_num_threads())


class Kernels:
    """The compiled functions, on contiguous CPU tensors of float32 or bfloat16.

    Args:
        library: the shared object built from `kernels.c`.
    """

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        pointer, number, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        arguments = {
            "rms": [pointer] * 3 + [number] * 2 + [real],
            "rope": [pointer] * 9 + [number] * 5 + [real],
            "silu": [pointer] * 2 + [number] * 2,
            "rows": [pointer] + [number] * 4 + [pointer] * 3,
        }
        self._functions = {}
        for dtype, suffix in _NAMES.items():
            for name, types in arguments.items():
                function = getattr(loaded, f"{name}_{suffix}")
                function.argtypes = types
                function.restype = ctypes.c_int if name == "rows" else None
                self._functions[name, dtype] = function
        self._team = team()
        self._shared = loaded.shared_rows
        self._shared.argtypes = [pointer, pointer, number, pointer, *[number] * 4, *[pointer] * 3]
        self._shared.restype = ctypes.c_int
        self._shrink, self._grow = loaded.shrink, loaded.grow
        self._shrink.argtypes = self._grow.argtypes = [pointer] * 3 + [number] * 2
        self._shrink.restype = self._grow.restype = None

    def rms(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of [N, width]."""
        out = torch.empty_like(x)
        call = self._functions["rms", x.dtype]
        call(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def rope(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, norms: tuple[Tensor, Tensor] | None,
        keys: Tensor, values: Tensor, heads: int, eps: float,
    ) -> Tensor:  # fmt: skip
        """Rotate, and write keys and values into the pool.

        Args:
            qkv: [N, (heads + 2 groups) size]. cos, sin: [N, size]. slots: int64 [N].
            norms: RMS weights of queries and keys, [size] each, or None.
            keys, values: [1, groups, capacity, size], written at `slots`.

        Returns:
            Queries [N x heads / groups, groups, size], rows in the order (node, head of its group).
        """
        count = qkv.shape[0]
        _, groups, capacity, size = keys.shape
        query = qkv.new_empty((count * heads // groups, groups, size))
        self._functions["rope", qkv.dtype](
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), slots.data_ptr(),
            None if norms is None else norms[0].data_ptr(), None if norms is None else norms[1].data_ptr(),
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), count, heads, groups, size, capacity, eps,
        )  # fmt: skip
        return query

    def silu(self, both: Tensor) -> Tensor:
        """silu(gate) x up, from gate and up side by side: [N, 2 width] to [N, width]."""
        count, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty((count, width))
        self._functions["silu", both.dtype](both.data_ptr(), out.data_ptr(), count, width)
        return out

    def shrink(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each row of float32 [N, width] scaled to a largest absolute value of 1, and the scales [N]."""
        out, sizes = torch.empty_like(x), x.new_empty(x.shape[0])
        self._shrink(x.data_ptr(), out.data_ptr(), sizes.data_ptr(), *x.shape)
        return out, sizes

    def grow(self, x: Tensor, sizes: Tensor, add: Tensor | None) -> Tensor:
        """x * sizes + add by row, in place; all float32."""
        self._grow(x.data_ptr(), sizes.data_ptr(), None if add is None else add.data_ptr(), *x.shape)
        return x

    def rows(self, logits: Tensor, vocab: int, best: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The `best` largest raw log-probabilities over the first `vocab` columns of [N, >= vocab].

        Returns:
            ids int64 [N, best], best first and ties to the lower id; log-probabilities float32
            [N, best]; bool [N], whether the row's logits are all finite.

        Raises:
            MemoryError: no memory for one row.
        """
        count = logits.shape[0]
        ids = np.empty((count, best), dtype=np.int64)
        logps = np.empty((count, best), dtype=np.float32)
        finite = np.empty(count, dtype=np.uint8)
        out = [array.ctypes.data for array in (ids, logps, finite)]
        call: Any = self._functions["rows", logits.dtype]
        threads = torch.get_num_threads()
        if count >= _SHARED_ROWS and threads > 1 and self._team.parallel:
            self._team.threads = threads
            function = ctypes.cast(call, ctypes.c_void_p)
            call = functools.partial(self._shared, ctypes.byref(self._team), function, logits.element_size())
        if call(logits.data_ptr(), logits.stride(0), count, vocab, best, *out):
            raise MemoryError("no memory for a row of logits")
        return ids, logps, finite.astype(bool)


def serves(dtype: torch.dtype, head: int = 0) -> bool:
    """Whether the kernels exist here for this dtype and head size."""
    return dtype in _NAMES and head <= _LARGEST_HEAD and head % 2 == 0 and load() is not None


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled if need be; None where that is not possible or not wanted."""
    return compiled(lambda: Kernels(built("kernels.c")))


def allowed() -> bool:
    """Whether compiled kernels are wanted and there is something to compile them with."""
    return os.environ.get("DSBD_NATIVE") != "0" and sys.platform != "win32" and _compiler() is not None


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compiled(make: Callable[[], _T]) -> _T | None:
    """What `make` builds and loads; None where that is not possible or not wanted."""
    if not allowed():
        return None
    try:
        return make()
    except (OSError, subprocess.SubprocessError, AttributeError):
        return None
    except Exception as error:
        # A cache that cannot be written is no reason not to decode.
        if isinstance(error.__cause__, OSError):
            return None
        raise


def built(*sources: str, flags: Sequence[str] = ()) -> Path:
    """The shared object built from the last of `sources` (files of this folder; those before it are included).

    Raises:
        OSError, subprocess.SubprocessError: no compiler, or one that refuses.
    """
    compiler = _compiler()
    if not compiler:
        raise FileNotFoundError("no C compiler")
    texts = [(_FOLDER / name).read_text(encoding="utf-8") for name in sources]
    everything = "\n".join([*texts, *_FLAGS, *flags, platform.machine(), _processor()])
    folder = cache_root() / "native" / hashlib.sha256(everything.encode()).hexdigest()[:16]
    last = Path(sources[-1])

    def build(folder: Path) -> None:
        out = str(folder / last.with_suffix(".so"))
        command = [compiler, *_FLAGS, *flags, "-o", out, str(_FOLDER / last), "-lm"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)

    return build_once(folder, build, what="the CPU kernels") / last.with_suffix(".so")


def processor_flags() -> set[str]:
    """What this processor says it can do, as Linux spells it; nothing where that cannot be read."""
    return set(_processor().partition(":")[2].split())


def _processor() -> str:
    """What `-march=native` depends on: a cache may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
