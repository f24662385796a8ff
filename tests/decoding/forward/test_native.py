"""The compiled steps are the tensor operations they replace, rounding included."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dsbd_cli.cli import doctor
from dsbd_cli.decoding.forward import native, simd
from dsbd_cli.decoding.forward.kernels import CKernels, c_kernels
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.loading import hung, processor
from tests import builders

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def kernels() -> CKernels:
    loaded = c_kernels()
    if loaded is None:
        pytest.skip("no C compiler here")
    return loaded


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in bfloat16, where every rounding is the same; a few units of float32 apart otherwise."""
    if a.dtype == torch.bfloat16:
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=2e-6, atol=1e-6)


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As Hugging Face's Llama computes it."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 64, 576])
def test_rms(kernels, dtype, width):
    x, weight = noise(5, width, dtype=dtype), noise(width, dtype=dtype, seed=1)
    assert close(kernels.rms(x, weight, 1e-5), rms(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu(kernels, dtype):
    both = 10 * noise(5, 66, dtype=dtype)
    both[0, :6] = torch.tensor([0.0, -0.0, 80.0, -80.0, 200.0, -60.0])
    assert close(kernels.silu(both), F.silu(both[:, :33]) * both[:, 33:])
    both[1, 3] = float("nan")
    assert kernels.silu(both).isnan().sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shared", [1, 3])
def test_rope(kernels, dtype, normed, shared):
    count, groups, size, capacity = 4, 2, 16, 9
    heads = groups * shared
    qkv = noise(count, (heads + 2 * groups) * size, dtype=dtype)
    cos, sin = noise(count, size, dtype=dtype, seed=1), noise(count, size, dtype=dtype, seed=2)
    norms = (noise(size, dtype=dtype, seed=3), noise(size, dtype=dtype, seed=4)) if normed else None
    slots = torch.tensor([3, 8, 1, 5])
    keys, values = torch.zeros(2, 1, groups, capacity, size, dtype=dtype)
    query = kernels.rope(qkv, cos, sin, slots, norms, keys, values, heads, 1e-6)

    parts = qkv.view(count, heads + 2 * groups, size)
    turn, value = parts[:, : heads + groups], parts[:, heads + groups :]
    if norms is not None:
        turn = torch.cat([rms(turn[:, :heads], norms[0], 1e-6), rms(turn[:, heads:], norms[1], 1e-6)], 1)
    low, high = turn.chunk(2, -1)
    turn = turn * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
    wanted = turn[:, :heads].view(count, groups, shared, size).transpose(1, 2).flatten(0, 1)
    assert close(query, wanted)
    assert close(keys[0][:, slots], turn[:, heads:].transpose(0, 1))
    assert torch.equal(values[0][:, slots], value.transpose(0, 1))
    untouched = [slot for slot in range(capacity) if slot not in slots]
    assert not keys[0][:, untouched].any()
    assert not values[0][:, untouched].any()


def test_shrink_and_grow(kernels):
    x = noise(4, 33, dtype=torch.float32)
    x[2] = 0
    small, sizes = kernels.shrink(x)
    assert torch.allclose(small.abs().amax(1), torch.tensor([1.0, 1, 0, 1]))
    add = noise(4, 33, dtype=torch.float32, seed=1)
    assert torch.allclose(kernels.grow(small.clone(), sizes, None), x, atol=1e-5)
    assert torch.allclose(kernels.grow(small.clone(), sizes, add), x + add, atol=1e-5)


@pytest.mark.parametrize("trouble", ["switched off", "no compiler", "broken compiler", "cache not writable"])
def test_without_kernels_everything_goes_on(trouble, monkeypatch, tmp_path):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if trouble == "switched off":
        monkeypatch.setenv("DSBD_NATIVE", "0")
    elif trouble == "no compiler":
        monkeypatch.setattr(processor.shutil, "which", lambda name: None)
    elif trouble == "broken compiler":
        monkeypatch.setenv("CC", "false")
        with pytest.raises(subprocess.CalledProcessError):
            native.built("kernels.c")
    else:
        (tmp_path / "native").write_text("a file where a folder should be")
    assert c_kernels.__wrapped__() is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_on_several_threads_are_the_same_rows(kernels, dtype):
    logits = noise(41, 700, dtype=dtype)
    logits[3, 5] = float("nan")
    whole = kernels.top_logits(logits, 650, 9)
    single = [kernels.top_logits(row[None], 650, 9) for row in logits]
    for got, wanted in zip(whole, zip(*single, strict=True), strict=True):
        assert (got == np.concatenate(wanted)).all()


def test_a_compiler_that_hangs_is_waited_for_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    slow = tmp_path / "cc"
    slow.write_text(f"#!/bin/sh\necho >> {calls}\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_PATIENCE", 0.2)

    def asked() -> int:
        """How often it was called when all that is compiled was asked for."""
        before = calls.stat().st_size if calls.exists() else 0
        for source in ("kernels.c", "simd.c"):
            with pytest.raises(subprocess.SubprocessError, match=r"had not ended after 0\.2 s"):
                native.built(source)
        return calls.stat().st_size - before

    assert asked() == 1
    assert asked() == 0
    assert "had not ended after 0.2 s (20" in doctor.examine()["devices"][0]
    # It may have been mended: a day later, when it is another, or when somebody asks.
    now = time.time()
    with monkeypatch.context() as later:
        later.setattr(hung.time, "time", lambda: now + 25 * 3600)
        assert asked() == 1
    with monkeypatch.context() as back:  # a clock that was set back is no reason to wait for ever
        back.setattr(hung.time, "time", lambda: now - 3600)
        assert asked() == 1
    hung.forget()
    assert asked() == 1
    if (works := shutil.which("cc")) is not None:
        slow.write_text(f'#!/bin/sh\nexec {works} "$@"\n')
        monkeypatch.setattr(native, "_PATIENCE", 120.0)
        assert native.built("kernels.c").is_file()
        assert hung.remembered() is None
    # What is remembered may be damaged.
    for damaged in (b"", b"[]", b'{"when": "x"}', b'{"when": 1e400, "seconds": 1}'):
        hung._path().write_bytes(damaged)
        assert hung.remembered() is None


def test_cc_may_be_several_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `CC="ccache gcc"`, or with options behind it."""
    compiler = processor.compiler()
    if compiler is None or not Path("/usr/bin/env").exists():
        pytest.skip("no C compiler here")
    monkeypatch.setenv("CC", f"/usr/bin/env '{compiler}' -O1")
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    assert native.built("kernels.c").is_file()


@pytest.mark.parametrize(
    ("cc", "said"),
    [
        ("sh -c 'echo no such option >&2; exit 1'", "no such option"),
        ("/nowhere/cc", "/nowhere/cc"),
        ("'", "quot"),
    ],
)
def test_a_compiler_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cc: str, said: str
) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_failures", [])
    monkeypatch.setattr(simd, "_library", simd._library.__wrapped__)  # asked anew
    runner = HfTreeModel(builders.rand(tmp_path / "model", head_dim=16), vocab_size=259)
    (note,) = runner.notes
    assert note.startswith("target: slower, for there is no code in C: ")
    assert said in note
