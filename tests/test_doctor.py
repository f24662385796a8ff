"""`dsbd doctor` says what is there and never falls ill itself."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from dsbd_cli.again import AGAIN
from dsbd_cli.cli import doctor, measured
from dsbd_cli.loading import hung, processor
from dsbd_cli.loading.ready import key
from dsbd_cli.loading.source import parse_source
from dsbd_cli.presets import load_preset
from dsbd_cli.prices import Curve, Prices, probe, store
from dsbd_cli.ui import look
from dsbd_cli.version import __version__

app = typer.Typer()
app.command()(doctor.doctor)


def nvml(mode: str) -> types.ModuleType:
    """A stand-in for pynvml: `absent`, `ok`, `noenergy`, `nothing` or `sliced` (MIG)."""
    module = types.ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def refuse(*_):
        raise NVMLError("Not Supported")

    def init():
        if mode == "absent":
            raise NVMLError("NVML Shared Library Not Found")

    module.NVMLError = NVMLError
    module.nvmlInit = init
    module.nvmlShutdown = lambda: None
    module.nvmlDeviceGetCount = lambda: 2
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetName = lambda handle: b"Card [x]" if handle == 0 else "Other card"
    module.nvmlDeviceGetPowerUsage = refuse if mode == "nothing" else lambda handle: 50_000
    module.nvmlDeviceGetTotalEnergyConsumption = (
        refuse if mode in ("noenergy", "nothing") else lambda handle: 1
    )
    module.nvmlDeviceGetMigMode = (lambda handle: [1, 1]) if mode == "sliced" else refuse
    return module


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("absent", "no NVML (NVML Shared Library Not Found)"),
        ("ok", "nvml 0: Card [x], energy counter"),
        ("noenergy", "nvml 1: Other card, no energy counter, power reading only"),
        ("nothing", "nvml 0: Card [x], neither energy counter nor power reading"),
        ("sliced", "nvml 0: Card [x], cut into MIG slices: joules are n/a"),
    ],
)
def test_energy_counters(monkeypatch, mode, said):
    monkeypatch.setitem(sys.modules, "pynvml", nvml(mode))
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0, result.output
    assert said in result.stdout


def test_without_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in CliRunner().invoke(app, []).stdout


def test_json_is_one_document(monkeypatch, tmp_path):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "none"))
    result = CliRunner().invoke(app, ["--json"])
    report = json.loads(result.stdout)
    assert set(report) == {
        "dsbd",
        "python",
        "packages",
        "devices",
        "energy",
        "hub",
        "cache",
        "presets",
        "formats",
        "prices",
        "host",
    }
    assert report["packages"]["transformers"]
    assert report["devices"][0].startswith("cpu: ")
    assert report["cache"] == f"{tmp_path / 'none'} (empty)"
    assert report["presets"]["qwen3-8b"] == "target to be downloaded, draft to be downloaded"


def test_presets_on_disk_are_seen(monkeypatch, tmp_path):
    from dsbd_cli.loading.gguf_cache import folder_of_sum
    from dsbd_cli.loading.wheel import SMOLLM2

    monkeypatch.setenv("DSBD_CACHE", str(tmp_path))
    before = doctor.examine()["presets"]["smol"]
    converted = folder_of_sum(SMOLLM2.sha256, tmp_path)
    converted.mkdir(parents=True)
    (converted / "config.json").write_text("{}")
    after = doctor.examine()["presets"]["smol"]
    assert before.startswith("target to be downloaded")
    assert after.startswith("target on disk")


@pytest.mark.parametrize(("given", "named"), [(None, "smol"), ("mine.yaml", "mine.yaml")])
def test_a_compiler_that_hung_is_tried_again_by_the_name_of_a_preset(monkeypatch, given, named):
    monkeypatch.setattr(processor, "can_compile", lambda: True)
    monkeypatch.setattr(hung, "remembered", lambda: f"cc had not ended (or by {AGAIN})")
    assert f"(or by dsbd doctor --measure {named})" in doctor._devices(given)[0]


def test_people_are_told_what_the_figures_are(monkeypatch):
    figures = {
        "formats": ["one: int8; ms of a slice by nodes: 1 at 1"],
        "prices": ["one: ms by nodes: 1 at 1"],
    }
    monkeypatch.setattr(doctor, "examine", lambda preset: figures)
    told = CliRunner().invoke(app, []).stdout
    for words in (
        "milliseconds of a few of its layers over so many tokens",
        "milliseconds of one forward over",
    ):
        assert told.count(words) == 1
    assert json.loads(CliRunner().invoke(app, ["--json"]).stdout) == figures
    monkeypatch.setattr(doctor, "examine", lambda preset: {"formats": [], "prices": "cannot be examined"})
    assert "milliseconds" not in CliRunner().invoke(app, []).stdout


def test_a_part_that_breaks_is_reported(monkeypatch):
    def broken(preset):
        raise RuntimeError("driver\nfell over")

    monkeypatch.setattr(doctor, "_devices", broken)
    assert doctor.examine()["devices"] == "cannot be examined (RuntimeError: driver fell over)"
    assert "fell over" in CliRunner().invoke(app, []).stdout


@pytest.mark.parametrize(
    ("coarse", "said"),
    [
        (torch.float32, "dtype auto is float32\n"),
        (
            torch.bfloat16,
            "dtype auto is bfloat16 for weights stored in bfloat16 or fewer bits, else float32\n",
        ),
    ],
)
def test_what_auto_means_on_a_cpu_is_what_loading_takes(monkeypatch, coarse, said):
    def pick(name, device, few=False):
        return coarse if few and device.type == "cpu" else torch.float32

    monkeypatch.setattr("dsbd_cli.loading.hardware.pick_dtype", pick)
    assert said in CliRunner().invoke(app, []).stdout


def test_the_processor_counts_joules_or_says_why_not(monkeypatch, tmp_path):
    from dsbd_cli import energy_probes

    monkeypatch.setattr(energy_probes, "POWERCAP", tmp_path)
    assert "cpu: no readable RAPL counter" in CliRunner().invoke(app, []).stdout
    counter = tmp_path / "intel-rapl:0"
    counter.mkdir()
    (counter / "name").write_text("package-0\n")
    (counter / "energy_uj").write_text("1234\n")
    assert "cpu: RAPL package counters" in CliRunner().invoke(app, []).stdout


def test_what_was_never_measured_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "none"))
    said = CliRunner().invoke(app, []).stdout.splitlines()
    for name in ("formats", "prices", "host"):
        (line,) = (one for one in said if one.startswith(name))
        assert "measured" in line or "timed" in line


def test_long_lines_hang_below_their_first_word(monkeypatch):
    monkeypatch.setattr(
        doctor, "examine", lambda preset: {"prices": ["some words " * 8 + "/a/long/path"], "host": []}
    )
    monkeypatch.setattr(look, "columns_of", lambda stream: 40)
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[0].startswith("prices     some")
    assert lines[1].startswith(" " * 11 + "words")
    monkeypatch.setattr(look, "columns_of", lambda stream: None)  # a pipe gets one line each
    assert len(CliRunner().invoke(app, []).stdout.splitlines()) == 2


def test_what_a_busy_machine_gave_is_measured_anew_by_the_name_of_its_preset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DSBD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(key, "code_sum", lambda: "this")
    preset = tmp_path / "my pair.yaml"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    preset.write_text("target: ./one\ndraft: ./two\n")
    busy = probe.measured_now(0.6)
    pair = load_preset("smol").pair
    smol = {
        "target": {"name": parse_source(pair.target).name},
        "draft": {"name": parse_source(pair.draft or "").name},
    }
    mine = {"target": {"name": "one", "dtype": "x", "device": "cpu"}, "draft": {"name": "two"}}
    for models in (smol, mine):
        facts = models | {"dsbd": __version__, "code": "this"}
        store.kept_or_measured(facts, lambda: Prices(Curve((1,), (1.0,)), origin=busy.origin, busy=busy.busy))
    for given, name in ((None, "PRESET"), (str(preset), f"'{preset}'")):
        first, second = sorted(measured.prices(given), key=lambda line: not line.startswith("one "))
        assert f"dsbd doctor --measure {name} does it anew" in first
        assert "dsbd doctor --measure smol does it anew" in second
