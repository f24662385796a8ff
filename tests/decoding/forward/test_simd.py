"""The float32 forward in C: torch's numbers on every path, the same for a node whoever shares its forward."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from dsbd_cli.decoding.cache.buffers import KVBuffer
from dsbd_cli.decoding.forward import native, simd
from dsbd_cli.decoding.forward.backends import candidates, why_no_simd
from dsbd_cli.errors import UserError
from dsbd_cli.loading import processor
from tests.decoding.forward.test_amx import KINDS, far, make, off_behind_a_long_path, plain, run, tree

LEVELS = [level for level in processor.levels() if level != "amx"]
Q4, Q8, BF16, F16, F32 = range(5)

pytestmark = pytest.mark.skipif(simd.library() is None, reason="no C compiler here")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(kind: int, rows: int, inputs: int) -> Tensor:
    """A random weight that the format holds, float32."""
    w = noise(rows, inputs, seed=rows)
    if kind in (Q4, Q8):
        blocks = w.view(rows, inputs // 32, 32)
        low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
        if kind == Q4:
            scale, offset = ((high - low) / 15).half().float(), low.half().float()
            return (((blocks - offset) / scale).round().clamp(0, 15) * scale + offset).view(rows, inputs)
        scale = (blocks.abs().amax(-1, keepdim=True) / 127).half().float()
        return ((blocks / scale).round().clamp(-127, 127) * scale).view(rows, inputs)
    return w.bfloat16().float() if kind == BF16 else w.half().float() if kind == F16 else w


def test_dsbd_cpu_lowers_the_level_and_knows_its_names(monkeypatch):
    monkeypatch.setenv("DSBD_CPU", "portable")
    assert processor.level() == "portable"
    assert not processor.amx_likely()
    monkeypatch.setenv("DSBD_CPU", "amx")
    assert processor.level() == processor.levels()[-1]
    monkeypatch.setenv("DSBD_CPU", "sse9")
    with pytest.raises(UserError, match="DSBD_CPU=sse9"):
        processor.level()


@pytest.mark.parametrize(
    ("missing", "wanted", "found"),
    [
        (set(), "avxvnni", "avxvnni"),
        ({"avx_vnni"}, "avxvnni", "avx2"),
        ({"avx512_vnni", "amx_int8"}, None, "avx512"),
        ({"avx512_vnni", "amx_int8"}, "avx512vnni", "avx512"),
        ({"avx512f"}, None, "avxvnni"),
        ({"avx512f", "avx_vnni"}, "avx512", "avx2"),
        ({"fma"}, "amx", "portable"),
    ],
)
def test_a_level_is_used_where_all_of_it_is_there(monkeypatch, missing, wanted, found):
    every = processor.AMX | {"avx_vnni", "avx512_vnni"}
    monkeypatch.setattr(processor, "flags", lambda: every - missing)
    if wanted:
        monkeypatch.setenv("DSBD_CPU", wanted)
    else:
        monkeypatch.delenv("DSBD_CPU", raising=False)
    assert processor.level() == found


def test_levels_are_built_apart():
    libraries = [simd.library(level) for level in LEVELS]
    assert all(library is not None for library in libraries)
    assert len({library._name for library in libraries}) == len(LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", range(5), ids=simd.FORMATS)
def test_products_are_torchs_and_a_row_does_not_depend_on_its_neighbours(level, kind):
    library = simd.library(level)
    for rows, inputs in ((16, 32), (33, 64), (7, 96), (80, 288)):
        w = weight_of(kind, rows, inputs)
        packed, found = simd.pack(library, w)
        assert found == kind
        x = noise(130, inputs, seed=1)
        whole = simd.product(library, packed, kind, rows, x)
        exact = x.double() @ w.double().T
        assert (whole - exact).abs().max() < 3e-6 * exact.abs().max()
        for count in range(1, 34):
            assert torch.equal(simd.product(library, packed, kind, rows, x[-count:].clone()), whole[-count:])


# Vectors of 16 floats as AVX-512 has them, on any processor, and an end of the process at the first that is read
# as if it lay where it does not: an AVX-512 machine ends it too.
_WIDE = """
import sys
from dsbd_cli.decoding.forward import native, simd
wide = ["-O1", "-DWIDE", "-Wno-psabi", "-fsanitize=alignment", "-fsanitize-undefined-trap-on-error", *sys.argv[1:]]
built = native.built
native.built = lambda *sources, flags=(), level=None: built(*sources, flags=[*flags, *wide], level=level)
from tests.decoding.forward import test_simd
x = test_simd.noise(13, 96)
for kind in range(5):
    packed, _ = simd.pack(simd.library(), test_simd.weight_of(kind, 80, 96))
    for count in range(1, 14):
        simd.product(simd.library(), packed, kind, 80, x[:count].clone(), int8=True)
        simd.product(simd.library(), packed, kind, 80, x[:count].clone())
test_simd.test_a_bfloat16_model_stays_in_its_format()
print("whole")
"""


@pytest.mark.parametrize("more", [[], ["-DFOURS"]], ids=["pairs", "fours"])
def test_vectors_of_sixteen_are_read_where_they_lie(more):
    command = [sys.executable, "-c", _WIDE, *more]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "whole\n", (ran.returncode, ran.stderr[-2000:])


@pytest.mark.parametrize("inputs", [1, 2, 7, 33])
def test_odd_sizes(inputs):
    w, x = noise(19, inputs), noise(6, inputs, seed=1)
    library = simd.library()
    packed, kind = simd.pack(library, w)
    assert kind == F32
    assert torch.allclose(simd.product(library, packed, kind, 19, x), x @ w.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", range(5), ids=simd.FORMATS)
def test_no_format_changes_a_weight(kind):
    library, w = simd.library(), weight_of(kind, 20, 128)
    packed, _ = simd.pack(library, w, (kind,))
    assert torch.equal(simd.product(library, packed, kind, 20, torch.eye(128)).T, w)
    if kind != F32:
        w[11, 77] *= 1 + 1e-6
        with pytest.raises(ValueError, match="no format"):
            simd.pack(library, w, (kind,))
        assert simd.pack(library, w)[1] > kind


def test_blocks_of_every_shape_that_gguf_files_have():
    library = simd.library()
    steps = torch.arange(32)
    half = torch.tensor(0.0123).half().float()
    four = {
        "Q4_0": (steps % 16 - 8) * half,
        "Q4_0, negative scale": (8 - steps % 16) * half,
        "constant": torch.full((32,), float(half)),
        "zero": torch.zeros(32),
        "few steps": (steps % 5) * half - 3 * half.half().float(),
        "tiny": (steps % 16) * 2.0**-24,
    }
    for name, block in four.items():
        assert simd.pack(library, block.float()[None])[1] == Q4, name
    row = torch.cat([(steps - 16) * half, torch.tensor([127.0]) * half, torch.zeros(31)])
    assert simd.pack(library, row[None])[1] == Q8  # one scale a row: a draft's int8 rows
    for bad in (float("inf"), float("nan")):
        w = noise(4, 64)
        w[2, 3] = bad
        packed, kind = simd.pack(library, w)
        assert kind == F32
        assert simd.product(library, packed, kind, 4, noise(1, 64))[0, 2].isfinite() == False  # noqa: E712


def forward_of(kind: str, level: str | None = None, dtype: torch.dtype = torch.float32):
    model = make(kind, dtype)
    assert why_no_simd(model, False) is None
    return model, simd.SimdForward(model, level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_is_its_paths(kind, level):
    model, forward = forward_of(kind, level)
    for count in (1, 5, 33, 100):
        ids, parents, slots = tree(count, count)
        got = run(forward, model, KVBuffer(250), ids, parents, slots)
        assert got.dtype == torch.float32
        assert far(got, plain(model, ids, parents)) < 1e-5


def test_a_bfloat16_model_stays_in_its_format():
    model, forward = forward_of("llama", dtype=torch.bfloat16)
    assert set(forward.formats) == {"bfloat16"}
    assert forward.describe() == f"float32 forward in C ({processor.level()}), weights in bfloat16"
    ids, parents, slots = tree(20, 1)
    assert far(run(forward, model, KVBuffer(64), ids, parents, slots), plain(model, ids, parents)) < 1e-5


def a_node_does_not_depend_on_other_nodes_nor_on_its_slots(model, forward):
    ids, parents, slots = tree(60, 3)
    whole = run(forward, model, KVBuffer(256), ids, parents, slots)
    for count in (1, 2, 5, 20):
        assert torch.equal(
            run(forward, model, KVBuffer(256), ids[:count], parents[:count], slots[:count]), whole[:count]
        )
    elsewhere = [256 - slot for slot in slots]
    assert torch.equal(run(forward, model, KVBuffer(300), ids, parents, elsewhere), whole)


def test_a_node_does_not_depend_on_other_nodes_nor_on_its_slots():
    a_node_does_not_depend_on_other_nodes_nor_on_its_slots(*forward_of("llama"))


def the_number_of_threads_changes_nothing(model, forward):
    ids, parents, slots = tree(37, 4)
    usual = run(forward, model, KVBuffer(128), ids, parents, slots)
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(run(forward, model, KVBuffer(128), ids, parents, slots), usual)
        finally:
            torch.set_num_threads(before)


def test_the_number_of_threads_changes_nothing():
    the_number_of_threads_changes_nothing(*forward_of("llama"))


@torch.inference_mode()
def test_a_prompt_is_the_same_in_any_parts_and_as_a_tree():
    model, forward = forward_of("llama")
    ids, whole = torch.arange(110) + 5, None
    for parts in ([110], [33, 77], [1, 109]):
        cache, end, got = KVBuffer(112), 0, []
        for part in parts:
            begin, end = end, end + part
            cache.slots, cache.used = torch.arange(begin + 1, end + 1), end + 1
            got.append(forward(cache, ids[begin:end], torch.arange(begin, end), None, 0))
        whole = torch.cat(got) if whole is None else whole
        assert torch.equal(torch.cat(got), whole)
    assert far(whole, model(ids[None]).logits[0]) < 1e-5
    chain = run(forward, model, KVBuffer(128), ids, list(range(-1, 109)), list(range(120, 10, -1)))
    assert torch.equal(chain, whole)
    cache = KVBuffer(112)
    cache.slots, cache.used = torch.arange(1, 111), 111
    assert torch.equal(forward(cache, ids, torch.arange(110), None, torch.tensor([4, 0])), whole[[4, 0]])


def not_a_number_shows_in_its_rows_only(model, forward):
    model.model.embed_tokens.weight.data[7] = float("nan")
    got = run(forward, model, KVBuffer(64), torch.tensor([5, 7, 9, 11]), [-1, 0, 0, 1], [3, 1, 2, 6])
    assert got[[1, 3]].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_not_a_number_shows_in_its_rows_only():
    not_a_number_shows_in_its_rows_only(*forward_of("llama"))


def test_the_runner_takes_it_and_its_pool_may_grow():
    assert off_behind_a_long_path(make("llama", torch.float32), simd.SimdForward).max() < 1e-4


def test_without_a_compiler_the_other_forwards_serve(monkeypatch):
    monkeypatch.setattr(simd, "library", lambda level=None: None)
    model = make("llama", torch.float32)
    assert why_no_simd(model, False) == "no C compiler"
    assert not any(isinstance(one, simd.SimdForward) for one in candidates(model))


def test_what_it_cannot_take_is_left_to_others():
    assert why_no_simd(make("llama", torch.float64), False) is not None
    assert why_no_simd(make("llama", torch.float32, head_dim=8), False) is not None
    assert why_no_simd(make("llama", torch.float32, intermediate_size=200), False) is not None
    assert np.isfinite(simd.SimdForward(make("llama", torch.float32, vocab_size=259)).relative_node_cost)


def test_a_compiler_that_does_not_know_the_highest_level_builds_a_lower_one(monkeypatch, tmp_path):
    real, wrapper = processor.compiler(), tmp_path / "cc"
    # (By each level's own switch: that of the highest here, and no other level has it.)
    if len(LEVELS) < 2 or processor.level() == "amx":
        pytest.skip("no levels here, or one that asks for whatever the processor has")
    own = set(processor.build_flags(LEVELS[-1])) - set(processor.build_flags(LEVELS[-2]))
    case = "|".join(f"*{flag}*" for flag in own if flag.startswith("-m"))
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in {case}) echo no such option >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", str(wrapper))
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    monkeypatch.setattr(simd, "_library", simd._library.__wrapped__)
    monkeypatch.setattr(native, "_failures", [])
    assert simd._level_below.__wrapped__(LEVELS[-1]) == LEVELS[-2]
    assert native.failure() == "no such option"
