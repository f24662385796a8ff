"""Help, version and completion; and the docs show the help that the program gives."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from dsbd_cli import __version__
from tests.cli.conftest import ROOT, Call, environment, program

COMMANDS = ["generate", "chat", "trace", "presets", "doctor"]
# A help text in the docs stands in a block of its own behind the command that gives it.
SHOWN = re.compile(r"^```(?:text|console)?\n\$ dsbd ([a-z -]*--help)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])


def help_text(dsbd: Call, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    ran = dsbd(*arguments)
    assert ran.code == 0, ran.err
    return ran.text.rstrip("\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(dsbd: Call, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    text = help_text(dsbd, monkeypatch, command, "--help")
    assert text.startswith(f"Usage: dsbd {command}")
    assert help_text(dsbd, monkeypatch, command, "-h") == text
    assert command in help_text(dsbd, monkeypatch, "--help")


@pytest.mark.parametrize("group", [[], ["bench"], ["presets"], ["distill"]])
def test_what_commands_do_is_said_in_whole(
    dsbd: Call, monkeypatch: pytest.MonkeyPatch, group: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, listed = dsbd(*group, "--help").text.split("Commands:\n")
    assert listed
    assert "..." not in listed


def test_bare_dsbd_is_help(dsbd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert help_text(dsbd, monkeypatch) == help_text(dsbd, monkeypatch, "--help")


def test_every_option_of_a_setting_is_offered_and_explained(
    dsbd: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsbd_cli.settings import FIELDS

    text = help_text(dsbd, monkeypatch, "generate", "--help")
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in text
    assert "outside the exactness theorem" in " ".join(text.split())


def test_help_shown_in_the_docs_is_the_programs_own(dsbd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    found = 0
    for page in pages():
        for arguments, shown in SHOWN.findall(page.read_text(encoding="utf-8")):
            assert shown == help_text(dsbd, monkeypatch, *arguments.split()), (
                f"{page.name}: `dsbd {arguments}` says something else by now (python scripts/help_in_docs.py)"
            )
            found += 1
    assert found > 0


def test_options_named_in_the_docs_exist(dsbd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    known = set()
    for command in ([], ["generate"], ["chat"], ["trace"], ["presets"], ["doctor"], ["bench"], ["distill"]):
        known |= set(
            re.findall(r"(?<![\w-])--[a-z][a-z-]+", help_text(dsbd, monkeypatch, *command, "--help"))
        )
    for page in pages():
        for line in page.read_text(encoding="utf-8").splitlines():
            if re.search(r"\bdsbd (generate|chat|trace)\b", line):
                used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.split("dsbd ", 1)[1]))
                assert used <= known | {"--nproc-per-node", "--no-python"}, f"{page.name}: {line}"


def test_version(dsbd: Call) -> None:
    ran = dsbd("--version")
    assert (ran.code, ran.text) == (0, f"dsbd {__version__}\n")


@pytest.mark.parametrize(("arguments", "word"), [(["genrate"], "genrate"), (["--versoin"], "--versoin")])
def test_a_mistyped_command_is_one_line(dsbd: Call, arguments: list[str], word: str) -> None:
    dsbd(*arguments).refused(word)


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion(shell: str) -> None:
    script = subprocess.run(
        program(), env=environment(_DSBD_COMPLETE=f"source_{shell}"), capture_output=True, text=True
    )
    assert script.returncode == 0, script.stderr
    assert "_DSBD_COMPLETE" in script.stdout
    asked = {
        "bash": {"COMP_WORDS": "dsbd gen", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "dsbd gen"},
        "fish": {"_TYPER_COMPLETE_ARGS": "dsbd gen", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    env = environment(_DSBD_COMPLETE=f"complete_{shell}", **asked)
    offered = subprocess.run(program(), env=env, capture_output=True, text=True)
    assert "generate" in offered.stdout, offered.stderr
    assert "doctor" not in offered.stdout
    assert os.name
