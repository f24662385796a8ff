"""From settings to a `Run`: what a method asks of models and engines, who proposes, and which loop runs.

One module, since all three are read off the same few settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dsbd_cli.decoding.law.beam_search import candidates_kept
from dsbd_cli.decoding.law.distribution import LogitsProcessor, Sampler
from dsbd_cli.decoding.law.width import DistinctWidth, ThresholdWidth, width_rule
from dsbd_cli.decoding.methods.deterministic import beam_search
from dsbd_cli.decoding.methods.dsbd import Run, alone, dsbd
from dsbd_cli.decoding.methods.lookup import CHAINS, LookupProposer
from dsbd_cli.decoding.methods.ngrams import NgramForests, assumed_gain
from dsbd_cli.decoding.methods.proposers import CapturedProposer, DraftModelProposer, ForestShape, Proposer
from dsbd_cli.decoding.methods.recalling import RecallingProposer
from dsbd_cli.decoding.methods.specinfer import TreeProposer, specinfer
from dsbd_cli.decoding.model.protocol import Demand, Engine, Need, TreeModel
from dsbd_cli.decoding.tree.events import Iteration, Layer
from dsbd_cli.decoding.tree.sequences import Hypotheses, Trie
from dsbd_cli.prices import Acceptance, Prices, beams_of
from dsbd_cli.settings import DEFAULT_TREE, DRAFTING, ONE_BEAM_METHODS, Settings, width_from_target


def processor_of(settings: Settings) -> LogitsProcessor:
    """T of these settings; the deterministic mode has none."""
    if settings.deterministic:
        return LogitsProcessor()
    return LogitsProcessor(settings.temperature, settings.top_k, settings.top_p)


def top_n_needed(settings: Settings, eos_count: int) -> int:
    """How many best entries of each target row the method asks for; 0 = whole rows."""
    if settings.deterministic:
        return candidates_kept(settings.width, eos_count)  # they may all share one parent
    return processor_of(settings).top_n


def takes_most_probable(settings: Settings) -> bool:
    """Whether the forest holds the draft's most probable continuations instead of draws."""
    return settings.deterministic or (settings.method == "dsbd" and settings.verify == "cover")


def draws_distinct(settings: Settings) -> bool:
    """Whether draws of a layer are distinct; one draw is, whatever is said."""
    return (
        settings.draws == "distinct"
        and settings.method not in ONE_BEAM_METHODS
        and not settings.deterministic
    )


def draws_tested(settings: Settings) -> int:
    """Draws of q that a layer is tested with: one in speculative sampling, W_S under `paper` and `continue`."""
    if settings.method == "speculative":
        return 1
    return settings.draft_width if settings.method == "dsbd" and not takes_most_probable(settings) else 0


def width_rule_of(settings: Settings) -> ThresholdWidth | DistinctWidth | None:
    """The rule for W_L, or None for W in every layer. The paper's needs a forest; `distinct` looks at p alone."""
    own = width_from_target(settings)
    if settings.deterministic or settings.method not in (("dsbd", "beam") if own else ("dsbd",)):
        return None
    return width_rule(settings.width, settings.min_width, settings.threshold, own)


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


def host_proposals(settings: Settings) -> str:
    """Which of these settings' proposals the host alone can make; empty: none."""
    if not takes_most_probable(settings):
        return ""
    if settings.lookup:
        return "the host looks up the prompt (lookup)"
    return "the host chooses the forest's nodes (forest-nodes)" if settings.forest_nodes else ""


def distinct_of(settings: Settings) -> int:
    """How many beams there are where they are distinct by rule; 0 where equal draws are one."""
    return settings.width if settings.deterministic or draws_distinct(settings) else 0


def forest_shape(settings: Settings, prices: Prices | None, unread: int = 0) -> ForestShape | None:
    """How large these settings' forests are to be; None where they are all alike, or there are none.

    Args:
        unread: prompt tokens that the draft would read when it is first asked (`ForestShape.begins`).
    """
    drafts = settings.method in DRAFTING and settings.method != "specinfer" and settings.gamma > 0
    if prices is None or not drafts:
        return None
    pruned = forest_mass(settings) < 1
    one_beam, drawn = settings.method in ONE_BEAM_METHODS, not takes_most_probable(settings)
    beams = beams_of(settings)
    first = Acceptance.assumed(
        beams,
        settings.gamma,
        1 if one_beam else settings.draft_width,
        pruned=pruned,
        least=settings.beams if drawn else 1,
    )
    narrow = not isinstance(width_rule_of(settings), ThresholdWidth)
    shape = ForestShape(
        prices, first, narrow=narrow, drawn=drawn, unread=unread, layers=settings.max_new_tokens
    )
    if forest_is_free(settings):
        shape.rival = max(1.0, assumed_gain(prices, beams))
    return shape


def forest_is_free(settings: Settings) -> bool:
    """Whether the text is the same whatever is drafted: forests may then follow who else is decoded."""
    return recalls(settings) and not isinstance(width_rule_of(settings), ThresholdWidth)


def recalls(settings: Settings) -> bool:
    """Whether a pipeline's forest may hold what the target said of the last one.

    What the target has computed is a function of the past, so a width that depends on the forest keeps its law. With
    `kv one` a beam is kept behind every iteration, so text depends on where iterations end, and host and device end
    the last one differently.
    """
    return takes_most_probable(settings) and not (settings.kv == "one" and settings.method == "dsbd")


def forest_mass(settings: Settings) -> float:
    """The draft's mass that a layer of a sparing `cover` forest holds: half of what top-p would cut stays.

    The target's own support ends at top-p; what the draft puts beyond it is mostly never drawn. The
    paper's dynamic width depends on the forest's mass, and is given the whole forest.
    """
    dynamic = isinstance(width_rule_of(settings), ThresholdWidth)
    greedy = settings.deterministic or processor_of(settings).greedy
    if greedy or dynamic or settings.method != "dsbd" or settings.verify != "cover":
        return 1.0
    return (1 + settings.top_p) / 2


def most_nodes(settings: Settings, prompt_tokens: int, budget: int) -> int:
    """Slots that a request may come to need in either model: its prompt, W sequences as long as may be, and the
    forests of two iterations in flight."""
    width = settings.beams
    forest = settings.gamma * settings.draft_width if settings.method in DRAFTING else 0
    if settings.method in DRAFTING:
        forest += CHAINS * settings.lookup * width
    if settings.method == "specinfer":
        forest, level = 0, 1
        for count in settings.tree or DEFAULT_TREE:
            level *= count
            forest += level
    return 1 + prompt_tokens + width * budget + 2 * (2 * width + forest)


def demand_of(settings: Settings, drafts: bool) -> Demand:
    """What these settings ask of an engine (`device.engines.Engines.choose`).

    Args:
        drafts: whether there is a draft to go with the target.
    """
    one_beam = settings.method in ONE_BEAM_METHODS
    width = settings.beams
    plain = not drafts or settings.method not in DRAFTING
    why_not_pipelined = why_not_captured = ""
    if not plain and draws_distinct(settings) and not takes_most_probable(settings):
        why_not_captured = "the host drafts distinct draws"
    tree: tuple[int, ...] = ()
    if not plain and settings.method == "specinfer":
        tree = tuple(settings.tree or DEFAULT_TREE)
    if not plain and (on_host := host_proposals(settings)):
        why_not_pipelined = why_not_captured = on_host
    if plain or tree:
        why_not_captured = "nothing is drafted" if plain else "the host drafts token trees"
    return Demand(
        width=width,
        draft_width=0 if plain else 1 if one_beam else settings.draft_width,
        gamma=0 if plain else len(tree) or settings.gamma,
        processor=processor_of(settings),
        draft_processor=None if takes_most_probable(settings) else draft_processor(settings),
        distinct=draws_distinct(settings),
        search=settings.deterministic,
        continues=settings.method == "dsbd" and settings.verify == "continue" and draws_tested(settings) > 0,
        recalls=not plain and recalls(settings),
        tree=tree,
        tree_rule=settings.tree_rule if tree else "",
        why_not_pipelined=why_not_pipelined,
        why_not_captured=why_not_captured,
    )


def start(
    settings: Settings,
    target: TreeModel,
    draft: TreeModel | None,
    trie: Trie,
    sampler: Sampler,
    draft_sampler: Sampler,
    engine: Engine | None = None,
    captured: CapturedProposer | None = None,
    prices: Prices | None = None,
    prompt: Sequence[int] = (),
    shape: ForestShape | None = None,
) -> Run:
    """A `Run` for these settings on prefilled models; `draft` may be None for plain decoding.

    Args:
        engine, captured: what `device.engines.Engines.choose` found for `demand_of` these settings, if anything.
        prices: what forests have to be worth on the host; None: all are full.
        prompt: token ids that `trie.root` stands for, for `lookup`.
        shape: `forest_shape` for these prices, where it was asked already; None makes one.
    """
    one_beam = settings.method in ONE_BEAM_METHODS
    width = settings.beams
    processor = draft_processor(settings)
    gamma = settings.gamma
    proposer: Proposer | None = None
    kv_one = settings.kv == "one" and settings.method == "dsbd"
    spare: NgramForests | None = None
    own = False  # the target's own conditionals serve as proposals
    if draft is not None and settings.method == "specinfer":
        expansion = settings.tree or DEFAULT_TREE
        gamma = len(expansion)
        distinct = settings.tree_rule == "rsd"
        proposer = TreeProposer(draft, trie, processor, expansion, draft_sampler, distinct)
    elif draft is not None and settings.method in DRAFTING:
        best = takes_most_probable(settings)
        draft_width = 1 if one_beam else settings.draft_width
        priced = prices is not None and engine is None and captured is None
        mass = forest_mass(settings) if priced else 1.0
        if mass < 1:
            # What mass is depends on the temperature.
            processor = LogitsProcessor(settings.temperature, processor.top_k)
        shape = (shape or forest_shape(settings, prices)) if priced else None
        # Full forests are those of a device, where the text depends on them.
        alike = settings.forest == "full" and not forest_is_free(settings) and not host_proposals(settings)
        by_host = best and engine is None and captured is None
        own = by_host and not alike
        kind = RecallingProposer if alike and by_host and recalls(settings) else DraftModelProposer
        told = own or kind is RecallingProposer
        proposer = kind(
            draft, trie, processor, draft_width, draft_sampler, best, mass, draws_distinct(settings),
            target if told else None, top_n_needed(settings, len(trie.eos_ids)),
            settings.forest_nodes if own else 0, 0 if best else gamma,
        )  # fmt: skip
        if settings.lookup and own and gamma:
            proposer = LookupProposer(proposer, trie, prompt, settings.lookup)
        if captured is not None:
            proposer = captured.falling_back_to(proposer)
        if shape is not None and prices is not None and own and forest_is_free(settings):
            full = gamma * settings.draft_width
            sizes = (
                min(full, settings.forest_nodes or full),
                top_n_needed(settings, len(trie.eos_ids)),
                distinct_of(settings),
            )
            spare = NgramForests(target, trie, prompt, prices, beams_of(settings), *sizes)
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
        distinct=draws_distinct(settings),
        draft_sampler=draft_sampler,
        tested=draws_tested(settings) if proposer is not None and gamma > 0 else 0,
        dynamic_width=width_rule_of(settings),
        proposer=proposer,
        kv_one=kv_one,
        survivors=own,
        shape=shape,
        spare=spare,
        engine=engine,
    )


def decode(run: Run, settings: Settings) -> Iterator[Layer | Iteration]:
    """Decode one request alone; `run.hypotheses` holds the outcome when this is exhausted."""
    return alone(loop_of(run, settings))


def loop_of(run: Run, settings: Settings) -> Iterator[Layer | Iteration | Need]:
    """The method's own loop, for whoever serves the needs that it yields."""
    if settings.deterministic:
        return beam_search(run, settings.early_stopping, settings.length_penalty)
    if settings.method == "specinfer":
        return specinfer(run, settings.tree_rule)
    if settings.method == "speculative":
        return dsbd(run, "paper")
    # beam and multinomial are dsbd without a forest; so is dsbd when its draft can't go on.
    return dsbd(run, settings.verify if settings.method == "dsbd" else "cover")
