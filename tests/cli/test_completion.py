"""Completion for the shell that is named, whichever shell runs dsbd."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Call

# What only this shell's script holds.
OWN = {
    "bash": "complete -o default -F",
    "zsh": "#compdef dsbd",
    "fish": "complete --command dsbd",
    "powershell": "Register-ArgumentCompleter",
    "pwsh": "Register-ArgumentCompleter",
}
FILES = {
    "bash": [".bash_completions/dsbd.sh", ".bashrc"],
    "zsh": [".zfunc/_dsbd", ".zshrc"],
    "fish": [".config/fish/completions/dsbd.fish"],
}


@pytest.fixture
def runs_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What is told of the shell that runs dsbd; nothing where it is called ''."""

    class Failed(EnvironmentError):
        pass

    def make(shell: str) -> None:
        def detect_shell() -> tuple[str, str]:
            if not shell:
                raise Failed
            return shell, f"/bin/{shell}"

        found = SimpleNamespace(ShellDetectionFailure=Failed, detect_shell=detect_shell)
        monkeypatch.setitem(sys.modules, "shellingham", found)

    return make


@pytest.mark.parametrize("equals", [False, True])
@pytest.mark.parametrize("shell", OWN)
def test_the_script_is_that_of_the_shell_that_is_named(
    dsbd: Call, runs_in: Callable[[str], None], shell: str, equals: bool
) -> None:
    runs_in("bash")
    ran = dsbd(f"--show-completion={shell}") if equals else dsbd("--show-completion", shell)
    assert (ran.code, ran.err) == (0, "")
    assert {name for name, words in OWN.items() if words in ran.text} == {
        name for name, words in OWN.items() if words == OWN[shell]
    }


def test_without_a_name_it_is_that_of_the_shell_that_runs_dsbd(
    dsbd: Call, runs_in: Callable[[str], None]
) -> None:
    runs_in("fish")
    assert OWN["fish"] in dsbd("--show-completion").text
    runs_in("dash")
    dsbd("--show-completion").refused("dash", "name one", "zsh")
    runs_in("")
    dsbd("--install-completion").refused("no shell is found", "name one", "zsh")


@pytest.mark.parametrize("option", ["--show-completion", "--install-completion"])
def test_an_unknown_shell_is_refused(dsbd: Call, option: str) -> None:
    dsbd(option, "zhs").refused(f"{option} zhs", "did you mean zsh?")
    dsbd(f"{option}=").refused(option, "no such shell")


@pytest.mark.parametrize("shell", FILES)
def test_it_is_installed_for_the_shell_that_is_named(
    dsbd: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert dsbd("--install-completion", shell).code == 0
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    assert files == FILES[shell]
    assert OWN[shell] in (tmp_path / FILES[shell][0]).read_text()


def test_a_start_file_that_cannot_be_used_is_named(
    dsbd: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    dsbd("--install-completion", "fish").refused("--install-completion", str(tmp_path / "file"), "fish")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".bashrc").write_bytes(b"\xff")
    dsbd("--install-completion", "bash").refused("--install-completion", "--show-completion bash")
