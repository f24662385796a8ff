"""A second run of the same command, which starts from what the first one remembered, says the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsbd_cli.loading.cache import cache_root
from tests import builders
from tests.cli.conftest import EVERY_WAY, Call, pair

Models = Callable[..., str]
# Clocks and what follows from them, and memory: after the self-test of a full load a draft has buffers, used or not.
_MEASURED = {
    "prefill_s", "decode_s", "tokens_per_s", "energy_j", "joules_per_token", "energy_source", "kv_bytes_allocated"
}  # fmt: skip


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What of a `--json` object is not a measurement, nor a seed that was drawn for nothing."""
    stats = {name: value for name, value in answer["stats"].items() if name not in _MEASURED}
    return answer | {"stats": stats, "seed": None}


@pytest.fixture
def full_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each pair that was loaded in full, from here on and with nothing remembered."""
    from dsbd_cli import loading

    shutil.rmtree(cache_root() / "ready", ignore_errors=True)
    loads, own = [], loading.load_pair

    def load(spec: Any, **options: Any) -> Any:
        loads.append(spec.target)
        return own(spec, **options)

    monkeypatch.setattr(loading, "load_pair", load)
    return loads


@pytest.mark.parametrize("way", EVERY_WAY)
def test_cold_and_warm_say_the_same(dsbd: Call, models: Models, full_loads: list[str], way: str) -> None:
    command = ["generate", "hello", *pair(models("rand"), models("rand", seed=1)), *EVERY_WAY[way],
               "--max-new-tokens", "12", "--json"]  # fmt: skip
    command += [] if "deterministic" in way else ["--seed", "3"]
    cold, warm = dsbd(*command), dsbd(*command)
    assert len(full_loads) == 1
    assert told(cold.json) == told(warm.json)


def test_the_text_in_a_pipe_is_the_same_byte_for_byte(
    dsbd: Call, full_loads: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    builders.rand(folder, num_key_value_heads=2)
    (folder / "chat_template.jinja").write_text("{% for t in messages %}{{ t['content'] }}\n{% endfor %}")
    trace = ["--trace", str(tmp_path / "trace.jsonl")]
    command = ["generate", "two  words </s>", *pair(str(folder)), "--seed", "1", "--max-new-tokens", "16"]
    cold, warm = dsbd(*command), dsbd(*command)
    traced = dsbd(*command, *trace)
    assert (cold.code, cold.out, cold.err) == (warm.code, warm.out, warm.err) == (0, traced.out, traced.err)
    assert len(full_loads) == 1


def test_a_cache_that_cannot_be_written_is_no_hindrance(
    dsbd: Call, models: Models, full_loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    command = ["generate", "hello", *pair(models("rand")), "--seed", "1", "--max-new-tokens", "4"]
    assert dsbd(*command).code == 0  # C code is there: a process remembers where it could not be compiled
    full_loads.clear()
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "file"))
    first, second = dsbd(*command), dsbd(*command)
    assert (first.code, first.out, first.err) == (second.code, second.out, second.err)
    assert first.code == 0
    assert len(full_loads) == 2
