"""Packed weights that are kept: mapped in the next start, and never those of another model, processor or version."""

from __future__ import annotations

import errno
import logging
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding.forward import amx, simd
from dsbd_cli.decoding.forward.simd import SimdForward
from dsbd_cli.decoding.forward.whole import WholeForward
from dsbd_cli.loading import PairSpec, load_pair, processor
from dsbd_cli.loading.ready import key, packed
from dsbd_cli.loading.ready import pair as ready
from dsbd_cli.loading.ready.packed import Piece, Place
from dsbd_cli.settings import Settings
from tests import builders
from tests.decoding.forward import emulated

SETTINGS = Settings(method="dsbd", max_new_tokens=10, seed=3)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def spec(tmp_path: Path) -> PairSpec:
    if simd.library() is None:
        pytest.skip("no C compiler here")
    builders.rand(tmp_path / "target", **SIZES)
    builders.rand(tmp_path / "draft", seed=1, **SIZES)
    spec = PairSpec(str(tmp_path / "target"), str(tmp_path / "draft"), target_dtype="float32")
    pair = load_pair(spec)
    decoder = Decoder(pair)
    assert isinstance(decoder.target._forward, SimdForward)
    assert ready.remember(spec, pair, decoder.verdicts())
    decoder.keep_packed(ready.places(spec, pair))
    return spec


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "ready").glob("*.packed"))


def started(spec: PairSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[Decoder, int]:
    """The next start, and how many matrices it packed."""
    count = [0]
    whole = WholeForward._laid_out

    def counted(self: WholeForward, *more: Any) -> Piece:
        count[0] += 1
        return whole(self, *more)

    pair = ready.load(spec)
    with monkeypatch.context() as patch:
        patch.setattr(WholeForward, "_laid_out", counted)
        return Decoder(load_pair(spec) if pair is None else pair), count[0]


def same(one: Decoder, other: Decoder) -> bool:
    found = [decoder.generate("hello", SETTINGS, energy=False) for decoder in (one, other)]
    return found[0].token_ids == found[1].token_ids and [beam.logprob for beam in found[0].beams] == [
        beam.logprob for beam in found[1].beams
    ]


def test_the_next_start_packs_nothing_and_computes_the_same(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    assert len(kept(cache)) == 2
    again, count = started(spec, monkeypatch)
    full = Decoder(load_pair(spec))
    assert count == 0
    assert again.describe() == full.describe()
    assert same(again, full)


def _other_weights(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    builders.rand(spec.target, seed=5, **SIZES)


def _other_processor(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    whole = processor.description()
    patch.setattr("dsbd_cli.loading.processor.description", lambda: f"{whole} more")


def _other_level(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("DSBD_CPU", "portable")


def _other_code(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key, "code_sum", lambda: "0")


def _other_version(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key, "__version__", "0.0")


def _other_format(spec: PairSpec, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(packed, "_MAGIC", b"dsbd packed weights 0\n")


@pytest.mark.parametrize(
    "change", [_other_weights, _other_processor, _other_level, _other_code, _other_version, _other_format]
)
def test_packed_weights_of_something_else_are_never_used(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch, cache: Path, change: Any
) -> None:
    if change is _other_level and processor.level() == "portable":
        pytest.skip("this processor has one level")
    before = kept(cache)
    with monkeypatch.context() as patch:
        change(spec, patch)
        pair = load_pair(spec)
        for place in ready.places(spec, pair).values():
            assert place.path in before
        decoder = Decoder(pair)
        decoder.keep_packed(ready.places(spec, pair))
        assert ready.remember(spec, pair, decoder.verdicts())
        again, count = started(spec, patch)
        assert count == 0
        assert same(again, decoder)
    assert kept(cache) == before  # the new one took its place
    # And back: what was written under the change is not taken now, whatever the pair's own record says.
    if change is not _other_weights:
        pair = load_pair(spec)
        for place in ready.places(spec, pair).values():
            assert packed.read(place, f"float32 in C, {processor.level()}") is None


def test_changed_weights_are_packed_anew_though_all_else_is_the_same(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    builders.rand(spec.target, seed=5, **SIZES)
    pair = load_pair(spec)
    decoder = Decoder(pair)
    assert ready.remember(spec, pair, decoder.verdicts())  # but the old packed weights lie there still
    again, count = started(spec, monkeypatch)
    assert count > 0
    assert same(again, decoder)
    assert started(spec, monkeypatch)[1] == 0


def test_a_damaged_file_is_packed_anew(
    spec: PairSpec, monkeypatch: pytest.MonkeyPatch, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = next(iter(ready.places(spec, load_pair(spec)).values()))
    layout = f"float32 in C, {processor.level()}, {builders.VOCAB} rows of the head"
    whole = place.path.read_bytes()
    size = int.from_bytes(whole[22:30], "little")
    body = -(-(30 + size) // 4096) * 4096
    for at in [0, 25, 40, body, body + 70, len(whole) // 2 // 4096 * 4096]:
        place.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert packed.read(place, layout) is None, at
    pages = [whole[begin : begin + 4096] for begin in range(body, len(whole), 4096)]
    swapped = whole[:body] + b"".join([pages[1], pages[0], *pages[2:]])
    zeroed = whole[:body] + bytes(len(whole) - body)
    for data in (swapped, zeroed, b"", whole[:10], whole[:-4096], whole[:-1], whole + b"x", b"hello"):
        place.path.write_bytes(data)
        with caplog.at_level(logging.DEBUG, "dsbd"):
            caplog.clear()
            assert packed.read(place, layout) is None
        assert len(caplog.records) == 1
    assert started(spec, monkeypatch)[1] > 0
    assert place.path.read_bytes() == whole
    place.path.unlink()
    place.path.mkdir()
    assert started(spec, monkeypatch)[1] > 0


@pytest.mark.parametrize("name", ["os.posix_fallocate", "os.replace", "tempfile.mkstemp"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    place = Place(tmp_path / "ready" / "one.packed", {})
    with monkeypatch.context() as patch, caplog.at_level(logging.DEBUG, "dsbd"):
        patch.setattr(name, refuse)
        assert not packed.write(place, "a", [piece()])
    assert len(caplog.records) == 1
    assert list((tmp_path / "ready").iterdir()) == []


def piece() -> Piece:
    return Piece(3, 5, 2, np.arange(100, dtype=np.uint8), np.ones(3, np.float32), None)


def test_pieces_come_back_as_they_were(tmp_path: Path) -> None:
    place = Place(tmp_path / "one.packed", {"a": (1, 2)})
    assert packed.read(place, "a") is None
    assert packed.write(place, "a", [piece(), piece()])
    found = packed.read(place, "a")
    assert found is not None
    assert len(found) == 2
    for one in found:
        assert one[:3] == piece()[:3]
        assert one.bias is None
        assert one.scale is not None
        assert one.weight.tobytes() == piece().weight.tobytes()
        assert one.scale.tolist() == [1.0] * 3
        assert one.weight.ctypes.data % 64 == one.scale.ctypes.data % 64 == 0
        assert not one.weight.flags.writeable
    assert packed.read(place, "b") is None
    assert packed.read(place._replace(key={"a": [1, 3]}), "a") is None


def test_what_nobody_reads_is_deleted(tmp_path: Path) -> None:
    old, new, left, going = (
        tmp_path / n for n in ("o.packed", "n.packed", ".x.packed.part-1", ".y.packed.part-2")
    )
    for path, days in ((old, 31), (new, 29), (left, 1), (going, 0)):
        path.write_text("x")
        then = time.time() - days * 86400
        os.utime(path, (then, then))
    assert packed.write(Place(tmp_path / "one.packed", {}), "a", [piece()])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".y.packed.part-2", "n.packed", "one.packed"]


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("of_blocks", [False, True])
def test_tiles_come_back_as_they_were(tmp_path: Path, int8: bool, of_blocks: bool) -> None:
    with emulated.tiles():
        _tiles_come_back(tmp_path, int8, of_blocks)


def _tiles_come_back(tmp_path: Path, int8: bool, of_blocks: bool) -> None:
    import torch

    from tests.decoding.forward.test_amx import made_of_blocks, make

    model = made_of_blocks("qwen2") if of_blocks else make("qwen2")
    place = Place(tmp_path / "one.packed", {})
    plain = amx.AmxForward(model, int8=int8)
    assert plain.keep(place)
    for other in (amx.AmxForward(model, int8=not int8), amx.AmxForward(model, blocks=False)):
        assert packed.read(place, other._kept_as()) is None  # what was packed in another way
    object.__setattr__(model, "packed", place)
    again = amx.AmxForward(model, int8=int8)
    assert again.formats == plain.formats
    for one, other in zip(plain._pieces, again._pieces, strict=True):
        assert one.format == other.format
        assert one.weight.tobytes() == other.weight.tobytes()
        for before, after in ((one.scale, other.scale), (one.bias, other.bias)):
            assert (before is None) == (after is None)
            assert before is None or torch.equal(torch.tensor(before), torch.tensor(after))
