"""The five methods as generators of events, and the one function that sample one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler
from dsbd_cli.decoding.law.width import ThresholdWidth, width_rule
from dsbd_cli.decoding.methods.deterministic import beam_search
from dsbd_cli.decoding.methods.dsbd import Run, dsbd
from dsbd_cli.decoding.methods.proposers import DraftLength, DraftModelProposer, Proposer
from dsbd_cli.decoding.methods.specinfer import TreeProposer, specinfer
from dsbd_cli.decoding.model.protocol import TreeModel
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import Hypotheses, Trie
from dsbd_cli.settings import DEFAULT_TREE, DRAFTING, ONE_BEAM_METHODS, Settings

if TYPE_CHECKING:
    from dsbd_cli.decoding.device.pipeline import Chain


def processor_of(settings: Settings) -> LogitsProcessor:
    """T of these settings; the deterministic mode has none."""
    if settings.deterministic:
        return LogitsProcessor()
    return LogitsProcessor(settings.temperature, settings.top_k, settings.top_p)


def top_n_needed(settings: Settings, eos_count: int) -> int:
    """How many best entries of each target row the method asks for; 0 = whole rows."""
    if settings.deterministic:
        # Hugging Face keeps (1 + EOS tokens) x W candidates, which may all share one parent.
        return max(2, 1 + eos_count) * settings.width
    return processor_of(settings).top_n


def takes_most_probable(settings: Settings) -> bool:
    """Whether the forest holds the draft's most probable continuations instead of draws."""
    return settings.deterministic or (settings.method == "dsbd" and settings.verify == "cover")


def draft_processor(settings: Settings) -> LogitsProcessor:
    """T of the draft's proposals: the same T, so that what is recorded is what was drawn from.

    Where nothing is drawn, only the ranking matters: the W_S best of the unwarped joint are those of
    the warped one, and more of them where top-p would leave fewer.
    """
    return (
        LogitsProcessor(top_k=settings.draft_width)
        if takes_most_probable(settings)
        else processor_of(settings)
    )


def relative_cost(settings: Settings, target: TreeModel, draft: TreeModel) -> float | None:
    """What one more drafted layer costs, in target calls; None where forests are to be full."""
    return None if settings.forest == "full" else target.relative_cost(draft)


def forest_mass(settings: Settings) -> float:
    """The draft's mass that a layer of a sparing `cover` forest holds: half of what top-p would cut stays.

    The target's own support ends at top-p; what the draft puts beyond it is mostly never drawn. A
    dynamic width (`threshold`) depends on the forest's mass, and is given the whole forest.
    """
    dynamic = settings.threshold is not None and settings.min_width < settings.width
    greedy = settings.deterministic or processor_of(settings).greedy
    if greedy or dynamic or settings.method != "dsbd" or settings.verify != "cover":
        return 1.0
    return (1 + settings.top_p) / 2


def start(
    settings: Settings,
    target: TreeModel,
    draft: TreeModel | None,
    trie: Trie,
    sampler: Sampler,
    draft_sampler: Sampler,
) -> Run:
    """A `Run` for these settings on prefilled models; `draft` may be None for plain decoding."""
    one_beam = settings.method in ONE_BEAM_METHODS
    width = 1 if one_beam else settings.width
    processor = draft_processor(settings)
    gamma = settings.gamma
    proposer: Proposer | None = None
    draft_length: DraftLength | None = None
    dynamic: ThresholdWidth | None = None
    if settings.method == "dsbd" and not settings.deterministic:
        dynamic = width_rule(width, settings.min_width, settings.threshold)
    kv_one = settings.kv == "one" and settings.method == "dsbd"
    chain: Chain | None = None
    plain = draft is None or settings.method not in DRAFTING
    covers = plain or (settings.method == "dsbd" and settings.verify == "cover")
    if covers and not kv_one and not settings.deterministic and dynamic is None:
        forests = (0, 0) if plain else (settings.draft_width, gamma)
        # On a GPU the device verifies as well, where the models allow it.
        if (chained := getattr(target, "device_chain", None)) is not None:
            chain = chained(None if plain else draft, trie, sampler, processor_of(settings), width, *forests)
    if draft is not None and settings.method == "specinfer":
        expansion = settings.tree or DEFAULT_TREE
        gamma = len(expansion)
        proposer = TreeProposer(draft, trie, processor, expansion, draft_sampler)
    elif draft is not None and settings.method in DRAFTING:
        distinct = takes_most_probable(settings)
        draft_width = 1 if one_beam else settings.draft_width
        # On a GPU the whole iteration runs in one recording, where the pair allows it.
        recorded = getattr(target, "device_proposer", None)
        if recorded is not None and chain is None:
            proposer = recorded(draft, trie, processor, draft_width, draft_sampler, distinct, gamma, width)
        if proposer is None:
            price = relative_cost(settings, target, draft)
            mass = 1.0 if price is None else forest_mass(settings)
            if mass < 1:
                processor = LogitsProcessor(
                    settings.temperature, processor.top_k
                )  # what mass is, depends on the temperature
            if price is not None and not settings.deterministic and chain is None:
                draft_length = DraftLength(price)
            proposer = DraftModelProposer(draft, trie, processor, draft_width, draft_sampler, distinct, mass)
    hypotheses = Hypotheses(trie.root, width, settings.early_stopping, settings.length_penalty)
    return Run(
        trie=trie,
        hypotheses=hypotheses,
        sampler=sampler,
        processor=processor_of(settings),
        width=width,
        draft_width=settings.draft_width,
        gamma=gamma,
        target=target,
        dynamic_width=dynamic,
        proposer=proposer,
        kv_one=kv_one,
        draft_length=draft_length,
        chain=chain,
    )


def decode(run: Run, settings: Settings) -> Iterator[Layer | Iteration]:
    """The method's own loop; `run.hypotheses` holds the outcome when it is exhausted."""
    if settings.deterministic:
        return beam_search(run, settings.early_stopping, settings.length_penalty)
    if settings.method == "specinfer":
        return specinfer(run)
    if settings.method == "speculative":
        return dsbd(run, "paper")
    # beam and multinomial are dsbd without a forest; so is dsbd when its draft can't go on.
    return dsbd(run, settings.verify if settings.method == "dsbd" else "cover")
