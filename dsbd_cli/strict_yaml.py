"""Strict YAML: a mapping whose keys are words given once, and plain values that mean what they look like.

`1e-5` is a number, `no` and `on` are words, `010` is not octal and not ten; tabs, aliases, tags and
second documents are refused with file and line.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import yaml

from dsbd_cli.errors import UserError
from dsbd_cli.names import near


def read_mapping(
    path: Path, known: Collection[str], nested: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, int]]:
    """Values and line numbers (from 1) of the top-level keys.

    Args:
        known: keys that the file may hold.
        nested: those of them that may hold a mapping; elsewhere one is the value's fault, not its keys'.

    Raises:
        UserError: one line with file and, where there is one, line and key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            raise UserError(f"{path} is empty: it must hold `key: value` lines")
        if not isinstance(node, yaml.MappingNode):
            refuse(path, node.start_mark.line + 1, "it must hold `key: value` lines, not a list or a text")
        _check_keys(path, node)
        for key, value in node.value:
            if key.value not in known:
                refuse(path, key.start_mark.line + 1, f"unknown key {key.value!r}{near(key.value, known)}")
            for mapping in _mappings(value) if key.value in nested else ():
                _check_keys(path, mapping)
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
        return _construct(path, node, text), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        refuse(path, mark.line + 1 if mark else None, _yaml_words(error, text, mark))
    except yaml.YAMLError as error:  # control characters
        raise UserError(f"{path} is not YAML ({error})") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None


def _construct(path: Path, node: yaml.MappingNode, text: str) -> dict[str, Any]:
    """Values of the top-level keys, each built alone so that a failure has a line."""
    loader = _Loader(text)
    try:
        values = {}
        for key, value in node.value:
            try:
                values[key.value] = loader.construct_document(value)
            except ValueError as error:  # a number of 5,000 digits
                refuse(path, value.start_mark.line + 1, f"{key.value}: {error}")
        return values
    finally:
        loader.dispose()


def _yaml_words(error: yaml.MarkedYAMLError, text: str, mark: Any) -> str:
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\t" in line:
        return "YAML takes no tabs: use spaces"
    if isinstance(error, yaml.composer.ComposerError) and (error.problem or "").endswith("is not allowed"):
        return str(error.problem)
    return f"not YAML: {error.problem or error.context}"


def _check_keys(path: Path, mapping: yaml.MappingNode) -> None:
    """Refuse keys that repeat or are not words."""
    seen: dict[str, int] = {}
    for key, _ in mapping.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            refuse(path, line, f"key {shown} is not a word")
        if key.value in seen:
            refuse(path, line, f"key {key.value!r} was already given in line {seen[key.value]}")
        seen[key.value] = line


def _mappings(node: yaml.Node) -> Iterator[yaml.MappingNode]:
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value)


def means_itself(text: str) -> bool:
    """Whether `text`, written plainly, is read back as this text and not as a number, a truth or nothing."""
    loader = _Loader("")
    try:
        return bool(loader.resolve(yaml.ScalarNode, text, (True, False)) == "tag:yaml.org,2002:str")
    finally:
        loader.dispose()


def refuse(path: Path, line: int | None, what: str) -> NoReturn:
    """Raise a UserError that begins with the place."""
    raise UserError(f"{path}{f', line {line}' if line else ''}: {what}") from None


class _Loader(yaml.SafeLoader):
    """Safe YAML with 1.2's idea of plain numbers, booleans and nulls, and without aliases."""

    yaml_implicit_resolvers = {}  # noqa: RUF012

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "aliases are not allowed", event.start_mark)
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            tag = event.tag.removeprefix("tag:yaml.org,2002:")
            raise yaml.composer.ComposerError(None, None, f"tag {tag!r} is not allowed", event.start_mark)
        return super().compose_node(parent, index)


# Each with the characters that such a value may begin with.
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
              r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
