"""What the evaluator concludes, on models whose figures are known beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsbd_cli.cli.main import run
from dsbd_cli.distill import draft as drafts
from dsbd_cli.distill import evaluate, shards
from dsbd_cli.distill.cost import Costs
from dsbd_cli.distill.evaluate import TokenFigures, measure, predictions
from dsbd_cli.distill.metrics import Warp, token_figures
from tests import builders


def figures(passes: list[float], runs: list[int]) -> TokenFigures:
    values = {name: np.array(passes) for name in ("warped", "cover_2", "cover_4", "cover_6")}
    return TokenFigures(values, np.array(runs))


def test_layers_multiply_along_each_answer() -> None:
    found = figures([0.5, 1.0, 0.2, 0.4], [3, 1])
    # Position 0 of the first answer: 1 + .5 + .5 * 1; position 1: 1 + 1 + .2; 2: 1 + .2; the second: 1 + .4.
    want = np.mean([2.0, 2.2, 1.2, 1.4])
    assert found.layers(found.values["warped"], 2) == pytest.approx(want)
    assert found.layers(found.values["warped"], 0) == 1.0
    steady = figures([0.6] * 1000, [1000])
    assert steady.layers(steady.values["warped"], 3) == pytest.approx(1 + 0.6 + 0.36 + 0.216, abs=2e-3)


def test_predicted_speed_up_is_the_formula() -> None:
    times = {"target": 40.0, "draft": 8.0}
    rows = predictions(figures([0.5] * 2000, [2000]), lambda name, count: times[name] + count, 2, 4)
    assert [row["gamma"] for row in rows] == [1, 2, 3, 4, 5, 6]
    row = rows[1]
    one = 1 + 0.5 + 0.25
    beam = 1 + 0.25 + 0.0625  # two draws, both inside the cover
    assert row["one_layers"] == pytest.approx(one, abs=2e-3)
    assert row["beam_layers"] == pytest.approx(beam, abs=2e-3)
    assert row["one_speedup"] == pytest.approx(one * 41 / (43 + 2 * 9), abs=2e-3)
    assert row["beam_speedup"] == pytest.approx(beam * 42 / (50 + 2 * 12), abs=2e-3)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Any, Any]:
    target = builders.rand(tmp_path / "target", num_hidden_layers=3, initializer_range=0.4)
    drafts.save_draft(drafts.prune(target, [0, 2]), tmp_path / "draft", share_embeddings=True)
    return target, drafts.load_shared_draft(tmp_path / "draft", target)


def test_every_answer_token_is_measured_in_its_place(pair: tuple[Any, Any]) -> None:
    target, draft = pair
    rows = [([3, 9, 30, 50, 70, 90], 2, 2), ([5, 6, 7], 2, 2)]
    found = measure(target, draft, shards.pack(rows), Warp())
    assert found.run.tolist() == [4, 1]
    with torch.no_grad():
        for first, (tokens, _, answer) in zip((0, 4), rows, strict=True):
            ids = torch.tensor([tokens])
            logits = [model(input_ids=ids).logits[0, answer - 1 : -1] for model in (target, draft)]
            want = token_figures(*logits, Warp())
            count = len(tokens) - answer
            for name, values in want.items():
                got = found.values[name][first : first + count]
                assert np.allclose(got, values.numpy(), atol=1e-5), name


def test_the_target_as_its_own_draft(pair: tuple[Any, Any]) -> None:
    target, _ = pair
    found = measure(target, target, shards.pack([(list(range(3, 40)), 1, 1)]), Warp())
    for name in ("raw", "warped", "agree"):
        assert found.mean(name) == pytest.approx(1.0, abs=1e-5)


def test_costs_are_measured_once(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    costs = Costs({"target": pair[0]})
    first = costs("target", 4)
    assert first > 0
    monkeypatch.setattr(costs, "_measure", lambda *_: 0.0)
    assert costs("target", 4) == first


def test_the_command_repeats_its_figures_from_stored_answers(
    pair: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": f"say {n}", "set": "a" if n < 3 else "b", "id": n} for n in range(5)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    common = [
        "distill",
        "evaluate",
        "--target",
        str(tmp_path / "target"),
        "--draft",
        str(tmp_path / "draft"),
        "--json",
    ]
    stored = tmp_path / "new" / "folder" / "answers.tokens.safetensors"
    written = ["--prompts", str(prompts), "--save-answers", str(stored), "--max-new-tokens", "12"]
    assert run([*common, *written]) == 0
    first = json.loads(capsys.readouterr().out)
    assert run([*common, "--answers", str(stored)]) == 0
    second = json.loads(capsys.readouterr().out)
    assert first["sets"] == second["sets"]
    assert list(first["sets"]) == ["a", "b"]
    assert 0 < first["sets"]["a"]["warped"] < 1
    assert len(first["predicted"]) == evaluate.MAX_GAMMA
    meta = shards.load(stored).meta
    assert (meta["ids"], meta["top_k"], meta["seed"]) == (["0", "1", "2", "3", "4"], 10, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "none.txt"], "none.txt"),
        (["--prompts", "a", "--answers", "b"], "not both"),
        ([], "no stored answers"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    pair: tuple[Any, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    common = ["distill", "evaluate", "--target", str(tmp_path / "target"), "--draft", str(tmp_path / "draft")]
    assert run([*common, *arguments]) == 2
    assert words in capsys.readouterr().err
