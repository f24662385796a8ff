"""Files that come whole or not at all, and what a killed writer leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_cli.paths import replacing, write_whole

_WRITER = """
import os, signal, sys
from pathlib import Path
from dsbd_cli.paths import replacing
with replacing(Path(sys.argv[1])) as draft:
    draft.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    path = tmp_path / "a[1].json"
    killed = subprocess.run([sys.executable, "-c", _WRITER, str(path)], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    # Another file's, another machine's, and one of a process that is there (this one's parent) stay.
    stay = [
        left.replace("a[1]", "a1"),
        left.replace(".json.", ".json.x"),
        f"{left.rpartition('-')[0]}-{os.getppid()}.tmp",
    ]
    for name in stay:
        (tmp_path / name).write_text("other")
    write_whole(path, "whole")
    assert names(tmp_path) == sorted([*stay, "a[1].json"])
    assert path.read_text() == "whole"


def cut(path: Path) -> None:
    with replacing(path) as draft:
        draft.write_text("half")
        raise ValueError("no")


def test_a_block_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("before")
    with pytest.raises(ValueError, match="no"):
        cut(path)
    assert names(tmp_path) == ["a"]
    assert path.read_text() == "before"
