"""Sampling inside `model.generate`: every branch taken once, against the law written a second time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dsbd_cli
from tests.decoding.enumerating import law_of, total_variation
from tests.decoding.reference import T, sequence_law, set_process
from tests.hf.states import tiny

IDS = torch.tensor([[2, 3, 2]])
EOS = 1
Path = tuple[int, ...]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return tuple(tiny("llama", seed, vocab_size=4, pad_token_id=0) for seed in (0, 1))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def law(pair: tuple[Any, Any]) -> Callable[[Path], np.ndarray]:
    """The target's conditionals, by the model's own forward."""
    rows: dict[Path, np.ndarray] = {}

    def row(path: Path) -> np.ndarray:
        if path not in rows:
            with torch.inference_mode():
                logits = pair[0](torch.cat([IDS, torch.tensor([path], dtype=torch.long)], 1)).logits[0, -1]
            rows[path] = torch.softmax(logits.double(), -1).numpy()
        return rows[path]

    return row


def answers(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[Path, float]:
    """The exact law of what `generate` returns behind the prompt, up to EOS."""
    target, draft = pair

    def play(sampler: Any) -> Path:
        monkeypatch.setattr("dsbd_cli.generation.SeededSampler", lambda seed, stream: sampler)
        out = target.generate(
            IDS, custom_generate=dsbd_cli.generate, draft_model=draft, do_sample=True, **options
        )
        path = out[0, IDS.shape[1] :].tolist()
        return tuple(path[: path.index(EOS) + 1] if EOS in path else path)

    return law_of(play)


@pytest.mark.parametrize(
    "method", ["multinomial", "speculative", "specinfer", "specinfer spectr", "specinfer rsd"]
)
@pytest.mark.parametrize("t", [T(1.0, 0, 1.0), T(0.7, 3, 0.9)])
def test_one_beam(
    pair: tuple[Any, Any],
    law: Callable[[Path], np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    t: T,
) -> None:
    method, _, rule = method.partition(" ")
    options: dict[str, Any] = {"gamma": 1} if method == "speculative" else {}
    if method == "specinfer":
        options = {"tree": (2,), "tree_rule": rule or "specinfer"}
    got = answers(pair, monkeypatch, method=method, max_new_tokens=2, temperature=t[0], top_k=t[1], top_p=t[2],
                  **options)  # fmt: skip
    want = sequence_law(law, t, [EOS], 2)
    assert abs(sum(got.values()) - 1) < 1e-9
    assert total_variation(got, want) < 1e-5
    # It would not pass as the law of another temperature.
    assert total_variation(got, sequence_law(law, t._replace(**{t._fields[0]: 0.5}), [EOS], 2)) > 0.01


@pytest.mark.parametrize(
    "options",
    [
        {"method": "beam"},
        {"method": "dsbd", "verify": "cover", "draft_width": 2, "gamma": 1},
        {"method": "dsbd", "verify": "continue", "draft_width": 1, "gamma": 1},
    ],
)
def test_beams(
    pair: tuple[Any, Any], law: Callable[[Path], np.ndarray], monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    t = T(0.8, 3, 1.0)
    got = answers(pair, monkeypatch, num_beams=2, max_new_tokens=2, temperature=t[0], top_k=t[1], top_p=t[2],
                  **options)  # fmt: skip
    want: dict[Path, float] = defaultdict(float)
    for outcome, mass in set_process(law, 2, t, [EOS], 2).items():
        want[outcome.answer] += mass
    assert abs(sum(got.values()) - 1) < 1e-9
    assert total_variation(got, dict(want)) < 1e-5
    assert total_variation(got, sequence_law(law, t, [EOS], 2)) > 0.01
