"""The loop: interleaved, resumable, one writer, results that do not depend on order."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from dsbd_cli.bench.command import run_bench
from dsbd_cli.bench.files import key_of, read_results, read_run
from dsbd_cli.bench.measure import seed_of
from dsbd_cli.bench.plan import make_plan
from dsbd_cli.bench.runner import Runner
from dsbd_cli.bench.terminal import summary_text
from dsbd_cli.errors import RunError, Stopped, UserError
from tests.bench.double import BytesTokenizer, FakeBackend, plan, prompter
from tests.builders import rand


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("dsbd_cli.bench.context.commit", lambda: "0" * 12)
    monkeypatch.setattr("dsbd_cli.bench.report._figures", lambda *_: {})  # drawn in test_report


def run(made, backend=None, **more):
    backend = backend or FakeBackend()
    run_bench(made, open_backend=lambda *_: backend, prompter=more.pop("prompter", prompter(made)))
    return backend


def results(folder):
    """What must be the same however a run was cut: everything but the session."""
    return {
        key_of(r): {k: v for k, v in r.items() if k not in ("session", "rank")} for r in read_results(folder)
    }


def test_arms_are_interleaved_per_item_in_a_shuffled_order(tmp_path):
    made = plan(tmp_path / "out", methods="multinomial,beam,speculative,dsbd", limit=12)
    jobs = made.jobs()
    assert Counter(job.key for job in jobs).most_common(1)[0][1] == 1
    assert len(jobs) == 48
    orders = [tuple(job.arm.name for job in jobs[i : i + 4]) for i in range(0, 48, 4)]
    for start, order in zip(range(0, 48, 4), orders, strict=True):
        assert len({job.item.id for job in jobs[start : start + 4]}) == 1
        assert sorted(order) == sorted(["multinomial", "beam", "speculative", "dsbd"])
    assert len(set(orders)) > 4
    first = Counter(order[0] for order in orders)
    assert max(first.values()) < 10
    again = plan(tmp_path / "out", methods="multinomial,beam,speculative,dsbd", limit=12)
    assert [job.key for job in again.jobs()] == [job.key for job in jobs]


def test_seeds_come_from_the_item_not_from_the_order(tmp_path):
    backend = run(plan(tmp_path / "a"))
    seeds = {}
    for arm, seed, _ in backend.calls[2:]:  # two warm-ups
        seeds.setdefault(arm, set()).add(seed)
    assert seeds["beam"] == seeds["dsbd"]
    assert len(seeds["beam"]) == 4
    reverse = run(plan(tmp_path / "b", methods="dsbd,beam"))
    assert results(tmp_path / "a") == results(tmp_path / "b")
    assert reverse.calls != backend.calls
    assert seed_of(1, "x", 0) != seed_of(1, "x", 1) != seed_of(2, "x", 1) != seed_of(2, "x", 1, 1)


def test_every_arm_is_warmed_up_and_warm_ups_are_not_counted(tmp_path):
    backend = run(plan(tmp_path / "out", methods="beam,dsbd,hf-sample"))
    warm = backend.calls[:3]
    assert {arm for arm, _, _ in warm} == {"beam", "dsbd", "hf-sample"}
    assert all(tokens == 12 for _, _, tokens in warm)
    assert all(tokens == 32 for _, _, tokens in backend.calls[3:])
    assert len(read_results(tmp_path / "out")) == 12


def test_on_a_card_the_warm_up_is_a_whole_answer(tmp_path):
    class Card(FakeBackend):
        def devices(self):
            return ["cuda:0"]

    backend = Card()
    made = plan(tmp_path / "out", methods="beam")
    runner = Runner(backend, prompter(made), None, 1)
    runner.warm_up(made.arms, made.dataset.items[0])
    assert [tokens for _, _, tokens in backend.calls] == [32]


@pytest.mark.parametrize("stop_after", [0, 1, 2, 5, 9])
def test_a_cut_run_goes_on_and_equals_an_unbroken_one(tmp_path, stop_after):
    run(plan(tmp_path / "whole"))
    with pytest.raises(Stopped, match="the same command goes on"):
        run(plan(tmp_path / "cut"), FakeBackend(stop_after=stop_after))
    given = len(read_results(tmp_path / "cut"))
    assert given == max(0, stop_after - 2)
    rest = run(plan(tmp_path / "cut"))
    assert results(tmp_path / "cut") == results(tmp_path / "whole")
    counted = [call for call in rest.calls if call[2] == 32]
    # The item it was cut in is asked of both arms again: clocks of two sessions are no pair.
    assert len(counted) == 8 - given + given % 2
    for item in {item for item, _, _ in results(tmp_path / "cut")}:
        assert len({r["session"] for r in read_results(tmp_path / "cut") if r["item"] == item}) == 1
    summaries = [
        json.loads((tmp_path / n / "summary.json").read_text())["runs"][0]["arms"] for n in ("cut", "whole")
    ]
    assert summaries[0] == summaries[1]


def test_a_torn_line_is_done_again_with_its_item(tmp_path, capsys):
    run(plan(tmp_path / "out"))
    said = "{} to give (2 arms, 4 items), into " + f"{tmp_path / 'out'}: loading the models"
    assert said.format("8 answers") in capsys.readouterr().err
    whole = results(tmp_path / "out")
    path = tmp_path / "out" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    again = run(plan(tmp_path / "out"))
    told = capsys.readouterr().err
    assert "torn" in told
    assert said.format("1 answer") in told
    run_file = tmp_path / "out" / "run.json"  # other files of models, perhaps with the same weights
    run_file.write_text(json.dumps(json.loads(run_file.read_text()) | {"sources": {}}))
    run(plan(tmp_path / "out"))
    assert "to give" not in capsys.readouterr().err
    assert len([call for call in again.calls if call[2] == 32]) == 2
    assert results(tmp_path / "out") == whole


def test_a_finished_run_says_so_and_loads_nothing(tmp_path, capsys):
    run(plan(tmp_path / "out"))
    (tmp_path / "out" / "report.html").unlink()

    def never(*_):
        raise AssertionError("a model was loaded")

    made = plan(tmp_path / "out")
    run_bench(made, open_backend=never, prompter=prompter(made))
    assert "all 8 answers are there already" in capsys.readouterr().err
    assert (tmp_path / "out" / "report.html").is_file()
    assert len(read_run(tmp_path / "out")["sessions"]) == 1


def test_more_items_arms_and_repeats_may_join_a_run(tmp_path):
    run(plan(tmp_path / "out"))
    first = results(tmp_path / "out")
    run(plan(tmp_path / "out", limit=6, methods="beam,dsbd,multinomial", repeats=2))
    every = results(tmp_path / "out")
    assert len(every) == 6 * 3 * 2
    assert {key: every[key] for key in first} == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"settings": {"seed": 5}}, r"seed \(1, now 5\)"),
        ({"settings": {"max_new_tokens": 16}}, "max_new_tokens"),
        ({"dataset": "squad"}, r"data\.kind"),
        ({"keep_distinct": True}, "keep_distinct"),
        ({"settings": {"width": 3}}, r"width \(4, now 3\)"),
    ],
)
def test_another_run_does_not_mix_in(tmp_path, change, words):
    run(plan(tmp_path / "out"))
    with pytest.raises(UserError, match=words):
        run(plan(tmp_path / "out", **change))


def test_another_model_does_not_mix_in(tmp_path):
    run(plan(tmp_path / "out"))
    path = tmp_path / "out" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    lines = len(read_results(tmp_path / "out"))
    other = FakeBackend()
    other.name = "other"
    with pytest.raises(UserError, match=r"models\.target\.name"):
        run(plan(tmp_path / "out", limit=5), other)
    assert len(read_results(tmp_path / "out")) == lines  # the cut item's too


def test_a_finished_run_is_not_that_of_other_models(tmp_path):
    """Another pair, a pair that is not there, and weights replaced in place are told though nothing is left to do."""
    from dsbd_cli.bench.plan import Options
    from dsbd_cli.cli.options import Chosen

    for name in ("t", "d", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)

    def again(weights="0", **pair):
        spec = {"target": str(tmp_path / "t"), "draft": str(tmp_path / "d"), **pair}
        options = Options("spider", out=tmp_path / "out", limit=2, methods="beam,dsbd")
        made = make_plan(options, Chosen(None, spec, {"max_new_tokens": 32}))
        backend = FakeBackend()
        facts = backend.facts()
        facts["target"] = {**facts["target"], "weights": weights}
        backend.facts = lambda: facts
        return run(made, backend)

    assert again().calls
    before = results(tmp_path / "out")
    assert not again().calls
    for change in ({"target": str(tmp_path / "gone")}, {"draft": str(tmp_path / "gone")}):
        with pytest.raises(UserError, match="gone: no such folder"):
            again(**change)
    for name in ("target", "draft"):
        with pytest.raises(UserError, match=rf"begun with another .*{name}"):
            again(**{name: str(tmp_path / "other")})
        with pytest.raises(UserError, match=rf"begun with another .*{name}_dtype \(auto, now bfloat16\)"):
            again(**{f"{name}_dtype": "bfloat16"})
    (tmp_path / "t" / "model.safetensors").write_text("x")
    with pytest.raises(UserError, match=r"models\.target\.weights \(0, now 1\)"):
        again(weights="1")
    assert results(tmp_path / "out") == before
    assert not again().calls  # the same weights, written anew


def test_a_failure_keeps_what_was_measured(tmp_path):
    with pytest.raises(RunError, match="NaN"):
        run(plan(tmp_path / "out"), FakeBackend(stop_after=5, error=RunError("NaN in the target")))
    assert len(read_results(tmp_path / "out")) == 3


def test_hf_arms_may_get_fewer_items(tmp_path):
    run(plan(tmp_path / "out", methods="beam,hf-sample", limit=5, hf_limit=2))
    counts = Counter(record["arm"] for record in read_results(tmp_path / "out"))
    assert counts == {"beam": 5, "hf-sample": 2}


def test_prompts_that_do_not_fit_are_counted_and_told(tmp_path, capsys):
    made = plan(tmp_path / "out", limit=0)
    lengths = sorted(len(prompter(made).ids(item, [])) for item in made.dataset.items)
    limit = lengths[-4] + 32
    run(made, prompter=prompter(made, limit))
    assert len({r["item"] for r in read_results(tmp_path / "out")}) == 65 - sum(
        n + 32 > limit for n in lengths
    )
    skipped = read_run(tmp_path / "out")["data"]["skipped"]
    assert sum(skipped.values()) == sum(n + 32 > limit for n in lengths) > 0
    assert "context limit" in next(iter(skipped))
    assert "left out" in capsys.readouterr().err


def test_where_no_prompt_fits_the_three_numbers_are_told(tmp_path):
    made = plan(tmp_path / "out")
    with pytest.raises(UserError, match=r"\d+ prompt tokens, 32 new tokens asked for, 64 is the target's"):
        run(made, prompter=prompter(made, 64))
    assert read_results(tmp_path / "out") == []


def test_a_second_turn_that_does_not_fit_is_a_problem_not_a_cut(tmp_path):
    made = plan(tmp_path / "out", dataset="mt-bench", methods="beam", limit=1)
    item = made.dataset.items[0]
    longest = len(prompter(made).ids(item, []))
    run(made, FakeBackend(say=lambda *_: "x" * 200), prompter=prompter(made, longest + 100))
    (record,) = read_results(tmp_path / "out")
    assert "turn 2 does not fit" in record["problem"]
    assert len(record["turns"]) == 1
    assert record["score"] is None


def test_a_template_less_model_gets_plain_text_and_its_stop_string(tmp_path):
    seen = []
    made = plan(tmp_path / "out", dataset="mt-bench", methods="beam", limit=1)
    run(made, FakeBackend(say=lambda arm, _: seen.append(arm.settings.stop) or "answer"))
    run_file = read_run(tmp_path / "out")
    assert run_file["fingerprint"]["prompt_form"] == "plain text"
    assert set(seen) == {("### Human",)}
    assert "prompts by plain text" in (tmp_path / "out" / "report.html").read_text()


class Templated(BytesTokenizer):
    chat_template = "some"

    def __init__(self, refuse):
        self.refuse = refuse

    def apply_chat_template(self, messages, **_):
        if self.refuse == "system" and messages[0]["role"] == "system":
            raise ValueError("System role not supported")
        if self.refuse == "all":
            raise SyntaxError("unexpected '}'")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def test_a_template_that_refuses_is_told_before_any_model_time(tmp_path):
    made = plan(tmp_path / "out", dataset="mt-bench")
    backend = FakeBackend()
    with pytest.raises(UserError, match="unexpected '}'"):
        run(made, backend, prompter=prompter(made, tokenizer=Templated("all")))
    assert backend.calls == []


def test_a_system_text_is_folded_into_the_first_turn_where_the_role_is_refused(tmp_path):
    made = plan(tmp_path / "out", dataset="mt-bench", settings={"system": "Be brief."})
    ids = prompter(made, tokenizer=Templated("system")).ids(made.dataset.items[0], [])
    text = bytes(token - 3 for token in ids).decode()
    assert text.startswith("<user>Be brief.\n\n")
    run(made, prompter=prompter(made, tokenizer=Templated("system")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": "beem"}, "did you mean beam"),
        ({"methods": ","}, "empty"),
        ({"repeats": 0}, "--repeats"),
        ({"limit": -1}, "--limit"),
        ({"sweeps": ["gamma"]}, "name=values"),
        ({"sweeps": ["gama=2"]}, "did you mean gamma"),
        ({"sweeps": ["gamma=two"]}, "--sweep: --gamma must be"),
        ({"sweeps": ["gamma=4..2"]}, "backwards"),
        ({"sweeps": ["gamma=2 gamma=3"]}, "twice"),
        ({"sweeps": ["tree=2x1"]}, "means nothing"),
        ({"sweeps": ["preset"]}, "carries no sweep"),
        ({"settings": {"tree": (2, 1)}}, "--tree means nothing"),
        ({"settings": {"method": "beam"}}, "--methods says"),
        ({"settings": {"num_return": 2}}, "--num-return"),
        ({"judge_url": "http://x"}, "go together"),
        ({"judge_url": "http://x", "judge_model": "m"}, "MT-Bench only"),
        ({"dataset": "spyder"}, "did you mean spider"),
        ({"data_dir": "gone"}, "no such folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(tmp_path, options, words):
    from pathlib import Path

    if "data_dir" in options:
        options = {"data_dir": Path(options["data_dir"])}
    with pytest.raises(UserError, match=words):
        plan(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_nothing_but_a_data_set_gives_methods_and_enough_settings_for_fronts(tmp_path):
    made = plan(tmp_path / "out", methods="default", limit=None, settings={})
    names = [arm.name for arm in made.arms]
    assert {"multinomial", "beam", "speculative", "specinfer", "dsbd"} < set(names)
    assert {"beam width=2", "dsbd width=2", "dsbd threshold=0.9", "dsbd draft_width=4"} < set(names)
    assert len(made.dataset.items) == 6
    assert [arm.name for arm in plan(tmp_path / "out", methods="beam,dsbd").arms] == ["beam", "dsbd"]


def test_a_drafting_arm_without_a_draft_is_refused(tmp_path, monkeypatch):
    from dsbd_cli.bench.plan import Options
    from dsbd_cli.cli.options import Chosen

    def plan_of(target: str) -> None:
        make_plan(Options("spider", methods="beam,dsbd"), Chosen(None, {"target": target}, {}))

    rand(tmp_path / "t")
    with pytest.raises(UserError, match="dsbd needs a draft"):
        plan_of(str(tmp_path / "t"))
    # What was written comes first.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for target, said in (
        ("nosuch/x", "target nosuch/x is not in the local cache"),
        ("./x", "target ./x: no such"),
    ):
        with pytest.raises(UserError, match=said):
            plan_of(target)


def test_a_baseline_that_is_no_arm_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match=r"--baseline dsdb is no arm of this run \(did you mean dsbd\?\)"):
        plan(tmp_path / "out", methods="beam,dsbd", baseline="dsdb")
    # Nobody named one: that is worth a line, and no reason to stop.
    made = plan(tmp_path / "out", methods="multinomial,dsbd")
    assert any("speeds are compared with nothing: beam is no arm" in note for note in made.notes)
    assert not any("compared with nothing" in note for note in plan(tmp_path / "out").notes)
    # A run that goes on in its folder has the arms of its earlier sessions too.
    run(plan(tmp_path / "out", methods="beam,dsbd", limit=2))
    made = plan(tmp_path / "out", methods="multinomial", baseline="dsbd", limit=2)
    run(made)
    arms = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"][0]["arms"]
    assert arms["multinomial"]["against_baseline"]["speed"]["items"] == 2


def test_ratings_that_nobody_will_give_are_told_at_the_start(tmp_path):
    told = [note for note in plan(tmp_path / "out", dataset="mt-bench").notes if "nobody rates" in note]
    assert len(told) == 1
    assert "--judge-url and --judge-model" in told[0]
    assert "dsbd bench judge" in told[0]
    bare = tmp_path / "mine.jsonl"
    bare.write_text('{"prompt": "hi"}\n')
    assert any("holds no references" in note for note in plan(tmp_path / "out", dataset=str(bare)).notes)
    bare.write_text('{"prompt": "hi", "references": ["ho"]}\n')
    assert not any("references" in note for note in plan(tmp_path / "out", dataset=str(bare)).notes)
    judged = plan(tmp_path / "out", dataset="mt-bench", judge_url="http://x/v1", judge_model="m")
    assert not any("nobody rates" in note for note in [*judged.notes, *plan(tmp_path / "out").notes])


def test_references_that_are_prose_are_scored_by_the_words_of_whole_answers(tmp_path):
    """An exact match would be 0 in every row, whatever the answers are worth."""

    class Prose(FakeBackend):
        def answer(self, arm, prompt_ids, seed):
            found = super().answer(arm, prompt_ids, seed)
            found.text = "The sky is blue.\nLight of that colour is scattered most."
            return found

    file = tmp_path / "mine.jsonl"
    said = "The sky is blue because of air.\nBlue light is scattered most."
    file.write_text("".join(json.dumps({"prompt": f"why {i}?", "references": said}) + "\n" for i in range(3)))
    made = plan(tmp_path / "out", dataset=str(file), methods="beam,dsbd")
    assert [note for note in made.notes if "are prose" in note]
    run(made, Prose())
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert summary["primary"] == ["f1", "F1", False]
    assert "whole answer" in summary["rule"]["rule"]
    words = ["sky", "is", "blue", "because", "of", "air", "blue", "light", "is", "scattered", "most"]
    given = ["sky", "is", "blue", "light", "of", "that", "colour", "is", "scattered", "most"]
    same = len(given) - len({"that", "colour"})
    wanted = 2 * same / (len(words) + len(given))
    for arm in summary["arms"].values():
        assert arm["score"]["value"] == pytest.approx(wanted)
        assert arm["f1"] is None  # once
        assert arm["outcomes"] is None
    against = summary["arms"]["dsbd"]["against_baseline"] or summary["arms"]["beam"]["against_baseline"]
    assert against["score"]["items"] == 3
    assert against["f1"]["value"] is None
    table = (tmp_path / "out" / "tables" / "results.md").read_text()
    assert "exact" not in table
    assert "mean F1 over items" in (tmp_path / "out" / "report.html").read_text()


def test_arms_that_drafted_nothing_are_named(tmp_path):
    class Undrafted(FakeBackend):
        def answer(self, arm, prompt_ids, seed):
            found = super().answer(arm, prompt_ids, seed)
            if arm.name in ("beam", "dsbd"):
                found.stats |= {"draft_calls": 0, "drafts_examined": 0, "accepted_by_depth": []}
            return found

    made = plan(tmp_path / "out", methods="beam,dsbd,dsbd:paper", limit=2)
    run(made, Undrafted())
    (summary,) = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    words = "nothing drafted: by the prices of this machine no forest pays here"
    assert [note for note in summary["warnings"] if words in note] == [
        f"dsbd: {words} (--forest full drafts anyway)"
    ]
    shown = "dsbd: nothing was drafted: on this machine drafting is expected to cost more time than it saves"
    page, screen = (tmp_path / "out" / "report.html").read_text(), summary_text(tmp_path / "out")
    for text in (page.replace("Dsbd", "dsbd"), screen):
        assert shown in text
        assert words not in text
    for name, settings in (("full", {"forest": "full"}), ("none", {"gamma": 0})):
        run(plan(tmp_path / name, methods="beam,dsbd", limit=2, settings=settings), Undrafted())
        (summary,) = json.loads((tmp_path / name / "summary.json").read_text())["runs"]
        assert words not in " ".join(summary["warnings"])


def test_gold_that_fails_is_left_out_and_told(tmp_path, sample_spider, capsys):
    import shutil

    folder = shutil.copytree(sample_spider, tmp_path / "data")
    entries = json.loads((folder / "dev.json").read_text())
    entries[3]["query"] = "SELECT name FROM nowhere"
    (folder / "dev.json").write_text(json.dumps(entries))
    run(plan(tmp_path / "out", data_dir=folder, limit=0, methods="beam"))
    assert read_run(tmp_path / "out")["data"]["skipped"] == {"gold query fails": 1}
    assert "nowhere" in capsys.readouterr().err
    assert len(read_results(tmp_path / "out")) == 64


@pytest.mark.parametrize("batch", [1, 2])
def test_what_is_done_between_answers_is_told_too(tmp_path, monkeypatch, batch):
    from dsbd_cli.bench.progress import BenchProgress

    told: list[str] = []
    monkeypatch.setattr(BenchProgress, "stage", lambda self, text: told.append(text))

    class Watched(FakeBackend):
        def logprob(self, prompt_ids, token_ids):
            assert "log-probability" in told[-1]
            return super().logprob(prompt_ids, token_ids)

        def answer(self, arm, prompt_ids, seed):
            assert "log-probability" not in told[-1]
            return super().answer(arm, prompt_ids, seed)

    run(plan(tmp_path / "out", dataset="mt-bench", limit=2, batch=batch), Watched())
    assert sum("log-probability" in text for text in told) >= 4
