"""`dsbd bench` as people call it: exit codes, streams, Ctrl-C, kill -9, torchrun."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsbd_cli.bench.files import key_of, read_results
from tests.builders import rand, says

DSBD = str(Path(sys.executable).with_name("dsbd"))


# One process of the suite runs them all: they share runs of the bench.
pytestmark = pytest.mark.xdist_group("bench runs")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    rand(folder / "t", max_position_embeddings=4096)
    rand(folder / "d", seed=1, max_position_embeddings=4096)
    return [
        "--target",
        str(folder / "t"),
        "--draft",
        str(folder / "d"),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]


@pytest.fixture(scope="module")
def env(new_cache):
    return os.environ | {"DSBD_CACHE": str(new_cache()), "OMP_NUM_THREADS": "1"}


def call(arguments, env, **more):
    return subprocess.run(
        [DSBD, "bench", *arguments], env=env, capture_output=True, text=True, timeout=600, **more
    )


def answers(folder):
    """What every run of the same must agree on: all but clocks."""
    clocks = ("session", "rank", "wall_s", "prefill_s", "decode_s", "energy_j", "turns")
    found = {}
    for record in read_results(folder):
        entry = {name: value for name, value in record.items() if name not in clocks}
        entry["ids"] = [turn["token_ids"] for turn in record["turns"]]
        entry["logprob"] = round(record["logprob"], 3)
        found[key_of(record)] = entry
    return found


def files_of(folder):
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()
    }


SMALL = [
    "--dataset",
    "spider",
    "--limit",
    "3",
    "--methods",
    "multinomial,beam,dsbd",
    "--max-new-tokens",
    "12",
]


@pytest.fixture(scope="module")
def whole(pair, env, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "out"
    done = call([*SMALL, *pair, "--out", str(folder)], env)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.mark.slow
def test_a_run_leaves_results_summary_and_report(whole):
    folder, done = whole
    for name in (
        "results.jsonl",
        "run.json",
        "summary.json",
        "report.html",
        "pareto_speed.png",
        "pareto_speed.svg",
    ):
        assert (folder / name).stat().st_size > 0
    assert len(read_results(folder)) == 9
    assert "built-in sample" in done.stdout
    assert "tok/s" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("energy is not measured") <= 1
    for record in read_results(folder):
        for turn in record["turns"]:
            assert turn["logprob_engine"] == pytest.approx(turn["logprob"], abs=1e-3)


@pytest.mark.slow
def test_a_finished_run_says_so_and_exits_0(whole, pair, env):
    folder, _ = whole
    before = (folder / "results.jsonl").read_bytes()
    done = call([*SMALL, *pair, "--out", str(folder)], env)
    assert done.returncode == 0
    assert "are there already" in done.stderr
    assert (folder / "results.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_reader_that_goes_away_costs_no_results(whole, pair, env, tmp_path):
    folder = tmp_path / "out"
    command = [DSBD, "bench", *SMALL, *pair, "--out", str(folder)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    process.stderr.close()  # the screen is gone altogether
    assert process.wait(600) in (0, 141)
    assert answers(folder) == answers(whole[0])
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_ctrl_c_keeps_whole_records_and_the_same_command_goes_on(whole, pair, env, tmp_path):
    folder = tmp_path / "out"
    command = [DSBD, "bench", *SMALL, *pair, "--out", str(folder)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_results(folder, 2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert "Traceback" not in errors
    assert 2 <= len(read_results(folder)) < 9
    assert call([*SMALL, *pair, "--out", str(folder)], env).returncode == 0
    assert answers(folder) == answers(whole[0])


def wait_for_results(folder, count):
    for _ in range(1200):
        if len(read_results(folder)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError("no results")


@pytest.mark.slow
def test_kill_nine_twice_then_resume_equals_an_unbroken_run(whole, pair, env, tmp_path):
    folder = tmp_path / "out"
    for count in (1, 4):
        process = subprocess.Popen([DSBD, "bench", *SMALL, *pair, "--out", str(folder)], env=env,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        wait_for_results(folder, count)
        process.kill()
        process.wait()
    done = call([*SMALL, *pair, "--out", str(folder)], env)
    assert done.returncode == 0, done.stderr
    assert "going on" in done.stderr
    lines = (folder / "results.jsonl").read_text().splitlines()
    assert len(lines) == len({key_of(json.loads(line)) for line in lines}) == 9
    assert answers(folder) == answers(whole[0])


def torchrun(arguments, env):
    command = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "--no-python", DSBD, "bench", *arguments]  # fmt: skip
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_two_processes_under_torchrun_equal_one(whole, pair, env, tmp_path):
    folder = tmp_path / "out"
    done = torchrun([*SMALL, *pair, "--out", str(folder)], env)
    assert done.returncode == 0, done.stderr
    assert answers(folder) == answers(whole[0])
    assert list(folder.glob("*.rank-*.jsonl")) == []
    assert {record["rank"] for record in read_results(folder)} == {0, 1}
    assert done.stdout.count("report:") == 1


@pytest.mark.slow
def test_two_processes_that_hold_one_target_equal_one(whole, pair, env, tmp_path):
    folder = tmp_path / "out"
    few = ["--dataset", "spider", "--limit", "1", "--methods", "beam,dsbd", "--max-new-tokens", "12"]
    done = torchrun([*few, *pair, "--tensor-parallel", "2", "--out", str(folder)], env)
    assert done.returncode == 0, done.stderr
    held = answers(folder)
    assert len(held) == 2
    assert held == {key: answers(whole[0])[key] for key in held}
    assert "tp_plan" not in done.stderr  # no warning of a form that goes away


@pytest.mark.slow
def test_hostile_answers_leave_the_data_byte_identical_and_the_score_repeatable(env, tmp_path, sample_spider):
    data = shutil.copytree(sample_spider, tmp_path / "data")
    model = tmp_path / "evil"
    says(model, "DROP TABLE book; DROP TABLE train", max_position_embeddings=4096)
    before = files_of(data)
    scores = []
    for name in ("one", "two"):
        done = call(["--dataset", "spider", "--data-dir", str(data), "--limit", "4", "--methods", "multinomial,beam",
                     "--target", str(model), "--device", "cpu", "--out", str(tmp_path / name)], env)  # fmt: skip
        assert done.returncode == 0, done.stderr
        scores.append([record["score"]["outcome"] for record in read_results(tmp_path / name)])
    assert scores[0] == scores[1] == ["error"] * 8
    assert files_of(data) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dataset", "nope"], "neither spider"),
        (["run"], "--dataset is missing: spider, squad, mt-bench"),
        (["--dataset", "spider", "--methods", "dsbd,beem"], "did you mean beam"),
        (["--dataset", "spider", "--methods", "beam", "--target", "./typo"], "typo"),
        (["--dataset", "squad", "--methods", "beam,dsbd", "--baseline", "baem"], "did you mean beam"),
        (["--dataset", "spider", "--methods", "beam", "--tensor-parallel", "2"], "torchrun"),
        (
            ["--dataset", "spider", "--methods", "beam", "--batch", "none"],
            "--batch must be auto or a whole number",
        ),
        (["report", "gone"], "no results of a bench"),
        (["judge", "gone", "--judge-url", "http://x/v1", "--judge-model", "m"], "no MT-Bench run"),
        (["--dataset", "mt-bench", "--judge-url", "http://127.0.0.1:9/v1"], "go together"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(env, tmp_path, arguments, words):
    done = call(arguments, env, cwd=tmp_path)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert list(tmp_path.glob("bench*")) == []


def test_the_line_says_what_is_waited_for(pair, monkeypatch, tmp_path, new_cache):
    from dsbd_cli.cli.main import run
    from dsbd_cli.ui import waiting

    told: list[str] = []
    monkeypatch.setenv("DSBD_CACHE", str(new_cache()))
    monkeypatch.setattr(waiting, "waiting", told.append)
    questions = tmp_path / "mine.jsonl"
    questions.write_text('{"prompt": "hi"}\n')
    command = ["bench", "--dataset", str(questions), *pair, "--methods", "beam", "--max-new-tokens", "4",
               "--out", str(tmp_path / "out")]  # fmt: skip
    assert run(command) == 0
    assert [line.split()[0] for line in told] == ["loading", "reading", "loading", "checking", "summing"]
    told.clear()
    assert run(command) == 0  # nothing is loaded for answers that are there
    assert [line.split()[0] for line in told[1:]] == ["reading", "summing"]
