"""Two requests in one engine, by enumeration: each has its own law, and neither says anything of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from dsbd_cli.decoding.law.distribution import Sampler
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.methods.setup import draft_processor, loop_of, most_nodes, start, top_n_needed
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.protocol import Compute
from dsbd_cli.decoding.model.shared import SharedModel
from dsbd_cli.decoding.tree.events import Layer
from dsbd_cli.decoding.tree.sequences import Node, Trie
from dsbd_cli.settings import Settings
from tests.decoding.enumerating import Branching, law_of, total_variation
from tests.decoding.harness import layer_set, outcome_of, settings_for
from tests.decoding.real import tiny
from tests.decoding.reference import Outcome, T, sequence_law, set_process
from tests.decoding.table_model import Path, PathLaw

VOCAB, EOS = 2, (1,)
PROMPTS = [[1, 0], [0, 0, 1]]


@cache
def shared() -> tuple[SharedModel, SharedModel]:
    models = [HfTreeModel(tiny("llama", VOCAB, seed), vocab_size=VOCAB) for seed in (3, 5)]
    target, draft = (SharedModel(model, 64, 64) for model in models)
    return target, draft


def path_law(prompt: list[int]) -> PathLaw:
    """The target's own conditionals behind a prompt, path by path in float32."""
    model = tiny("llama", VOCAB, 3)

    @cache
    def law(path: Path) -> np.ndarray:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *path]])).logits[0, -1]
        return np.exp(torch.log_softmax(logits, -1).double().numpy())

    return law


class Asking:
    """A request that waits for what it asked for last."""

    def __init__(self, prompt: list[int], settings: Settings, sampler: Sampler) -> None:
        target, draft = shared()
        budget = settings.max_new_tokens

        def ends(node: Node) -> str | None:
            return "eos" if node.token in EOS else "length" if node.depth >= budget else None

        trie = Trie(ends, EOS, budget)
        size = most_nodes(settings, len(prompt), budget)
        self.models: list[Any] = [target.admit(prompt, trie.root, size, top_n_needed(settings, len(EOS)))]
        if settings.method not in ("beam", "multinomial"):
            self.models.append(draft.admit(prompt, trie.root, size, draft_processor(settings).top_n))
        for model in self.models:
            model.prefill(prompt, trie.root)
        own = self.models[1] if len(self.models) > 1 else None
        self.run: Run = start(settings, self.models[0], own, trie, sampler, sampler)
        self.loop: Iterator[Any] = loop_of(self.run, settings)
        self.layers: list[frozenset[Path]] = []
        self.need: Compute | None = None

    def go_on(self) -> None:
        """To the next need, or to the end."""
        self.need = None
        for event in self.loop:
            if isinstance(event, Compute):
                self.need = event
                return
            if isinstance(event, Layer):
                self.layers.append(layer_set(event))

    def outcome(self) -> Outcome:
        return outcome_of(self.run, tuple(self.layers))


def both(settings: list[Settings], sampler: Branching) -> tuple[Outcome, ...]:
    """Both to their ends, in forwards that serve whoever waits for the same model."""
    members = [Asking(prompt, own, sampler) for prompt, own in zip(PROMPTS, settings, strict=True)]
    try:
        for member in members:
            member.go_on()
        while waiting := [member for member in members if member.need is not None]:
            needs = [(member, member.need) for member in waiting if member.need is not None]
            model = needs[0][1].model.shared  # type: ignore[attr-defined]
            served = [(member, need) for member, need in needs if need.model.shared is model]  # type: ignore[attr-defined]
            model.compute([need for _, need in served])
            for member, _ in served:
                member.go_on()
        return tuple(member.outcome() for member in members)
    finally:
        for member in members:
            for one in member.models:
                one.leave()


COMMON: dict[str, Any] = {"max_new_tokens": 2, "width": 2, "gamma": 1, "draft_width": 2}
ONE = {**COMMON, "method": "speculative", "width": 1}


@pytest.mark.parametrize(
    "ways",
    [
        [{**COMMON, "method": "dsbd", "verify": "cover"}, ONE],
        [{**COMMON, "method": "beam"}, {**ONE, "method": "multinomial"}],
        [{**COMMON, "method": "dsbd", "verify": "paper"}, {**ONE, "method": "multinomial"}],
        [{**COMMON, "method": "dsbd", "verify": "continue"}, {**ONE, "max_new_tokens": 1}],
        [{**COMMON, "method": "dsbd", "verify": "cover", "draws": "distinct"}, ONE],
    ],
    ids=["cover and speculative", "beam and multinomial", "paper", "continue", "distinct"],
)
def test_each_of_two_requests_has_its_own_law(ways: list[dict[str, Any]]) -> None:
    settings = [settings_for(T(), **way) for way in ways]
    together = law_of(lambda sampler: both(settings, sampler))
    assert abs(sum(together.values()) - 1) < 1e-12
    alone: list[dict[Any, float]] = [defaultdict(float), defaultdict(float)]
    for outcomes, mass in together.items():
        for one, law in zip(outcomes, alone, strict=True):
            law[one] += mass
    apart = {(a, b): x * y for a, x in alone[0].items() for b, y in alone[1].items()}
    assert total_variation(together, apart) < 1e-12
    for prompt, own, law in zip(PROMPTS, settings, alone, strict=True):
        if own.width == 1:
            answers: dict[Path, float] = defaultdict(float)
            for outcome, mass in law.items():
                answers[outcome.answer] += mass
            exact: dict[Any, float] = sequence_law(path_law(prompt), T(), EOS, own.max_new_tokens)
            assert total_variation(dict(answers), exact) < 1e-6  # of float32
        else:
            distinct = own.draws == "distinct"
            process = set_process(
                path_law(prompt), own.width, T(), EOS, own.max_new_tokens, distinct=distinct
            )
            assert total_variation(dict(law), process) < 1e-6
