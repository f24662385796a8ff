"""Settings as people write them, on the command line, in a chat, in a sweep, and as they are told in a few words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.settings import DEFAULT_TREE, KINDS, NONE

_TREE_RULES = {"specinfer": "multi-step sampling", "spectr": "k-sequential (SpecTr)",
               "rsd": "without replacement (RSD)"}  # fmt: skip


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


def told(name: str, value: Any) -> str:
    """A setting as its option's name and value: `max-new-tokens 6`, `raw`, `stop ["."]`."""
    option = name.replace("_", "-")
    if value is True:
        return option
    if value is None or value is False:
        return f"{option} {str(value).lower()}"
    plain = isinstance(value, (int, float)) or (isinstance(value, str) and value.split() == [value])
    return f"{option} {value if plain else json.dumps(value, ensure_ascii=False)}"


def describe(values: Mapping[str, Any]) -> str:
    """The method and the numbers that shape it, in a few words.

    Args:
        values: settings by name; those of a trace may lack what came later.
    """
    method, deterministic = values["method"], values["deterministic"]
    parts = [method]
    if method == "dsbd" and not deterministic:
        parts.append(values["verify"])
    if deterministic:
        parts.append("deterministic")
    if method in ("dsbd", "beam"):
        parts.append(f"W {values['width']}")
    if method in ("dsbd", "beam") and values.get("draws", "iid") != "iid":
        parts.append(values["draws"])
    if method == "dsbd":
        parts.append(f"W_S {values['draft_width']}")
    if method in ("dsbd", "speculative"):
        parts.append(f"gamma {values['gamma']}")
    if method == "specinfer":
        parts.append(",".join(map(str, values["tree"] or DEFAULT_TREE)))
        parts.append(_TREE_RULES[values.get("tree_rule", "specinfer")])
    return " ".join(parts)
