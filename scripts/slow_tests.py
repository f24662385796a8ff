"""Writes tests/slow.txt, what `make quick` leaves out, from the output of a whole run of the tests.

    .venv/bin/python -m pytest -n auto --dist loadgroup --durations=0 > build/durations.txt
    python scripts/slow_tests.py build/durations.txt

A test is slow where all its cases together take more than LIMIT seconds.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

LIMIT = 3.0
LIST = Path(__file__).parents[1] / "tests" / "slow.txt"
_LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(\S+?::[^\[\s]+)")


def slow(durations: str) -> list[str]:
    """The names of slow tests, without their cases, sorted."""
    seconds: Counter[str] = Counter()
    for line in durations.splitlines():
        if found := _LINE.match(line):
            seconds[found[2]] += float(found[1])
    # A state machine has no function of its own to name: it carries the mark itself.
    return sorted(name for name, total in seconds.items() if total > LIMIT and not name.endswith("::runTest"))


if __name__ == "__main__":
    LIST.write_text("".join(f"{name}\n" for name in slow(Path(sys.argv[1]).read_text())))
