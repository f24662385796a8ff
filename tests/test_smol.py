"""The default pair on real prompts: what the engine promises, on the weights people will run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dsbd_cli.bench.datasets import KINDS, load_dataset
from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import UserError
from dsbd_cli.prompts import encode
from dsbd_cli.result import Result
from dsbd_cli.settings import Settings

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smol")]
# Forests are full: what an adaptive one drafts here, prices off, is nothing.
FIXED = Settings(threshold=None, verify="cover", forest="full", gamma=5)


@pytest.fixture(scope="module")
def smol() -> Decoder:
    try:
        return Decoder.from_preset("smol", target_dtype="float32", draft_dtype="float32", target_device="cpu",
                                   draft_device="cpu")  # fmt: skip
    except UserError as error:
        pytest.skip(f"the default pair cannot be loaded here: {error}")


@pytest.fixture(scope="module")
def prompts(smol: Decoder, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """50 prompts of the built-in samples, as token ids: all MT-Bench ones, then SQuAD and Spider in turn."""
    build: Path = tmp_path_factory.mktemp("samples")

    def items(kind: str) -> Iterator[list[int]]:
        for item in load_dataset(kind, None, build).items:
            yield encode(item.messages(()), smol.pair.tokenizer, FIXED, smol.pair.vocab_size)[0]

    by_kind = {kind: list(items(kind)) for kind in KINDS}
    pairs = zip(by_kind["squad"], by_kind["spider"], strict=False)
    chosen = [*by_kind["mt-bench"], *(ids for pair in pairs for ids in pair)]
    return sorted(chosen[:50], key=len)


def test_a_sensible_answer(smol: Decoder) -> None:
    result = smol.generate("What is the capital of France?", dataclasses.replace(smol.settings, seed=1))
    assert "Paris" in result.text
    assert result.finish_reason == "eos"


@pytest.fixture(scope="module")
def answered(smol: Decoder, prompts: list[list[int]]) -> list[tuple[Result, Result]]:
    """Prompts of all lengths, each with a seed of its own: by beam sampling, and by the default rule."""
    answers = []
    for seed, ids in list(enumerate(prompts))[::5]:
        settings = dataclasses.replace(smol.settings, seed=seed, max_new_tokens=24, forest="full")
        assert dataclasses.replace(settings, seed=None, max_new_tokens=FIXED.max_new_tokens) == FIXED
        beam = smol.generate(ids, dataclasses.replace(settings, method="beam"), energy=False)
        answers.append((beam, smol.generate(ids, settings, energy=False)))
    return answers


def test_cover_is_beam_sampling_token_for_token(answered: list[tuple[Result, Result]]) -> None:
    for beam, cover in answered:
        assert cover.token_ids == beam.token_ids
        assert cover.stats.drafts_accepted > 0
        assert cover.stats.target_calls < beam.stats.target_calls


def test_default_rule_commits_enough_layers_a_call(answered: list[tuple[Result, Result]]) -> None:
    stats = [cover.stats for _, cover in answered]
    assert sum(one.layers for one in stats) / sum(one.target_calls for one in stats) >= 2.5


def test_deterministic_is_hugging_face_beam_search(smol: Decoder, prompts: list[list[int]]) -> None:
    model = smol.pair.target.model
    settings = Settings(deterministic=True, forest="full", max_new_tokens=20)
    for ids in prompts[:9:2]:  # the last one is of 200 tokens, which Hugging Face reads once a beam
        beam = smol.generate(ids, dataclasses.replace(settings, method="beam"), energy=False)
        dsbd = smol.generate(ids, settings, energy=False)
        assert dsbd.stats.target_calls < beam.stats.target_calls
        answer = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            num_beams=4, do_sample=False, max_new_tokens=20, length_penalty=1.0, early_stopping=False,
            eos_token_id=list(smol.pair.eos_ids), pad_token_id=smol.pair.eos_ids[0], temperature=None,
            top_k=None, top_p=None,
        )  # fmt: skip
        assert beam.token_ids == dsbd.token_ids == answer[0, len(ids) :].tolist()


def test_beams_cost_little_more_memory_than_one(smol: Decoder) -> None:
    ids = (smol.pair.tokenizer("The history of the lighthouse is long. " * 40)["input_ids"])[:200]
    peak = {}
    for method in ("multinomial", "beam", "dsbd"):
        settings = dataclasses.replace(
            smol.settings, method=method, width=4, seed=3, max_new_tokens=100, early_stopping="never"
        )
        stats = smol.generate(ids, settings).stats
        assert stats.layers == 100
        peak[method] = stats.kv_bytes_peak or 0
    assert peak["beam"] <= 1.3 * peak["multinomial"]
    assert peak["dsbd"] <= 1.3 * peak["multinomial"]


def test_a_first_bench_gets_some_questions_right_by_every_method(
    smol: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from dsbd_cli.bench.measure import seed_of
    from dsbd_cli.bench.plan import Options, make_plan
    from dsbd_cli.bench.prompting import Prompter
    from dsbd_cli.bench.score import Scorer
    from dsbd_cli.cli.options import Chosen

    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    plan = make_plan(Options(dataset="squad", sweeps=("width=4",)), Chosen(None, {}, {}))
    prompter = Prompter(smol.pair.tokenizer, smol.pair.vocab_size, None, plan.settings, plan.shots)
    right = dict.fromkeys([arm.name for arm in plan.arms], 0)
    with Scorer("squad") as scorer:
        for item in plan.dataset.items:
            ids = prompter.ids(item, [])
            for arm in plan.arms:
                settings = dataclasses.replace(
                    arm.settings, stop=plan.stops, seed=seed_of(plan.seed, item.id, 0)
                )
                result = smol.generate(ids, settings, energy=False)
                score = scorer.score(item, [result.text], [result.finish_reason])
                right[arm.name] += score["exact_match"]
    assert set(right) == {"multinomial", "beam", "speculative", "specinfer", "dsbd"}
    assert min(right.values()) > 0, right
