"""The prompts of a batch, decoded together or one by one, and the record of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dsbd_cli.batch import AUTO
from dsbd_cli.batch.items import Item, item_seed
from dsbd_cli.errors import UserError
from dsbd_cli.many import Answer, Asked, Batch, Load, Pulse
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings
from dsbd_cli.ui.summary import few_beams

if TYPE_CHECKING:
    from dsbd_cli.decoder import Decoder

Tell = Callable[[str], None]
# A prompt, its record, and its result if it was not refused.
Done = tuple[Item, dict[str, Any], "Result | None"]


def decode_items(
    decoder: Decoder,
    settings: Settings,
    seed: int,
    items: Iterable[Item | None],
    running: Running,
    pulse: Pulse | None = None,
) -> Iterator[Done]:
    """The record of each prompt as it comes: the result's fields, or `error` where the prompt cannot be served.

    Nothing in it but clocks depends on the other prompts: what it takes over from them it would have computed, and what
    the shared buffers hold (`kv_bytes_allocated`) is left out.

    Args:
        items: taken as places become free; None for "none just now".
        running: how many at a time.
        pulse: called again and again while prompts are under way.

    Raises:
        RunError: the run itself broke, which ends the batch.
    """
    taken: list[Item] = []

    def asked() -> Iterator[Asked | None]:
        for item in items:
            if item is None:
                yield None
                continue
            taken.append(item)
            yield item.prompt, dataclasses.replace(settings, seed=item_seed(seed, item.index))

    if running.batch is not None:
        answers = running.batch.answers(asked(), pulse)
    else:
        answers = one_by_one(decoder, asked(), pulse)
    for answer in answers:
        item = taken[answer.index]
        head: dict[str, Any] = {"index": item.index} | ({"id": item.id} if item.id is not None else {})
        if answer.result is None:
            yield item, head | {"error": str(answer.error)}, None
            continue
        answer.result.stats.kv_bytes_allocated = None
        few = few_beams(answer.result)
        notes = [*answer.notes, *([] if few is None else [few])]
        record = head | answer.result.to_dict() | ({"notes": notes} if notes else {})
        yield item, record, answer.result


class Running:
    """How many prompts of a run are decoded at a time; a context manager.

    Args:
        batch: a number, or `auto`.
        tell: receives notices.

    Attributes:
        batch: what decodes them together; None: one by one.
    """

    def __init__(self, decoder: Decoder, batch: str, tell: Tell) -> None:
        self.batch = (
            None if batch == "1" else Batch(decoder, None if batch == AUTO else int(batch), tell=tell)
        )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        if self.batch is not None:
            self.batch.close()

    def load(self) -> Load | None:
        """How things stand; None one by one."""
        return None if self.batch is None else self.batch.load()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        load = self.load()
        return load is None or load.running + load.waiting == 0


def one_by_one(
    decoder: Decoder, asked: Iterable[Asked | None], pulse: Pulse | None = None
) -> Iterator[Answer]:
    """Answers of prompts that share nothing.

    Args:
        pulse: called before a prompt is read and after every iteration.
    """
    from dsbd_cli.decoding import Finished, Iteration, Layer, Notice

    index = 0
    for one in asked:
        if one is None:
            continue
        notes: list[str] = []
        layers = 0
        if pulse is not None:
            pulse(partial(Load, 1, 0, reading=1))
        try:
            for event in decoder.stream(*one):
                if isinstance(event, Notice):
                    notes.append(event.text)
                elif isinstance(event, Layer):
                    layers += 1
                elif isinstance(event, Iteration) and pulse is not None:
                    pulse(partial(Load, 1, 0, tokens=layers))
                elif isinstance(event, Finished):
                    yield Answer(index, event.result, None, notes)
        except UserError as error:
            yield Answer(index, None, error)
        index += 1
