"""Pairs of models through the whole tool, on every method: law, near ties, padded heads, windows."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding.forward import kernels
from dsbd_cli.settings import Settings
from tests import builders
from tests.cli.conftest import WAYS, Call, pair

Models = Callable[..., str]
LETTERS = ("A", "B", "C", "D")
FIRST = builders.VOCAB  # id of A


def four_letters(folder: Path, rows: np.ndarray) -> str:
    """A model that only ever says four letters, by the table `rows` [4, 4]; after a prompt, by row 0."""
    table = torch.zeros(FIRST + 4, FIRST + 4)
    table[:, FIRST:] = torch.tensor(rows[0], dtype=torch.float32)
    table[FIRST:, FIRST:] = torch.tensor(rows, dtype=torch.float32)
    builders.markov(folder, table, LETTERS)
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize(
    "given",
    [
        {"method": "multinomial"}, {"method": "speculative"}, {"method": "specinfer"},
        {"method": "specinfer", "tree": (3, 2)}, {"method": "beam", "width": 1, "min_width": 1},
        *({"method": "dsbd", "verify": verify, "width": 1, "min_width": 1, "draft_width": 2}
          for verify in ("paper", "continue", "cover")),
    ],
    ids=lambda given: "-".join(str(given[name]) for name in ("method", "tree", "verify") if name in given),
)  # fmt: skip
def test_two_tokens_follow_the_targets_law(given: dict[str, Any], draft: str, tmp_path: Path) -> None:
    rng, runs = np.random.default_rng(4), 600
    p = rng.dirichlet(np.full(4, 0.7), size=4)
    q = 0.9 * p + 0.1 * rng.dirichlet(np.ones(4), size=4) if draft == "good" else p[:, ::-1].copy()
    decoder = Decoder.from_pair(four_letters(tmp_path / "t", p), four_letters(tmp_path / "d", q))
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(runs):
        settings = Settings(
            temperature=1, top_k=0, top_p=1, max_new_tokens=2, seed=seed, threshold=None, **given
        )
        counts[tuple(token - FIRST for token in decoder.generate("x", settings).token_ids)] += 1
    law = {(a, b): p[0, a] * p[a, b] for a in range(4) for b in range(4)}
    assert counts.keys() <= law.keys()
    common = [key for key in law if law[key] * runs >= 5]
    seen, means = [counts[key] for key in common], [law[key] * runs for key in common]
    if runs - sum(means) > 1e-6:
        seen, means = [*seen, runs - sum(seen)], [*means, runs - sum(means)]
    assert stats.chisquare(seen, means).pvalue > 0.001


@pytest.mark.parametrize("way", WAYS)
def test_greedy_in_bfloat16_differs_at_near_ties_only(
    dsbd: Call, models: Models, way: str, tmp_path: Path
) -> None:
    """The first other token is one whose logit is the best, or one unit of the last place below it."""
    wide = {"vocab": 2048, "tie_word_embeddings": False}
    target, draft = models("rand", **wide), models("rand", seed=1, **wide)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    left = 0
    for number in range(8):
        command = ["generate", f"prompt {number}", *pair(target, draft), "--dtype", "bfloat16", "--temperature", "0",
                   "--max-new-tokens", "24", "--json"]  # fmt: skip
        ran = dsbd(*command, *WAYS[way])
        assert ran.code == 0, ran.err
        mine = ran.json["token_ids"]
        plain = dsbd(*command, "--method", "multinomial").json["token_ids"]
        same = next((place for place, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b), None)
        if same is None:
            continue
        left += 1
        prompt = builders.tok(tmp_path)(f"prompt {number}").input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + plain[:same]])).logits[0, -1, : builders.VOCAB]
        best = float(logits.max())
        unit = float(torch.finfo(torch.bfloat16).eps) * 2.0 ** np.floor(np.log2(abs(best)))
        assert float(logits[mine[same]]) >= best - unit
        assert float(logits[plain[same]]) >= best - unit
    assert left < 8  # most texts have no tie at all


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "draft_rows"), [(320, 264), (264, 320), (320, 259), (259, 320)])
def test_padded_heads_of_different_size(
    dsbd: Call, models: Models, way: str, rows: int, draft_rows: int
) -> None:
    command = pair(models("rand", vocab=rows), models("rand", vocab=draft_rows, seed=1))
    for seed in range(2):  # of random weights every fifth token would be one of 61 rows that are no token
        ran = dsbd("generate", "hi", *command, *WAYS[way], "--temperature", "1", "--top-k", "0", "--top-p", "1",
                   "--max-new-tokens", "30", "--seed", str(seed), "--json")  # fmt: skip
        assert ran.code == 0, ran.err
        ids = ran.json["token_ids"]
        assert ids
        assert max(ids) < builders.VOCAB


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("letters", [5, 40])
def test_a_window_is_crossed_or_refused_by_name(dsbd: Call, models: Models, way: str, letters: int) -> None:
    options = {"sliding_window": 8, "initializer_range": 0.3}
    target, draft = models("rand", "mistral", **options), models("rand", "mistral", seed=1, **options)
    prompt = "abcdefghij" * 4
    ran = dsbd("generate", prompt[:letters], *pair(target, draft), *WAYS[way], "--temperature", "0",
               "--max-new-tokens", "30", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    model = AutoModelForCausalLM.from_pretrained(target)
    ids = torch.tensor([builders_ids(prompt[:letters])])
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30)
    assert ran.json["token_ids"] == plain[0, ids.shape[1] :].tolist()


def builders_ids(text: str) -> list[int]:
    """Byte tokens of an ASCII text."""
    from tests.cli.test_options import builders_ids as ids

    return ids(text)


@pytest.mark.parametrize("copy", [False, True], ids=["one folder", "two folders"])
@pytest.mark.parametrize("method", ["speculative", "specinfer"])
def test_the_same_model_as_draft_is_always_accepted(method: str, copy: bool, tmp_path: Path) -> None:
    """Every proposal is: none is multiplied in int8, and one sequence's sums are the other's."""
    target = str(tmp_path / "t")
    model: Any = builders.rand(target, tie_word_embeddings=False, eos_token_id=None)
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # far from flat, so that int8 would tell
    model.save_pretrained(target)
    draft = str(shutil.copytree(target, tmp_path / "copy")) if copy else target
    decoder = Decoder.from_pair(target, draft, dtype="float32", device="cpu")
    assert decoder.draft is not None
    assert not decoder.draft._forward.int8
    examined = 0
    for seed in range(4):
        settings = Settings(method=method, top_k=0, top_p=1.0, max_new_tokens=32, seed=seed, forest="full")
        found = decoder.generate("a prompt", settings).stats
        examined += found.drafts_examined
        # (A sum over other slots rounds otherwise: a proposal may be refused by a hair, once in millions.)
        assert found.acceptance_rate == 1.0
    assert examined > 60


@pytest.mark.parametrize("compiled", [True, False])
def test_an_architecture_without_a_tree_says_what_works_and_does_it(
    dsbd: Call, models: Models, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    if not compiled:  # as where there is no C compiler
        monkeypatch.setattr(kernels, "c_kernels", lambda: None)
    folder = models("rand", "bloom", hidden_size=32, n_layer=2, n_head=4)
    command = ["generate", "hello", "--target", folder, "--dtype", "float32", "--max-new-tokens", "8"]
    for method in ("beam", "dsbd", "speculative", "specinfer"):
        refused = dsbd(*command, "--draft", models("rand"), "--method", method)
        refused.refused("bloom uses ALiBi", "method multinomial decodes it path by path")
    ran = dsbd(*command, "--method", "multinomial", "--temperature", "0", "--json")
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)("hello").input_ids])
    theirs = model.generate(ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    assert ran.code == 0, ran.err
    assert ran.json["token_ids"] == theirs.tolist()
    assert any("path by path" in note for note in ran.json["stats"]["notes"])


def test_a_layer_that_can_never_pass_is_noted(dsbd: Call, models: Models) -> None:
    command = ["generate", "hello", *pair(models("rand"), models("rand", seed=1)), "--max-new-tokens", "4"]
    paper = [*command, "--verify", "paper", "--width", "4", "--draft-width", "3"]
    assert "draft-width 3 is below the 4 draws" in dsbd(*paper, "--threshold", "none").err
    for works in (["--draft-width", "4"], ["--verify", "cover"], ["--threshold", "0.9", "--min-width", "3"]):
        assert "is below the" not in dsbd(*paper, "--threshold", "none", *works).err, works
