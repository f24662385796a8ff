"""What the rules of token trees accept: tokens a target call, for several trees, on texts of the target's own.

Texts are drawn once, by the target alone, of which every rule has the law. Given a text, a rule says of each token with
what chance it came out as an accepted draw, and these say how many target calls the text takes on average: nothing else
is drawn, and the rules are compared on the same texts. A second run gives the same numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from benchmarks.kit import pairs
from benchmarks.kit.prompts import add_prompts, load_prompts
from benchmarks.kit.report import aligned, show
from dsbd_cli.batch.items import item_seed
from dsbd_cli.bench.stats import paired_rate
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding import LogitsProcessor, draft_processor
from dsbd_cli.decoding.law.distribution import Row, joint, residual
from dsbd_cli.decoding.law.verification import align, division_factor, keys, looked_at
from dsbd_cli.errors import DsbdError, UserError
from dsbd_cli.loading.quiet import quiet_transformers
from dsbd_cli.setting_text import parse_setting
from dsbd_cli.settings import TREE_RULES, Settings

TREES = "1x1x1,2x2x1,4x2x1,3x3x3,4x4x4"
_MOST_ENTRIES = 32  # of a support whose draws without replacement are enumerated
_DUST = 1e-15
Pair = tuple[np.ndarray, np.ndarray]


def chain(p: np.ndarray, q: np.ndarray, draws: int) -> np.ndarray:
    """Chance of each token to come out as an accepted draw, by SpecInfer's rule: [n], like p and q."""
    accepted, still_open, current = np.zeros(len(p)), 1.0, p
    for _ in range(draws):
        taken = np.minimum(current, q)
        accepted += still_open * taken
        still_open *= max(0.0, 1 - taken.sum())
        current = residual(current, q)
    return accepted


def sequential(p: np.ndarray, q: np.ndarray, draws: int) -> np.ndarray:
    """`chain` by SpecTr's rule."""
    held = np.minimum(p / division_factor(p, q, draws), q)
    return np.asarray(held * looked_at(held.sum(), draws))


def distinct(p: np.ndarray, q: np.ndarray, draws: int) -> np.ndarray:
    """`chain` by recursive rejection of draws without replacement, over all orders of refused ones."""
    taken = np.minimum(p, q)
    if draws == 1:
        return taken
    accepted, rest = taken.copy(), residual(p, q)
    for index in np.flatnonzero(q - taken > _DUST):
        left = q.copy()
        left[index] = 0.0
        if (mass := left.sum()) > 0:
            accepted += (q[index] - taken[index]) * distinct(rest, left / mass, draws - 1)
    return accepted


RULES: Mapping[str, Callable[[np.ndarray, np.ndarray, int], np.ndarray]] = dict(
    zip(TREE_RULES, (chain, sequential, distinct), strict=True)
)


def target_calls(chances: Sequence[Sequence[float]], tokens: int, budget: int) -> float:
    """Target calls that a text takes on average.

    Args:
        chances: by depth of the tree and place of the text: of the token there to be an accepted draw, given that it
            came out.
        tokens: length of the text; it ended there by EOS, or at the budget.
    """
    begins = np.zeros(tokens + 1)
    begins[0] = 1.0
    for place in range(tokens):
        going = begins[place]
        # The last token of the budget is drawn and never drafted.
        drafted = min(len(chances), budget - place - 1)
        for depth in range(min(drafted, tokens - place)):
            accepted = chances[depth][place + depth]
            begins[place + depth + 1] += going * (1 - accepted)
            going *= accepted
        begins[min(place + drafted + 1, tokens)] += going
    return float(begins[:tokens].sum())


def given_the_text(
    rule: str, draws: int, places: Sequence[tuple[np.ndarray, np.ndarray, int]]
) -> list[float]:
    """Of each token of a text, its chance to have been accepted. `places`: p, q and the token's index in both."""
    return [float(RULES[rule](p, q, draws)[token] / p[token]) for p, q, token in places]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    pairs.add_pair(result)
    add_prompts(result, 12)
    group = result.add_argument_group("what is compared")
    group.add_argument("--trees", default=TREES, help="expansions by depth (default %(default)s)")
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default %(default)s)")
    group.add_argument("--seed", type=int, default=1, help="of the texts (default %(default)s)")
    group.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="sampling settings")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    quiet_transformers()
    try:
        print(aligned(rows(options)))
        return 0
    except DsbdError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def rows(options: argparse.Namespace) -> list[list[str]]:
    """The table: a tree and a rule a line, the rule of SpecInfer first."""
    trees = [tuple(parse_setting("tree", tree.replace("x", ","))) for tree in options.trees.split(",")]
    decoder, settings = pairs.load(options)
    given = dict(one.split("=", 1) for one in options.set)
    settings = settings.merged({name: parse_setting(name, value) for name, value in given.items()}).merged(
        {"method": "multinomial", "max_new_tokens": options.max_new_tokens}
    )
    if decoder.draft is None:
        raise UserError("token trees need a draft: leave out --draft none")
    if not 0 < settings.top_k <= _MOST_ENTRIES:
        raise UserError(
            f"draws without replacement are enumerated: give --set top_k=N, at most {_MOST_ENTRIES}"
        )
    prompts, label = load_prompts(options, decoder.pair, settings)
    texts = []
    for number, prompt in enumerate(prompts):
        result = decoder.generate(
            prompt.ids, settings.merged({"seed": item_seed(options.seed, number)}), energy=False
        )
        if result.token_ids:
            texts.append(places_of(decoder, settings, prompt.ids, result.token_ids))
    tokens = [len(text) for text in texts]
    print(f"{len(texts)} texts of {label}, {sum(tokens)} tokens", file=sys.stderr)
    chances = {
        (rule, draws): [given_the_text(rule, draws, text) for text in texts]
        for rule in RULES
        for draws in {count for tree in trees for count in tree}
    }
    table = [["tree", "rule", "accepted at the root", "tokens a call", "times specinfer (median text)"]]
    for tree in trees:
        calls = {
            rule: [
                target_calls([chances[rule, draws][i] for draws in tree], count, options.max_new_tokens)
                for i, count in enumerate(tokens)
            ]
            for rule in RULES
        }
        for rule in RULES:
            times, _ = paired_rate(tokens, calls[rule], tokens, calls[TREE_RULES[0]])
            share = np.concatenate(chances[rule, tree[0]]).mean()
            table.append(
                ["x".join(map(str, tree)), rule, f"{share:.3f}", f"{sum(tokens) / sum(calls[rule]):.3f}",
                 "1" if rule == TREE_RULES[0] else show(times.to_dict())]
            )  # fmt: skip
    return table


def places_of(
    decoder: Decoder, settings: Settings, prompt: Sequence[int], text: Sequence[int]
) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """p and q at each place of a text, on their joint support, and the index of the token that stands there."""
    assert decoder.pair.draft is not None
    both = [logps(model.model, model.device, prompt, text, decoder.pair.vocab_size)
            for model in (decoder.pair.target, decoder.pair.draft)]  # fmt: skip
    processor = draft_processor(settings)
    found = []
    for place, token in enumerate(text):
        union, p, q = aligned_supports(both[0][place], both[1][place], processor)
        found.append((p, q, int(np.searchsorted(union, token))))
    return found


def aligned_supports(
    target: np.ndarray, draft: np.ndarray, processor: LogitsProcessor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """T of two rows of log-probabilities: tokens that either can say, ascending, p and q."""
    supports = [joint([0.0], [Row(np.arange(len(row)), row)], processor) for row in (target, draft)]
    p, q = supports
    return align(keys(p.parent, p.token), p.prob, keys(q.parent, q.token), q.prob)


@torch.inference_mode()
def logps(
    model: torch.nn.Module, device: torch.device, prompt: Sequence[int], text: Sequence[int], vocab: int
) -> np.ndarray:
    """Log-probabilities before each token of the text, by one forward: float64 [tokens, vocabulary]."""
    ids = torch.tensor([[*prompt, *text]], device=device)
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(text) + 1).logits[0, :-1, :vocab]
    return np.asarray(torch.log_softmax(logits.float(), dim=-1).double().cpu())


if __name__ == "__main__":
    sys.exit(main())
