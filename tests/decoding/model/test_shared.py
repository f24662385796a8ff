"""Prompts that begin alike in one shared model: read once, and with the numbers that each has alone."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoding.cache.prefixes import LEAST
from dsbd_cli.decoding.forward.amx import AmxForward
from dsbd_cli.decoding.forward.hf import HfForward
from dsbd_cli.decoding.forward.llama import LlamaForward
from dsbd_cli.decoding.forward.simd import SimdForward
from dsbd_cli.decoding.forward.whole import WholeForward
from dsbd_cli.decoding.model import shared as shared_module
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.model.protocol import Compute
from dsbd_cli.decoding.model.shared import RequestModel, SharedModel
from dsbd_cli.decoding.tree.sequences import Node
from tests.builders import VOCAB, rand
from tests.decoding.forward import emulated

# Heads of 16 are those of the forward in C, of 32 those of tiles; a window is crossed.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "C": ("llama", {"hidden_size": 64, "num_key_value_heads": 2}),
    "tiles": ("llama", {"hidden_size": 128, "num_key_value_heads": 2, "vocab_size": 272}),
    "fused": ("llama", {}),
    "own": ("gpt2", {}),
    "window": ("mistral", {"sliding_window": 8}),
}
COMMON = [3 + 7 * i % 200 for i in range(40)]
TAILS = [[5], [6, 7], [5, 9, 9], [10, 11, 12, 13], [5, 9, 8]]
PROMPTS = [COMMON + tail for tail in TAILS]
# The common part once, and of each what none before it has (its last token in any case).
ONCE = 40 + 1 + 2 + 2 + 4 + 1


class Counted:
    """A forward, and of how many nodes it was asked; `fail` raises in the next call."""

    def __init__(self, forward: Any) -> None:
        self.forward, self.count, self.fail = forward, 0, False

    def __call__(self, cache: Any, ids: Any, *rest: Any) -> Any:
        if self.fail:
            self.fail = False
            raise KeyboardInterrupt
        self.count += len(ids)
        return self.forward(cache, ids, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.forward, name)


def model_of(folder: Path, kind: str = "C") -> HfTreeModel:
    name, sizes = KINDS[kind]
    plain = rand(folder, name, **({"initializer_range": 0.3} | sizes))
    model = HfTreeModel(plain.bfloat16() if kind == "tiles" else plain, vocab_size=VOCAB)
    forward = {"C": SimdForward, "tiles": AmxForward, "fused": LlamaForward}.get(kind, HfForward)
    assert isinstance(model.tree_forward, forward)
    return model


def shared_of(model: HfTreeModel, slots: int = 1 << 20, spare: int = 0) -> tuple[SharedModel, Counted]:
    shared = SharedModel(model, 16, 64)
    shared.slots, shared.spare = slots, spare
    counted = shared._forward = Counted(shared._forward)  # type: ignore[assignment]
    return shared, counted  # type: ignore[return-value]


def admitted(shared: SharedModel, ids: list[int], size: int = 64) -> RequestModel:
    request = shared.admit(ids, Node(-1, None), size, 8)
    assert request is not None
    return request


def read(shared: SharedModel, *requests: RequestModel) -> None:
    for _ in shared.prefill(requests):
        pass


def agrees(model: HfTreeModel, request: RequestModel) -> None:
    """At the prompt's end and two tokens behind it the numbers are those of the prompt alone."""
    root = Node(-1, None)
    model.prefill(request.ids, root, top_n=8, reuse=False)
    paths = [(root, request.root)]
    for _ in range(2):
        token = int(model.best(paths[-1][0], 1)[0][0])
        paths.append((Node(token, paths[-1][0]), Node(token, paths[-1][1])))
        model.forward([paths[-1][0]])
        request.shared.compute([Compute(request, [paths[-1][1]])])
    for alone, together in paths:
        (tokens, logps), (own, found) = model.best(alone, 8), request.best(together, 8)
        assert tokens.tolist() == own.tolist()
        if isinstance(model.tree_forward, WholeForward):  # whatever else is in a forward
            assert np.array_equal(logps, found)
        np.testing.assert_allclose(logps, found, atol=2e-5)


@pytest.mark.parametrize("chunk", [2048, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_that_begins_alike_reads_that_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int
) -> None:
    monkeypatch.setattr(shared_module, "_CHUNK", chunk)
    with emulated.tiles() if kind == "tiles" else contextlib.nullcontext():
        model = model_of(tmp_path, kind)
        shared, counted = shared_of(model)
        requests = [admitted(shared, ids) for ids in PROMPTS]
        read(shared, *requests)
        assert counted.count == ONCE < sum(map(len, PROMPTS))
        for request in requests:
            agrees(model, request)


def test_a_prompt_takes_over_what_another_has_read_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that one is not at its end, or was left for later."""
    monkeypatch.setattr(shared_module, "_CHUNK", 20)
    model = model_of(tmp_path)
    shared, counted = shared_of(model)
    first, second, later = (admitted(shared, ids) for ids in PROMPTS[:3])
    half = shared.prefill([first])
    next(half)
    read(shared, second)
    assert counted.count == 20 + 22
    for _ in half:
        pass
    assert counted.count == 20 + 22 + 21
    assert later.unread
    shared.compute([Compute(later, [Node(4, later.root)])])
    assert not later.unread
    assert counted.count == 20 + 22 + 21 + 2 + 1
    for request in (first, second, later):
        agrees(model, request)


@pytest.mark.parametrize("keep", [True, False])
def test_prompts_that_ended_are_kept_while_nobody_needs_the_room(tmp_path: Path, keep: bool) -> None:
    model = model_of(tmp_path)
    shared, counted = shared_of(model, slots=200, spare=100)
    for ids in PROMPTS[:2]:
        request = admitted(shared, ids)
        read(shared, request)
        agrees(model, request)
        request.leave(keep=keep)
        assert shared.free == shared.regions.capacity
    read_once, behind = 41 + 2, 2 * 2  # of `agrees`
    assert counted.count == (read_once if keep else 41 + 42) + behind
    # Three regions of 64 leave no room for them, and no more fit than without them.
    requests = [admitted(shared, ids) for ids in PROMPTS[:3]]
    assert shared.prefixes.slots == 0
    assert shared.admit(PROMPTS[3], Node(-1, None), 64, 8) is None
    read(shared, *requests)
    for request in requests:
        agrees(model, request)
        request.leave(keep=keep)
    assert shared.free == shared.regions.capacity <= 200
    assert len(shared.stores.masks._free) == len(shared.stores.masks.table) - 1


def test_a_longer_prompt_makes_buffers_grow_and_the_others_keep_theirs(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    shared, _ = shared_of(model, spare=50)
    first = admitted(shared, PROMPTS[0])
    read(shared, first)
    assert shared.regions.capacity == 64 + 50
    second = admitted(shared, PROMPTS[1] + [9] * 100, 200)
    assert shared.regions.capacity == shared.stores.cache.capacity == 64 + 200 + 50
    read(shared, second)
    agrees(model, first)
    agrees(model, second)


def test_what_was_not_computed_is_not_taken_over(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    shared, counted = shared_of(model)
    first, second = (admitted(shared, ids) for ids in PROMPTS[:2])
    counted.fail = True
    with pytest.raises(KeyboardInterrupt):
        read(shared, first)
    assert first.unread
    read(shared, second)
    assert counted.count == len(PROMPTS[1])
    agrees(model, second)
    first.leave(keep=True)
    assert shared.prefixes.slots == 0


def test_a_few_tokens_in_common_are_read_again(tmp_path: Path) -> None:
    shared, counted = shared_of(model_of(tmp_path))
    requests = [admitted(shared, [*COMMON[: LEAST - 1], 200 + i]) for i in range(3)]
    read(shared, *requests)
    assert counted.count == 3 * LEAST


def test_a_model_that_is_captured_reads_prompts_together_as_before(tmp_path: Path) -> None:
    """Beside a GPU prompts are read many in one forward, and requests that ended may still be in flight."""
    model = HfTreeModel(rand(tmp_path, initializer_range=0.3), vocab_size=VOCAB, graphs=True)
    shared, counted = shared_of(model)
    requests = [admitted(shared, ids) for ids in PROMPTS]
    assert len(list(shared.prefill(requests))) == 1
    assert counted.count == sum(map(len, PROMPTS))
    for request in requests:
        request.leave(keep=True)
    assert shared.prefixes.slots == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_read_like_a_prompt_gives_what_it_gave_token_by_token(tmp_path: Path, kind: str) -> None:
    with emulated.tiles() if kind == "tiles" else contextlib.nullcontext():
        reads_like_a_prompt(tmp_path, kind)


def reads_like_a_prompt(tmp_path: Path, kind: str) -> None:
    model = model_of(tmp_path, kind)
    shared, _ = shared_of(model)
    slow, late = admitted(shared, COMMON), admitted(shared, COMMON)
    read(shared, slow)
    late.root = slow.root  # one request, asked in two ways
    trunk = Node(9, Node(7, Node(5, slow.root)))
    beams = [Node(3, Node(11, trunk)), Node(4, Node(12, trunk)), Node(8, trunk)]
    late.begin_above(beams)
    assert late.root is trunk
    assert late.ids == [*COMMON, 5, 7, 9]
    for request in (slow, late):
        shared.compute([Compute(request, beams)])
        assert [request.tree.position(node) for node in beams] == [44, 44, 43]
        assert request.tree.prompt_length == 40
        assert request.max_depth == slow.max_depth
    for node in beams:
        (tokens, logps), (own, found) = slow.best(node, 8), late.best(node, 8)
        assert tokens.tolist() == own.tolist()
        np.testing.assert_allclose(logps, found, atol=0.1 if kind == "tiles" else 2e-5)
    # And again from there, as answers grow.
    further = [Node(6, beams[0]), Node(5, beams[0])]
    late.begin_above(further)
    assert late.ids == [*COMMON, 5, 7, 9, 11, 3]
    for request in (slow, late):
        shared.compute([Compute(request, further)])
    for node in further:
        np.testing.assert_allclose(
            slow.best(node, 8)[1], late.best(node, 8)[1], atol=0.1 if kind == "tiles" else 2e-5
        )
    late.leave()
    slow.leave()
    assert shared.free == shared.regions.capacity
