"""Activations of 8 bits times 4-bit blocks: whole numbers in blocks, and what a row gives is its own."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.forward import simd
from dsbd_cli.decoding.forward.selftest import Verdict
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.decoding.tree.sequences import Node
from tests.decoding.forward.test_amx import KINDS, far, make, plain, run, tree
from tests.decoding.forward.test_simd import (
    BF16,
    F16,
    F32,
    LEVELS,
    Q4,
    Q8,
    a_node_does_not_depend_on_other_nodes_nor_on_its_slots,
    noise,
    not_a_number_shows_in_its_rows_only,
    the_number_of_threads_changes_nothing,
    weight_of,
)

pytestmark = pytest.mark.skipif(simd.library() is None, reason="no C compiler here")


FOUR = [level for level in LEVELS if simd.library(level).narrows(Q8)] if simd.library() is not None else []
BUILDS = [*LEVELS, "portable, four products", "sixteen floats, four products"]


@functools.cache
def library_of(build: str) -> Any:
    """A level's, or on any processor a plain one in which four products are added up as processors with them do."""
    if "," not in build:
        return simd.library(build)
    flags = ["-DFOURS", "-Wno-psabi", *(["-DWIDE"] if "sixteen" in build else [])]
    return simd._loaded("portable", flags)


def rounded(x: Tensor, run: int) -> Tensor:
    """x [N, inputs] as bytes times two scales a block, of `run` inputs in turns, float64: `native/narrow.c`."""
    x = x.double().view(len(x), -1, 16 // run, 2, run)  # [N, blocks, runs, halves, inputs]
    most = x.abs().amax((1, 2, 3, 4), keepdim=True)
    steps = (x.abs().amax((2, 4), keepdim=True) * 32767 / most).floor() + 1
    scale = steps.clamp(max=32767) * most / (127 * 32767)
    whole = (x / scale).round()
    assert whole.abs().max() <= 127
    return (whole * scale).flatten(1)


@pytest.mark.parametrize("kind", [Q4, Q8])
@pytest.mark.parametrize("build", BUILDS)
def test_products_are_those_of_rounded_rows_and_a_row_does_not_depend_on_its_neighbours(build, kind):
    library = library_of(build)
    assert bool(library.narrows(Q8)) == (build in FOUR or "four" in build)
    if not library.narrows(kind):
        return
    for rows, inputs in ((16, 32), (33, 64), (7, 96), (80, 288)):
        w = weight_of(kind, rows, inputs)
        packed, found = simd.pack(library, w)
        assert found == kind
        x = noise(130, inputs, seed=1) * torch.linspace(0.01, 30, inputs)
        whole = simd.product(library, packed, kind, rows, x, int8=True)
        exact = rounded(x, 4 if library.narrows(Q8) else 2) @ w.double().T
        # (A value halfway between two bytes may go to either: float32 divides, the reference does so in float64.)
        off = (whole - exact).abs().amax(1) / exact.abs().amax(1)
        assert off.median() < 1e-6
        assert off.max() < 0.01
        assert far(whole, x.double() @ w.double().T) < 0.02
        for count in range(1, 20):
            got = simd.product(library, packed, kind, rows, x[-count:].clone(), int8=True)
            assert torch.equal(got, whole[-count:])


@pytest.mark.parametrize("four", [False, True])
def test_levels_agree(four):
    x = noise(9, 96)
    for kind in (Q4, Q8) if four else (Q4,):
        w = weight_of(kind, 48, 96)
        found = [
            simd.product(library, *simd.pack(library, w), 48, x, int8=True)
            for library in map(library_of, BUILDS)
            if bool(library.narrows(Q8)) == four
        ]
        assert found
        assert all(far(one, found[0]) < 1e-6 for one in found)


@pytest.mark.parametrize("build", BUILDS)
def test_the_largest_sums_are_whole(build):
    library = library_of(build)
    x = torch.full((3, 64), 2.5)
    x[1] = -2.5
    x[2, ::2] = -2.5
    for kind in (Q4, Q8):
        if not library.narrows(kind):
            continue
        for sign in (1, -1):
            w = torch.full((16, 64), sign * (127 / 128 if kind == Q8 else 15 / 16))
            if kind == Q4:
                w[:, ::32] = 0.0  # so that most are 15 steps from it
            packed, _ = simd.pack(library, w, (kind,))
            got = simd.product(library, packed, kind, 16, x, int8=True)
            assert far(got, rounded(x, 4).double() @ w.double().T) < 1e-6


def test_other_formats_are_multiplied_as_they_are():
    for kind in (BF16, F16, F32) if FOUR else (Q8, BF16, F16, F32):
        w, x = weight_of(kind, 20, 64), noise(5, 64)
        level = LEVELS[-1]
        packed, found = simd.pack(simd.library(level), w)
        assert found == kind
        product = simd.product(simd.library(level), packed, kind, 20, x, int8=True)
        assert torch.equal(product, simd.product(simd.library(level), packed, kind, 20, x))


def test_rows_without_a_size_and_rows_of_extremes():
    library, w = simd.library(), weight_of(Q4, 16, 64)
    packed, kind = simd.pack(library, w)
    x = noise(7, 64)
    x[0], x[6] = 0, 1e-40
    x[1, 5], x[2, 9] = float("nan"), float("inf")
    x[3] *= 1e30
    x[4, 1:] *= 1e-30  # beside one that is 10^30 as large
    x[5] *= 1e-30
    got = simd.product(library, packed, kind, 16, x, int8=True)
    assert (got[[0, 6]] == 0).all()
    assert got[1].isnan().all()
    assert not got[2].isfinite().any()
    assert far(got[4], x[4].double() @ w.double().T) < 0.01
    for row in (3, 5):
        assert far(got[row], x[row].double() @ w.double().T) < 0.02


def quantised(kind: str) -> torch.nn.Module:
    """A model whose matrices, but for the head, are 4-bit blocks."""
    model = make(kind, torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "layers" in name and weight.shape[1] % 32 == 0:
            weight.data = weight_of(Q4, *weight.shape) / 16
    return model


def forward_of(kind: str, level: str | None = None) -> tuple[torch.nn.Module, simd.SimdForward]:
    model = quantised(kind)
    return model, simd.SimdForward(model, level, int8_activations=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_its_paths_up_to_what_rounding_does(kind, level):
    model, forward = forward_of(kind, level)
    assert forward.int8_activations
    assert not forward.int8
    assert forward.describe().endswith("activations in 8 bits")
    for count in (1, 33):
        ids, parents, slots = tree(count, count)
        got = run(forward, model, KVBuffer(250), ids, parents, slots)
        exact = plain(model, ids, parents)
        assert 1e-5 < far(got, exact) < 0.1
        short = run(simd.SimdForward(model, level), model, KVBuffer(250), ids, parents, slots)
        assert far(short, exact) < 1e-5


def test_a_node_does_not_depend_on_other_nodes_nor_on_its_slots_nor_on_threads():
    a_node_does_not_depend_on_other_nodes_nor_on_its_slots(*forward_of("llama"))
    the_number_of_threads_changes_nothing(*forward_of("llama"))


def test_not_a_number_shows_in_its_rows_only():
    not_a_number_shows_in_its_rows_only(*forward_of("llama"))


def test_the_runner_takes_it_and_says_where_there_is_nothing_to_round():
    runner = HfTreeModel(quantised("llama"), vocab_size=272, int8_activations=True)
    runner.prefill(list(range(5, 40)), Node(-1, None))
    assert runner.tree_forward.int8_activations
    assert not runner.notes
    other = HfTreeModel(make("llama", torch.float32), vocab_size=272, int8_activations=True)
    other.prefill(list(range(5, 40)), Node(-1, None))
    assert not other.tree_forward.int8_activations
    assert "no activation is rounded" in other.notes[0]
    assert "(none of its weights are in such blocks)" in other.notes[0]
    assert (runner.int8_activations, other.int8_activations) == (True, False)


@pytest.mark.parametrize(
    ("why", "said"),
    [("hooked", "has a forward hook"), ("sizes", "no multiples of 16"), ("uncompiled", "no C compiler")],
)
def test_why_none_is_rounded_is_said_as_it_is(monkeypatch: pytest.MonkeyPatch, why: str, said: str) -> None:
    model = quantised("llama")
    if why == "hooked":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    elif why == "sizes":
        model.config.intermediate_size += 1
    else:
        monkeypatch.setattr(simd, "library", lambda *_: None)
    runner = HfTreeModel(model, vocab_size=272, int8_activations=True, test=False)
    assert not runner.int8_activations
    assert said in runner.notes[0]


def test_one_that_the_self_test_refuses_is_not_what_it_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantised("llama")
    runner = HfTreeModel(model, vocab_size=272, int8_activations=True)
    monkeypatch.setattr(
        "dsbd_cli.decoding.model.hf_model.check_tree",
        lambda tree, *_: "off" if tree._forward.int8_activations else None,
    )
    assert not runner.int8_activations
    assert "SimdForward with activations in 8 bits is not used" in runner.notes[0]
    assert runner.in_vain == runner.notes
    # The next load, from what is kept of the verdict, tells that and no other reason.
    kept = Verdict(**json.loads(json.dumps(runner.verdict()._asdict())))
    again = HfTreeModel(model, vocab_size=272, int8_activations=True, tested=kept)
    assert again.in_vain == again.notes == runner.notes
    assert again.verdict() == runner.verdict()
    # A disagreement about another forward is no matter of the format.
    monkeypatch.setattr(
        "dsbd_cli.decoding.model.hf_model.check_tree",
        lambda tree, *_: None if type(tree._forward).__name__ == "HfForward" else "off",
    )
    other = HfTreeModel(model, vocab_size=272)
    other.require_tree()
    assert (len(other.notes) > 0, other.in_vain) == (True, [])
