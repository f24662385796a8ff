"""`dsbd chat`: turns of a conversation on one engine, whose caches keep the history."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsbd_cli.cli.generate import plain
from dsbd_cli.cli.options import Chosen, decoding_options
from dsbd_cli.cli.output import Out, note
from dsbd_cli.cli.signals import terminated
from dsbd_cli.cli.stdin import arriving_lines
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.group import Group, joined
from dsbd_cli.idle import in_vain
from dsbd_cli.names import near
from dsbd_cli.setting_text import parse_setting
from dsbd_cli.settings import DRAFTING, FIELDS, METHODS
from dsbd_cli.tally import ratio
from dsbd_cli.ui import waiting
from dsbd_cli.ui.look import hanging, is_terminal, unicode_terminal
from dsbd_cli.ui.safe import visible
from dsbd_cli.ui.summary import number, room, summary

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder
    from dsbd_cli.result import Result
    from dsbd_cli.settings import Settings

HELP = """\
/method NAME            answer by another method from now on
/compare [A] [B]        the last turn by two methods, side by side with their numbers
/settings [NAME=VALUE]  show the settings, or change some
/reset                  forget the conversation
/quit                   leave (or Ctrl-D); Ctrl-C stops an answer"""
_SAID = 24  # where in a line of it the words begin


@decoding_options
def chat(
    chosen: Chosen,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary line after an answer.")] = False,
) -> None:
    """Talk with a model, turn by turn.

    Only the new words of a turn are computed: what was said stays in the caches. /help lists the
    commands; Ctrl-C stops an answer, Ctrl-D leaves. With stdin from a pipe every line is a turn or a
    command; one that cannot be is told with its number, the rest goes on, and the exit code is 2.
    """
    _, settings = chosen.resolve()
    if settings.raw or settings.num_return > 1:
        raise UserError(f"{'--raw' if settings.raw else '--num-return'} has no place in a chat")
    if chosen.team().shard.world > 1:
        raise UserError("a chat is for one process, or for one team of --tensor-parallel")
    decoder = chosen.load(every_method=True, typing=is_terminal(sys.stdin))
    for line in chosen.notes(decoder):
        note(line)
    if not decoder.pair.tokenizer.chat_template:
        raise UserError("the target has no chat template, so it cannot chat: use dsbd generate")
    group = joined()
    interactive = group.agreed(is_terminal(sys.stdin))
    if interactive:
        note("/help for help, Ctrl-D to leave")
    session = Session(decoder, decoder.settings, quiet)
    refused = 0
    for place, line in enumerate(_for_all(_typed if interactive else _piped, group), start=1):
        try:
            if not session.take(line):
                break
        except UserError as error:
            refused += not interactive
            note(str(error) if interactive else f"line {place}: {error}")
        except KeyboardInterrupt:
            if (
                not interactive or terminated() or group.size > 1
            ):  # a team cannot stop at one and the same place
                raise
            note("stopped")
    if refused:
        raise typer.Exit(UserError.exit_code)


def _for_all(lines: Callable[[], Iterator[str]], group: Group) -> Iterator[str]:
    """The lines that come to the first process of a team."""
    own = lines() if group.first else iter(())
    while (line := group.agreed(next(own, None))) is not None:
        yield line


def _piped() -> Iterator[str]:
    """Lines of a pipe as they come."""
    return (line for line in arriving_lines(lambda: True) if line is not None)


def _typed() -> Iterator[str]:
    """Lines typed at the terminal until Ctrl-D; Ctrl-C clears the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())

    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if terminated():
                raise
        except EOFError:
            print(file=sys.stderr)
            return


@dataclass
class Session:
    """One conversation.

    Attributes:
        messages: turns so far, user and assistant in alternation.
        last: how the last turn was answered, or None.
    """

    decoder: Decoder
    settings: Settings
    quiet: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Result | None = None

    def take(self, line: str) -> bool:
        """One line of the user's: a command or a turn. False when it asked to leave.

        Raises:
            UserError: a command that makes no sense, or a turn that has no room.
            KeyboardInterrupt: the turn was stopped; what had been said of the answer is kept.
        """
        words = line.split()
        if not words:
            return True
        if not line.startswith("/"):
            self._turn(line)
            return True
        command, *rest = words
        if command == "/quit":
            return False
        actions = {"/reset": self._reset, "/method": self._method, "/settings": self._set,
                   "/compare": self._compare, "/help": self._help}  # fmt: skip
        if command not in actions:
            known = [*actions, "/quit"]
            raise UserError(f"no command {command}{near(command, known)}: {', '.join(known)}")
        actions[command](rest)
        return True

    def _turn(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            result = plain(self._kept(asked, said), note, stream=True, wrap=True)
        except KeyboardInterrupt:
            # Half an answer is part of the conversation; none at all leaves it as it was.
            if "".join(said):
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
                self.last = None
            raise
        Out().write("\n")
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        self.last = result
        if not self.quiet:
            note(summary(result, room()))

    def _kept(self, messages: list[dict[str, str]], said: list[str]) -> Iterator[Any]:
        """The turn's events, its text noted down as it comes."""
        from dsbd_cli.decoding import Text

        for event in self.decoder.stream(messages, self.settings, reuse=True):
            if isinstance(event, Text):
                said.append(event.new)
            yield event

    def _reset(self, words: list[str]) -> None:
        self.messages, self.last = [], None
        note("the conversation is forgotten")

    def _help(self, words: list[str]) -> None:
        for line in HELP.splitlines():
            command, said = line[:_SAID], line[_SAID:]
            with waiting.above():
                print(hanging(command, said, sys.stderr), file=sys.stderr, flush=True)

    def _method(self, words: list[str]) -> None:
        if len(words) != 1:
            raise UserError(f"/method NAME: one of {', '.join(METHODS)}")
        self._change({"method": words[0]})
        note(f"method {self.settings.method}")

    def _set(self, words: list[str]) -> None:
        given: dict[str, Any] = {}
        for word in words:
            name, equals, value = word.partition("=")
            name = name.lstrip("-").replace("-", "_")
            if name not in FIELDS:
                raise UserError(f"/settings NAME=VALUE: no setting {name!r}{near(name, FIELDS)}")
            if not equals:
                now = _shown(self.settings.to_dict()[name])
                raise UserError(
                    f"/settings {name} needs a value: /settings {name}=VALUE (it is {now}; /settings alone shows all)"
                )
            given[name] = _parse(name, value)
        if given:
            self._change(given)
        values = self.settings.to_dict()
        for name in given or values:
            note(f"{name} = {_shown(values[name])}")

    def _change(self, given: dict[str, Any]) -> None:
        settings = self.settings.merged(given)
        if settings.raw or settings.num_return > 1:
            raise UserError("raw and num_return have no place in a chat")
        if settings.method in DRAFTING and self.decoder.draft is None:
            raise UserError(f"{settings.method} needs a draft model, and this chat was started without one")
        self.settings = settings
        for line in in_vain(settings, given):
            note(line)

    def _compare(self, words: list[str]) -> None:
        if len(words) > 2 or any(word not in METHODS for word in words):
            raise UserError(f"/compare [A] [B]: methods, of {', '.join(METHODS)}")
        if not self.messages:
            raise UserError("/compare answers the last turn again: there is none yet")
        mine = self.settings.method
        names = {0: [mine, "beam" if mine != "beam" else "dsbd"], 1: [mine, *words], 2: words}[len(words)]
        side_by_side([self._again(name) for name in names])

    def _again(self, method: str) -> Result:
        """The last turn answered by `method`; the conversation stays as it is."""
        other = Session(self.decoder, self.settings)
        # One seed for both, so that only the method differs.
        seed = self.last.seed if self.last is not None else self.settings.seed
        other._change({"method": method, "seed": seed})
        return self.decoder.generate(self.messages[:-1], other.settings)


def _parse(name: str, value: str) -> Any:
    """A setting typed as text, in the setting's type."""
    if name in ("stop", "system") and value.lower() == "none":
        return () if name == "stop" else None
    if name == "stop":
        return (value,)
    if name in ("deterministic", "raw") and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return parse_setting(name, value)


def _shown(value: Any) -> str:
    """A setting as it can be typed."""
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def side_by_side(results: list[Result]) -> None:
    """Two answers and their numbers in two columns; below each other where there is no room for that."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    if not is_terminal(sys.stdout) or console.width < 60:
        for result in results:
            Out().write(f"[{result.method}]\n{result.text}\n")
            note(f"{result.method}: {summary(result)}")
        return
    table = Table(expand=True, box=box.SQUARE if unicode_terminal(sys.stdout.encoding) else box.ASCII)
    for result in results:
        table.add_column(result.method, ratio=1, overflow="fold")
    table.add_row(*(Text(visible(result.text)) for result in results), end_section=True)
    table.add_row(*("\n".join(_numbers(result)) for result in results))
    console.print(table)


def _numbers(result: Result) -> list[str]:
    stats = result.stats
    per_token = ratio(result.beams[0].logprob, stats.new_tokens)
    return [
        f"{counted(stats.new_tokens, 'token')}, log-prob per token {number(per_token)}",
        f"{number(stats.tokens_per_s, 1)} tok/s, {number(stats.joules_per_token)} J/token",
        f"{number(stats.layers_per_target_call)} layers/target call",
        f"width {number(stats.mean_width, 1)}, distinct {number(stats.mean_distinct_width, 1)}",
    ]
