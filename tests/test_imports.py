"""No two modules import each other: whatever is read first, the rest is there already."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "dsbd_cli"
# Rooms whose own order is checked where they are.
_ELSEWHERE = ("dsbd_cli.decoding", "dsbd_cli.bench")


def imports() -> dict[str, set[str]]:
    """Module -> modules of this package it imports, anywhere in its text: in functions and for types too."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        seen = found.setdefault(name, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                seen.update(alias.name for alias in node.names if alias.name in files)
            elif isinstance(node, ast.ImportFrom) and node.module in files:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                seen.update(one if one in files else node.module for one in inner)
    return found


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules each of which reaches all others."""
    reach = {}
    for name in graph:
        seen: set[str] = set()
        todo = [*graph[name]]
        while todo:
            other = todo.pop()
            if other not in seen:
                seen.add(other)
                todo += graph[other]
        reach[name] = seen
    found = [sorted(one for one in graph if one in reach[name] and name in reach[one]) for name in graph]
    return [list(one) for one in sorted({tuple(circle) for circle in found if circle})]


def test_a_circle_is_seen():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_no_modules_import_each_other():
    graph = imports()
    assert len(graph) > 80
    assert [one for one in circles(graph) if not one[0].startswith(_ELSEWHERE)] == []
