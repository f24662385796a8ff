"""The parts of the measuring scripts whose faults would show as plausible numbers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.kit import growth, phases, profiler
from benchmarks.kit.arms import DEFAULT_ARMS, parse_arms
from benchmarks.kit.bandwidth import copy_bandwidth, read_bytes
from benchmarks.kit.prompts import Prompt, fitted, part_of
from benchmarks.kit.results import Results, joined, read, write
from benchmarks.kit.summary import median, summarise
from dsbd_cli.bench.methods import METHODS
from dsbd_cli.decoder import Decoder
from dsbd_cli.decoding.methods.dsbd import Run
from dsbd_cli.decoding.model.hf_model import HfTreeModel
from dsbd_cli.errors import UserError
from dsbd_cli.settings import Settings
from tests import builders

# Arms.


def test_default_arms_hold_every_method() -> None:
    arms = parse_arms(DEFAULT_ARMS, Settings())
    # (Rules of token trees have a script of their own, `benchmarks/tree_rules.py`.)
    assert {arm.method for arm in arms} >= set(METHODS) - {"dsbd", "specinfer:spectr", "specinfer:rsd"}
    fixed = next(arm for arm in arms if arm.name == "dsbd:cover threshold=none")
    assert fixed.settings.threshold is None
    assert fixed.settings.verify == "cover"
    assert next(arm for arm in arms if arm.name == "dsbd:cover threshold=0.9").settings.threshold == 0.9


def test_arms_from_text_and_file(tmp_path: Path) -> None:
    table = "beam width=8  # wide\n\ndsbd:paper gamma=2 threshold=none; specinfer tree=3x2"
    (tmp_path / "arms.txt").write_text(table)
    for text in (table, str(tmp_path / "arms.txt")):
        beam, paper, tree = parse_arms(text, Settings(max_new_tokens=7))
        assert (beam.name, beam.settings.width, beam.settings.max_new_tokens) == ("beam width=8", 8, 7)
        assert (paper.settings.verify, paper.settings.gamma, paper.settings.threshold) == ("paper", 2, None)
        assert tree.settings.tree == (3, 2)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bean", "no method 'bean'"),
        ("beam width=2,4", "several values"),
        ("beam; beam", "twice"),
        ("# nothing", "empty"),
        ("beam gamma=2", "means nothing"),
    ],
)
def test_arms_that_are_wrong(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse_arms(text, Settings())


# Results files.


def test_results_are_taken_up_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.json"
    with Results(path, {"seed": 1, "sizes": (1, 2)}, ("arm", "x")) as results:
        results.parts["arms"] = ["a"]
        results.add({"arm": "a", "x": 1, "value": 3.5})
    with Results(path, {"seed": 1, "sizes": (1, 2)}, ("arm", "x")) as results:
        assert results.has(arm="a", x=1)
        assert not results.has(arm="a", x=2)
        results.add({"arm": "a", "x": 2, "value": None})
    found = read(path)
    assert found["arms"] == ["a"]
    assert [record["value"] for record in found["records"]] == [3.5, None]
    assert [entry.name for entry in path.parent.iterdir()] == ["out.json"]


def test_results_survive_a_failed_write(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with Results(path, {}, ("x",)) as results:
        results.add({"x": 1})
    before = path.read_text()
    results.add({"x": 2, "value": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        results.save()
    assert path.read_text() == before


def test_results_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with Results(path, {"torch": "2.0", "seed": 0}, ("x",)):
        pass
    with pytest.raises(UserError, match=r"another torch \(2\.0, now 2\.1\)"):
        Results(path, {"torch": "2.1", "seed": 0}, ("x",))
    for text in ("not json", "[]", json.dumps({"format": 2, "facts": {}, "records": []}), "{}"):
        path.write_text(text)
        with pytest.raises(UserError, match="not a results file"):
            Results(path, {}, ("x",))
        with pytest.raises(UserError, match="not a results file"):
            read(path)
        assert path.read_text() == text


# Prompts.


def test_prompts_fitted_to_a_length() -> None:
    prompts = [Prompt("a", [1, 2, 3]), Prompt("b", [4, 5]), Prompt("c", [6])]
    assert [p.ids for p in fitted(prompts, 2)] == [[2, 3], [4, 5], [3, 6]]
    assert [p.ids for p in fitted(prompts, 5)] == [[4, 5, 1, 2, 3], [2, 3, 6, 4, 5], [5, 1, 2, 3, 6]]
    for length in (1, 4, 50):
        for prompt, fit in zip(prompts, fitted(prompts, length), strict=True):
            assert (fit.name, len(fit.ids)) == (prompt.name, length)
            # The question stays where it is answered: at the end.
            assert fit.ids[-min(length, len(prompt.ids)) :] == prompt.ids[-length:]


# Summary.


def record(
    arm: str, prompt: str, tokens: int, seconds: float, repeat: int = 0, **more: Any
) -> dict[str, Any]:
    values = {
        "arm": arm,
        "prompt": prompt,
        "repeat": repeat,
        "new_tokens": tokens,
        "decode_s": seconds,
        "wall_s": 2 * seconds,
        "energy_j": None,
        "logprob": -1.0 * tokens,
        "target_calls": tokens,
        "kv_bytes_peak": 10,
        "peak_bytes": None,
    }
    return values | more


def test_summary_pairs_by_prompt() -> None:
    records = [
        record("ours", "p1", 10, 1.0, energy_j=20.0, draft_calls=4, layers=20),
        record("ours", "p2", 10, 2.0, energy_j=40.0, draft_calls=4, layers=20, kv_bytes_peak=30),
        record("ours", "p3", 10, 10.0, energy_j=60.0, draft_calls=4, layers=20),
        record("base", "p1", 5, 1.0, energy_j=20.0),
        record("base", "p2", 5, 2.0, energy_j=60.0),
    ]
    found = summarise(records, ["ours", "base", "absent"], ["base", "absent"], {"target": 100, "draft": 10})
    assert list(found) == ["ours", "base"]
    ours = found["ours"]
    assert ours["prompts"] == 3
    assert ours["tokens_per_s"]["value"] == pytest.approx(30 / 13)
    assert ours["tokens_per_s_median"]["value"] == pytest.approx(5)
    assert ours["tokens_per_s_with_prefill"]["value"] == pytest.approx(30 / 26)
    assert ours["joules_per_token"]["value"] == pytest.approx(4)
    assert ours["logprob_per_token"]["value"] == pytest.approx(-1)
    assert ours["layers_per_call"]["value"] == pytest.approx(2)
    assert ours["bytes_per_s"] == pytest.approx((30 * 100 + 12 * 10) / 13)
    assert ours["kv_bytes_peak"] == 30
    # p3 has no partner and must not count: both pairs are twice as fast.
    against = ours["against"]["base"]
    assert against["speed"] == {"value": 2.0, "low": None, "high": None, "items": 2}  # two tell no spread
    assert against["energy"]["value"] == pytest.approx((0.5 + 4 / 12) / 2)
    assert against["kv_bytes"]["value"] == pytest.approx(2)
    # The base never knew its drafts or layers: unknown stays unknown.
    assert found["base"]["layers_per_call"] is None
    assert found["base"]["against"] == {}


def test_repeats_are_added_up_not_counted_as_prompts() -> None:
    records = [record("a", "p", 10, 1.0, kv_bytes_peak=5), record("a", "p", 30, 1.0, repeat=1, energy_j=3.0)]
    numbers = summarise(records, ["a"], [], {"target": 1})["a"]
    assert numbers["prompts"] == 1
    assert numbers["tokens_per_s"] == {"value": 20.0, "low": None, "high": None, "items": 1}
    assert numbers["joules_per_token"] is None  # one of the two is unknown
    assert numbers["kv_bytes_peak"] == 10


def test_median_and_its_interval() -> None:
    estimate = median([1.0] * 50 + [100.0])
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)
    spread = median(list(range(101)))
    assert spread.value == 50
    # Exact order statistics of the median's 95 % interval at n = 101: ranks 41 and 61, give or take.
    assert spread.low is not None
    assert spread.high is not None
    assert 37 <= spread.low <= 44
    assert 56 <= spread.high <= 63


# Bytes.


def test_read_bytes_counts_what_a_forward_reads(tmp_path: Path) -> None:
    tied = builders.rand(tmp_path, tie_word_embeddings=True)
    untied = builders.rand(tmp_path, tie_word_embeddings=False)
    whole = sum(weight.numel() for weight in tied.parameters())
    assert read_bytes(tied) == 4 * whole
    assert read_bytes(untied) == 4 * whole  # its own table is looked up, its head is read
    assert read_bytes(untied.to(torch.bfloat16)) == 2 * whole


def test_copy_bandwidth_is_a_rate() -> None:
    assert 1e7 < copy_bandwidth(torch.device("cpu"), 1 << 20) < 1e13


# Where time goes.


def test_phases_sort_time_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that only the steps move: draft 1, target 100, verification 10_000, the rest 1_000_000."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])

    def slower(name: str, seconds: float) -> None:
        step = getattr(Run, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            now[0] += seconds
            return step(*arguments, **options)

        monkeypatch.setattr(Run, name, timed)

    slower("propose", 1.0)
    slower("advance", 100.0)
    slower("p_beam", 10_000.0)
    slower("finish_iteration", 1_000_000.0)
    builders.rand(tmp_path / "t")
    builders.rand(tmp_path / "d", seed=1, num_hidden_layers=1)
    decoder = Decoder.from_pair(tmp_path / "t", tmp_path / "d", device="cpu")
    (arm,) = parse_arms("dsbd:cover threshold=none", Settings(max_new_tokens=6))
    before = (Run.propose, Run.advance, Run.finish_iteration)
    plain = decoder.generate([5, 6, 7], arm.settings.merged({"seed": 3}))
    with phases.Phases(torch.device("cpu")) as found:
        found.begin()
        timed = decoder.generate([5, 6, 7], arm.settings.merged({"seed": 3}))
    assert (Run.propose, Run.advance, Run.finish_iteration) == before
    assert timed.token_ids == plain.token_ids
    count = found.iterations
    assert count > 1
    assert found.seconds["draft"] == count - 1  # the first border opens the window
    assert found.seconds["target"] == 100 * count
    assert found.seconds["verify"] >= 10_000 * count
    assert found.seconds["verify"] % 10_000 == 0
    assert found.seconds["rest"] == 1_000_000 * count


def test_phases_where_the_device_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wait an iteration is the target's; nothing else is waited for, and what is decoded stays the same."""
    builders.rand(tmp_path / "t")
    decoder = Decoder.from_pair(tmp_path / "t", tmp_path / "t", device="cpu")
    chained = [HfTreeModel(model.model, vocab_size=decoder.pair.vocab_size, role=role, graphs=True)
               for role, model in (("target", decoder.target), ("draft", decoder.draft))]  # fmt: skip
    (arm,) = parse_arms("dsbd:cover threshold=none", Settings(max_new_tokens=12))
    settings = arm.settings.merged({"seed": 3, "forest": "full"})
    plain = decoder.generate([5, 6, 7], settings)
    decoder.target, decoder.draft = chained
    waits: list[int] = []
    monkeypatch.setattr(phases, "synchronize", lambda device: waits.append(1))
    with phases.Phases(torch.device("cpu")) as found:
        found.begin()
        timed = decoder.generate([5, 6, 7], settings)
    assert timed.token_ids == plain.token_ids
    assert "pipelined" in timed.stats.paths["engine"]
    assert found.iterations == timed.stats.target_calls + 1  # the first layer needs no call
    assert found.seconds["target"] > 0
    assert len(waits) <= 2  # around the layer that the prompt's own row gives


# The profiler's events.


def event(
    name: str, begin: float = 0, end: float = 0, device: DeviceType = DeviceType.CPU, **more: Any
) -> Any:
    span = SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, device_type=device, time_range=span, **more)


def test_counts_of_profiler_events() -> None:
    cuda = DeviceType.CUDA
    events = [
        event("cudaStreamSynchronize"),
        event("cudaEventSynchronize"),
        event("cudaMemcpyAsync"),  # does not wait by itself
        event("cudaDeviceSynchronize"),
        event("cudaLaunchKernel"),
        event("cuLaunchKernelEx"),
        event("cudaGraphLaunch"),
        event("aten::copy_"),
        event("Memcpy DtoH (Device -> Pinned)", 0, 10, cuda),
        event("kernel a", 5, 30, cuda),
        event("kernel b", 6, 20, cuda),
        event("kernel c", 50, 60, cuda),
        event("a range", 0, 1000, cuda, is_user_annotation=True),
    ]
    found = profiler.counts(events, 2)
    assert found == {
        "waits": 1.0,
        "kernel_launches": 1.0,
        "graph_launches": 0.5,
        "device_synchronize": 0.5,
        "copies_to_host": 0.5,
        "copies_to_device": 0.0,
        "busy_ms": pytest.approx(40 / 1000 / 2),
    }


# Curves.


def test_growth_of_known_lines() -> None:
    assert growth.steepest([(1, 2.0), (2, 4.0), (4, 8.0)]) == pytest.approx(1)
    assert growth.steepest([(1, 1.0), (2, 1.0), (4, 4.0)]) == pytest.approx(2)
    assert growth.overall([(1, 1.0), (2, 1.0), (4, 4.0)]) == pytest.approx(1)
    assert growth.steepest([(8, 3.0)]) is None
    assert growth.overall([(8, 3.0)]) is None


def test_lines_are_medians_over_rounds() -> None:
    records = [
        {"curve": "nodes", "series": "target", "x": 2, "round": 0, "forward_ms": 9.0},
        {"curve": "nodes", "series": "target", "x": 1, "round": 0, "forward_ms": 1.0},
        {"curve": "nodes", "series": "target", "x": 2, "round": 1, "forward_ms": 4.0},
        {"curve": "nodes", "series": "target", "x": 2, "round": 2, "forward_ms": 5.0},
        {"curve": "nodes", "series": "draft", "x": 2, "round": 0, "error": "out of memory"},
        {"curve": "width", "series": "target", "x": 2, "round": 0, "forward_ms": 7.0},
    ]
    assert growth.lines(records, "nodes", "forward_ms", 10) == {"target": [(1, 10.0), (2, 50.0)]}


def test_parts_of_a_run_are_joined(tmp_path: Path) -> None:
    prompts = [Prompt(str(i), [i]) for i in range(10)]
    parts = [part_of(prompts, f"{i}/3") for i in (1, 2, 3)]
    assert [prompt for part in parts for prompt in part] == prompts
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for wrong in ("0/3", "4/3", "1/11", "a/2", "1", "1/0"):
        with pytest.raises(UserError, match="--part"):
            part_of(prompts, wrong)
    paths = [tmp_path / f"{i}.json" for i in range(3)]
    for path, part in zip(paths, parts, strict=True):
        with Results(path, {"model": "a"}, ("prompt",)) as results:
            results.parts["sessions"] = [path.name]
            for prompt in part:
                results.add({"prompt": prompt.name})
    whole = joined(paths, ("prompt",))
    assert [record["prompt"] for record in whole["records"]] == [prompt.name for prompt in prompts]
    assert whole["sessions"] == [path.name for path in paths]
    write(tmp_path / "whole.json", whole)
    assert read(tmp_path / "whole.json") == whole
    with pytest.raises(UserError, match="same measurements"):
        joined([paths[0], paths[0]], ("prompt",))
    with Results(tmp_path / "other.json", {"model": "b"}, ("prompt",)):
        pass
    with pytest.raises(UserError, match="another model"):
        joined([paths[0], tmp_path / "other.json"], ("prompt",))
