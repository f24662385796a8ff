"""What `auto` means as a number format: a rule where nothing can be chosen or kept, else what was measured once."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsbd_cli.decoder import Decoder
from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec, load_pair, number_format, processor
from dsbd_cli.loading.hardware import NumberFormat, choice, pick_dtype
from dsbd_cli.loading.place import Place
from dsbd_cli.loading.ready import key
from dsbd_cli.loading.ready import pair as ready
from dsbd_cli.loading.source import parse_source
from dsbd_cli.prices import formats, slices, store
from tests import builders

CPU = torch.device("cpu")
BOTH = (torch.float32, torch.bfloat16)
INT8 = NumberFormat(torch.float32, True)


@pytest.mark.parametrize("likely", [True, False])
def test_a_cpu_takes_bfloat16_where_it_is_quick_and_loses_nothing(monkeypatch, likely):
    monkeypatch.setattr(processor, "amx_likely", lambda: likely)
    assert pick_dtype("auto", CPU, coarse=True) == (torch.bfloat16 if likely else torch.float32)
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("float32", CPU, coarse=True) == torch.float32
    assert pick_dtype("bfloat16", CPU) == torch.bfloat16


def test_a_checkpoint_keeps_the_digits_it_has(tmp_path, monkeypatch):
    monkeypatch.setattr(processor, "amx_likely", lambda: True)
    builders.rand(tmp_path / "full")
    builders.rand(tmp_path / "half").to(torch.bfloat16).save_pretrained(tmp_path / "half")
    for target, draft in (("full", "half"), ("half", "full")):
        pair = load_pair(PairSpec(str(tmp_path / target), str(tmp_path / draft)))
        assert pair.target.dtype == (torch.float32 if target == "full" else torch.bfloat16)
        assert pair.draft.dtype == (torch.float32 if draft == "full" else torch.bfloat16)


def test_without_a_compiler_or_its_instructions_nothing_is_likely(monkeypatch):
    flags = processor.AMX | {"more"}
    monkeypatch.setattr(processor, "flags", lambda: flags)
    monkeypatch.setattr(processor, "can_compile", lambda: True)
    assert processor.amx_likely()
    monkeypatch.setattr(processor, "can_compile", lambda: False)
    assert not processor.amx_likely()
    monkeypatch.setattr(processor, "can_compile", lambda: True)
    monkeypatch.setattr(processor, "flags", lambda: flags - {"amx_bf16"})
    assert not processor.amx_likely()


def test_quick_bfloat16_is_read_off_the_processor_and_can_be_hidden(monkeypatch):
    monkeypatch.setattr(processor, "can_compile", lambda: False)  # torch's own products then
    monkeypatch.setattr(processor, "flags", lambda: processor.AMX - {"amx_bf16"})
    assert choice(CPU, True) == tuple(map(NumberFormat, BOTH))
    assert choice(CPU, False) == (NumberFormat(torch.float32),)
    for hidden, there in (("avx2", 1), ("portable", 1), ("avx512", 2)):
        monkeypatch.setenv("DSBD_CPU", hidden)
        assert len(choice(CPU, True)) == there
    monkeypatch.delenv("DSBD_CPU")
    monkeypatch.setattr(processor, "flags", lambda: processor.AMX - {"avx512_bf16"})
    assert choice(CPU, True) == (NumberFormat(torch.float32),)


def test_activations_of_8_bits_are_for_blocks_compilers_and_vectors(monkeypatch):
    monkeypatch.setattr(processor, "can_compile", lambda: True)
    monkeypatch.setattr(processor, "flags", lambda: processor.AMX)
    float32 = NumberFormat(torch.float32)
    assert choice(CPU, True, True) == (float32, NumberFormat(torch.bfloat16), INT8)
    assert INT8 not in choice(CPU, True, False)
    assert INT8 not in choice(torch.device("cuda"), True, True) if torch.cuda.is_available() else True
    monkeypatch.setenv("DSBD_CPU", "avx2")
    assert choice(CPU, True, True) == (float32, INT8)
    monkeypatch.setenv("DSBD_CPU", "portable")
    assert choice(CPU, True, True) == (float32,)
    monkeypatch.delenv("DSBD_CPU")
    monkeypatch.setattr(processor, "can_compile", lambda: False)
    assert INT8 not in choice(CPU, True, True)
    for one in (float32, NumberFormat(torch.bfloat16), INT8):
        assert NumberFormat.called(one.name) == one


# Measured formats. Which are open, and how quick they are, is made up here.


class Judge:
    """Stands for the clock: says which format is the quicker one, and counts how often it is asked."""

    def __init__(self) -> None:
        self.says, self.asked = "bfloat16", []

    def __call__(self, place: Any, config: Any, open_: Any, *, int8: bool, trust: bool) -> formats.Verdict:
        assert open_ == tuple(map(NumberFormat, BOTH))
        self.asked.append((place.role, int8))
        return formats.Verdict(self.says, {}, "made up")


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DSBD_PRICES", raising=False)
    monkeypatch.setattr(processor, "bf16_likely", lambda: True)
    made = Judge()
    monkeypatch.setattr(slices, "judge", made)
    return made


@pytest.fixture
def spec(tmp_path: Path) -> PairSpec:
    for name, seed in (("target", 1), ("draft", 2)):
        builders.rand(tmp_path / name, seed=seed).to(torch.bfloat16).save_pretrained(tmp_path / name)
    return PairSpec(str(tmp_path / "target"), str(tmp_path / "draft"), "cpu", "cpu")


def dtypes(pair: Any) -> tuple[torch.dtype, torch.dtype]:
    return pair.target.dtype, pair.draft.dtype


def test_formats_are_timed_once_and_kept(spec: PairSpec, judge: Judge) -> None:
    told: list[str] = []
    pair = load_pair(spec, progress=lambda stage, *_: told.append(stage))
    assert dtypes(pair) == (torch.bfloat16, torch.bfloat16)
    assert judge.asked == [("target", False), ("draft", True)]
    assert formats.ONCE in told
    judge.says = "float32"  # whatever the clock would say now
    told.clear()
    assert dtypes(load_pair(spec, progress=lambda stage, *_: told.append(stage))) == dtypes(pair)
    assert formats.ONCE not in told
    assert len(judge.asked) == 2
    kept = {facts["number format"]: verdict.dtype for _, facts, verdict in formats.listed()}
    assert kept == {"target": "bfloat16", "draft": "bfloat16"}


def test_a_format_that_is_asked_for_wins_and_is_not_timed(spec: PairSpec, judge: Judge) -> None:
    for name in ("float32", "bfloat16"):
        pair = load_pair(spec.replace(target_dtype=name, draft_dtype=name))
        assert dtypes(pair) == (getattr(torch, name),) * 2
        assert pair.formats == {}
    assert not judge.asked
    judge.says = "float32"
    assert dtypes(load_pair(spec.replace(draft_dtype="bfloat16"))) == BOTH
    assert judge.asked == [("target", False)]


def test_where_there_is_no_choice_nothing_is_timed(
    tmp_path: Path, spec: PairSpec, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "amx_likely", lambda: False)
    builders.rand(tmp_path / "full")  # of weights that bfloat16 would round
    assert load_pair(PairSpec(str(tmp_path / "full"))).target.dtype == torch.float32
    monkeypatch.setattr(processor, "bf16_likely", lambda: False)
    assert dtypes(load_pair(spec)) == (torch.float32, torch.float32)
    assert not judge.asked


@pytest.mark.parametrize("likely", [True, False])
@pytest.mark.parametrize("why", ["switched off", "the cache is read-only"])
def test_where_nothing_can_be_kept_the_rule_holds(
    tmp_path: Path, spec: PairSpec, judge: Judge, monkeypatch: pytest.MonkeyPatch, why: str, likely: bool
) -> None:
    monkeypatch.setattr(processor, "amx_likely", lambda: likely)
    if why == "switched off":
        monkeypatch.setenv("DSBD_PRICES", "off")
    else:
        (tmp_path / "cache").write_text("a file where the folder should be")
    judge.says = "float32" if likely else "bfloat16"
    (dtype, _), wanted = number_format_of(spec)
    assert dtype == (torch.bfloat16 if likely else torch.float32)
    assert (wanted is None) == (why == "switched off")
    assert not judge.asked


def number_format_of(spec: PairSpec, **changed: Any) -> Any:
    """What loading takes for the target, without loading it: compiled code needs a cache folder too."""
    from dsbd_cli.loading.model import load_config

    place = Place(replace(parse_source(spec.target, "target"), **changed), "target", spec.target)
    return number_format.pick(
        "auto",
        place,
        load_config(place, False),
        CPU,
        coarse=True,
        whole=True,
        trust=False,
        tell=lambda *_: None,
    )


def touched(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(Path(spec.target) / "model.safetensors", (1, 1))


def with_threads(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)


def of_another_version(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "__version__", "0.0.0")


def by_other_code(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key, "code_sum", lambda: "other")


def elsewhere(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "description", lambda: "flags: others")


def damaged(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, _, _ in [*formats.listed()]:
        path.write_text("{}")


def dropped(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    formats.forget(["another"])
    assert [*formats.listed()]
    formats.forget(["target", "another"])
    assert "target" not in [facts["name"] for _, facts, _ in formats.listed()]


@pytest.mark.parametrize(
    "change", [touched, with_threads, of_another_version, by_other_code, elsewhere, damaged, dropped]
)
def test_it_is_timed_anew_when_what_it_depends_on_changes(
    spec: PairSpec, judge: Judge, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    assert number_format_of(spec)[0].dtype == torch.bfloat16
    judge.says = "float32"
    assert number_format_of(spec)[0].dtype == torch.bfloat16
    change(spec, monkeypatch)
    assert number_format_of(spec)[0].dtype == torch.float32
    assert len(judge.asked) == 2


# A pair that is remembered.


@pytest.fixture
def remembered(spec: PairSpec, judge: Judge) -> PairSpec:
    pair = load_pair(spec)
    assert ready.remember(spec, pair, Decoder(pair).verdicts())
    judge.asked.clear()
    return spec


def test_a_remembered_pair_keeps_its_formats_and_times_nothing(remembered: PairSpec, judge: Judge) -> None:
    judge.says = "float32"
    pair = ready.load(remembered)
    assert pair is not None
    assert dtypes(pair) == (torch.bfloat16, torch.bfloat16)
    assert not judge.asked
    # What needs the real model loads it in the same format.
    assert pair.target.model.real().dtype == torch.bfloat16


@pytest.mark.parametrize("change", [with_threads, damaged, dropped])
def test_a_remembered_pair_whose_verdict_is_gone_is_loaded_in_full(
    remembered: PairSpec, judge: Judge, monkeypatch: pytest.MonkeyPatch, change: Callable[..., None]
) -> None:
    judge.says = "float32"
    change(remembered, monkeypatch)
    assert ready.load(remembered) is None
    assert load_pair(remembered).target.dtype == torch.float32


def test_a_remembered_pair_is_not_that_of_another_choice(
    remembered: PairSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Instructions that are hidden, or measuring that is switched off, may mean another format."""
    with monkeypatch.context() as patch:
        patch.setattr(processor, "bf16_likely", lambda: False)
        assert ready.load(remembered) is None
    with monkeypatch.context() as patch:
        patch.setenv("DSBD_PRICES", "off")
        assert ready.load(remembered) is None
    assert ready.load(remembered) is not None


@pytest.mark.parametrize("unusable", [False, True])
def test_a_pair_whose_formats_were_not_to_be_had_is_not_remembered(
    spec: PairSpec, judge: Judge, monkeypatch: pytest.MonkeyPatch, unusable: bool
) -> None:
    """Another process measured for too long, or the verdict is none: that is no reason to stay with the rule."""
    monkeypatch.setattr(processor, "amx_likely", lambda: False)
    with monkeypatch.context() as patch:
        if unusable:
            judge.says = "int8"
        else:
            patch.setattr(store, "found_or_measured", lambda *_, **__: (None, ()))
        pair = load_pair(spec)
    assert dtypes(pair) == (torch.float32, torch.float32)
    ready.remember(spec, pair, Decoder(pair).verdicts())
    assert ready.load(spec) is None
    formats.forget(["target", "draft"])
    judge.says = "bfloat16"
    assert dtypes(load_pair(spec)) == (torch.bfloat16, torch.bfloat16)


# Activations of 8 bits.

needs_c = pytest.mark.skipif(not processor.int8_likely(), reason="no C compiler or vectors here")


@needs_c
def test_8_bits_asked_for_are_the_targets_and_are_remembered(spec: PairSpec, judge: Judge) -> None:
    asked = spec.replace(target_dtype="int8", draft_dtype="int8")
    pair = load_pair(asked)
    assert (pair.target.format, pair.draft.format) == ("int8", "float32")
    assert dtypes(pair) == (torch.float32, torch.float32)
    decoder = Decoder(pair)
    assert decoder.models()["target"]["dtype"] == "float32"  # it has no blocks
    assert not judge.asked
    assert ready.remember(asked, pair, decoder.verdicts())
    again = ready.load(asked)
    assert again is not None
    assert (again.target.format, again.draft.format) == ("int8", "float32")
    # The same model for a draft computes as its target does: every proposal is accepted.
    own = Decoder(load_pair(spec.replace(draft=spec.target, target_dtype="int8", draft_dtype="int8")))
    for one in (own.target, own.draft):
        assert "no activation is rounded" in one.notes[0]


@needs_c
def test_blocks_are_timed_with_8_bits_and_a_draft_is_not(spec: PairSpec, judge: Judge, monkeypatch) -> None:
    for likely in ("bf16_likely", "amx_likely"):
        monkeypatch.setattr(processor, likely, lambda: False)
    open_ = []

    def judged(place: Any, config: Any, formats_: Any, **_: Any) -> formats.Verdict:
        open_.append(formats_)
        return formats.Verdict("int8", {}, "made up")

    monkeypatch.setattr(slices, "judge", judged)
    found, verdict = number_format_of(spec, kind="gguf")
    assert found == INT8
    assert verdict["dtype"] == "int8"
    assert open_ == [(NumberFormat(torch.float32), INT8)]
    assert number_format_of(spec)[0] == NumberFormat(torch.float32)  # a checkpoint has no blocks
    assert len(open_) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": "cuda"}, "is for CPUs"),
        ({"whole": False}, "goes with none of --quantization"),
        ({"level": "portable"}, "needs a C compiler and a processor with AVX2"),
    ],
)
def test_8_bits_that_are_not_to_be_had_are_refused(spec: PairSpec, monkeypatch, change, said) -> None:
    if "level" in change:
        monkeypatch.setenv("DSBD_CPU", change["level"])
    place = Place(parse_source(spec.target, "target"), "target", spec.target)
    with pytest.raises(UserError, match=said) as error:
        number_format.pick(
            "int8",
            place,
            None,
            torch.device(change.get("device", "cpu")),
            coarse=True,
            whole=change.get("whole", True),
            trust=False,
            tell=lambda *_: None,
        )
    assert "choose" in str(error.value)
    assert "--target-dtype int8" in str(error.value)
