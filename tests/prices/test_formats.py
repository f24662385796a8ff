"""Number formats: which one follows from times, what a slice of a model is, and timing on a simulated machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsbd_cli.loading.hardware import NumberFormat
from dsbd_cli.loading.model import load_config
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.source import parse_source
from dsbd_cli.prices import Curve, slices
from dsbd_cli.prices.formats import Verdict, quickest
from dsbd_cli.prices.slices import Slice, Sliced, judge, measure
from tests import builders
from tests.decoding.forward import emulated
from tests.prices.test_measure import Machine, Model

BOTH = NumberFormat(torch.float32), NumberFormat(torch.bfloat16)


def times(*curves: tuple[float, float]) -> dict[str, dict[int, float]]:
    names = ("float32", "bfloat16", "float16")
    return {name: dict(zip((1, 16), curve, strict=True)) for name, curve in zip(names, curves, strict=False)}


@pytest.mark.parametrize(
    ("ms", "taken"),
    [
        (times((4.0, 8.0)), "float32"),
        (times((4.0, 8.0), (4.0, 8.0)), "float32"),
        (times((4.0, 8.0), (3.6, 7.2)), "float32"),  # 1.11 times: nearly equal
        (times((4.0, 8.0), (3.4, 6.8)), "bfloat16"),  # 1.18 times
        (times((4.0, 8.0), (9.0, 18.0)), "float32"),
        (times((3.0, 30.0), (9.0, 9.0)), "float32"),  # a third as quick at one node, 3.3 times at sixteen
        (times((3.0, 30.0), (6.0, 9.0)), "bfloat16"),
        (
            times((4.0, 8.0), (3.4, 6.8), (3.2, 6.6)),
            "bfloat16",
        ),  # the third is not clearly quicker than the second
    ],
)
def test_what_rounds_more_has_to_be_clearly_quicker(ms: Any, taken: str) -> None:
    assert quickest(ms) == taken


def test_a_verdict_is_what_was_written() -> None:
    busy = Verdict("bfloat16", times((4.0, 8.0), (2.0, 3.0)), "measured once", "others were at work")
    assert Verdict.from_dict(busy.to_dict()) == busy
    verdict = Verdict("bfloat16", times((4.0, 8.0), (2.0, 3.0)), "measured once")
    assert Verdict.from_dict(verdict.to_dict()) == verdict
    assert verdict.describe() == (
        "bfloat16, measured once; ms of a slice by nodes: float32 4 at 1, 8 at 16; bfloat16 2 at 1, 3 at 16"
    )
    assert Verdict("float32", {}, "not timed").describe() == "float32, not timed"


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"dtype": None},
        {"dtype": "float16"},
        {"ms": 3},
        {"ms": {"bfloat16": {"1": -1}}},
        {"ms": {"bfloat16": {"1": 10**400}}},
    ],
)
def test_anything_else_is_no_verdict(change: dict[str, Any]) -> None:
    values = Verdict("bfloat16", times((4.0, 8.0), (2.0, 3.0)), "").to_dict() | change
    for wrong in (values, None, []):
        with pytest.raises(ValueError, match=r".+"):
            Verdict.from_dict(wrong)


class Timed:
    """A slice whose forwards cost what a curve says."""

    def __init__(self, machine: Machine, *ms: float, room: int | None = None) -> None:
        self.tree = Model(machine, "target", Curve((1, 16), ms), 0.25, room)
        self._machine, self.sweeps = machine, 0

    def sweep(self) -> None:
        self.sweeps += 1
        self._machine.spend(50.0)


@pytest.mark.parametrize("seed", [None, *range(6)])
def test_times_are_those_of_the_machine_and_its_noise_decides_nothing(seed: int | None) -> None:
    machine = Machine(seed, often=0.4)
    models: Any = {"float32": Timed(machine, 4.0, 9.0), "bfloat16": Timed(machine, 3.8, 8.8)}
    found = measure(models, clock=machine, budget=20.0)
    for name, one in (("float32", (4.0, 9.0)), ("bfloat16", (3.8, 8.8))):
        assert list(found[name].values()) == pytest.approx(one, rel=0.1)
    assert quickest(found) == "float32"
    assert models["float32"].sweeps == models["bfloat16"].sweeps == len(found["float32"]) * 10


def test_the_budget_ends_it_after_two_rounds_at_least() -> None:
    machine = Machine()
    models: Any = {"float32": Timed(machine, 4e3, 9e3), "bfloat16": Timed(machine, 3e3, 4e3)}
    assert quickest(measure(models, clock=machine)) == "bfloat16"
    assert models["float32"].sweeps == 3 * 2


def test_a_short_context_is_not_left() -> None:
    machine = Machine()
    models: Any = {"float32": Timed(machine, 4.0, 9.0, room=2), "bfloat16": Timed(machine, 4.0, 9.0, room=2)}
    assert list(measure(models, clock=machine)["float32"]) == [1]


# Slices of real (tiny) models.


def place_of(folder: Path) -> Place:
    return Place(parse_source(str(folder), "target"), "target", str(folder), {"local_files_only": True})


def sliced(folder: Path, kind: str = "llama", **options: Any) -> Slice:
    builders.rand(folder, kind, **options)
    place = place_of(folder)
    return Slice(place, load_config(place, False), False)


@pytest.mark.parametrize("tied", [True, False])
def test_a_slice_is_the_first_layers_and_as_large_a_part_of_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    monkeypatch.setattr(slices, "_WEIGHTS", 22_000)  # two layers of 10,000, of four
    cut = sliced(tmp_path, num_hidden_layers=4, tie_word_embeddings=tied, vocab=259)
    assert (cut.vocab_size, cut.share) == (128 + 259 % 16, 0.5)
    model: Any = cut.model(BOTH[0], False).tree.model
    whole = builders.rand(tmp_path / "again", num_hidden_layers=4, tie_word_embeddings=tied, vocab=259)
    theirs = dict(whole.named_parameters())
    assert len(model.model.layers) == 2
    for name, weight in model.named_parameters():  # its own weights, not made-up ones
        assert torch.equal(weight, theirs[name][: len(weight)]), name
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_a_slice_on_tiles_keeps_its_weights_in_blocks_and_is_pushed_out_by_what_the_rest_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "_WEIGHTS", 1)  # one layer
    model = builders.rand(
        tmp_path, hidden_size=64, intermediate_size=96, num_attention_heads=2, head_dim=32, vocab=256
    )
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data = (weight.data * 400).round().clamp(-7, 7) / 64  # whole numbers times one scale
    model.save_pretrained(str(tmp_path))
    place = place_of(tmp_path)
    with emulated.tiles():
        cut = Slice(place, load_config(place, False), False)
        one = cut.model(BOTH[1], False)
        forward: Any = one.tree.tree_forward
        assert forward.describe() == "AMX forward, bfloat16, weights in 4-bit blocks"
        weights = sum(forward.formats.values())
        assert forward.bytes_read < weights
        assert one._rest.nbytes == pytest.approx(forward.bytes_read * (1 / cut.share - 1), abs=16)


def test_made_up_weights_where_none_lie_here(tmp_path: Path) -> None:
    builders.rand(tmp_path)
    config = load_config(place_of(tmp_path), False)
    (tmp_path / "model.safetensors").unlink()
    for one in BOTH:
        weight = Slice(place_of(tmp_path), config, False).model(one, False).tree.model.lm_head.weight
        assert weight.dtype == one.dtype
        assert torch.equal(weight.float(), weight.bfloat16().float())
        assert weight.std() > 0


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_formats_are_timed_through_the_forwards_that_serve_the_model(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {}

    def fake(models: dict[str, Sliced]) -> Any:
        for name, one in models.items():
            one.sweep()
            seen[name] = one
        return times((4.0, 8.0), (2.0, 3.0))

    monkeypatch.setattr(slices, "measure", fake)
    builders.rand(tmp_path, kind)
    place = place_of(tmp_path)
    verdict = judge(place, load_config(place, False), BOTH, int8=False, trust=False)
    assert verdict.dtype == "bfloat16"
    assert verdict.origin.startswith("measured ")
    assert {name: one.tree.model.dtype for name, one in seen.items()} == {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
    }


@pytest.mark.parametrize("share", [0.0, 0.61])
def test_a_verdict_says_whether_the_machine_was_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(slices, "Window", lambda: SimpleNamespace(share=lambda: share))
    monkeypatch.setattr(slices, "measure", lambda models: times((4.0, 8.0), (2.0, 3.0)))
    builders.rand(tmp_path)
    place = place_of(tmp_path)
    found = judge(place, load_config(place, False), BOTH, int8=False, trust=False)
    assert ("on a busy machine (other processes took 61%" in found.describe()) is (share > 0.5)
    assert bool(found.busy) is (share > 0.5)


@pytest.mark.parametrize(("share", "chosen"), [(None, "float32"), (0.05, "float32"), (0.61, "bfloat16")])
def test_beside_others_one_thread_says_which_format_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None, chosen: str
) -> None:
    """Two threads, one of whose cores somebody else had, took whichever came first: half the speed, for good."""
    monkeypatch.setattr(slices, "Window", lambda: SimpleNamespace(share=lambda: share))
    seen: list[int] = []

    def measured(models: Any) -> Any:
        seen.append(torch.get_num_threads())
        return times((4.0, 8.0), (4.0, 8.0) if seen[-1] == 2 else (2.0, 3.0))

    monkeypatch.setattr(slices, "measure", measured)
    builders.rand(tmp_path)
    place = place_of(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert judge(place, load_config(place, False), BOTH, int8=False, trust=False).dtype == chosen
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == ([2, 1] if chosen == "bfloat16" else [2])


def test_a_real_clock_gives_times_of_each(tmp_path: Path) -> None:
    cut = sliced(tmp_path)
    found = measure({"float32": cut.model(BOTH[0], False)}, budget=0.01)
    assert found["float32"].keys() == {1, 16}
    assert all(ms > 0 for ms in found["float32"].values())


@pytest.mark.parametrize("computes", [torch.float32, torch.bfloat16])
def test_what_one_forward_serves_alike_is_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computes: torch.dtype
) -> None:
    """As the float32 forward in C does, whatever a checkpoint is held in, and AMX's for drafts."""
    monkeypatch.setattr(slices, "measure", lambda *_: pytest.fail("timed in vain"))
    forward = SimpleNamespace(dtype=computes, int8=False, int8_activations=False, bytes_read=100)
    monkeypatch.setattr("dsbd_cli.decoding.HfTreeModel.tree_forward", forward)
    builders.rand(tmp_path)
    place = place_of(tmp_path)
    verdict = judge(place, load_config(place, False), BOTH, int8=True, trust=False)
    assert verdict.dtype == str(computes).removeprefix("torch.")
    assert "the same forward" in verdict.describe()


def test_of_formats_that_compute_alike_one_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 bits where there are no blocks."""
    seen: list[str] = []

    def fake(models: dict[str, Sliced]) -> Any:
        seen.extend(models)
        return times((4.0, 8.0), (2.0, 3.0))

    monkeypatch.setattr(slices, "measure", fake)
    builders.rand(tmp_path, "gpt2")
    place = place_of(tmp_path)
    open_ = (*BOTH, NumberFormat.called("int8"))
    assert judge(place, load_config(place, False), open_, int8=False, trust=False).dtype == "bfloat16"
    assert seen == ["float32", "bfloat16"]


def test_a_model_that_cannot_be_sliced_takes_what_rounds_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builders.rand(tmp_path)
    place = place_of(tmp_path)
    config = load_config(place, False)
    for broken in ({"_MOST": 10}, {"skeleton": lambda *_: None}):
        with monkeypatch.context() as patch:
            for name, value in broken.items():
                patch.setattr(slices, name, value)
            assert (
                judge(place, config, BOTH, int8=False, trust=False)
                .describe()
                .startswith("float32, not timed")
            )
