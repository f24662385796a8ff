"""Settings as they are typed and shown in a chat."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from dsbd_cli.errors import UserError
from dsbd_cli.names import near
from dsbd_cli.setting_text import parse_setting
from dsbd_cli.settings import FIELDS

# A turn goes through the template, and one beam of it is the answer.
UNLISTED = ("raw", "num_return")
LISTED = tuple(name for name in FIELDS if name not in UNLISTED)
_TEXTS = ("stop", "system", "prices")  # of any words
_NAMED = re.compile(r"-*([\w-]+)=")


def read(line: str, now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `NAME=VALUE ...`, where quotes hold a value together; a text alone needs none.

    Args:
        line: what follows the command.
        now: settings by name, to be shown where a value is missing.

    Raises:
        UserError: no such setting, one that a chat has no place for, no value, or a quote that is not closed.
    """
    given: dict[str, Any] = {}
    for word in _words(line):
        text, equals, value = word.partition("=")
        name = text.lstrip("-").replace("-", "_")
        if name in UNLISTED:
            raise UserError(f"{name} has no place in a chat")
        if name not in LISTED:
            spaces = f"; {_quoted(next(reversed(given)))}" if given and not equals else ""
            raise UserError(f"/settings NAME=VALUE: no setting {text!r}{near(name, LISTED)}{spaces}")
        if not equals:
            raise UserError(
                f"/settings {name} needs a value: /settings {name}=VALUE (it is {shown(now[name])}; /settings alone "
                "shows all)"
            )
        new = parse(name, value)
        # As on the command line, each stop is one more.
        given[name] = (*given.get(name, ()), *new) if name == "stop" else new
    return given


def _words(line: str) -> list[str]:
    """`line` by settings: split at spaces outside quotes, or whole where it is one text."""
    line = line.strip()
    first = _NAMED.match(line)
    others = line.split()[1:]
    if first and first[1].replace("-", "_") in _TEXTS and not any(map(_NAMED.match, others)):
        value = line[first.end() :]
        if not value.startswith(("'", '"')):
            return [line]  # an apostrophe is no quote here
    splitter = shlex.shlex(line, posix=True, punctuation_chars=False)
    splitter.whitespace_split, splitter.escape, splitter.commenters = True, "", ""
    try:
        return list(splitter)
    except ValueError:
        raise UserError(f"/settings: a quote is not closed; {_quoted('NAME')}") from None


def _quoted(name: str) -> str:
    return f'a value with spaces stands in quotes: {name}="..."'


def parse(name: str, value: str) -> Any:
    """A setting typed as text, in the setting's type. Raises UserError: no such number."""
    if name in ("stop", "system") and value.lower() == "none":
        return () if name == "stop" else None
    if name == "stop":
        return (value,)
    if name == "deterministic" and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return parse_setting(name, value)


def shown(value: Any) -> str:
    """A setting as it can be typed."""
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
