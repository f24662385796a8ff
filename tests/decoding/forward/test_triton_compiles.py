"""Every Triton kernel of a forward compiles for real devices; no device is needed for that.

The interpreter, which the other tests run kernels in, takes what the compiler refuses (a variable that has another
type in each branch, say), and shared memory has no end there.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsbd_cli.decoding.forward import triton_attention, triton_kernels, triton_products

# Compute capability, and the shared memory that a program may have there, in bytes.
DEVICES = [(86, 99 << 10), (90, 227 << 10)]
_WORDS = {"ids_ptr", "positions_ptr", "slots_ptr", "begins_ptr", "used_ptr"}
_FLOATS = {"squares_ptr", "part_ptr", "peak_ptr", "mass_ptr"}
_REALS = {"eps", "head_eps", "scaling"}


def signature(kernel: Any, kind: str, constants: dict[str, Any]) -> dict[str, str]:
    """Types of a kernel's arguments, by their names."""
    types = {}
    for name in kernel.arg_names:
        types[name] = (
            "constexpr" if name in constants
            else "*i64" if name in _WORDS
            else "*fp32" if name in _FLOATS
            else "*i32" if name == "turn_ptr"
            else f"*{kind}" if name.endswith("_ptr")
            else "fp32" if name in _REALS
            else "i32"
        )  # fmt: skip
    return types


def compiled(kernel: Any, device: int, kind: str, how: dict[str, Any], **constants: Any) -> Any:
    names = kernel.arg_names
    constants = (
        {"EARLY": device >= 90} | {name: value for name, value in how.items() if name in names} | constants
    )
    options = {name: value for name, value in how.items() if name not in names}
    types = signature(kernel, kind, constants)
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]] for name in names if types[name].startswith("*")
    }
    source = ASTSource(
        kernel, types, {(names.index(name),): value for name, value in constants.items()}, aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", device, 32), options=options)


@pytest.fixture(autouse=True)
def for_real():
    if not isinstance(triton_kernels._rms, triton.runtime.JITFunction):
        pytest.skip("kernels are interpreted in this process")


@pytest.mark.slow
@pytest.mark.parametrize(("device", "shared"), DEVICES)
@pytest.mark.parametrize("count", [1, 64])
def test_products_of_few_nodes(device, shared, count):
    products = triton_products.Products(device >= 90)
    found = []
    for inputs in (576, 1536) if count > 1 else (576,):
        tile, wide = products._tile(count, inputs, 32), products._tile(count, inputs, 64)
        one = {"INPUTS": inputs, "PARTS": 64}
        found += [
            compiled(triton_products._heads, device, "bf16", tile, **one, SIZE=64, HALF=16, BIASED=True, NORMED=False),
            compiled(triton_products._heads, device, "fp16", wide, **one, SIZE=64, HALF=32, BIASED=False, NORMED=True),
            compiled(triton_products._residual, device, "bf16", products._tile(count, inputs, 16), INPUTS=inputs,
                     COLS=16, BIASED=True),
            compiled(triton_products._gated, device, "bf16", tile, **one, COLS=16),
            compiled(triton_products._logits, device, "bf16", products._head_tile(count, inputs), **one, COLS=64),
        ]  # fmt: skip
    found.append(
        compiled(triton_products._start, device, "bf16", products._how(4), NORMED=True, WIDTH=1024, SIZE=64)
    )
    assert max(kernel.metadata.shared for kernel in found) <= shared


@pytest.mark.slow
@pytest.mark.parametrize(("device", "shared", "kind"), [(*DEVICES[0], "fp32"), (*DEVICES[1], "bf16")])
def test_steps_between_large_products_and_attention(device, shared, kind):
    attention, how = triton_attention.Attention(device >= 90), triton_products.how(device >= 90, 4)
    found = [
        compiled(triton_kernels._rms, device, kind, how, BLOCK=4096),
        compiled(triton_kernels._silu, device, kind, how, BLOCK=1024),
        compiled(triton_kernels._rope, device, kind, how, NORMED=True, IN_ORDER=False, HEADS=1, HALF=64),
    ]
    exact = kind == "fp32"
    for dim in (64, 128, 256):
        tile = attention.tile(184, dim, exact)
        for eights in (False, True):
            given = {"EXACT": exact, "LEAST": 512, "DIM": dim, "AHEAD": device >= 90, "EIGHTS": eights}
            found.append(compiled(triton_attention._attend, device, kind, how | tile, **given))
    assert max(kernel.metadata.shared for kernel in found) <= shared
