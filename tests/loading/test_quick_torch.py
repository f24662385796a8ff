"""torch by halves: what a quick run leaves out is not executed, and is there, as ever, for whoever wants it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsbd_cli.loading.ready import quick_torch
from tests import builders

# What is left of a program: torch's modules and names. Whatever has been touched, they are those of a plain import.
REPORT = """
import sys, torch
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "torchgen")), sorted(vars(torch)))
print(torch.cond.__module__, torch.while_loop.__module__, torch.vmap.__module__)
"""
QUICK = """
import inspect, sys
from dsbd_cli.loading.ready import quick_torch
quick_torch.import_torch()
import torch, torch.nn.functional
LEFT = ["torch._decomp", "torch._prims", "torch._refs", "torch._subclasses.fake_tensor", "torch.fx.passes"]
waits = quick_torch.waiting()
assert {"torch._meta_registrations", "torch.export", "torch.utils.data"} < set(waits), waits
assert not [name for name in LEFT if name in sys.modules]
# Arithmetic, and whoever looks through the modules or imports one once more, touches none of them.
assert torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3)).sum() == 24
import torch.export
inspect.getmodule(inspect.currentframe())
assert quick_torch.waiting() == waits
"""
AFTER = """
assert not quick_torch.waiting()
assert not [name for name, one in sys.modules.items() if type(one) is quick_torch._Module]
assert not [one for one in sys.meta_path if type(one) is quick_torch._Finder]
"""
TOUCH = {
    "an attribute": "torch.export.export",
    "a name": "from torch.optim import AdamW",
    "a module under one": "import torch.ao.nn.quantized",
    "a function that torch hands on": "assert torch.vmap(torch.sin)(torch.ones(2)).shape == (2,)",
    "another part of torch": "import torch._subclasses.fake_tensor",
}


def fresh(program: str, *arguments: str) -> str:
    """What a new process prints."""
    ran = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def plain() -> str:
    return fresh(REPORT)


known = pytest.mark.skipif(not quick_torch.serves(), reason="this version of torch is imported whole")


@known
@pytest.mark.parametrize("how", TOUCH)
def test_whoever_wants_more_of_torch_gets_all_of_it(how: str, plain: str) -> None:
    more = fresh(f"{QUICK}\n{TOUCH[how]}\n{AFTER}\n{REPORT}").splitlines()
    named, functions = plain.splitlines()
    assert more[1] == functions
    assert set(eval(named.partition("]")[0] + "]")) <= set(eval(more[0].partition("]")[0] + "]"))
    if how == "an attribute":  # what it asks for is part of the plain import, so nothing else has come
        assert more[0] == named


TRANSFORMERS = """
from transformers import AutoModelForCausalLM
assert not quick_torch.waiting()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True).eval()
ids = torch.tensor([[1, 2, 3]])
with torch.inference_mode():
    there = model(ids).logits
meta = model.to("meta")
assert meta(ids.to("meta")).logits.shape == there.shape
exported = torch.export.export(torch.nn.Linear(3, 4), (torch.ones(2, 3),))
assert exported.module()(torch.ones(2, 3)).shape == (2, 4)
print(there.tolist())
"""


@known
def test_transformers_after_a_quick_import(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    builders.rand(tmp_path / "model")
    logits = eval(fresh(f"{QUICK}\n{TRANSFORMERS}\n{AFTER}", str(tmp_path / "model")))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.inference_mode():
        assert model(torch.tensor([[1, 2, 3]])).logits.tolist() == logits


def test_a_torch_of_unknown_version_is_left_as_it_is() -> None:
    program = f"""
import importlib.metadata
from dsbd_cli.loading.ready import quick_torch
quick_torch._VERSIONS = ("0.1",)
quick_torch.import_torch()
{AFTER.replace("sys.", "__import__('sys').")}
import sys
assert "torch" not in sys.modules
"""
    fresh(program)


def test_a_torch_that_is_there_is_left_as_it_is() -> None:
    import torch

    before = torch.vmap
    quick_torch.import_torch()
    assert torch.vmap is before
    assert not quick_torch.waiting()
