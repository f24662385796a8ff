"""`dsbd`: mounts the commands, and turns every way a run can end into an exit code.

0 done, 1 the run failed, 2 the input is wrong, 130 after Ctrl-C, 143 after SIGTERM; one line on stderr, no
traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
import threading
from collections.abc import Sequence
from typing import Annotated

import typer

from dsbd_cli.cli import ranks, signals, streams
from dsbd_cli.cli.completion import Root
from dsbd_cli.errors import DsbdError, Stopped
from dsbd_cli.group import depart, joined
from dsbd_cli.paths import FULL, write_error
from dsbd_cli.ui.waiting import ready
from dsbd_cli.version import __version__

app = typer.Typer(
    name="dsbd",
    cls=Root,
    help="Dynamic-width speculative beam decoding: beam-quality text at the speed of speculation.",
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Base of all usage errors, whichever click typer brings along.
_ClickError = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

# Faults of a path that somebody named.
_NAMED_WRONGLY = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"dsbd {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(0)


def _mount() -> None:
    from dsbd_cli.cli import bench, chat, distill, doctor, generate, presets, trace, tune

    app.command("generate", no_args_is_help=False)(generate.generate)
    app.command("chat")(chat.chat)
    app.add_typer(bench.app, name="bench")
    app.add_typer(distill.app, name="distill", short_help="Make a draft for a target, from the target alone.")
    app.add_typer(presets.app, name="presets")
    app.command("doctor", short_help="Say what this machine offers, and what was measured on it.")(
        doctor.doctor
    )
    app.command("trace", short_help="Replay or draw a run that generate --trace recorded.")(trace.trace)
    app.command(
        "tune", no_args_is_help=False, short_help="Find the quickest settings here, for your prompts."
    )(tune.tune)


def say(line: str) -> None:
    """One line on stderr, whatever state stderr is in."""
    from dsbd_cli.cli.output import note

    with contextlib.suppress(OSError, ValueError):
        note(line)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never raises."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    streams.mend()
    try:
        refuse_known(arguments)
        _mount_once()
        try:
            code = app(arguments, standalone_mode=False, prog_name="dsbd")
        finally:
            ready()
        sys.stdout.flush()
        if code == 130:  # how typer hands on Ctrl-C
            _say_stopped(_stopped())
        return code if isinstance(code, int) else 0
    except SystemExit as error:
        # click ends a program whose reader went away by itself, with code 1.
        if isinstance(error.__context__, BrokenPipeError):
            return _reader_gone()
        return error.code if isinstance(error.code, int) else 1
    except Stopped as error:
        _say_stopped(str(error))
        return error.exit_code
    except DsbdError as error:
        ranks.leave(error.exit_code, say, str(error))
        return error.exit_code
    except _ClickError as error:  # type: ignore[misc]
        ranks.leave(2, say, usage_line(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        _say_stopped(_stopped())
        return 130
    except BrokenPipeError:
        return _reader_gone()
    except OSError as error:
        if error.errno in FULL:  # without a file's name it was stdout
            say(str(write_error(error.filename or "stdout", error)))
            return 1
        reason = error.strerror or str(error)
        say(f"{error.filename} cannot be used: {reason}" if error.filename else reason)
        return 2 if error.filename and error.errno in _NAMED_WRONGLY else 1
    except MemoryError:
        say("out of memory: try a smaller model, --dtype bfloat16, or a shorter prompt")
        return 1


def _stopped() -> str:
    return "stopped by SIGTERM" if signals.terminated() else "stopped"


def _say_stopped(line: str) -> None:
    # A launcher that is stopped stops all its ranks; one of them says so.
    if not ranks.follower():
        say(line)


def _reader_gone() -> int:
    """Nothing to report to anyone. Streams are pointed elsewhere, so that exit is quiet too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
            continue
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
    # Others of a team wait for this process: its launcher has to end them.
    return 0 if joined().size == 1 else signals.BROKEN_PIPE


def usage_line(error: Exception) -> str:
    """A usage error as one line, with the option it is about."""
    line = _missing(error) or _malformed(error) or " ".join(error.format_message().split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if (
        line.startswith("Got unexpected extra argument")
        and context is not None
        and context.info_name == "generate"
    ):
        line = f"a PROMPT of several words stands in quotes: {line[0].lower()}{line[1:]}"
    return f"{line} (see {context.command_path} --help)" if context is not None else line


def _missing(error: Exception) -> str | None:
    """What an option or argument that has to be given is, where the error is that it was not."""
    param = getattr(error, "param", None)
    said = getattr(param, "help", None)
    if type(error).__name__ != "MissingParameter" or param is None or not said:
        return None
    option = param.param_type_name == "option"
    name = param.opts[0] if option else param.metavar or param.name.upper()
    return f"{name} is missing: {said.split('. ')[0].removesuffix('.')}"


def _malformed(error: Exception) -> str | None:
    """What a value that is none of its option's type was, where the parser of values says what it wanted."""
    param = getattr(error, "param", None)
    told = getattr(error.__cause__ or error.__context__, "errors", None)
    if param is None or not callable(told) or not (found := told()):
        return None
    wanted = str(found[0]["msg"]).partition(", ")[0].removeprefix("Input should be ")
    name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
    return f"{name} must be {wanted}, not {found[0]['input']!r}"


def refuse_known(arguments: Sequence[str]) -> None:
    """Options of other tools that we do not offer are refused by name, with the reason."""
    from dsbd_cli.cli.options import REFUSED
    from dsbd_cli.errors import UserError

    for argument in arguments:
        if argument == "--":
            return
        name = argument.split("=")[0].replace("_", "-")
        if name in REFUSED:
            raise UserError(f"{name} is not offered: {REFUSED[name]}")


_mounted = False


def _mount_once() -> None:
    global _mounted
    if not _mounted:
        _mounted = True
        _mount()


def main() -> None:
    """Run the command line, and end the process with its exit code."""
    streams.hold_descriptors()
    signals.heed()
    if sys.argv[1:2] in (["generate"], ["chat"]):
        # Imports make a quarter of a million objects that stay, and each search for garbage looks at them all:
        # `options` turns it on once the pair is loaded.
        gc.disable()
    code = run()
    if code == 130:
        # Threads of torch may still be in a forward; an orderly exit would wait for them.
        sys.stderr.flush()
        os._exit(signals.EXIT_CODE if signals.terminated() else 130)
    else:
        depart(code)
        _leave(code)


def _leave(code: int) -> None:
    """End the process: with torch at once, for an orderly end takes it most of a second to free what goes anyway.

    What is registered for the end still runs, and streams are flushed. Where one refuses, or a thread has work of
    its own to finish, the end is the interpreter's.
    """
    others = [one for one in threading.enumerate() if one is not threading.current_thread()]
    if "torch" in sys.modules and all(one.daemon for one in others):
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    sys.exit(code)
