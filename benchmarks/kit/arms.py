"""Arms from a small table: a method a line, and the settings that differ from the preset's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from dsbd_cli.bench.arms import Arm, build_arms
from dsbd_cli.bench.methods import METHODS
from dsbd_cli.bench.sweep import label_of, parse_sweep
from dsbd_cli.errors import UserError
from dsbd_cli.settings import Settings

# Fixed width (threshold none) makes dsbd's law that of `beam`: equal quality, so speeds compare.
DEFAULT_ARMS = """
multinomial
beam
speculative
specinfer
dsbd:paper     threshold=none
dsbd:continue  threshold=none
dsbd:cover     threshold=none
dsbd:cover     threshold=0.9
dsbd-kv-one
hf-sample
hf-beam-sample
hf-beam-search
hf-assisted
"""


def parse_arms(text: str, base: Settings) -> list[Arm]:
    """The arms of a table: lines, or parts between `;`, of `METHOD name=value ...`; `#` begins a comment.

    Args:
        text: the table, or the path of a file that holds it.
        base: settings of everything that a line does not name.

    Raises:
        UserError: no such method or setting, or none at all.
    """
    if ";" not in text and " " not in text and Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.replace(";", "\n").splitlines()]
    arms: list[Arm] = []
    for line in filter(None, lines):
        method, *words = line.split()
        if method not in METHODS:
            raise UserError(f"--arms: no method {method!r}; known: {', '.join(METHODS)}")
        grid = parse_sweep(" ".join(words)) if words else {}
        many = next((name for name, values in grid.items() if len(values) > 1), None)
        if many:
            raise UserError(f"--arms: {line!r} gives {many} several values: write a line for each")
        point = {name: values[0] for name, values in grid.items()}
        (arm,), _ = build_arms([method], base, point, [])
        arm = dataclasses.replace(arm, name=f"{method} {label_of(point)}".strip(), swept=point)
        if any(arm.name == other.name for other in arms):
            raise UserError(f"--arms: {arm.name!r} is there twice")
        arms.append(arm)
    if not arms:
        raise UserError("--arms is empty")
    return arms
