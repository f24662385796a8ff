"""Writes the real `--help` of each command into docs/commands.md; a test compares the two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "generate": """Decode one prompt, or many.

`--tree-rule` is how `specinfer` verifies the children of a node: by multi-step speculative sampling (`specinfer`; Miao
et al. 2024), by k-sequential selection (`spectr`; Sun et al. 2023) or by recursive rejection of distinct draws (`rsd`;
Jeon et al. 2024). All give the same law with other numbers of target calls
([why, and how many](results/tree-rules.md)).""",
    "chat": "A conversation; `/help` inside it lists its commands.",
    "tune": "The quickest settings for a machine, a pair and some prompts, as a preset ([how](speed.md#prices)).",
    "trace": "Replay or draw what `dsbd generate --trace` recorded.",
}
PROGRAM = "from dsbd_cli.cli.main import main; main()"


def help_of(command: str) -> str:
    """What `dsbd COMMAND --help` prints at 100 columns."""
    env = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, command, "--help"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.rstrip("\n")


def main() -> None:
    parts = [
        "# Commands\n\nThe help texts below are the program's own (`python scripts/help_in_docs.py`). `bench` has\n"
        "[a page of its own](bench.md), so have `distill` ([here](distill.md)) and `presets` ([here](presets.md));\n"
        "`doctor` says what it finds, and `dsbd COMMAND --help` what each takes.\n"
    ]
    for command, what in COMMANDS.items():
        shown = help_of(command)
        parts.append(f"## dsbd {command}\n\n{what}\n\n```text\n$ dsbd {command} --help\n{shown}\n```\n")
    (ROOT / "docs" / "commands.md").write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
