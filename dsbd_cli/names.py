"""What a misspelt name may have meant, said wherever a user gives one."""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from dsbd_cli.errors import UserError

_Class = TypeVar("_Class", bound=type)


def near(name: str, known: Any) -> str:
    """` (did you mean X?)` for the closest known spelling, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def named(what: str) -> Callable[[_Class], _Class]:
    """A dataclass that answers an unknown name as it answers a bad value: by a UserError, which says what is near.

    Args:
        what: a field is called, `{}` for its name: "unknown setting 'widht' (did you mean width?)".
    """

    def decorated(record: _Class) -> _Class:
        made: Any = record  # a type checker knows the names by itself
        init, fields = made.__init__, tuple(field.name for field in dataclasses.fields(made))

        @functools.wraps(init)
        def checked(self: Any, *values: Any, **given: Any) -> None:
            for name in given:
                if name not in fields:
                    raise UserError(f"unknown {what.format(repr(name))}{near(name, fields)}")
            init(self, *values, **given)

        made.__init__ = checked
        return record

    return decorated
