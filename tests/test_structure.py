"""Who imports whom: no circle, rooms of `decoding` in their order, one door into them, a law without torch;
and modules that a reader can hold.

Read from the source, so late imports inside functions and those for type checkers count as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOOR = "dsbd_cli.decoding"
# A room imports itself and rooms of a smaller number; `methods` and `device` do not know each other.
RANKS = {"law": 0, "tree": 1, "cache": 2, "forward": 3, "model": 4, "device": 5, "methods": 5}
# A longer module is one thing, and its docstring says why.
MOST_LINES = 300
# Measuring code looks inside: which rooms, file by file. Everything else knows the door only.
LOOKS_INSIDE = {
    "benchmarks/gpu_check.py": {"cache", "forward"},
    "benchmarks/kit/phases.py": {"device"},
    "benchmarks/tree_rules.py": {"law"},
}


def name_of(path: Path) -> str:
    """`dsbd_cli/ui/look.py` -> `dsbd_cli.ui.look`; a package's name for its `__init__.py`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules(folder: str) -> dict[str, Path]:
    return {name_of(path): path for path in sorted((ROOT / folder).rglob("*.py"))}


@cache
def imported(path: Path) -> frozenset[str]:
    """Every module that the file imports anywhere; `from package import name` is `name` where that is a module."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    return frozenset(
        _imported(ast.parse(path.read_text(encoding="utf-8")), package, modules("dsbd_cli").keys())
    )


def _imported(tree: ast.AST, package: str, known: Collection[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "import_module", "importlib.import_module", "__import__",
        ):  # fmt: skip
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The shortest circle through each module that lies on one, each circle once."""
    found: dict[frozenset[str], list[str]] = {}
    for start in sorted(graph):
        back = {start: ""}
        queue = [start]
        for at in queue:
            if start in graph[at]:
                path = [at]
                while path[-1] != start:
                    path.append(back[path[-1]])
                found.setdefault(frozenset(path), [*reversed(path), start])
                break
            for following in sorted(graph[at] - back.keys()):
                back[following] = at
                queue.append(following)
    return list(found.values())


def room(module: str) -> str | None:
    """The room of `decoding` that a module stands in; "" for the door, None outside."""
    if module == DOOR:
        return ""
    return module.split(".")[2] if module.startswith(f"{DOOR}.") else None


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"d"}, "e": {"a"}}
    assert circles(graph) == [["a", "b", "c", "a"], ["d", "d"]]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import dsbd_cli.text", {"dsbd_cli.text"}),
        ("def f():\n    from dsbd_cli.ui import look", {"dsbd_cli.ui.look"}),
        ("if TYPE_CHECKING:\n    from dsbd_cli.errors import UserError", {"dsbd_cli.errors"}),
        ("from . import look", {"dsbd_cli.ui.look"}),
        ("from .look import is_terminal", {"dsbd_cli.ui.look"}),
        ("from .. import errors", {"dsbd_cli.errors"}),
        ("import importlib\nimportlib.import_module('dsbd_cli.text')", {"importlib", "dsbd_cli.text"}),
    ],
)
def test_imports_are_read_wherever_they_stand(code: str, names: set[str]) -> None:
    assert set(_imported(ast.parse(code), "dsbd_cli.ui", modules("dsbd_cli").keys())) == names


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules("dsbd_cli")
    assert len(known) > 150
    graph = {name: set(imported(path) & known.keys()) for name, path in known.items()}
    assert not circles(graph), "\n".join(" -> ".join(circle) for circle in circles(graph))


def test_every_module_of_decoding_stands_in_a_room() -> None:
    inside = {room(module) for module in modules("dsbd_cli")} - {None, ""}
    assert inside == RANKS.keys()


def test_rooms_import_only_what_lies_below_them() -> None:
    wrong = []
    for module, path in modules("dsbd_cli").items():
        here = room(module)
        if not here:
            continue
        for other in sorted(imported(path)):
            there = room(other)
            if there is None or there == here:
                continue
            if there == "" or RANKS[there] >= RANKS[here]:
                wrong.append(f"{module} imports {other}")
    assert not wrong, "\n".join(wrong)


def test_others_come_in_by_the_door() -> None:
    wrong, used = [], {}
    outside = modules("dsbd_cli") | modules("benchmarks") | modules("scripts")
    for module, path in outside.items():
        if room(module) is not None:
            continue
        file = path.relative_to(ROOT).as_posix()
        for other in sorted(imported(path)):
            if (there := room(other)) is None or there == "":
                continue
            if there in LOOKS_INSIDE.get(file, set()):
                used.setdefault(file, set()).add(there)
            else:
                wrong.append(f"{file} imports {other}")
    assert not wrong, "\n".join(wrong)
    assert used == LOOKS_INSIDE, "a permission that nobody uses any more"


def test_a_long_module_says_why_it_is_one() -> None:
    silent = []
    for module, path in modules("dsbd_cli").items():
        text = path.read_text(encoding="utf-8")
        says = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
        if len(text.splitlines()) > MOST_LINES and "One module, since " not in says:
            silent.append(f"{module} has {len(text.splitlines())} lines")
    assert not silent, "\n".join(silent)


BROAD = {"Exception", "OSError", "RuntimeError", "TimeoutError"}


def names_in(tree: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}


def test_what_a_callers_signal_handler_raises_is_let_by() -> None:
    """It says nothing of what it came into, though that may raise whatever it likes (`errors.let_by`)."""
    wrong, seen = [], 0
    for module, path in modules("dsbd_cli").items():
        if module.split(".")[1:2] not in (
            ["decoding"],
            ["loading"],
            ["prices"],
            ["energy"],
            ["energy_probes"],
            ["hf"],
            ["prompts"],
            ["templates"],
        ):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            # Time limits are often `TimeoutError`, which is an OSError.
            if isinstance(node, ast.ExceptHandler) and node.type and BROAD & names_in(node.type):
                seen += 1
                calls = [ast.unparse(one.func) for one in ast.walk(node) if isinstance(one, ast.Call)]
                if not {"let_by", "_explained"} & set(calls):
                    wrong.append(f"{module}, line {node.lineno}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "contextlib.suppress":
                wrong += (
                    [f"{module}, line {node.lineno}: errors.suppressed"] if BROAD & names_in(node) else []
                )
    assert seen > 40
    assert not wrong, "\n".join(wrong)


def test_the_law_needs_numpy_only() -> None:
    allowed = sys.stdlib_module_names | {"numpy"}
    wrong = [
        f"{module} imports {other}"
        for module, path in modules("dsbd_cli").items()
        if room(module) == "law"
        for other in sorted(imported(path))
        if other.partition(".")[0] not in allowed and room(other) != "law"
    ]
    assert not wrong, "\n".join(wrong)


BLOCKED = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import dsbd_cli.decoding.law as law
for found in pkgutil.walk_packages(law.__path__, law.__name__ + "."):
    importlib.import_module(found.name)
    print(found.name)
"""


def test_the_law_can_be_imported_where_there_is_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "dsbd_cli.decoding.law.verification" in done.stdout.split()


def test_the_methods_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, dsbd_cli, dsbd_cli.decoding.methods;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_tests_called_slow_are_there():
    root = Path(__file__).parents[1]
    for line in (root / "tests" / "slow.txt").read_text(encoding="utf-8").split():
        file, _, name = line.partition("::")
        assert f"def {name.rpartition('::')[2]}(" in (root / file).read_text(encoding="utf-8"), line
