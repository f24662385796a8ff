"""A setting as people write it: on the command line, in a chat, in a sweep."""

from __future__ import annotations

from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.settings import KINDS, NONE


def parse_setting(name: str, value: Any) -> Any:
    """An option's text in the setting's type: `none`, `2,2,1`, numbers; other values as they are.

    Raises:
        UserError: no such number.
    """
    if not isinstance(value, str):
        return value
    kind = KINDS[name]
    try:
        if value.lower() in NONE and "None" in kind and "str" not in kind:
            return None
        if name == "tree":
            return tuple(int(part) for part in value.split(","))
        if kind.startswith("float"):
            return float(value)
        if kind.startswith("int"):
            return int(value)
    except ValueError:
        special = {"tree": "positive numbers such as 2,2,1", "threshold": "a number or none"}
        wanted = special.get(name, "a whole number" if kind.startswith("int") else "a number")
        raise UserError(f"--{name.replace('_', '-')} must be {wanted}, not {value!r}") from None
    return value
