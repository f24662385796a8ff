"""`dsbd chat`: turns of a conversation on one engine, whose caches keep the history."""

from __future__ import annotations

import contextlib
import functools
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsbd_cli.cli.generate import plain
from dsbd_cli.cli.options import Chosen, decoding_options
from dsbd_cli.cli.output import Out, note
from dsbd_cli.cli.signals import terminated
from dsbd_cli.cli.stdin import arriving_lines
from dsbd_cli.cli.typed import LISTED, UNLISTED, read, shown
from dsbd_cli.counted import counted
from dsbd_cli.errors import UserError
from dsbd_cli.group import Group, joined
from dsbd_cli.idle import draws_nothing, in_vain
from dsbd_cli.names import near
from dsbd_cli.settings import DEFAULTS, DRAFTING, METHODS
from dsbd_cli.tally import ratio
from dsbd_cli.ui import waiting
from dsbd_cli.ui.look import hanging, is_terminal, unicode_terminal
from dsbd_cli.ui.safe import visible
from dsbd_cli.ui.summary import number, room, summary

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder
    from dsbd_cli.result import Result
    from dsbd_cli.settings import Settings

EXAMPLE = '/settings width=2 system="Be terse."; a text alone needs no quotes'
HELP = f"""\
/method NAME            answer by another method from now on
/compare [A] [B]        the last turn by two methods, side by side with their numbers
/settings [NAME=VALUE]  show the settings, or change some: {EXAMPLE}
/reset                  forget the conversation
/quit                   leave (or Ctrl-D); Ctrl-C stops an answer, and what it said stays in the conversation"""
_SAID = 24  # where in a line of it the words begin


@functools.partial(decoding_options, unlisted=UNLISTED)
def chat(
    chosen: Chosen,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary line after an answer.")] = False,
) -> None:
    """Talk with a model, turn by turn.

    Only the new words of a turn are computed: what was said stays in the caches. /help lists the
    commands; Ctrl-C stops an answer, Ctrl-D leaves. With stdin from a pipe every line is a turn or a
    command; one that cannot be is told with its number, the rest goes on, and the exit code is 2.
    """
    for name in UNLISTED:
        if chosen.settings.get(name, DEFAULTS[name]) != DEFAULTS[name]:
            raise UserError(f"--{name.replace('_', '-')} has no place in a chat")
    # A preset's yield.
    chosen = replace(chosen, settings=chosen.settings | {name: DEFAULTS[name] for name in UNLISTED})
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
            note(f"stopped; {session.left}")
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
        seed: of the last turn, or None.
        left: what a stop just now leaves of the conversation, in words.
    """

    decoder: Decoder
    settings: Settings
    quiet: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Result | None = None
    seed: int | None = None
    left: str = "the conversation is as it was"

    def take(self, line: str) -> bool:
        """One line of the user's: a command or a turn. False when it asked to leave.

        Raises:
            UserError: a command that makes no sense, or a turn that has no room.
            KeyboardInterrupt: the turn was stopped; what had been said of the answer is kept.
        """
        words = line.split()
        self.left = "the conversation is as it was"
        if not words:
            return True
        if not line.startswith("/"):
            self._turn(line)
            return True
        command, *rest = words
        if command == "/quit":
            return False
        actions = {"/reset": self._reset, "/method": self._method, "/settings": lambda _: self._set(line),
                   "/compare": self._compare, "/help": self._help}  # fmt: skip
        if command not in actions:
            known = [*actions, "/quit"]
            raise UserError(f"no command {command}{near(command, known)}: {', '.join(known)}")
        actions[command](rest)
        return True

    def _turn(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        self.left = "nothing was said yet, so the turn is no part of the conversation"
        seed = self._seed()
        try:
            result = plain(self._kept(asked, said, seed), note, stream=True, wrap=True)
        except KeyboardInterrupt:
            # Half an answer is part of the conversation; none at all leaves it as it was.
            if "".join(said):
                self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
                self.last, self.seed = None, seed
                self.left = f"what was said of the answer stays in the conversation{self._told(seed)}"
            raise
        Out().write("\n")
        self.messages = [*asked, {"role": "assistant", "content": result.text}]
        self.last, self.seed = result, seed
        self.left = "the answer stays in the conversation"
        if not self.quiet:
            told, columns = self._told(seed), room()
            note(summary(result, None if columns is None else columns - len(told)) + told)

    def _seed(self) -> int:
        """The next turn's: the one that was given, or one drawn for all processes."""
        given = self.settings.seed
        return joined().agreed(secrets.randbelow(2**31)) if given is None else given

    def _told(self, seed: int) -> str:
        """A drawn seed that a text depends on, to end a line with."""
        settings = self.settings
        return "" if settings.seed is not None or draws_nothing(settings) else f", seed {seed}"

    def _kept(self, messages: list[dict[str, str]], said: list[str], seed: int) -> Iterator[Any]:
        """The turn's events, its text noted down as it comes."""
        from dsbd_cli.decoding import Text

        for event in self.decoder.stream(messages, self.settings.merged({"seed": seed}), reuse=True):
            if isinstance(event, Text):
                said.append(event.new)
            yield event

    def _reset(self, words: list[str]) -> None:
        self.messages, self.last, self.seed = [], None, None
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

    def _set(self, line: str) -> None:
        given = read(line.strip().removeprefix("/settings"), self.settings.to_dict())
        if given:
            self._change(given)
        values = self.settings.to_dict()
        for name in given or LISTED:
            note(f"{name} = {shown(values[name])}")

    def _change(self, given: dict[str, Any]) -> None:
        settings = self.settings.merged(given)
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
        other._change({"method": method, "seed": self.seed})
        return self.decoder.generate(self.messages[:-1], other.settings)


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
