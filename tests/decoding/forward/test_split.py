"""A target that two processes hold together says what one process says."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import builders
from tests.decoding.forward.split_worker import answers

# One process of the suite runs them all: the pairs of processes that they share are started once.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("split")]

ROOT = Path(__file__).parents[3]
WAYS = {
    "beam": {"method": "beam", "width": 3},
    "dsbd": {"method": "dsbd", "width": 3, "draft_width": 4, "gamma": 3},
    "deterministic": {"method": "dsbd", "width": 3, "gamma": 2, "deterministic": True},
}
TINY = {"num_attention_heads": 8, "intermediate_size": 48}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped, tied, biases of qkv": ("qwen2", TINY | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "every head its own, untied": ("llama", TINY | {"num_key_value_heads": 8, "tie_word_embeddings": False}),
    "biases everywhere": (
        "llama",
        TINY | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "norms of heads, size of their own": ("qwen3", TINY | {"num_key_value_heads": 4, "head_dim": 16}),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "odd heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48},
                  "does not divide the 3 query heads"),
    "one key head": ("llama", {"num_key_value_heads": 1}, "does not divide the 1 key/value heads"),
    "another architecture": ("gpt2", {}, "GPT2LMHeadModel: try --device-map auto"),
    "a window": ("mistral", {"sliding_window": 16}, "layers that see a window only"),
}  # fmt: skip


def spread(folder: Path, kind: str, seed: int, options: dict[str, Any]) -> None:
    """A random model whose logits and biases are not all about nothing."""
    import torch

    model = builders.rand(folder, kind, seed=seed, **options)
    torch.manual_seed(seed + 100)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 and "norm" not in name:
                weight.normal_(0, 0.3)
            elif weight.dim() == 2:
                weight.mul_(6)
    model.save_pretrained(str(folder))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("split")
    for seed, (name, (kind, options)) in enumerate(MODELS.items()):
        spread(base / name, kind, seed, options)
    for name, (kind, options, _) in REFUSED.items():
        builders.rand(base / name, kind, **options)
    spread(base / "draft", "llama", 9, {})
    return {
        "models": {name: str(base / name) for name in [*REFUSED, *MODELS]},
        "draft": str(base / "draft"),
        "ways": {name: {"max_new_tokens": 8, "prices": "off"} | values for name, values in WAYS.items()},
        "prompts": ["one", "a second prompt, longer than that"],
    }


@pytest.fixture(scope="module")
def held(
    asked: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, new_cache: Callable[[], Path]
) -> list[dict[str, Any]]:
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("answers")
    (folder / "asked").write_text(json.dumps(asked))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tests.decoding.forward.split_worker",
        str(folder / "asked"),
        str(folder / "out"),
    ]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
              "PYTHONPATH": str(ROOT), "DSBD_CACHE": str(new_cache())}  # fmt: skip
    running = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                         cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], said
    return [json.loads((folder / f"out.{rank}").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone(asked: dict[str, Any]) -> dict[str, Any]:
    mine = asked | {"models": {name: asked["models"][name] for name in MODELS}}
    return json.loads(json.dumps(answers(mine, 1)))


@pytest.mark.parametrize("name", MODELS)
def test_two_processes_that_hold_one_target_say_what_one_says(
    held: list[dict[str, Any]], alone: dict[str, Any], name: str
) -> None:
    split, whole = dict(held[0][name]), dict(alone[name])
    assert "split over 2 processes" in split.pop("forward")
    assert "split" not in whole.pop("forward")
    assert split == whole
    assert whole["device"][0].startswith("pipelined iterations")
    assert (
        len({json.dumps(one) for one in whole["beam"]}) == 2
    )  # they say different things to different prompts


def test_both_processes_take_the_same_decisions(held: list[dict[str, Any]]) -> None:
    assert held[0] == held[1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(held: list[dict[str, Any]], name: str) -> None:
    said = held[0][name]
    assert isinstance(said, str)
    assert REFUSED[name][2] in said
    assert name in said or "tensor-parallel serves" in said
