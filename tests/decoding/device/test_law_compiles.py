"""The law's Triton kernels compile for real devices as they are launched; no device is needed for that.

(`test_triton_compiles` does so for a forward's.) What is launched on tensors of a CPU is compiled instead of run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton comes with torch's CUDA wheels")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsbd_cli.decoding.device import law_triton
from dsbd_cli.decoding.device.layout import CoverLayout

_POINTERS = {torch.int64: "*i64", torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16"}
EOS = torch.zeros(2, dtype=torch.long)


def words(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.fixture(params=[86, 90])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of the kernels that were launched, each compiled for a device; from 90 on they start early."""
    if not isinstance(law_triton._verify, triton.runtime.JITFunction):
        pytest.skip("kernels are interpreted in this process")
    device, names = int(request.param), set()

    def run(kernel: Any, *args: Any, grid: Any, **rest: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False))
        given |= {name: value for name, value in rest.items() if name in kernel.arg_names}
        constants = {one.name: given[one.name] for one in kernel.params if one.is_constexpr}
        types = {
            name: "constexpr" if name in constants
            else _POINTERS[value.dtype] if isinstance(value, torch.Tensor)
            else "i32"
            for name, value in given.items()
        }  # fmt: skip
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        options = {name: value for name, value in rest.items() if name not in kernel.arg_names}
        options.pop("launch_pdl", None)
        triton.compile(
            ASTSource(kernel, types, places), target=GPUTarget("cuda", device, 32), options=options
        )
        names.add(kernel.__name__)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    monkeypatch.setattr(law_triton, "starts_early", lambda _: device >= 90)
    return names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rules"),
    [({"recalled": 8}, {}), ({"kept": 12}, {}), ({"drawn": 10}, {}), ({"drawn": 10}, {"distinct": True}),
     ({}, {"greedy": True}), ({}, {"distinct": True})],
)  # fmt: skip
def test_forests_and_verification(compiled, kind, rules):
    law = law_triton.TritonLaw(torch.device("cuda", 0))
    layout = CoverLayout.of(2, 4, 8, 3, **kind)
    greedy, distinct = rules.get("greedy", False), rules.get("distinct", False)
    state, request, outcome = (
        words(2, size) for size in (layout.state_size, layout.request_size, layout.outcome_size)
    )
    best, scores = words(16, 21, dtype=torch.float32), words(2, 8, dtype=torch.float64)
    if layout.drawn:
        law.draw(best, scores, 1, layout, request, outcome, EOS, greedy, 10, distinct)
    else:
        law.draft(best, scores, 1, layout, outcome, EOS)
    if layout.recalled:
        law.recall(best, words(2, 8), 1, layout, outcome, words(2, layout.memory_size))
    rows = words(2 * layout.nodes, 21, dtype=torch.float32)
    law.verify(rows, state, state.clone(), request, outcome, layout, EOS, greedy, 10, distinct)
    assert compiled == {
        "_verify",
        "_draw" if layout.drawn else "_draft",
        *(["_recall"] if layout.recalled else []),
    }


def test_best_entries_and_masks(compiled):
    law, layout = law_triton.TritonLaw(torch.device("cuda", 0)), CoverLayout.of(1, 4, 8, 3)
    masks: Any = SimpleNamespace(table=words(64, 512, dtype=torch.bfloat16))
    side: Any = SimpleNamespace(vocab=49152, top_n=10)
    law.pack(side, words(8, 49152, dtype=torch.bfloat16))
    law.forest_masks(masks, words(1, 4), words(1, 3, 8), words(1, 24), words(1, 24))
    law.catch_up_masks(masks, words(1, layout.state_size), layout, words(1, 8), words(1, 8))
    assert compiled == {"_parts_of_rows", "_whole_rows", "_forest_masks", "_catch_up_masks"}
