"""`import torch` without the half of it that decoding with a remembered pair never touches.

torch imports at once what compiles, exports, quantises and trains, and how each operator acts on tensors without
data: half of its 770 modules, and half of the processor time. Those written down in `_LATER` are entered in
`sys.modules` by name alone, and executed, all of them and in torch's own order, as soon as anybody reads an attribute
of one, or imports transformers or another part of torch. From then on nothing differs from a plain `import torch`.

Why not `importlib.util.LazyLoader`: each of its modules comes alone, and in another order torch's circles of imports
fail; until Python 3.12 a second `import` statement executes it, and so does `inspect` when it looks through
`sys.modules`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

# Any other torch, tried with none of them, is imported as it is: its parts may lean on each other otherwise.
_VERSIONS = ("2.13",)
# What nothing else needs while torch is imported; a name that a version has not is never asked for.
_LATER = frozenset((
    "torch._higher_order_ops", "torch._meta_registrations", "torch._native", "torch._size_docs",
    "torch._storage_docs", "torch._tensor_docs", "torch.ao", "torch.compiler", "torch.cuda.tunable",
    "torch.distributed._meta_registrations", "torch.distributions", "torch.export", "torch.fft",
    "torch.func", "torch.linalg", "torch.masked", "torch.mtia", "torch.nested", "torch.nn.intrinsic",
    "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.optim", "torch.profiler",
    "torch.quantization", "torch.quasirandom", "torch.signal.windows", "torch.sparse", "torch.special",
    "torch.utils.collect_env", "torch.utils.data", "torch.xpu", "torchgen.model", "unittest.mock",
))  # fmt: skip
# Of these torch itself takes functions by name: it gets some that call the real ones, until those are there.
_FUNCTIONS = {"torch._higher_order_ops": ("cond", "while_loop"), "torch.func": ("vmap",)}
# Whose first import means that more of torch is wanted than decoding needs.
_USERS = frozenset({"accelerate", "functorch", "torch", "torchgen", "transformers"})
# Read by the import system and by whoever looks through `sys.modules`; true before a module is executed.
_KNOWN = frozenset(
    ("__cached__", "__class__", "__file__", "__loader__", "__name__", "__package__", "__spec__")
)

_lock = threading.RLock()
_waiting: dict[str, tuple[types.ModuleType, importlib.abc.Loader]] = {}
_alone = False  # whether a module is executed by itself when it is touched: while others are being executed


def serves() -> bool:
    """Whether the installed torch is of a version that is known here."""
    return importlib.metadata.version("torch").startswith(tuple(f"{version}." for version in _VERSIONS))


def import_torch() -> None:
    """Import torch, what decoding needs of it; nothing where torch is there already or of an unknown version."""
    global _alone
    if "torch" in sys.modules or not serves():
        return
    sys.meta_path.insert(0, _FINDER)
    _alone = True
    try:
        import torch  # noqa: F401
    finally:
        _alone = False


def waiting() -> list[str]:
    """The modules that are not executed yet, in torch's order."""
    return list(_waiting)


def whole() -> None:
    """Execute all that waits; then torch is as a plain import leaves it."""
    global _alone
    with _lock:
        if _alone:
            return
        _alone = True
        try:
            while _waiting:
                _execute(next(iter(_waiting)))
            if _FINDER in sys.meta_path:
                sys.meta_path.remove(_FINDER)
                torch = sys.modules["torch"]
                for home, names in _FUNCTIONS.items():
                    for name in names:
                        if isinstance(getattr(torch, name, None), _Function):
                            setattr(torch, name, getattr(sys.modules[home], name))
        finally:
            _alone = False


def _touch(name: str) -> None:
    with _lock:
        if name not in _waiting:
            return
        if _alone:
            _execute(name)
        else:
            whole()


def _execute(name: str) -> None:
    module, loader = _waiting.pop(name)
    module.__class__ = types.ModuleType
    module.__loader__ = loader
    if module.__spec__ is not None:
        module.__spec__.loader = loader
    loader.exec_module(module)


class _Function:
    """A function of a module that waits."""

    def __init__(self, home: str, name: str) -> None:
        self._home, self.__name__ = home, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole()
        function: Callable[..., Any] = getattr(importlib.import_module(self._home), self.__name__)
        return function(*args, **kwargs)


class _Module(types.ModuleType):
    """A module that waits: whoever reads of it more than its name has it executed first."""

    def __getattribute__(self, attribute: str) -> Any:
        plain = types.ModuleType.__getattribute__  # no `super()`: once touched, this is no `_Module` any more
        if attribute in _KNOWN:
            return plain(self, attribute)
        name = plain(self, "__name__")
        if name in _FUNCTIONS and name in _waiting and _reader() == "torch":
            if attribute in _FUNCTIONS[name]:
                return _Function(name, attribute)
            if attribute == "__path__":  # which `from ... import` looks for
                return plain(self, attribute)
        _touch(name)
        return plain(self, attribute)


def _reader() -> str:
    """The module in which an attribute is read, past the import system."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        _waiting[module.__name__] = (module, self._real)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _alone:
            if name.partition(".")[0] in _USERS:
                whole()
            return None
        if name not in _LATER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_FINDER = _Finder()
