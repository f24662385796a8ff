"""Writes the tree of dsbd_cli, a line a file, into CONTRIBUTING.md; a test compares the two."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- python scripts/tree_in_docs.py writes this -->\n```text\n", "```\n<!-- up to here -->\n"
SUFFIXES = (".py", ".c")


def summary(path: Path) -> str:
    """The first sentence of a module's docstring, or of the comment that a C file begins with; no citations."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        words = ast.get_docstring(ast.parse(text)) or ""
    else:
        found = re.match(r"/\*(.*?)\*/", text, re.DOTALL)
        words = re.sub(r"^\s*\*", "", found[1], flags=re.MULTILINE) if found else ""
    first = " ".join(words.strip().split("\n\n")[0].split())
    first = re.split(r"(?<=[\w`)])\. ", first)[0].removesuffix(".")
    return re.sub(r" \(docs/design\.md sections? [^)]*\)", "", first)


def files(folder: Path) -> list[Path]:
    """What the tree names in a folder: its files first, then the folders that hold any; by name."""
    inside = [path for path in sorted(folder.iterdir()) if not path.name.startswith(("__pycache__", "."))]
    here = [path for path in inside if path.suffix in SUFFIXES and path.name != "__init__.py"]
    return here + [path for path in inside if path.is_dir() and any(path.rglob("*.py"))]


def tree(folder: Path = ROOT / "dsbd_cli", depth: int = 0) -> str:
    """The lines of a folder: its own, named by `__init__.py`, and those of what it holds."""
    lines = [line(depth, f"{folder.name}/", summary(folder / "__init__.py"))]
    for path in files(folder):
        if path.is_dir():
            lines.append(tree(path, depth + 1))
        else:
            lines.append(line(depth + 1, path.name, summary(path)))
    return "".join(lines)


def line(depth: int, name: str, words: str) -> str:
    return f"{'  ' * depth + name:<27} {words}".rstrip() + "\n"


def main() -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + tree() + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
