"""The harness runs our methods: a local task, offline, against its own Hugging Face model."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.errors import UserError
from dsbd_cli.lm_eval import register
from tests.builders import rand

harness = pytest.mark.skipif(
    find_spec("lm_eval") is None, reason="the harness is an extra: pip install '.[eval]'"
)

CAPITALS = [("France", "Paris"), ("Italy", "Rome"), ("Spain", "Madrid"), ("Norway", "Oslo"), ("Peru", "Lima")]
ANSWER = """
task: capital_answer
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n", "aa"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOICE = """
task: capital_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: [Paris, Rome, Madrid, Oslo, Lima]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
METHODS = {
    "multinomial": {}, "beam": {"width": 3}, "speculative": {"gamma": 2}, "specinfer": {"tree": "2x1"},
    "dsbd": {"width": 4, "threshold": 0.9},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two models and two tasks."""
    place = tmp_path_factory.mktemp("harness")
    rand(place / "target", seed=3)
    rand(place / "draft", seed=4)
    (place / "tasks").mkdir()
    lines = [{"question": f"What is the capital of {land}?", "answer": city} for land, city in CAPITALS]
    data = place / "capitals.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, text in (("answer", ANSWER), ("choice", CHOICE)):
        (place / "tasks" / f"{name}.yaml").write_text(text.replace("FILE", str(data)))
    return place


@pytest.fixture
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def evaluate(folder: Path, model: str, task: str, **arguments: Any) -> list[dict[str, Any]]:
    """The samples of a task, in order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    register()
    found = lm_eval.simple_evaluate(
        model=model,
        model_args={"dtype": "float32"} | arguments,
        tasks=[task],
        device="cpu",
        batch_size=2,
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    return sorted(found["samples"][task], key=lambda sample: sample["doc_id"])


def answers(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["resps"][0][0] for sample in samples]


def ours(folder: Path, method: str, **settings: Any) -> dict[str, Any]:
    return {"target": str(folder / "target"), "draft": str(folder / "draft"), "method": method, **settings}


@harness
@pytest.mark.slow
@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("method", METHODS)
def test_greedy_answers_equal_those_of_hugging_face(folder, method):
    theirs = answers(evaluate(folder, "hf", "capital_answer", pretrained=str(folder / "target")))
    mine = evaluate(
        folder, "dsbd", "capital_answer", **ours(folder, method, temperature=0, **METHODS[method])
    )
    assert answers(mine) == theirs
    assert len(set(theirs)) > 1
    assert any(theirs)


@harness
@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_likelihoods_are_the_targets(folder):
    theirs = evaluate(folder, "hf", "capital_choice", pretrained=str(folder / "target"))
    mine = evaluate(folder, "dsbd", "capital_choice", **ours(folder, "dsbd"))
    for one, two in zip(theirs, mine, strict=True):
        for (expected, _), (given, _) in zip(one["filtered_resps"], two["filtered_resps"], strict=True):
            assert float(given) == pytest.approx(float(expected), abs=1e-4)


@harness
@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_sampled_answers_follow_the_seed_and_the_prompt_alone(folder, caplog):
    first = answers(evaluate(folder, "dsbd", "capital_answer", **ours(folder, "dsbd", seed=5)))
    assert any("temperature=0 is greedy" in record.message for record in caplog.records)
    assert answers(evaluate(folder, "dsbd", "capital_answer", **ours(folder, "dsbd", seed=5))) == first
    assert answers(evaluate(folder, "dsbd", "capital_answer", **ours(folder, "dsbd", seed=6))) != first
    file = folder / "tasks" / "reversed.yaml"
    data = folder / "reversed.jsonl"
    data.write_text("\n".join(reversed((folder / "capitals.jsonl").read_text().splitlines())) + "\n")
    file.write_text(ANSWER.replace("capital_answer", "capital_reversed").replace("FILE", str(data)))
    turned = answers(evaluate(folder, "dsbd", "capital_reversed", **ours(folder, "dsbd", seed=5)))
    assert turned[::-1] == first


@harness
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"widht": 3}, "did you mean width"),
        ({"method": "dsbd", "draft": None}, "needs a draft"),
        ({"temperature": -1}, "temperature"),
        ({"stop": "x"}, "unknown argument 'stop'"),
    ],
)
def test_wrong_model_args_are_one_line(folder, arguments, words):
    from dsbd_cli.lm_eval.model import DsbdLM

    with pytest.raises(UserError, match=words):
        DsbdLM(**({"target": str(folder / "target"), "device": "cpu"} | arguments))


@harness
@pytest.mark.usefixtures("offline")
def test_the_command_line_is_the_harness_with_the_model_known(folder, monkeypatch, capsys):
    from dsbd_cli.lm_eval.__main__ import main

    task = str(folder / "tasks" / "answer.yaml")
    given = ",".join(
        f"{name}={value}" for name, value in ours(folder, "dsbd", width=2, temperature=0).items()
    )
    # No --device: the harness then names cuda:0, also where there is none.
    command = ["lm_eval", "--model", "dsbd", "--model_args", given, "--tasks", task]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert "capital_answer" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command[:4], "target=./gone", *command[5:]])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "./gone" in capsys.readouterr().err.splitlines()[-1]


def test_without_the_harness_the_one_line_says_what_to_install(monkeypatch, capsys):
    from dsbd_cli.lm_eval.__main__ import main

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "dsbd-cli[eval]" in error
    assert len(error.splitlines()) == 1
