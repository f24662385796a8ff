"""Comparing two runs, and tables as files for papers."""

from __future__ import annotations

import csv
import io
import json
import shutil

import pytest
from typer.testing import CliRunner

from dsbd_cli.bench.command import run_bench
from dsbd_cli.bench.compare import compare_runs
from dsbd_cli.bench.export import file_name, latex, to_csv, to_latex, to_markdown
from dsbd_cli.bench.paired_tables import p_value
from dsbd_cli.bench.report import write_report
from dsbd_cli.bench.table import Column, Table
from dsbd_cli.cli.bench import app
from dsbd_cli.errors import UserError
from tests.bench.double import FakeBackend, plan, prompter


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("dsbd_cli.bench.report._figures", lambda *_: {})


class Half(FakeBackend):
    """Twice as quick in dsbd, and no likelier."""

    def answer(self, arm, prompt_ids, seed):
        answer = super().answer(arm, prompt_ids, seed)
        if arm.method == "dsbd":
            answer.decode_s /= 2
        return answer


def run(folder, backend=FakeBackend, **options):
    made = plan(folder, **{"limit": 6, **options})
    run_bench(made, open_backend=lambda *_: backend(), prompter=prompter(made))
    return folder


def rows(comparison):
    table = comparison.tables[1]
    return {(row[0], row[2]): row for row in table.rows}


def test_two_runs_are_paired_item_by_item(tmp_path):
    one, two = run(tmp_path / "one", Half), run(tmp_path / "two", limit=9)
    comparison = compare_runs(one, two)
    assert "6 items in both" in comparison.head
    found = rows(comparison)
    speed = found["one: dsbd", "x tokens/s"]
    assert speed[3]["value"] == pytest.approx(2)
    assert speed[4] == 6
    assert speed[5] == pytest.approx(2 / 2**6)  # all six pairs point one way
    assert found["one: beam", "x tokens/s"][3]["value"] == pytest.approx(1)
    assert found["one: beam", "x tokens/s"][5] is None
    assert comparison.tables[0].title == "No setting differs"


def test_settings_that_differ_stand_side_by_side(tmp_path):
    one, two = run(tmp_path / "one"), run(tmp_path / "two", settings={"width": 3, "seed": 5})
    table = compare_runs(one, two).tables[0]
    assert [row for row in table.rows if row[0] == "seed"] == [["seed", "1", "5"]]
    assert ["dsbd: width", "4", "3"] in table.rows
    text = compare_runs(one, two).text()
    assert "Settings that differ" in text


def test_one_arm_against_another(tmp_path):
    one, two = run(tmp_path / "one"), run(tmp_path / "two")
    found = rows(compare_runs(one, two, ("dsbd", "beam")))
    assert found["one: dsbd", "x tokens/s"][1] == "two: beam"
    assert found["one: dsbd", "x tokens/s"][3]["value"] == pytest.approx(1.5)


def test_other_machines_and_prompts_are_told(tmp_path):
    one, two = run(tmp_path / "one"), run(tmp_path / "two")
    there = json.loads((two / "run.json").read_text())
    there["sessions"][0] |= {"threads": 99, "others": 0.4}
    (two / "run.json").write_text(json.dumps(there))
    lines = [json.loads(line) for line in (two / "results.jsonl").read_text().splitlines()]
    for line in lines:
        line["turns"][0]["prompt_tokens"] += 7
    (two / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    notes = " ".join(compare_runs(one, two).notes)
    assert "the machines differ in threads" in notes
    assert "the prompts differ" in notes
    assert "other processes took 40% of the cores' time" in notes


def test_what_cannot_be_compared_is_refused(tmp_path):
    one, two = run(tmp_path / "one"), run(tmp_path / "two", dataset="squad")
    with pytest.raises(UserError, match="not runs of the same items"):
        compare_runs(one, two)
    with pytest.raises(UserError, match="no results of a bench"):
        compare_runs(one, tmp_path)
    with pytest.raises(UserError, match="no arm 'beem' \\(did you mean beam"):
        compare_runs(one, one, ("beem",))
    with pytest.raises(UserError, match="once for both runs, or twice"):
        compare_runs(one, one, ("beam", "beam", "beam"))
    three = run(tmp_path / "three", methods="multinomial")
    with pytest.raises(UserError, match="no arm in common"):
        compare_runs(one, three)


def test_a_cut_and_resumed_run_compares_and_exports_like_an_unbroken_one(tmp_path):
    whole, cut = run(tmp_path / "a" / "run"), tmp_path / "b" / "run"
    made = plan(cut, limit=6)
    for stop_after in (5, 6):
        with pytest.raises(Exception, match="goes on"):
            run_bench(
                made, open_backend=lambda *_, n=stop_after: FakeBackend(stop_after=n), prompter=prompter(made)
            )
    run(cut)
    for entry in rows(compare_runs(whole, cut)).values():
        assert entry[3]["value"] in (0, pytest.approx(1))
        assert entry[4] == 6
    for name in ("results", "comparisons", "cost", "outcomes", "settings"):
        for suffix in ("csv", "md", "tex"):
            file = f"tables/{name}.{suffix}"
            assert (whole / file).read_bytes() == (cut / file).read_bytes()


def test_the_command_prints_and_writes(tmp_path):
    one, two = run(tmp_path / "one"), run(tmp_path / "two")
    done = CliRunner().invoke(app, ["compare", str(one), str(two), "--out", str(tmp_path / "both")])
    assert done.exit_code == 0
    assert "Paired comparisons" in done.output
    assert {p.name for p in (tmp_path / "both" / "tables").iterdir()} == {
        f"{name}.{suffix}" for name in ("settings", "comparisons") for suffix in ("csv", "md", "tex")
    }


def test_a_missing_package_is_named_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("dsbd_cli.bench.extra.find_spec", lambda name: None if name == "scipy" else name)
    for arguments in (
        ["report", "x"],
        ["compare", "x", "y"],
        ["run", "--dataset", "squad", "--out", str(tmp_path / "o")],
    ):
        done = CliRunner().invoke(app, arguments)
        assert isinstance(done.exception, UserError)
        assert "needs scipy: pip install 'dsbd-cli[bench]'" in str(done.exception)
    assert not (tmp_path / "o").exists()


TABLE = Table(
    "t", "A & B",
    [Column("arm", "arm"), Column("score", "score", lambda e: f"{e['value']}", True), Column("p", "p", p_value)],
    [["a_b|c", {"value": 0.5, "low": 0.25, "high": 0.75}, 0.0004],
     ["x", {"value": 1, "low": None, "high": None}, None]],
    "100 % of it.",
)  # fmt: skip


def test_csv_holds_bare_numbers_and_both_ends():
    lines = list(csv.DictReader(io.StringIO(to_csv(TABLE))))
    assert lines[0] == {
        "arm": "a_b|c",
        "score": "0.5",
        "score_low": "0.25",
        "score_high": "0.75",
        "p": "0.0004",
    }
    assert (lines[1]["score_low"], lines[1]["p"]) == ("", "")


def test_markdown_keeps_its_columns():
    lines = to_markdown(TABLE).splitlines()
    assert lines[0] == "### A & B"
    assert lines[4] == "| a_b\\|c | 0.5 | <0.001 |"
    assert lines[-1] == "100 % of it."


def test_latex_means_every_character():
    text = to_latex(TABLE)
    assert "a\\_b|c & 0.5 & \\textless{}0.001 \\\\" in text
    assert "\\caption{A \\& B. 100 \\% of it.}" in text
    assert "{lrr}" in text
    assert latex("50% {x}\\y ~^#$") == r"50\% \{x\}\textbackslash{}y \textasciitilde{}\textasciicircum{}\#\$"


def test_every_table_lies_beside_the_report_and_old_ones_go(tmp_path):
    folder = run(tmp_path / "out", methods="multinomial,beam,dsbd")
    place = folder / "tables"
    items = list(csv.DictReader((place / "items.csv").open()))
    assert len(items) == 18
    assert float(items[0]["decode_s"]) > 0
    (place / "memory.csv").write_text("of another run")
    (place / "mine.txt").write_text("kept")
    (place / "turns.md").write_text("of another run")
    write_report([folder])
    assert not (place / "turns.md").exists()
    assert (place / "mine.txt").exists()
    assert "of another run" not in (place / "memory.csv").read_text()
    both = write_report([folder, shutil.copytree(folder, tmp_path / "again")], tmp_path / "both")
    assert (both / "tables" / "out-results.csv").is_file()
    assert (both / "tables" / "again-items.csv").is_file()
    assert file_name("a/b: c (2)") == "a_b_c_2"


def test_a_folder_of_another_format_is_refused_in_one_line(tmp_path):
    folder = run(tmp_path / "out")
    path = folder / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["decode_s"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = (folder / "report.html").read_bytes()
    with pytest.raises(UserError, match="this version of dsbd does not know"):
        write_report([folder])
    with pytest.raises(UserError, match="this version of dsbd does not know"):
        compare_runs(folder, folder)
    assert (folder / "report.html").read_bytes() == before


def test_results_from_before_groups_and_loads_were_kept_are_still_read(tmp_path):
    folder = run(tmp_path / "out")
    path = folder / "results.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "group"}) + "\n" for r in lines))
    there = json.loads((folder / "run.json").read_text())
    for name in ("load", "load_at_end", "others", "usable_cores"):
        there["sessions"][0].pop(name)
    (folder / "run.json").write_text(json.dumps(there))
    write_report([folder])
    run(folder, limit=8)  # and resumed
    arms = json.loads((folder / "summary.json").read_text())["runs"][0]["arms"]
    assert arms["dsbd"]["against_baseline"]["speed"]["items"] == 8
