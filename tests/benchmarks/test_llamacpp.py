"""What llama.cpp is asked for, and what is made of its answer; the engine itself need not be installed."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks.kit import llamacpp
from dsbd_cli.errors import UserError
from dsbd_cli.settings import Settings


def reply(ids: list[int], reason: str) -> dict:
    return {"choices": [{"logprobs": {"content": [{"id": one} for one in ids]}, "finish_reason": reason}]}


def test_the_end_of_text_counts_once_as_for_every_arm():
    assert llamacpp.tokens_of(reply([5, 6], "length"), (2,)) == [5, 6]
    assert llamacpp.tokens_of(reply([5, 6], "stop"), (2,)) == [5, 6, 2]
    assert llamacpp.tokens_of(reply([5, 2], "stop"), (2,)) == [5, 2]
    assert llamacpp.tokens_of(reply([5], "stop"), ()) == [5]


def test_it_samples_from_our_distribution():
    settings = Settings(method="multinomial", temperature=0.7, top_k=7, top_p=0.9, max_new_tokens=11)
    asked = llamacpp.request_of(settings, [3, 4], 2**40 + 5, (2,))
    assert asked["prompt"] == [3, 4]
    assert (asked["temperature"], asked["top_k"], asked["top_p"], asked["max_tokens"]) == (0.7, 7, 0.9, 11)
    assert asked["samplers"] == ["top_k", "top_p", "temperature"]
    assert asked["min_p"] == 0
    assert asked["repeat_penalty"] == 1
    assert asked["seed"] == 5
    assert not asked["ignore_eos"]
    assert llamacpp.request_of(settings, [3], 1, ())["ignore_eos"]


def test_without_the_package_one_line_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install xllamacpp"):
        llamacpp.LlamaCpp(None, 100)  # type: ignore[arg-type]
