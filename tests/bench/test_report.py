"""Summaries and reports: right numbers, self-contained pages, nothing made up."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from dsbd_cli.bench import tables
from dsbd_cli.bench.cells import fixed, interval, number, size
from dsbd_cli.bench.command import run_bench
from dsbd_cli.bench.fronts import front
from dsbd_cli.bench.published import applies
from dsbd_cli.bench.report import write_report
from dsbd_cli.bench.summary import summarize, with_ratings
from dsbd_cli.bench.terminal import summary_text, text_table
from dsbd_cli.errors import UserError
from tests.bench.double import FakeBackend, plan, prompter

GOLD = "SELECT count(*) FROM book"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A run with a sweep, whose numbers are known."""
    folder = tmp_path_factory.mktemp("swept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        made = plan(
            folder,
            limit=10,
            methods="multinomial,beam,speculative,specinfer,dsbd,hf-sample",
            sweeps=["threshold=none,0.7 draft_width=2,3", "width=2,3"],
        )
        run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made))
    return folder


def arms(folder):
    return json.loads((folder / "summary.json").read_text())["runs"][0]["arms"]


def test_speed_ratios_and_counts_are_those_of_the_backend(swept):
    found = arms(swept)
    assert found["beam"]["tokens_per_s"]["value"] == pytest.approx(10)
    assert found["dsbd"]["tokens_per_s"]["value"] == pytest.approx(15)
    assert found["dsbd"]["against_baseline"]["speed"]["value"] == pytest.approx(1.5)
    assert found["dsbd"]["against_baseline"]["speed"]["low"] == pytest.approx(1.5)
    assert found["dsbd"]["tokens_per_s_whole"]["value"] < 15
    assert found["dsbd"]["logprob_per_token"]["value"] == pytest.approx(-0.5)
    assert found["dsbd"]["perplexity"]["value"] == pytest.approx(2.718281828**0.5)
    assert found["dsbd"]["layers_per_target_call"] == pytest.approx(2, rel=0.1)
    assert found["dsbd"]["acceptance_rate"] == pytest.approx(1 / 3)
    assert found["dsbd"]["mean_width"] == 4
    assert found["beam width=2"]["mean_width"] == 2
    assert found["hf-sample"]["mean_width"] is None
    assert found["hf-sample"]["layers_per_target_call"] is None
    assert found["dsbd"]["logprob_difference"] == 0
    assert found["multinomial"]["logprob_per_token"]["value"] == pytest.approx(-0.55)
    assert found["dsbd"]["against_baseline"]["logprob"]["value"] == pytest.approx(0)
    assert found["multinomial"]["against_baseline"]["logprob"]["value"] == pytest.approx(-0.05)


def test_unknown_energy_is_null_with_its_reason(swept):
    for arm in arms(swept).values():
        assert arm["joules_per_token"]["value"] is None
        assert arm["energy_reason"] == "fake: nothing to read"


def test_the_page_is_self_contained_and_says_what_it_is(swept):
    page = (swept / "report.html").read_text()
    assert "built-in sample" in page
    assert "not results on the benchmark" in page.replace("These are ", "")
    for link in re.findall(r"(?:src|href)=\"([^\"]{0,40})", page):
        assert link.startswith("data:image/svg+xml;base64,")
    assert "http://" not in re.sub(r"base64,[^\"]+", "", page)
    assert "https://" not in re.sub(r"base64,[^\"]+", "", page)
    assert page.count("<table") == page.count("</table>")
    for word in ("Seed", "torch", ">Settings<", ">Sessions<", "Quality against speed", "specinfer"):
        assert word in page
    assert "nan" not in re.sub(r"base64,[^\"]+", "", page).lower().replace("nance", "")


def test_figures_lie_beside_the_page_as_png_and_svg(swept):
    for name in ("pareto_speed", "width", "depth", "ablation_threshold", "ablation_draft_width"):
        assert (swept / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert b"<svg" in (swept / f"{name}.svg").read_bytes()
    assert not (swept / "pareto_energy.png").exists()


def test_the_same_results_give_the_same_report(swept, tmp_path):
    copy = shutil.copytree(swept, tmp_path / "run")
    before = (copy / "report.html").read_bytes()
    write_report([copy])
    assert (copy / "report.html").read_bytes() == before


def test_several_runs_stand_side_by_side(swept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one, two = shutil.copytree(swept, tmp_path / "a"), shutil.copytree(swept, tmp_path / "b")
    kept = (one / "summary.json").read_bytes()
    target = write_report([one, two])
    assert target.name == "bench-report"
    assert [run["name"] for run in json.loads((target / "summary.json").read_text())["runs"]] == ["a", "b"]
    assert (one / "summary.json").read_bytes() == kept
    page = (target / "report.html").read_text()
    assert ">a<" in page
    assert ">b<" in page
    assert "a: " in summary_text(target)


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match="no results of a bench"):
        write_report([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_hostile_answers_are_text_in_the_page(tmp_path):
    made = plan(tmp_path / "out", methods="beam")
    evil = "</td><script>alert(1)</script>[red]x[/red] \ud800"
    run_bench(made, open_backend=lambda *_: FakeBackend(say=lambda *_: evil), prompter=prompter(made))
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


def test_outcomes_are_counted_apart(tmp_path):
    texts = iter(["SELECT 1", "none", "SELECT x FROM y", "SELECT 2", "SELECT 3", "SELECT 4"])
    made = plan(tmp_path / "out", methods="beam", limit=5)
    run_bench(made, open_backend=lambda *_: FakeBackend(say=lambda *_: next(texts)), prompter=prompter(made))
    outcomes = arms(tmp_path / "out")["beam"]["outcomes"]
    assert outcomes["no_sql"] == 1
    assert outcomes["error"] == 1
    assert sum(outcomes.values()) == 5
    assert "no SQL found" in summary_text(tmp_path / "out")


def rating(item, turn, value, judge="m"):
    return {"item": item, "arm": "beam", "repeat": 0, "turn": turn, "judge": judge, "value": value}


def test_missing_ratings_are_left_out_of_the_mean_and_counted():
    base = {"arm": "beam", "repeat": 0, "score": None, "turns": [{}, {}]}
    records = [{"item": name, **base} for name in "abc"]
    ratings = [
        rating("a", 0, 8),
        rating("a", 1, 6),
        rating("b", 0, None),
        rating("b", 1, 4),
        rating("c", 0, 9, "x"),
    ]
    scored = {r["item"]: r["score"] for r in with_ratings(records, ratings, {"model": "m"})}
    assert scored["a"]["rating"] == 7
    assert scored["b"] == {"rating": None, "outcome": "rating missing", "turn_1": None, "turn_2": 4}
    assert scored["c"] is None
    assert with_ratings(records, ratings, None)[0]["score"] is None


def test_without_a_judge_the_score_is_not_available(tmp_path):
    made = plan(tmp_path / "out", dataset="mt-bench", methods="beam,dsbd", limit=2)
    run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made))
    assert arms(tmp_path / "out")["beam"]["score"]["value"] is None
    assert arms(tmp_path / "out")["beam"]["tokens_per_s"]["value"] == pytest.approx(10)
    assert "no judge was given" in (tmp_path / "out" / "report.html").read_text()
    assert "n/a" in summary_text(tmp_path / "out")


def test_summaries_of_energy_that_never_moved_are_null():
    turn = {"stats": {}, "logprob": None, "logprob_engine": None, "new_tokens": 3, "finish_reason": "eos",
            "energy_reason": "the energy counter did not move within the window"}  # fmt: skip
    record = {"item": "a", "arm": "beam", "repeat": 0, "new_tokens": 3, "wall_s": 1.0, "prefill_s": 0.1,
              "decode_s": 0.9, "energy_j": 0.0, "logprob": -1.0, "peak_bytes": None, "score": None,
              "turns": [turn]}  # fmt: skip
    run = {"data": {"kind": "squad"}, "arms": {"beam": {"method": "beam"}}, "sessions": [],
           "fingerprint": {"models": {}, "seed": 1}}  # fmt: skip
    arm = summarize(run, [record], [])["arms"]["beam"]
    assert arm["joules_per_token"]["value"] is None
    assert "did not move" in arm["energy_reason"]
    moved = summarize(run, [record, {**record, "item": "b", "energy_j": 6.0}], [])["arms"]["beam"]
    assert (
        moved["joules_per_token"]["value"] == 1.0
    )  # a window too short for the counter still adds its tokens


def test_fronts():
    points = [(1, 5), (2, 4), (2, 3), (3, 4), (4, 1), (0.5, 5)]
    assert front(points) == [(4, 1), (3, 4), (1, 5)]
    assert front(points, low_x=True) == [(0.5, 5)]
    assert front([]) == []


def test_the_papers_figures_stand_only_beside_the_papers_pairs():
    models = {"target": {"name": "meta-llama/Llama-2-13b-hf"}, "draft": {"name": "JackFram/llama-68m"}}
    data = {"kind": "squad", "builtin": False}
    assert applies({"data": data, "models": models})
    assert not applies({"data": {**data, "builtin": True}, "models": models})
    assert not applies({"data": {"kind": "jsonl", "builtin": False}, "models": models})
    assert not applies({"data": data, "models": {**models, "draft": {"name": "other"}}})
    assert not applies({"data": data, "models": {**models, "draft": None}})


def test_cells():
    assert [number(v) for v in (None, 0, 0.12345, 12.345, 123.4, 12345.6, 0.0001234)] == [
        "n/a", "0", "0.123", "12.3", "123", "12,346", "1.2e-04",
    ]  # fmt: skip
    assert fixed(None) == "n/a"
    assert interval({"value": 1.5, "low": None, "high": None}, 2) == "1.50"
    assert interval({"value": 1.5, "low": 1.0, "high": 2.0}, 2) == "1.50 [1.00, 2.00]"
    assert interval({"value": None, "low": None, "high": None}) == interval(None) == "n/a"
    assert [size(v) for v in (None, 12, 4096, 3 * 2**20)] == ["n/a", "12 B", "4.0 KiB", "3.0 MiB"]
    assert text_table(["a", "b"], [["x", "1"], ["long", "22"]]) == "a      b\n----  --\nx      1\nlong  22"


@pytest.mark.parametrize("width", [20, 60, 100, 140, 400, None])
def test_a_table_fits_the_terminal_and_loses_no_column(swept, width):
    plain = summary_text(swept)
    fitted = summary_text(swept, width)
    run = json.loads((swept / "summary.json").read_text())["runs"][0]
    shown = [line for line in fitted.splitlines() if not line.startswith(("report:", "target ", "score = "))]
    longest = max(len(name) for name in run["arms"]) + 26  # an arm beside the widest single column
    if width is not None:
        assert max(map(len, shown[3:])) <= max(width, longest)
    for heading in tables.results(run).heads:
        assert heading in fitted
    if width in (400, None):
        assert fitted.split() == plain.split()


def test_the_screen_says_what_a_speed_is_compared_with(swept):
    said = "x base: tokens per second over the baseline's on the same item"
    assert summary_text(swept).count(said) == 1


def test_a_report_says_how_answers_ended_in_words(swept):
    page = (swept / "report.html").read_text()
    assert ">end</th>" in page
    assert "ended by itself" in page
    assert ">eos<" not in page


@pytest.mark.parametrize(("limit", "said"), [(1, "1 item: too few"), (3, "3 items: too few"), (12, None)])
def test_a_run_of_few_items_says_that_it_decides_nothing(tmp_path, limit, said):
    made = plan(tmp_path / "run", dataset="squad", limit=limit, methods="multinomial,beam")
    run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made))
    page, screen = (tmp_path / "run" / "report.html").read_text(), summary_text(tmp_path / "run")
    for text in (page, screen):
        assert ("too few to decide anything about quality" in text) is (said is not None)
        assert text.count(said or "items asked") == 1


def test_a_run_without_references_says_nothing_of_scores(tmp_path):
    (tmp_path / "plain.txt").write_text("one\ntwo\n")
    made = plan(tmp_path / "run", dataset=str(tmp_path / "plain.txt"), methods="multinomial,beam")
    run_bench(made, open_backend=lambda *_: FakeBackend(), prompter=prompter(made))
    page, screen = (tmp_path / "run" / "report.html").read_text(), summary_text(tmp_path / "run")
    assert "score =" not in screen
    assert "exact match: n/a, no answer has one" in page
    for text in (page, screen):
        assert "2 items: too few to decide anything about speed but what an interval shows" in text
        assert "moves a mean score" not in text
