"""The records of `native/whole.h`, as C lays them out."""

from __future__ import annotations

import ctypes
from typing import Any

_pointer, _long, _float = ctypes.c_void_p, ctypes.c_long, ctypes.c_float


class Linear(ctypes.Structure):
    _fields_ = [("weight", _pointer), ("scale", _pointer), ("bias", _pointer), ("inputs", _long),
                ("outputs", _long), ("format", _long)]  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = [*((name, _pointer) for name in ("before", "after", "q_norm", "k_norm")),
                *((name, Linear) for name in ("qkv", "out", "gate_up", "down"))]  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = [*((name, _long) for name in ("layers", "hidden", "heads", "groups", "size", "inner", "int8")),
                *((name, _float) for name in ("eps", "head_eps", "scaling")),
                ("layer", ctypes.POINTER(Layer)), ("norm", _pointer), ("head", Linear)]  # fmt: skip


class Request(ctypes.Structure):
    _fields_ = [*((name, _long) for name in ("count", "used", "capacity", "begin")),
                *((name, _pointer) for name in ("x", "cos", "sin", "mask")), ("mask_stride", _long),
                *((name, _pointer) for name in ("slots", "keep", "positions")), ("kept", _long),
                *((name, _pointer) for name in ("keys", "values", "logits"))]  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = [("request", Request),
                *((name, _pointer) for name in ("numbers", "embedding", "cos", "sin", "table", "hidden")),
                ("width", _long), ("positions", _pointer), ("rows_of", _pointer), ("vocab", _long), ("best", _long),
                *((name, _pointer) for name in ("best_ids", "best_logps", "finite"))]  # fmt: skip


def prototyped(library: Any) -> Any:
    """The types of a library's `room`, `forward` and `step`."""
    library.room.restype = _long
    library.room.argtypes = [_pointer, _long, _long, _long, _long]
    library.forward.restype = None
    library.forward.argtypes = [_pointer] * 4
    library.step.restype = _long
    library.step.argtypes = [*[_pointer] * 4, _long]
    return library
