"""The five methods as generators of events, and the one function that picks one."""

from __future__ import annotations

from collections.abc import Iterator

from dsbd_cli.decoding.chance import Chance
from dsbd_cli.decoding.events import Iteration, Layer
from dsbd_cli.decoding.forest import DraftModelProposer, Proposer
from dsbd_cli.decoding.hypotheses import Hypotheses
from dsbd_cli.decoding.law import Warp
from dsbd_cli.decoding.methods.deterministic import beam_search
from dsbd_cli.decoding.methods.dsbd import dsbd
from dsbd_cli.decoding.methods.specinfer import TreeProposer, specinfer
from dsbd_cli.decoding.model import TreeModel
from dsbd_cli.decoding.run import Run
from dsbd_cli.decoding.tree import Trie
from dsbd_cli.decoding.width import FixedWidth, WidthRule, width_rule
from dsbd_cli.settings import DEFAULT_TREE, ONE_BEAM_METHODS, Settings

DRAFTING = ("dsbd", "speculative", "specinfer")


def warp_of(settings: Settings) -> Warp:
    """T of these settings; the deterministic mode has none."""
    if settings.deterministic:
        return Warp()
    return Warp(settings.temperature, settings.top_k, settings.top_p)


def start(
    settings: Settings,
    target: TreeModel,
    draft: TreeModel | None,
    trie: Trie,
    chance: Chance,
    draft_chance: Chance,
) -> Run:
    """A `Run` for these settings on prefilled models; `draft` may be None for plain decoding."""
    one_beam = settings.method in ONE_BEAM_METHODS
    width = 1 if one_beam else settings.width
    warp = warp_of(settings)
    gamma = settings.gamma
    proposer: Proposer | None = None
    if draft is not None and settings.method == "specinfer":
        expansion = settings.tree or DEFAULT_TREE
        gamma = len(expansion)
        proposer = TreeProposer(draft, trie, warp, expansion, draft_chance)
    elif draft is not None and settings.method in DRAFTING:
        distinct = settings.deterministic or (settings.method == "dsbd" and settings.verify == "cover")
        draft_width = 1 if one_beam else settings.draft_width
        if settings.deterministic:
            # Beam search has no T; the draft's most probable continuations need no more of its rows.
            warp = Warp(top_k=draft_width)
        proposer = DraftModelProposer(draft, trie, warp, draft_width, draft_chance, distinct)
    widths: WidthRule = FixedWidth(width)
    if settings.method == "dsbd" and not settings.deterministic:
        widths = width_rule(width, settings.min_width, settings.threshold)
    hypotheses = Hypotheses(trie.root, width, settings.early_stopping, settings.length_penalty)
    kv_one = settings.kv == "one" and settings.method == "dsbd"
    return Run(
        target,
        trie,
        hypotheses,
        chance,
        warp_of(settings),
        width,
        trie.budget,
        widths,
        proposer,
        gamma,
        kv_one,
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
