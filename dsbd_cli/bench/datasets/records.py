"""What a benchmark asks: typed items that know their own prompt, and the data set that holds them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from dsbd_cli.bench.datasets import spider_prompt, squad_prompt
from dsbd_cli.bench.datasets.files import unique
from dsbd_cli.bench.datasets.prompts import Example, Message, as_text, as_turns
from dsbd_cli.bench.datasets.spider_prompt import Schema
from dsbd_cli.errors import UserError


class Item(Protocol):
    """One thing to answer, in one or more turns.

    `answers` are the model's answers to the turns before, `examples` the worked ones that go before the question.
    """

    @property
    def id(self) -> str: ...

    @property
    def turns(self) -> int: ...

    def messages(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> list[Message]:
        """The next prompt as chat messages."""
        ...

    def text(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> str | list[Message]:
        """The next prompt as plain text, for models without a chat template; messages of a file stay what they are."""
        ...


@dataclass(frozen=True)
class SpiderItem:
    """A question on a database, with its gold query."""

    id: str
    schema: Schema
    question: str
    gold: str
    database: Path
    hardness: str | None = None
    turns: int = 1

    @property
    def asked(self) -> str:
        return spider_prompt.ask(self.schema, self.question)

    @property
    def groups(self) -> frozenset[str]:
        """What a worked example must not share with this item."""
        return frozenset({self.schema.db_id})

    def example(self) -> Example:
        """This item as a worked example for others."""
        return Example(self.asked, " ".join(self.gold.split()), self.groups)

    def messages(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> list[Message]:
        return as_turns(spider_prompt.INSTRUCTION, examples or (spider_prompt.EXAMPLE,), self.asked)

    def text(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> str:
        return as_text(spider_prompt.INSTRUCTION, examples or (spider_prompt.EXAMPLE,), self.asked)


@dataclass(frozen=True)
class SquadItem:
    """A question on a paragraph, with its reference answers (at least one)."""

    id: str
    context: str
    question: str
    references: tuple[str, ...]
    title: str = ""
    turns: int = 1

    @property
    def asked(self) -> str:
        return squad_prompt.ask(self.context, self.question)

    @property
    def groups(self) -> frozenset[str]:
        """What a worked example must not share with this item; a file may leave titles out."""
        return frozenset({self.context, self.title} - {""})

    def example(self) -> Example:
        """This item as a worked example for others."""
        return Example(self.asked, " ".join(self.references[0].split()), self.groups)

    def messages(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> list[Message]:
        return as_turns(squad_prompt.INSTRUCTION, examples or (squad_prompt.EXAMPLE,), self.asked)

    def text(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> str:
        return as_text(squad_prompt.INSTRUCTION, examples or (squad_prompt.EXAMPLE,), self.asked)


@dataclass(frozen=True)
class MtBenchItem:
    """An open question in two turns; `references` are the judge's, for some categories."""

    id: str
    category: str
    questions: tuple[str, ...]
    references: tuple[str, ...] = ()

    @property
    def turns(self) -> int:
        return len(self.questions)

    def messages(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> list[Message]:
        turns: list[Message] = []
        for question, answer in zip(self.questions, answers, strict=False):
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*turns, {"role": "user", "content": self.questions[len(answers)]}]

    def text(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> str:
        heads = {"user": "### Human: ", "assistant": "### Assistant: "}
        lines = [heads[m["role"]] + m["content"] for m in self.messages(answers)]
        return "\n".join([*lines, "### Assistant:"])


@dataclass(frozen=True)
class PlainItem:
    """A prompt of the user's own file, with reference answers if the file has them."""

    id: str
    prompt: str | tuple[Mapping[str, Any], ...]
    references: tuple[str, ...] = ()
    turns: int = 1

    def messages(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> list[Message]:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]

    def text(self, answers: Sequence[str], examples: Sequence[Example] = ()) -> str | list[Message]:
        return self.prompt if isinstance(self.prompt, str) else self.messages(answers)


@dataclass(frozen=True)
class Dataset:
    """Checked data, ready to be asked.

    Attributes:
        kind: `spider`, `squad`, `mt-bench`, or of a user's file `jsonl` or `prose`: decides the score.
        label: how outputs name it; says "built-in sample" where it is one.
        source: where it was read from.
        items: in the order they are asked.
        total: how many usable items the source holds; `items` may be a selection.
        builtin: the small sample of this project, not the benchmark.
        skipped: why items of the source are not used, and how many.
        extras: data that belongs to the score (the judge's prompts).
    """

    kind: str
    label: str
    source: str
    items: tuple[Item, ...]
    total: int
    builtin: bool = False
    skipped: Mapping[str, int] = field(default_factory=dict)
    extras: Mapping[str, Any] = field(default_factory=dict)

    # Where an answer of a model without a chat template ends, since it has no turn to end.
    RAW_STOPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "spider": ("\n\n",),
        "squad": ("\n",),
        "mt-bench": ("### Human",),
        "jsonl": (),
        "prose": (),
    }

    @property
    def is_file(self) -> bool:
        """Whether it is a user's own file."""
        return self.kind in ("jsonl", "prose")

    @property
    def raw_stops(self) -> tuple[str, ...]:
        """Stop strings used when prompts are plain text."""
        return self.RAW_STOPS[self.kind]

    def digest(self) -> str:
        """sha256 over what is asked and what is scored against; does not depend on folders or selection."""
        lines = []
        for item in self.items:
            record = dataclasses.asdict(item)  # type: ignore[call-overload]
            record.pop("database", None)
            lines.append(f"{item.id} {record!r}")
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def select(self, limit: int | None) -> Dataset:
        """The first `limit` items in an order fixed by their ids: a larger limit holds the smaller one.

        The order mixes articles and databases, which official files keep together.
        """
        ordered = sorted(self.items, key=lambda item: hashlib.sha256(item.id.encode()).digest())
        return dataclasses.replace(self, items=tuple(ordered[:limit]))


def made(
    kind: str,
    items: Sequence[Item],
    label: str,
    path: Path,
    *,
    empty: str,
    source: Path | None = None,
    **more: Any,
) -> Dataset:
    """The data set of one file's items, checked: what all loaders end in.

    Args:
        path: the file with the items. source: what outputs name, if not that file.
        empty: what is wrong if there are no items.

    Raises:
        UserError: no items, or two of one id.
    """
    if not items:
        raise UserError(empty)
    unique([item.id for item in items], path)
    return Dataset(kind, label, str(source or path), tuple(items), len(items), **more)
