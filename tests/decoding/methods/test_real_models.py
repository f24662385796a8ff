"""The methods on real weights in float32: greedy, cover against beam, and one law end to end."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.settings import Settings
from tests.builders import markov
from tests.decoding.real import KINDS, play, tiny, tree_model
from tests.decoding.reference import T, sequence_law, set_process
from tests.decoding.table_model import by_last

VOCAB, EOS = 40, (7, 11)
METHODS: dict[str, dict[str, Any]] = {
    "multinomial": {"method": "multinomial"},
    "beam": {"method": "beam", "width": 3},
    "speculative": {"method": "speculative", "gamma": 3},
    "specinfer": {"method": "specinfer", "tree": (2, 2, 1)},
    "spectr": {"method": "specinfer", "tree": (2, 2, 1), "tree_rule": "spectr"},
    "rsd": {"method": "specinfer", "tree": (2, 2, 1), "tree_rule": "rsd"},
    "paper": {"method": "dsbd", "verify": "paper", "width": 3},
    "continue": {"method": "dsbd", "verify": "continue", "width": 3},
    "cover": {"method": "dsbd", "verify": "cover", "width": 3},
}


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))] for _ in range(count)]


@cache
def hugging_faces_greedy(kind: str, prompt: tuple[int, ...]) -> list[int]:
    ids = torch.tensor([prompt])
    return tiny(kind, VOCAB, 0).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
        eos_token_id=list(EOS), pad_token_id=0,
    )[0, len(prompt) :].tolist()  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_greedy_is_hugging_faces_greedy(method: str, kind: str) -> None:
    """In float32 every method says what plain greedy decoding says."""
    target, draft = (tree_model(kind, VOCAB, seed, str(seed)) for seed in (0, 1))
    settings = Settings(temperature=0.0, max_new_tokens=12, **METHODS[method])
    for number, prompt in enumerate(prompts(6)):
        drafting = method not in ("multinomial", "beam")
        run, _ = play(settings, target, draft if drafting else None, prompt, EOS, seed=number)
        assert run.hypotheses.ranking()[0].tokens() == hugging_faces_greedy(kind, tuple(prompt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft_seed", [0, 1])
def test_cover_says_what_beam_says(kind: str, draft_seed: int) -> None:
    """The same seed, the same text: the forest decides only how many target calls it takes."""
    target, draft = tree_model(kind, VOCAB, 0, "target"), tree_model(kind, VOCAB, draft_seed, "draft")
    given = {"width": 4, "min_width": 1, "threshold": None, "max_new_tokens": 12, "early_stopping": "never"}
    calls = Counter[str]()
    for number, prompt in enumerate(prompts(12)):
        answers = []
        for method, proposer in (("beam", None), ("dsbd", draft)):
            settings = Settings(method=method, verify="cover", temperature=0.8, **given)  # type: ignore[arg-type]
            run, _ = play(settings, target, proposer, prompt, EOS, seed=number)
            answers.append([node.tokens() for node in run.hypotheses.ranking()])
            calls[method] += run.target.calls
        assert answers[0] == answers[1]
    assert calls["dsbd"] <= calls["beam"]
    if draft_seed == 0:  # the draft is the target: much of the support is covered
        assert calls["dsbd"] < 0.8 * calls["beam"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["multinomial", "speculative", "specinfer", "paper", "continue", "cover"])
def test_law_on_exact_weights(method: str, tmp_path: Path) -> None:
    """The law end to end: a Llama that is a table, a very different one as its draft, 800 seeds."""
    rng, runs, eos, t = np.random.default_rng(8), 800, (3,), T(0.9, 3, 0.95)
    tables = [rng.dirichlet(np.full(4, 0.8), size=4) for _ in range(2)]
    models = [
        HfTreeModel(markov(tmp_path / name, torch.tensor(table, dtype=torch.float32)), vocab_size=4)
        for name, table in zip(("target", "draft"), tables, strict=True)
    ]
    given = METHODS[method] | ({"width": 2} if "width" in METHODS[method] else {})
    settings = Settings(
        temperature=t.tau, top_k=t.k, top_p=t.p, threshold=None, min_width=1, max_new_tokens=3, **given
    )
    law_of_table = by_last(tables[0], start=1)
    counts: Counter[Any] = Counter()
    law: dict[Any, float] = {}
    if "width" in given:
        for outcome, mass in set_process(law_of_table, 2, t, eos, 3).items():
            law[outcome.pool, outcome.active] = law.get((outcome.pool, outcome.active), 0.0) + mass
    else:
        law = dict(sequence_law(law_of_table, t, eos, 3))
    for seed in range(runs):
        run, _ = play(settings, models[0], models[1], [1], eos, seed)
        pool, active = (
            frozenset(tuple(node.tokens()) for node in nodes)
            for nodes in (run.hypotheses.pool, run.hypotheses.active)
        )
        counts[(pool, active) if "width" in given else next(iter(pool))] += 1
    assert counts.keys() <= law.keys()
    common = [key for key in law if law[key] * runs >= 5]
    seen, means = [counts[key] for key in common], [law[key] * runs for key in common]
    if runs - sum(means) > 1e-6:
        seen.append(runs - sum(seen))
        means.append(runs - sum(means))
    assert stats.chisquare(seen, means).pvalue > 0.001
