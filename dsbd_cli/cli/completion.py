"""`--show-completion` and `--install-completion`: typer's own, for the shell that is named behind them.

Typer's are switches that ask which shell runs the program; a name behind them would be passed over.
"""

from __future__ import annotations

import contextlib
from subprocess import CalledProcessError
from typing import Any

from typer.completion import install_callback, show_callback
from typer.core import TyperGroup

from dsbd_cli.errors import UserError
from dsbd_cli.names import near

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_DO = {"--show-completion": show_callback, "--install-completion": install_callback}
_HELP = "{} completion for a shell ({}); without a name for the one that runs dsbd."


class Root(TyperGroup):
    """The commands of dsbd, and completion for a shell."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        for param in params:
            if param.opts and (option := param.opts[0]) in _DO:
                param.help = _HELP.format(option[2:].partition("-")[0].capitalize(), ", ".join(SHELLS[:4]))
        return params

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        option, equals, shell = args[0].partition("=") if args else ("", "", "")
        if option in _DO and not ctx.resilient_parsing:
            named = shell if equals else next(iter(args[1:]), None)
            _complete(ctx, option, _running(option) if named is None else _known(option, named))
        return super().parse_args(ctx, args)


def _complete(ctx: Any, option: str, shell: str) -> None:
    """Print or install the completion; ends the program."""
    do: Any = _DO[option]
    try:
        do(ctx, None, shell)
    except (OSError, ValueError, CalledProcessError) as error:  # ValueError: a start file that is not UTF-8
        where = getattr(error, "filename", None)
        if where is None and isinstance(error, OSError):  # stdout, as of any command
            raise
        where = where or f"a start file of {shell}"
        raise UserError(
            f"{option}: {where} cannot be used: {getattr(error, 'strerror', None) or error} "
            f"(dsbd --show-completion {shell} prints what would be installed)"
        ) from None


def _known(option: str, shell: str) -> str:
    if shell not in SHELLS:
        raise UserError(
            f"{option} {shell}: no such shell{near(shell, SHELLS)}; there are {', '.join(SHELLS)}"
        )
    return shell


def _running(option: str) -> str:
    """The shell that runs the program."""
    found = ""
    with contextlib.suppress(ImportError, OSError, RuntimeError):
        import shellingham

        with contextlib.suppress(shellingham.ShellDetectionFailure):
            found = shellingham.detect_shell()[0]
    if found not in SHELLS:
        said = f"dsbd was not started by a shell that is known ({found})" if found else "no shell is found"
        raise UserError(f"{option}: {said}: name one, of {', '.join(SHELLS)}")
    return found
