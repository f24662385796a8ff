"""Triton's interpreter, without the larger part of its time, which changes nothing."""

from __future__ import annotations

from typing import Any


def quicken() -> None:
    """Exchange Triton's language for the interpreter's once a launch, for the rest of this process.

    A launch does so, and undoes it at its end; but every call of a kernel's helper in between looks through the whole
    language again (Triton 3.9, `InterpretedFunction.__call__`). Other versions are left as they are.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    exchange, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    spoken: set[int] = set()  # modules whose language is exchanged, in the launch under way

    def once(fn: Any) -> Any:
        module = id(fn.__globals__)
        if module in spoken:
            return interpreter._LangPatchScope()
        spoken.add(module)
        return exchange(fn)

    def launched(self: Any, *args: Any, **named: Any) -> None:
        spoken.clear()
        try:
            launch(self, *args, **named)
        finally:
            spoken.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
