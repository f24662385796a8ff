"""Pairs whose iterations run "captured" (on a CPU every step is the captured one), and what they decided."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from dsbd_cli.decoding.device.engines import Choice, Engines
from dsbd_cli.decoding.device.law import DeviceLaw
from dsbd_cli.decoding.law.distribution import SeededSampler
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.methods.recalling import RecallingProposer
from dsbd_cli.decoding.methods.setup import decode, demand_of, draft_processor, start, top_n_needed
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node, Trie
from dsbd_cli.settings import Settings
from tests.builders import VOCAB, rand

PROMPT = [3, 4, 9, 10, 11]
EOS = [5, 6, 7, 8]
WAYS: dict[str, dict[str, Any]] = {
    "cover": {"verify": "cover", "threshold": None},
    "cover-dynamic": {"verify": "cover", "threshold": 0.9},
    "paper": {"verify": "paper"},
    "continue": {"verify": "continue", "threshold": None},
    "kv-one": {"verify": "cover", "kv": "one"},
    "greedy": {"temperature": 0.0},
    "speculative": {"method": "speculative"},
    "deterministic": {"deterministic": True},
}
# What the device verifies too.
PIPELINED: dict[str, dict[str, Any]] = {
    "cover": WAYS["cover"],
    "greedy": WAYS["greedy"],
    "cold": {"threshold": None, "temperature": 1e-307},
    "one layer": {"threshold": None, "gamma": 1},
    "wide": {"threshold": None, "width": 6, "draft_width": 9, "gamma": 5, "temperature": 1.5},
    "one beam": {"threshold": None, "width": 1, "min_width": 1},
    "beam": {"method": "beam"},
    "multinomial": {"method": "multinomial"},
    "distinct": {"threshold": None, "draws": "distinct"},
    "distinct beam": {"method": "beam", "draws": "distinct", "width": 7, "top_k": 5},
    "distinct width": {"draws": "distinct", "threshold": 0.7, "min_width": 1},
    "iid of distinct width": {"threshold": 0.7, "min_width": 1, "width_rule": "distinct"},
    "cover-dynamic": WAYS["cover-dynamic"],
    "dynamic from one": {"threshold": 0.6, "min_width": 1, "width": 6, "draft_width": 4},
    "kv-one": WAYS["kv-one"],
    "kv-one dynamic": {"kv": "one", "threshold": 0.8, "min_width": 1},
    "paper": WAYS["paper"],
    "continue": WAYS["continue"],
    "speculative": WAYS["speculative"],
    "speculative hot": {"method": "speculative", "gamma": 5, "temperature": 2.0, "top_p": 1.0},
    "speculative greedy": {"method": "speculative", "temperature": 0.0},
    "deterministic": WAYS["deterministic"],
    "deterministic wide": {"deterministic": True, "width": 6, "draft_width": 9, "early_stopping": "never"},
    "deterministic beam": {"method": "beam", "deterministic": True, "width": 3},
    "deterministic one": {"deterministic": True, "width": 1, "min_width": 1, "length_penalty": 2.0},
}
# Draws of q that are tested: sizes, widths, and what a layer goes on behind.
TESTED: dict[str, dict[str, Any]] = {
    "paper dynamic": {"verify": "paper", "threshold": 0.6, "min_width": 1, "width": 5, "draft_width": 7},
    "paper of distinct width": {
        "verify": "paper",
        "threshold": 0.7,
        "min_width": 1,
        "width_rule": "distinct",
    },
    "paper narrow forest": {"verify": "paper", "threshold": None, "draft_width": 2},
    "paper one beam": {"verify": "paper", "threshold": None, "width": 1, "min_width": 1, "draft_width": 3},
    "paper kv-one": {"verify": "paper", "kv": "one", "threshold": 0.5, "min_width": 2},
    "paper greedy": {"verify": "paper", "temperature": 0.0},
    "continue dynamic": {"verify": "continue", "threshold": 0.8, "min_width": 2, "draft_width": 8},
    "continue wide": {"verify": "continue", "threshold": None, "width": 6, "draft_width": 9, "gamma": 5},
    "continue one draw": {"verify": "continue", "threshold": None, "draft_width": 1, "top_k": 2},
    "distinct paper": {"verify": "paper", "draws": "distinct", "threshold": None, "draft_width": 6},
    "distinct continue": {"verify": "continue", "draws": "distinct", "threshold": None},
    "distinct few": {"verify": "continue", "draws": "distinct", "threshold": None, "top_k": 4, "top_p": 0.8},
    "distinct width tested": {"verify": "paper", "draws": "distinct", "threshold": 0.7, "min_width": 1},
    "distinct greedy": {"verify": "paper", "draws": "distinct", "threshold": None, "temperature": 0.0},
    "distinct one": {"verify": "paper", "draws": "distinct", "width": 1, "min_width": 1, "draft_width": 1},
    "continue kv-one": {"verify": "continue", "kv": "one", "threshold": None},
}


class Trees(list[HfTreeModel]):
    """Target and draft (or the target alone), and what chooses engines for them."""

    def __init__(self, models: Sequence[HfTreeModel]) -> None:
        super().__init__(models)
        self.engines = Engines()
        self.choice = Choice()
        self.recalls = True  # on the host, where a pipeline would; else the draft alone proposes

    def alone(self) -> Trees:
        return Trees(self[:1])

    @property
    def notes(self) -> list[str]:
        return [note for model in self for note in model.notes] + self.engines.notes


def settings_of(way: str, **more: Any) -> Settings:
    options = (WAYS | PIPELINED | TESTED)[way]
    base = {} if "deterministic" in options else {"temperature": 1.0, "top_k": 10, "top_p": 0.9}
    # A device drafts full forests; on a CPU the host alone would spare some of them.
    sizes = {"width": 4, "draft_width": 5, "gamma": 3, "forest": "full"}
    return Settings(**(base | sizes | options | more))


def is_drawn(settings: Settings) -> bool:
    """Whether a seed changes what is decoded; where it does not, a second one asks for the same run again."""
    return not settings.deterministic and settings.temperature > 1e-9


def related(folder: Any) -> tuple[Any, Any]:
    """A target, and a draft that mostly agrees with it."""
    target = rand(folder, initializer_range=0.3, num_key_value_heads=2)
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.03 * torch.randn(weight.shape, generator=generator)
    return target, draft


def trees(pair: Sequence[Any], graphs: bool | None) -> Trees:
    return Trees(
        [
            HfTreeModel(model, vocab_size=VOCAB, role=role, graphs=graphs)
            for model, role in zip(pair, ("target", "draft"), strict=True)
        ]
    )


def ends(budget: int, stop: Sequence[int], eos: Sequence[int]) -> Any:
    def why(node: Node) -> str | None:
        if node.token in eos:
            return "eos"
        if node.token in stop:
            return "stop"
        return "length" if node.depth >= budget else None

    return why


def begun(
    models: Trees, settings: Settings, seed: int, budget: int = 30, stop: Sequence[int] = (), eos: Sequence[int] = EOS
) -> Run:  # fmt: skip
    target, draft = (*models, None)[:2]
    assert target is not None
    trie = Trie(ends(budget, stop, eos), eos, budget)
    target.prefill(PROMPT, trie.root, top_n=top_n_needed(settings, len(eos)))
    if draft is not None:
        draft.prefill(PROMPT, trie.root, top_n=draft_processor(settings).top_n)
    samplers = SeededSampler(seed, 0), SeededSampler(seed, 1)
    demand = demand_of(settings, draft is not None)
    choice = models.choice = models.engines.choose(target, draft, demand, trie, samplers[1])
    run = start(settings, target, draft, trie, *samplers, choice.engine, choice.proposer)
    if choice.engine is None and choice.proposer is None and demand.recalls:
        # How far each iteration gets is then the same on the host.
        assert draft is not None
        run.survivors, run.proposer = False, RecallingProposer(
            draft, trie, draft_processor(settings), demand.draft_width, samplers[1], True,
            target=target if models.recalls else None, target_top=target.logits.size,
        )  # fmt: skip
    return run


def told(models: Trees, settings: Settings, seed: int, **more: Any) -> Any:
    """Everything that was decided, event by event, the target's calls, the live slots at the end, and spared calls.

    Those are of iterations that had nothing to compute: of known beams, with no forest or one of ends. (The first one
    starts from the prompt's logits: a device does not come into it.)
    """
    run = begun(models, settings, seed, **more)
    events: list[Any] = []
    calls = []
    for event in decode(run, settings):
        draws = getattr(event, "draws", None)
        events.append([node.tokens() for node in (event.active if draws is None else draws)])
        events.append(getattr(event, "verdicts", None))
        if draws is None:
            calls.append(models[0].calls)
    live = [model.tree.slots.live for model in models]
    spared = sum(before == after for before, after in pairwise(calls))
    return events, [node.tokens() for node in run.hypotheses.ranking()], models[0].calls, live, spared


def finished(models: Trees, settings: Settings, seed: int, **more: Any) -> Run:
    """A run decoded to its end."""
    run = begun(models, settings, seed, **more)
    for _ in decode(run, settings):
        pass
    return run


def said(run: Run) -> list[list[int]]:
    return [node.tokens() for node in run.hypotheses.ranking()]


def reserved(model) -> int:
    """Slots of a model's cache that are reserved for nodes not known yet."""
    return sum(len(each.slots) for each in model.tree._reservations)


def interpreted(law: DeviceLaw, device: torch.device) -> bool:
    """Whether these are Triton's kernels without a GPU, which take a hundred times as long as tensors do."""
    return type(law).__name__ == "TritonLaw" and device.type == "cpu"
