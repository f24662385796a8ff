"""Prompts as token ids, checked for all items before a model is loaded; none is ever cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsbd_cli.bench.datasets.records import Dataset, Item
from dsbd_cli.bench.datasets.shots import Shots
from dsbd_cli.errors import UserError
from dsbd_cli.loading.spec import PairSpec
from dsbd_cli.prompts import encode
from dsbd_cli.settings import Settings


@dataclass(frozen=True)
class Prompter:
    """Turns items into token ids for one target.

    Attributes:
        tokenizer: the target's.
        vocab_size: ids below it are tokens.
        limit: the target's context limit, or None.
        settings: system text and `raw` are read.
        shots: worked examples, or None for the data set's own single one.
    """

    tokenizer: Any
    vocab_size: int
    limit: int | None
    settings: Settings
    shots: Shots | None = None

    @property
    def form(self) -> str:
        """`chat template` or `plain text`."""
        chat = self.tokenizer.chat_template and not self.settings.raw
        return "chat template" if chat else "plain text"

    def ids(self, item: Item, answers: Sequence[str]) -> list[int]:
        """The next prompt of an item.

        Raises:
            UserError: the chat template refuses it, messages in plain text, or too few worked examples.
        """
        examples = self.shots.of(item) if self.shots else ()
        build = item.messages if self.form == "chat template" else item.text
        prompt: Any = build(answers, examples)
        try:
            return encode(prompt, self.tokenizer, self.settings, self.vocab_size)[0]
        except UserError as error:
            raise UserError(f"item {item.id}: {error}") from None

    def fits(self, ids: Sequence[int]) -> bool:
        """Whether the prompt leaves room for the whole budget."""
        return self.limit is None or len(ids) + self.settings.max_new_tokens <= self.limit


def check_prompts(prompter: Prompter, dataset: Dataset) -> Dataset:
    """The data set less the items whose first prompt does not fit; those are counted in `skipped`.

    Raises:
        UserError: a prompt cannot be asked (which), or none fits.
    """
    fitting, longest = [], 0
    for item in dataset.items:
        ids = prompter.ids(item, [])
        if prompter.fits(ids):
            fitting.append(item)
        else:
            longest = max(longest, len(ids))
    left_out = len(dataset.items) - len(fitting)
    if not left_out:
        return dataset
    if not fitting:
        raise UserError(
            f"no prompt leaves room: up to {longest} prompt tokens, {prompter.settings.max_new_tokens} new tokens "
            f"asked for, {prompter.limit} is the target's context limit"
        )
    skipped = {**dataset.skipped, f"prompt over the context limit of {prompter.limit}": left_out}
    return dataclasses.replace(dataset, items=tuple(fitting), skipped=skipped)


def prompter_of_spec(spec: PairSpec, settings: Settings, shots: Shots | None = None) -> Prompter:
    """A prompter from the target's tokenizer and config alone: nothing heavy is loaded.

    Args:
        spec: its draft, where it has one, is named with a target that cannot be had and is missing too.

    Raises:
        UserError: a source that is missing, broken or not reachable.
    """
    from dsbd_cli.loading import architecture, compat, early
    from dsbd_cli.loading.cache import cache_root
    from dsbd_cli.loading.model import load_config, load_tokenizer
    from dsbd_cli.loading.place import locate
    from dsbd_cli.loading.progress import silent
    from dsbd_cli.loading.quiet import quiet_transformers
    from dsbd_cli.loading.source import parse_source

    sources = {"target": parse_source(spec.target, "target")}
    if spec.draft is not None:
        sources["draft"] = parse_source(spec.draft, "draft")
    asked = early.of_hub(sources, {"target": spec.revision, "draft": spec.draft_revision})
    place = locate(sources["target"], "target", spec.revision, cache_root(), silent, [*asked.values()])
    with quiet_transformers():
        config = load_config(place, spec.trust_remote_code)
        tokenizer = load_tokenizer(place, spec.trust_remote_code)
    vocab = compat.token_range(tokenizer) or config.get_text_config().vocab_size
    return Prompter(tokenizer, vocab, architecture.max_positions_of(config), settings, shots)
