"""Pairs of answers: within a session, with the items that stand out named, and what sessions have in common."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from dsbd_cli.bench.command import run_bench
from dsbd_cli.bench.findings import findings
from dsbd_cli.bench.pairs import common, compare, within_sessions
from dsbd_cli.bench.report import write_report
from dsbd_cli.bench.sessions import alike, warnings
from dsbd_cli.bench.summary import summarize
from tests.bench.double import FakeBackend, plan, prompter

SESSION = {"devices": {"cpu": "a cpu"}, "cpu": "a cpu", "cores": 4, "threads": 2, "load": 0.2}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def answer(item, arm, seconds, *, tokens=10, session=0, repeat=0, score=None, logprob=-5.0, joules=None):
    return {
        "item": item, "arm": arm, "repeat": repeat, "session": session, "rank": 0, "new_tokens": tokens,
        "wall_s": seconds + 0.1, "prefill_s": 0.1, "decode_s": seconds, "energy_j": joules, "logprob": logprob,
        "peak_bytes": None, "score": score, "turns": [],
    }  # fmt: skip


def run_of(records, sessions=(SESSION,), kind="squad", arms=("beam", "dsbd")):
    described = {name: {"method": name, "settings": {}, "swept": {}} for name in arms}
    run = {"data": {"kind": kind, "builtin": False, "label": "x", "items": 9}, "arms": described, "baseline": "beam",
           "sessions": list(sessions), "fingerprint": {"models": {}, "seed": 1}}  # fmt: skip
    return summarize(run, records, [])


def disturbed():
    """Speed ratios of which one is wild."""
    ratios = {"a": 161.6, "b": 2.47, "c": 0.81, "d": 0.69, "e": 1.42, "f": 1.38}
    records = [answer(item, "dsbd", 1.0) for item in ratios]
    return records + [answer(item, "beam", ratio) for item, ratio in ratios.items()]


def test_the_headline_is_the_median_and_the_wild_item_is_named():
    summary = run_of(disturbed())
    speed = summary["arms"]["dsbd"]["against_baseline"]["speed"]
    assert speed["value"] == pytest.approx(1.40)
    assert speed["of_sums"] == pytest.approx(168.37 / 6, rel=1e-3)
    assert [o["item"] for o in speed["outliers"]] == ["a"]
    text = findings(summary)
    assert "no difference in speed shown, 1.40 times the tokens/s" in text
    assert "28.06 times by the sums" in text
    assert "standing out: a (162 times)" in text
    assert "items would show a difference of this size" in text


def test_a_pair_is_of_one_session():
    records = [answer(item, arm, 1.0 if arm == "dsbd" else 2.0) for item in "abc" for arm in ("beam", "dsbd")]
    records[1] = answer("a", "dsbd", 50.0, session=1)  # its clock is of another time
    for sessions in ((SESSION, SESSION), (SESSION, {**SESSION, "threads": 1})):
        both = common(records[1::2], records[::2])
        clocked = within_sessions(both, sessions)
        found = compare(both, clocked, "exact_match", True)
        assert found["speed"]["value"] == 2
        assert found["speed"]["items"] == 2
        assert found["logprob"]["items"] == 3  # texts are the same whenever they are given
        assert found["clocks"] == "1 item left out of speed and energy: answered in two sessions"


def test_an_arm_that_joined_later_is_compared_on_like_machines_only():
    records = [answer(item, "beam", 2.0) for item in "abc"]
    records += [answer(item, "dsbd", 1.0, session=1) for item in "abc"]
    near = run_of(records, (SESSION, {**SESSION, "load": 0.9}))["arms"]["dsbd"]["against_baseline"]
    assert near["speed"]["value"] == 2
    assert "different sessions on like machines" in near["clocks"]
    for other in ({"threads": 1}, {"devices": {"cuda:0": "card"}}, {"load": 3.9}):
        summary = run_of(records, (SESSION, {**SESSION, **other}))
        far = summary["arms"]["dsbd"]["against_baseline"]
        assert far["speed"]["value"] is None
        assert far["logprob"]["items"] == 3
        assert summary["warnings"]
        assert "speed is not compared" in findings(summary)


def test_unlike_sessions_and_busy_machines_are_told():
    assert warnings([SESSION, SESSION], [0, 1]) == []
    assert warnings([SESSION, {**SESSION, "threads": 1}], [0]) == []  # nothing was answered in the other
    assert "threads (2; 1)" in warnings([SESSION, {**SESSION, "threads": 1}], [0, 1])[0]
    assert "load average of 3.1 on 4 cores" in warnings([{**SESSION, "load": 3.1}], [0])[0]
    # What others took meanwhile was measured: what this machine did before is no matter.
    assert warnings([{**SESSION, "load": 3.1, "others": 0.02}], [0]) == []
    assert "other processes took 40%" in warnings([{**SESSION, "load": 0.0, "others": 0.4}], [0])[0]
    assert alike({**SESSION, "load": 3.1, "others": 0.02}, {**SESSION, "others": 0.03})
    assert not alike({**SESSION, "others": 0.5}, {**SESSION, "others": 0.03})
    old = {name: value for name, value in SESSION.items() if name != "load"}
    assert warnings([old], [0]) == []
    assert alike(old, SESSION)


def test_a_session_records_its_load_threads_and_cores(tmp_path):
    made = plan(tmp_path / "out", methods="beam", limit=2)
    run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made))
    (session,) = json.loads((tmp_path / "out" / "run.json").read_text())["sessions"]
    for name in ("load", "load_at_end", "others", "threads", "cores", "usable_cores"):
        assert session[name] is None or session[name] >= 0
    assert session["threads"] >= 1


def test_a_difference_in_quality_is_named_as_plainly_as_one_in_speed():
    rng = np.random.default_rng(1)
    names = [f"i{n}" for n in range(30)]
    records = [
        answer(n, "beam", 1.0, logprob=-5 + rng.normal() / 9, score={"exact_match": 1.0, "f1": 1.0})
        for n in names
    ]
    records += [answer(n, "dsbd", math.exp(rng.normal() / 9) / 2, logprob=-9 + rng.normal() / 9,
                       score={"exact_match": float(k % 3 == 0), "f1": 0.4}) for k, n in enumerate(names)]  # fmt: skip
    text = findings(run_of(records))
    assert "<b>faster</b>" in text
    assert "<b>worse</b> exact match" in text
    assert "<b>worse</b> log-prob (nats per token)" in text
    assert "(n = 30)" in text
    assert text.index("Hugging Face's beams were not run here") < text.index("faster")


def test_hugging_faces_beams_come_first_where_they_were_run():
    records = [answer(item, arm, seconds) for item in "abcd"
               for arm, seconds in (("beam", 2.0), ("dsbd", 1.0), ("hf-beam-search", 3.0))]  # fmt: skip
    summary = run_of(records, arms=("beam", "dsbd", "hf-beam-search"))
    text = findings(summary)
    first = text.index(
        "<b>dsbd</b> against <b>Hugging Face's beam search</b> (n = 4): <b>faster</b>, 3.00 times"
    )
    assert first < text.index("against <b>beam</b>")


def test_two_items_show_no_interval_anywhere():
    records = [answer(item, arm, 1.0 + (arm == "beam"), score={"exact_match": 1.0, "f1": 0.5}, joules=3.0)
               for item in "ab" for arm in ("beam", "dsbd")]  # fmt: skip
    summary = run_of(records)

    def ends(value):
        if isinstance(value, dict):
            yield from ([value["low"], value["high"]] if "low" in value else [])
            for entry in value.values():
                yield from ends(entry)
        elif isinstance(value, list):
            for entry in value:
                yield from ends(entry)

    every = list(ends(summary))
    assert len(every) > 20
    assert set(every) == {None}
    assert "too few for an interval" in findings(summary)


def test_a_counter_too_coarse_for_single_answers_gives_sums_without_an_interval():
    joules = [0.0, 6.0, 0.0, 6.0]
    records = [answer(str(n), arm, 1.0, joules=j) for n, j in enumerate(joules) for arm in ("beam", "dsbd")]
    arm = run_of(records)["arms"]["dsbd"]
    assert arm["joules_per_token"]["value"] == pytest.approx(12 / 40)
    assert arm["joules_per_token"]["low"] is None
    assert arm["against_baseline"]["joules_per_token"]["value"] == 1
    assert arm["against_baseline"]["joules_per_token"]["low"] is None


def test_speed_and_score_of_each_group():
    records = []
    for n in range(8):
        for arm, seconds in (("beam", 2.0), ("dsbd", 1.0 if n % 2 else 4.0)):
            score = {"correct": float(n % 2)}
            records.append(
                {**answer(str(n), arm, seconds, score=score), "group": "easy" if n % 2 else "extra"}
            )
    groups = run_of(records, kind="spider")["arms"]["dsbd"]["groups"]
    assert list(groups) == ["easy", "extra"]
    assert [entry["speed"]["value"] for entry in groups.values()] == [2, 0.5]
    assert [entry["score"]["value"] for entry in groups.values()] == [1, 0]
    assert run_of([{**r, "group": None} for r in records], kind="spider")["arms"]["dsbd"]["groups"] is None


def test_a_conversation_that_is_rated_by_half_does_not_count_for_the_whole(tmp_path):
    made = plan(tmp_path / "out", dataset="mt-bench", methods="beam,dsbd", limit=8)
    run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made))
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    (tmp_path / "out" / "run.json").write_text(json.dumps(run | {"judge": {"model": "m"}}))
    items = [
        json.loads(line)["item"] for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    ]
    lines = [{"item": item, "arm": "beam", "repeat": 0, "turn": turn, "judge": "m", "value": 8 - 4 * turn}
             for n, item in enumerate(dict.fromkeys(items)) for turn in (0, 1) if turn == 0 or n < 2]  # fmt: skip
    (tmp_path / "out" / "ratings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report([tmp_path / "out"])
    arm = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"][0]["arms"]["beam"]
    assert (arm["score"]["value"], arm["score"]["items"], arm["score"]["low"]) == (6, 2, None)
    assert [(t["value"], t["items"], t["missing"]) for t in arm["turns"]] == [(8, 8, 0), (4, 2, 6)]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Ratings by turn" in page
    assert "2 of 8" in page
    assert "8.00 [8.00" not in page
