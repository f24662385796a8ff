"""`--deterministic` against Hugging Face's own beam search: token for token, for `beam` and `dsbd`."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from dsbd_cli.settings import Settings
from tests.decoding.real import KINDS, play, tiny, tree_model

HUGGING_FACE: dict[str, bool | str] = {"first": True, "heuristic": False, "never": "never"}
CASES = 200


class Case(NamedTuple):
    """One random case; `seed` names the target. An even one is its own draft, an odd one has another."""

    kind: str
    vocab: int
    seed: int
    prompt: tuple[int, ...]
    eos: tuple[int, ...]
    width: int
    draft_width: int
    gamma: int
    alpha: float
    stop: str
    budget: int


def hugging_face(case: Case, eos: tuple[int, ...], returned: int = 1) -> list[list[int]]:
    """The `returned` best answers of `generate`, each cut behind its EOS."""
    prompt = torch.tensor([case.prompt])
    found = tiny(case.kind, case.vocab, case.seed).generate(
        prompt, attention_mask=torch.ones_like(prompt), num_beams=case.width, do_sample=False,
        max_new_tokens=case.budget, eos_token_id=list(eos) or None, pad_token_id=eos[0] if eos else 0,
        early_stopping=HUGGING_FACE[case.stop] if case.width > 1 else None,
        length_penalty=case.alpha if case.width > 1 else None, num_return_sequences=returned,
    )  # fmt: skip
    return [cut(row[len(case.prompt) :].tolist(), eos) for row in found]


def cut(tokens: list[int], eos: tuple[int, ...]) -> list[int]:
    ends = [place + 1 for place, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0]] if ends else tokens


def ours(case: Case, method: str) -> tuple[list[list[int]], int, int]:
    """What the engine ranks, best first; drafted layers tested, and passed."""
    settings = Settings(
        method=method, deterministic=True, width=case.width, min_width=1, draft_width=case.draft_width,
        gamma=case.gamma, length_penalty=case.alpha, early_stopping=case.stop, max_new_tokens=case.budget,
    )  # fmt: skip

    target = tree_model(case.kind, case.vocab, case.seed, "target")
    draft = tree_model(case.kind, case.vocab, case.seed + case.seed % 2, "draft")
    run, layers = play(settings, target, draft if method == "dsbd" else None, case.prompt, case.eos)
    tested = [layer.passed for layer in layers if layer.drafted is not None]
    return [node.tokens() for node in run.hypotheses.ranking()], len(tested), sum(tested)


def random_cases() -> list[Case]:
    """Half with EOS ids among the tokens that the model likes to say, so that many answers end by one."""
    rng, cases = random.Random(2025), []
    for number in range(CASES):
        kind = KINDS[number % len(KINDS)]
        vocab = rng.choice([12, 17, 25, 40])
        case = Case(
            kind, vocab, rng.randrange(4), tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 6))), (),
            rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 4), rng.choice([0.0, 1.0, 2.0]),
            rng.choice(list(HUGGING_FACE)), rng.randint(6, 16),
        )  # fmt: skip
        eos = rng.sample(range(vocab), rng.randint(1, 4))
        if number % 4 != 3:
            eos[0] = hugging_face(case._replace(budget=6), ())[0][rng.randint(2, 5)]
        cases.append(case._replace(eos=tuple(dict.fromkeys(eos))))
    return cases


@pytest.mark.slow
def test_200_random_tiny_cases() -> None:
    """The answer, and behind it every other finished beam, in Hugging Face's order."""
    cases = random_cases()
    ended = tested = passed = 0
    for case in cases:
        expected = hugging_face(case, case.eos, returned=case.width)
        ended += expected[0][-1] in case.eos
        for method in ("beam", "dsbd"):
            found, more_tested, more_passed = ours(case, method)
            tested, passed = tested + more_tested, passed + more_passed
            assert 1 <= len(found) <= case.width
            assert found == expected[: len(found)], (method, case)
    assert ended >= CASES / 2, f"only {ended} answers end by EOS"
    # Neither always nor never accepted: the comparison is one of drafted layers too.
    assert 0.1 * tested < passed < 0.9 * tested
    assert {case.width for case in cases} == {1, 2, 3, 4, 5, 6}
    assert {len(case.eos) for case in cases} == {1, 2, 3, 4}


@pytest.mark.parametrize("stop", HUGGING_FACE)
def test_one_beam_is_greedy_search(stop: str) -> None:
    """Hugging Face has no beam search of one beam: its greedy search ends at the first EOS."""
    for seed in range(4):
        case = Case("gpt2", 12, seed, (1, 2), (), 1, 2, 2, 2.0, stop, 12)
        free = hugging_face(case, ())[0]
        case = case._replace(eos=(free[3],))
        assert ours(case, "dsbd")[0] == ours(case, "beam")[0] == hugging_face(case, case.eos)
