"""A bench of batches: windows that are pairs, clocks of whole windows, resume, and real (tiny) models."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from dsbd_cli.bench.backend import PairBackend
from dsbd_cli.bench.command import run_bench
from dsbd_cli.bench.compare import compare_runs
from dsbd_cli.bench.files import key_of, read_results
from dsbd_cli.bench.findings import findings
from dsbd_cli.bench.logprobs import answer_logprobs
from dsbd_cli.bench.report import write_report
from dsbd_cli.bench.summary import summarize
from dsbd_cli.bench.terminal import summary_text
from dsbd_cli.bench.windows import clocks, windows_of
from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import Stopped, UserError
from tests.bench.double import BytesTokenizer, FakeBackend, plan, prompter
from tests.bench.test_backend import METHODS, arm
from tests.builders import says


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("dsbd_cli.bench.context.commit", lambda: "0" * 12)
    monkeypatch.setattr("dsbd_cli.bench.report._figures", lambda *_: {})


def run(made, backend=None):
    backend = backend or FakeBackend()
    run_bench(made, open_backend=lambda *_: backend, prompter=prompter(made))
    return backend


def answers(folder):
    return {key_of(r): (r["turns"][0]["text"], r["score"], r["logprob"]) for r in read_results(folder)}


def arms_of(folder):
    return json.loads((folder / "summary.json").read_text())["runs"][0]["arms"]


def windows(made, done=(), at_a_time=2):
    return list(windows_of(made.jobs(), done, at_a_time, made.seed))


def test_all_arms_are_asked_the_same_windows_in_shuffled_orders(tmp_path):
    made = plan(tmp_path, dataset="squad", methods="multinomial,beam,dsbd", limit=50, repeats=2, batch=2)
    found = windows(made)
    assert Counter(job.key for window in found for job in window.jobs) == {j.key: 1 for j in made.jobs()}
    assert max(len(window.jobs) for window in found) - min(len(window.jobs) for window in found) <= 1
    assert max(len(window.jobs) for window in found) <= 16
    threes = [found[i : i + 3] for i in range(0, len(found), 3)]
    for three in threes:
        assert len({(window.id, window.repeat) for window in three}) == 1
        assert sorted(window.arm.name for window in three) == ["beam", "dsbd", "multinomial"]
    assert len({tuple(window.arm.name for window in three) for three in threes}) > 2
    assert [w.id for w in windows(made)] == [w.id for w in found]


def test_items_that_only_some_arms_are_asked_are_windows_of_their_own(tmp_path):
    made = plan(tmp_path, dataset="squad", methods="beam,hf-sample", limit=20, hf_limit=7, batch=4)
    by_arm = {}
    for window in windows(made, at_a_time=4):
        by_arm.setdefault(window.arm.name, []).append((window.id, len(window.jobs)))
    assert [size for _, size in by_arm["hf-sample"]] == [7]
    assert by_arm["hf-sample"][0] in by_arm["beam"]
    assert sum(size for _, size in by_arm["beam"]) == 20


def test_what_is_done_is_left_out_of_its_window(tmp_path):
    made = plan(tmp_path, dataset="squad", methods="beam,dsbd", limit=10, batch=4)
    jobs = made.jobs()
    done = {job.key for job in jobs if job.arm.name == "beam" or job.item.id == jobs[0].item.id}
    left = windows(made, done, at_a_time=4)
    assert [(window.arm.name, len(window.jobs)) for window in left] == [("dsbd", 9)]
    assert windows(made, {job.key for job in jobs}) == []


def test_answers_are_those_of_one_prompt_at_a_time(tmp_path):
    run(plan(tmp_path / "one", limit=6))
    backend = run(plan(tmp_path / "many", limit=6, batch=3))
    assert answers(tmp_path / "one") == answers(tmp_path / "many")
    counted = [window for window in backend.windows if window[1] > 2]
    assert counted == [(name, 6, 3) for name, _, _ in counted]
    assert {name for name, _, _ in counted} == {"beam", "dsbd"}
    assert all(
        tokens == 12 for _, _, tokens in backend.calls[:4]
    )  # two arms, warmed up with two short answers


def test_a_window_has_one_clock_and_an_answer_none(tmp_path):
    run(plan(tmp_path / "out", limit=6, batch=3))
    records = read_results(tmp_path / "out")
    for record in records:
        assert record["wall_s"] is record["decode_s"] is record["prefill_s"] is record["energy_j"] is None
    mine = [record for record in records if record["arm"] == "dsbd"]
    (window,) = clocks(mine)
    assert window["new_tokens"] == sum(record["new_tokens"] for record in mine)
    seconds = sum(record["new_tokens"] / 15 + 0.5 for record in mine) / 3
    assert window["wall_s"] == window["decode_s"] == pytest.approx(seconds)
    found = arms_of(tmp_path / "out")
    assert found["dsbd"]["tokens_per_s"]["of_sums"] == pytest.approx(window["new_tokens"] / seconds)
    assert found["dsbd"]["joules_per_token"]["of_sums"] == pytest.approx(12 / window["new_tokens"])
    assert found["dsbd"]["peak_bytes"] == 7
    assert found["dsbd"]["against_baseline"]["speed"]["items"] == 1
    assert found["dsbd"]["against_baseline"]["speed"]["low"] is None  # one window says nothing of the next
    assert found["dsbd"]["against_baseline"]["logprob"]["items"] == 6
    assert found["dsbd"]["windows"][0]["answers"] == 6


def test_speed_is_paired_by_window_and_says_so(tmp_path):
    run(plan(tmp_path / "out", dataset="squad", limit=60, batch=2))
    entry = arms_of(tmp_path / "out")["dsbd"]["against_baseline"]
    assert (entry["speed"]["items"], entry["speed"]["unit"]) == (4, "window")
    assert entry["speed"]["low"] < entry["speed"]["value"] < entry["speed"]["high"]
    assert (entry["score"]["items"], entry["logprob"]["items"]) == (60, 60)
    folder = tmp_path / "out"
    run_facts = json.loads((folder / "run.json").read_text())
    text = findings(summarize(run_facts, read_results(folder), []))
    assert "(n = 4 windows)" in text
    assert "on each of 60 items" in text
    page = (folder / "report.html").read_text()
    for words in (
        "up to 2 answers shared their forwards",
        "tok/s in all",
        "padded batches",
    ):
        assert words in page
    assert "prefill included" in summary_text(folder)
    assert len((folder / "tables" / "windows.csv").read_text().splitlines()) == 9


def test_one_prompt_at_a_time_says_nothing_of_windows(tmp_path):
    run(plan(tmp_path / "out", batch=1))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "tok/s in all" not in page
    assert "shared their forwards" not in page
    assert not (tmp_path / "out" / "tables" / "windows.csv").exists()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["fingerprint"]["batch"] is None


@pytest.mark.parametrize("stop_after", [0, 3, 20, 40, 75])
def test_a_cut_run_goes_on_and_equals_an_unbroken_one(tmp_path, stop_after):
    options = {"dataset": "squad", "limit": 40, "batch": 2}
    run(plan(tmp_path / "whole", **options))
    with pytest.raises(Stopped, match="the same command goes on"):
        run(plan(tmp_path / "cut", **options), FakeBackend(stop_after=stop_after))
    there = read_results(tmp_path / "cut")
    # Whole windows only: of 40 items in windows of 13 or 14.
    for record in there:
        same = [r for r in there if r["arm"] == record["arm"] and r["window"] == record["window"]]
        assert len(same) == record["window"]["answers"]
    rest = run(plan(tmp_path / "cut", **options))
    assert sum(1 for call in rest.calls if call[2] == 32) == 80 - len(there)
    assert answers(tmp_path / "cut") == answers(tmp_path / "whole")
    cut, whole = arms_of(tmp_path / "cut"), arms_of(tmp_path / "whole")
    for name in whole:
        sums = [
            sorted((w["item"], w["new_tokens"], w["wall_s"]) for w in side[name]["windows"])
            for side in (cut, whole)
        ]
        assert sums[0] == sums[1]
        assert cut[name]["score"] == whole[name]["score"]


def test_a_window_that_a_kill_tore_is_completed_and_its_clock_kept(tmp_path, capsys):
    run(plan(tmp_path / "out", limit=6, batch=3))
    whole, before = answers(tmp_path / "out"), arms_of(tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    again = run(plan(tmp_path / "out", limit=6, batch=3))
    assert "torn" in capsys.readouterr().err
    assert len([call for call in again.calls if call[2] == 32]) == 1
    assert answers(tmp_path / "out") == whole
    after = arms_of(tmp_path / "out")
    for name in before:
        assert before[name]["windows"][0] in after[name]["windows"]


def test_batches_and_single_answers_do_not_mix(tmp_path):
    run(plan(tmp_path / "out", batch=3))
    for other in (1, 4, None):
        with pytest.raises(UserError, match="was begun with another batch"):
            run(plan(tmp_path / "out", batch=other))
    run(plan(tmp_path / "auto", batch=None))
    assert {r["window"]["at_a_time"] for r in read_results(tmp_path / "auto")} == {3}


def test_two_runs_are_compared_window_by_window(tmp_path):
    for name in ("a", "b"):
        run(plan(tmp_path / name, limit=6, batch=3))
    run(plan(tmp_path / "single", limit=6))
    text = compare_runs(tmp_path / "a", tmp_path / "b").text()
    assert re.search(r"dsbd +b: dsbd +x tokens/s +1\.00 +1 ", text)
    text = compare_runs(tmp_path / "a", tmp_path / "single").text()
    assert "x tokens/s" not in text
    assert "log-prob" in text


def test_the_second_turn_follows_every_first(tmp_path):
    made = plan(tmp_path / "out", dataset="mt-bench", methods="beam", baseline="beam", limit=3, batch=2)
    backend = run(made)
    assert [size for _, size, _ in backend.windows] == [2, 3, 3]  # warm-up, first turns, second turns
    run(plan(tmp_path / "one", dataset="mt-bench", methods="beam", baseline="beam", limit=3))
    many, one = (
        {r["item"]: [t["text"] for t in r["turns"]] for r in read_results(tmp_path / name)}
        for name in ("out", "one")
    )
    assert many == one
    (window,) = arms_of(tmp_path / "out")["beam"]["windows"]
    assert window["new_tokens"] == sum(r["new_tokens"] for r in read_results(tmp_path / "out"))


def test_a_number_of_answers_is_checked(tmp_path):
    with pytest.raises(UserError, match="--batch must be at least 1"):
        plan(tmp_path, batch=0)


# Real models.

PROMPTS = [[5, 6, 7, 8, 9], [5, 6], [9, 8, 7, 6, 5, 4, 5, 6, 7], [7, 7, 7]]
SEEDS = [3, 4, 5, 6]


@pytest.mark.parametrize("method", [name for name in METHODS if not name.startswith("hf-")])
def test_answers_of_ours_are_those_of_the_prompt_alone(random_pair, method):
    made, told = arm(method), []
    many, cost = random_pair.answer_many(made, PROMPTS, SEEDS, 3, told.append)
    assert told == [1, 2, 3, 4]
    assert cost.wall_s > 0
    for ids, seed, answer in zip(PROMPTS, SEEDS, many, strict=True):
        assert answer.token_ids == random_pair.answer(made, ids, seed).token_ids
        assert answer.prompt_tokens == len(ids)
        assert answer.wall_s is answer.prefill_s is answer.decode_s is None


@pytest.mark.parametrize("method", ["hf-beam-search", "hf-sample", "hf-beam-sample", "hf-assisted"])
def test_hugging_faces_padded_batches_give_each_prompt_its_answer(random_pair, method):
    """Greedy, where company must not matter: padding is not seen, and answers come back in their order."""
    made = arm(method, temperature=0.0) if method != "hf-beam-search" else arm(method)
    many, _ = random_pair.answer_many(made, PROMPTS, SEEDS, 3, lambda _: None)
    for ids, answer in zip(PROMPTS, many, strict=True):
        assert answer.token_ids == random_pair.answer(made, ids, 1).token_ids
        assert answer.prefill_s is None
        assert answer.stats["target_calls"] > 0


@pytest.mark.parametrize("method", ["hf-sample", "hf-beam-sample", "hf-beam-search", "beam"])
def test_rows_that_end_early_are_cut_where_they_end(tmp_path, method):
    says(tmp_path, "A", "B")
    backend = PairBackend(Decoder.from_pair(tmp_path, tmp_path, device="cpu", dtype="float32"))
    for stop, wanted in (((), ("AB", "eos", 3)), (("B",), ("A", "stop", 2))):
        many, _ = backend.answer_many(arm(method, stop=stop), PROMPTS, SEEDS, 4, lambda _: None)
        for answer in many:
            assert (answer.text, answer.finish_reason, answer.new_tokens) == wanted


def test_log_probabilities_of_many_are_those_of_each(random_pair, monkeypatch):
    answers = [[5], [], [9, 8, 7, 6, 5, 4], [6, 6, 6]]
    alone = [random_pair.logprob(*pair) for pair in zip(PROMPTS, answers, strict=True)]
    assert alone[1] is None
    for most in (1 << 24, 1500):  # all in one forward, and in several
        monkeypatch.setattr("dsbd_cli.bench.logprobs._MOST_ON_CPU", most)
        many = answer_logprobs(random_pair.decoder.pair, PROMPTS, answers)
        assert many == [None if value is None else pytest.approx(value, abs=1e-4) for value in alone]


def test_rounded_lengths_stay_within_the_models_positions(random_pair, monkeypatch):
    pair = random_pair.decoder.pair
    shapes = []
    handle = pair.target.model.register_forward_pre_hook(
        lambda _, __, options: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    monkeypatch.setattr(pair.target, "max_positions", 20)
    try:
        answer_logprobs(pair, PROMPTS, [[5]] * 4)
    finally:
        handle.remove()
    assert shapes == [(4, 20)]


def test_the_sample_is_asked_in_batches_from_end_to_end(random_pair, tmp_path):
    made = plan(
        tmp_path / "out", dataset="squad", settings={"max_new_tokens": 4}, shots=0, limit=5, batch=2,
        methods="multinomial,beam,dsbd,hf-beam-sample", hf_limit=3,
    )  # fmt: skip

    class Small(BytesTokenizer):
        """Ids that the tiny model knows."""

        def __call__(self, text, add_special_tokens=True, verbose=True):
            return {"input_ids": [4 + byte % 8 for byte in text.encode()[-30:]]}

    run_bench(made, open_backend=lambda *_: random_pair, prompter=prompter(made, tokenizer=Small()))
    found = arms_of(tmp_path / "out")
    assert {name: arm["answers"] for name, arm in found.items()} == {
        "multinomial": 5, "beam": 5, "dsbd": 5, "hf-beam-sample": 3,
    }  # fmt: skip
    assert found["hf-beam-sample"]["against_baseline"]["speed"]["items"] == 1
    assert all(arm["tokens_per_s"]["of_sums"] > 0 for arm in found.values())
    assert found["dsbd"]["logprob_difference"] < 1e-3
    write_report([tmp_path / "out"])
