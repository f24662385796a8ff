"""Logits that are not finite never reach a choice; the run ends naming model, step and dtype."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import METHODS, Call, pair

Models = Callable[..., str]


def broken(folder: str, copy: Path, value: float, rows: slice) -> str:
    """A copy of a model whose head has `value` in some rows."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    name = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
    head = weights[name].clone()
    head[rows] = value
    save_file(weights | {name: head}, copy / "model.safetensors", {"format": "pt"})
    return str(copy)


@pytest.mark.parametrize("temperature", ["0", "1"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("value", "rows"), [(float("inf"), slice(5, 6)), (float("nan"), slice(None))])
def test_a_target_without_numbers_stops_the_run(
    dsbd: Call, models: Models, tmp_path: Path, value: float, rows: slice, method: str, temperature: str
) -> None:
    good = models("rand", tie_word_embeddings=False)
    bad = broken(good, tmp_path / "bad", value, rows)
    ran = dsbd("generate", "hi", *pair(bad, good), "--method", method, "--temperature", temperature,
               "--max-new-tokens", "20")  # fmt: skip
    assert (ran.code, ran.text.strip()) == (1, ""), (ran.code, ran.out, ran.err)
    lines = ran.err.splitlines()
    assert len(lines) == 1, ran.err
    for word in ("target", "not finite", "step 0", "float32"):
        assert word in lines[0]


@pytest.mark.parametrize(
    ("dtype", "advice"),
    [
        ("float32", "in float32: check"),
        ("bfloat16", "try --dtype float32, or"),
        ("float16", "bfloat16 or float32, or"),
    ],
)
def test_what_is_advised_is_not_what_was_done(
    dsbd: Call, models: Models, tmp_path: Path, dtype: str, advice: str
) -> None:
    bad = broken(models("rand", tie_word_embeddings=False), tmp_path / "bad", float("nan"), slice(None))
    ran = dsbd("generate", "hi", "--target", bad, "--method", "beam", "--dtype", dtype)
    assert ran.code == 1
    assert advice in ran.err


@pytest.mark.parametrize("method", ["speculative", "specinfer", "dsbd"])
def test_a_draft_without_numbers_is_not_silently_never_accepted(
    dsbd: Call, models: Models, tmp_path: Path, method: str
) -> None:
    good = models("rand", tie_word_embeddings=False)
    bad = broken(good, tmp_path / "bad", float("nan"), slice(None))
    ran = dsbd(
        "generate", "hi", *pair(good, bad), "--method", method, "--max-new-tokens", "20", "--forest", "full"
    )
    assert ran.code == 1, ran.err
    assert "draft" in ran.err
    assert "not finite" in ran.err
    assert torch.isfinite(load_file(Path(good) / "model.safetensors")["lm_head.weight"]).all()
