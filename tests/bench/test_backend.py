"""Measuring real (tiny) models: tokens, clocks, log-probabilities, references."""

from __future__ import annotations

import contextlib
import dataclasses
import time

import pytest
import torch

from dsbd_cli.bench import context, hf
from dsbd_cli.bench.arms import Arm, build_arms
from dsbd_cli.bench.backend import PairBackend
from dsbd_cli.bench.methods import parse_methods
from dsbd_cli.decoder import Decoder
from dsbd_cli.settings import Settings
from tests.builders import says

METHODS = [
    "multinomial", "beam", "speculative", "specinfer", "specinfer:spectr", "specinfer:rsd", "dsbd:paper",
    "dsbd:continue", "dsbd:cover", "dsbd-kv-one", "hf-sample", "hf-beam-sample", "hf-beam-search", "hf-assisted",
]  # fmt: skip
PROMPT = [5, 6, 7, 8, 9]


def arm(method: str, **settings) -> Arm:
    (made,), _ = build_arms([method], Settings(), {"max_new_tokens": 24, **settings}, [])
    return made


@pytest.fixture(scope="module")
def ab_pair(tmp_path_factory):
    """A target, and the same as draft, that answers `AB` and ends."""
    folder = tmp_path_factory.mktemp("ab")
    says(folder, "A", "B")
    return PairBackend(Decoder.from_pair(folder, folder, device="cpu", dtype="float32"))


def test_all_methods_are_tried():
    assert {*METHODS, "dsbd"} == set(parse_methods("all"))


@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_the_answer_whatever_the_budget(ab_pair, method):
    answer = ab_pair.answer(arm(method, max_new_tokens=500), PROMPT, 1)
    assert answer.text == "AB"
    assert answer.new_tokens == len(answer.token_ids) == 3  # A, B and the end; for beams not W times that
    assert answer.finish_reason == "eos"
    assert 0 < answer.decode_s < answer.wall_s
    assert answer.decode_s == pytest.approx(answer.wall_s - answer.prefill_s)


@pytest.mark.parametrize("method", METHODS)
def test_the_engines_log_probability_is_the_teacher_forced_one(random_pair, method):
    for seed in range(3):
        answer = random_pair.answer(arm(method, top_k=0, top_p=1.0), PROMPT, seed)
        forced = random_pair.logprob(PROMPT, answer.token_ids)
        assert forced < 0
        if not method.startswith("hf-"):
            assert answer.logprob_engine == pytest.approx(forced, abs=1e-3)


def test_an_answer_that_several_arms_give_is_forced_once(random_pair, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "dsbd_cli.bench.logprobs.answer_logprob", lambda _, *ids: asked.append(ids) or float(len(asked))
    )
    found = [random_pair.logprob(*ids) for ids in (([5, 6], [7]), ([5, 6], [8]), ([5, 6], [7]), ([5], [7]))]
    assert found == [1.0, 2.0, 1.0, 3.0]
    random_pair.logprob([9], [])  # what was made up here is forgotten


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_answer(random_pair, method):
    one, two, other = (random_pair.answer(arm(method), PROMPT, seed).token_ids for seed in (1, 1, 2))
    assert one == two
    if method != "hf-beam-search":
        assert one != other


@pytest.mark.parametrize("method", METHODS)
def test_no_tokens_is_none_and_no_division(random_pair, method):
    answer = random_pair.answer(arm(method, max_new_tokens=0), PROMPT, 1)
    assert (answer.new_tokens, answer.text, answer.logprob_engine) == (0, "", None)
    assert random_pair.logprob(PROMPT, []) is None


@pytest.mark.parametrize("method", ["beam", "dsbd"])
def test_the_engines_prefill_is_taken_out_of_decoding(random_pair, method, monkeypatch):
    target = random_pair.decoder.target
    prefill = target.prefill

    def slow(*arguments, **options):
        time.sleep(0.05)
        return prefill(*arguments, **options)

    monkeypatch.setattr(target, "prefill", slow)
    answer = random_pair.answer(arm(method), PROMPT, 1)
    assert answer.prefill_s >= 0.05
    assert answer.decode_s <= answer.wall_s - 0.05


@pytest.mark.parametrize("method", ["hf-sample", "hf-beam-sample", "hf-beam-search"])
def test_a_slow_forward_shows_in_the_clock_of_generate(random_pair, method):
    model = random_pair.decoder.pair.target.model
    plain = random_pair.answer(arm(method), PROMPT, 1)
    calls = []

    def slow(*_):
        calls.append(1)
        time.sleep(0.02)

    handle = model.register_forward_pre_hook(slow)
    try:
        answer = random_pair.answer(arm(method), PROMPT, 1)
    finally:
        handle.remove()
    assert answer.token_ids == plain.token_ids
    assert answer.prefill_s >= 0.02
    assert answer.decode_s >= 0.02 * (len(calls) - 1)


def test_hf_beam_search_is_our_deterministic_beam(random_pair):
    ours = random_pair.answer(arm("beam", deterministic=True), PROMPT, 1)
    theirs = random_pair.answer(arm("hf-beam-search"), PROMPT, 1)
    assert ours.token_ids == theirs.token_ids


@pytest.mark.parametrize("method", [method for method in METHODS if method.startswith("hf-")])
def test_references_run_with_attention_that_plans_nothing_and_the_same_tokens(
    random_pair, method, monkeypatch
):
    allowed = []
    model = random_pair.decoder.pair.target.model

    def note(*_):
        allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))

    before = torch.backends.cuda.cudnn_sdp_enabled()
    handle = model.register_forward_pre_hook(note)
    try:
        inside = random_pair.answer(arm(method), PROMPT, 1).token_ids
    finally:
        handle.remove()
    assert set(allowed) == {(False, True)}
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    monkeypatch.setattr(hf, "without_planning", contextlib.nullcontext)
    assert random_pair.answer(arm(method), PROMPT, 1).token_ids == inside


def test_a_session_says_which_attention_references_run_with():
    assert context.session(["cpu"], ["dsbd"])["attention"] == "flash, efficient, math"


def test_references_take_our_settings_not_the_models_own(random_pair):
    pair = random_pair.decoder.pair
    kept = pair.target.model.generation_config
    greedy = arm("hf-sample", temperature=0.0)
    plain = random_pair.answer(greedy, PROMPT, 1).token_ids
    try:
        changed = kept.__class__(**{**kept.to_diff_dict(), "repetition_penalty": 5.0, "max_length": 7})
        pair.target.model.generation_config = changed
        assert random_pair.answer(greedy, PROMPT, 1).token_ids == plain
        assert pair.target.model.generation_config is changed
    finally:
        pair.target.model.generation_config = kept
    ours = random_pair.answer(arm("multinomial", temperature=0.0), PROMPT, 1)
    assert ours.token_ids == plain


@pytest.mark.parametrize("method", METHODS)
def test_stop_strings_end_every_method_alike(ab_pair, method):
    answer = ab_pair.answer(arm(method, stop=("B",)), PROMPT, 1)
    assert (answer.text, answer.finish_reason, answer.new_tokens) == ("A", "stop", 2)


def test_the_weights_are_part_of_the_facts(random_pair, ab_pair):
    facts = random_pair.facts()
    assert facts["target"]["weights"] != facts["draft"]["weights"]
    assert ab_pair.facts()["target"]["weights"] == ab_pair.facts()["draft"]["weights"]
    assert facts["target"]["dtype"] == "float32"


def test_unknown_energy_is_null_with_a_reason(random_pair, monkeypatch, tmp_path):
    from dsbd_cli import energy_probes

    monkeypatch.setattr(energy_probes, "POWERCAP", tmp_path)
    backend = PairBackend(random_pair.decoder)
    answer = backend.answer(arm("beam"), PROMPT, 1)
    assert answer.energy_j is None
    assert "RAPL" in answer.energy_reason
    assert backend.meter.source is None


def test_energy_windows_are_those_of_the_call(random_pair, monkeypatch):
    from dsbd_cli import energy_probes

    class Counting(energy_probes.Unknown):
        source = "a counter of joules"
        joules = 0.0

        def stop(self):
            self.joules += 2.5
            return 2.5, None

    monkeypatch.setattr("dsbd_cli.energy.probes_of", lambda *_: [Counting("cpu", "")])
    backend = PairBackend(random_pair.decoder)
    answer = backend.answer(arm("dsbd"), PROMPT, 1)
    assert answer.energy_j == 2.5
    assert answer.energy_parts == {"cpu": 2.5}


def test_an_arm_keeps_its_settings_but_for_the_seed(random_pair):
    made = arm("dsbd:paper", draft_width=3)
    answer = random_pair.answer(made, PROMPT, 9)
    result = random_pair.decoder.generate(PROMPT, dataclasses.replace(made.settings, seed=9))
    assert answer.token_ids == result.token_ids
    assert answer.stats["widths"] == result.stats.widths
