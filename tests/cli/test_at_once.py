"""Ctrl-C while the program is still being imported: a word and 130, as later."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.cli.conftest import ROOT, environment

# Ctrl-C where the module named first is asked for; then the command as it is started.
PROGRAM = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.modules.pop(sys.argv[1], None)
"""
STARTS = {
    "script": "from dsbd_cli.__main__ import main; main()",
    "module": "import runpy; runpy.run_module('dsbd_cli', run_name='__main__')",
}


def start(how: str, module: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + STARTS[how], module],
        env=environment() | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("how", STARTS)
@pytest.mark.parametrize(
    "module", ["dsbd_cli.settings", "typer", "dsbd_cli.cli.main", "dsbd_cli.cli.signals"]
)
def test_ctrl_c_during_imports(how: str, module: str) -> None:
    ran = start(how, module)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "dsbd: stopped\n")


def test_one_process_of_several_says_so() -> None:
    ran = start("module", "typer", RANK="1")
    assert (ran.returncode, ran.stderr) == (130, "")


def test_the_script_starts_there() -> None:
    scripts = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    assert re.search(r'^dsbd = "(.*)"$', scripts, re.MULTILINE)[1] == "dsbd_cli.__main__:main"  # type: ignore[index]
