"""`dsbd doctor` says what is there and never falls ill itself."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
import typer
from typer.testing import CliRunner

from dsbd_cli.cli import doctor
from dsbd_cli.ui import look

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


def test_a_part_that_breaks_is_reported(monkeypatch):
    def broken():
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
        doctor, "examine", lambda: {"prices": ["some words " * 8 + "/a/long/path"], "host": []}
    )
    monkeypatch.setattr(look, "columns_of", lambda stream: 40)
    lines = CliRunner().invoke(app, []).stdout.splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[0].startswith("prices     some")
    assert lines[1].startswith(" " * 11 + "words")
    monkeypatch.setattr(look, "columns_of", lambda stream: None)  # a pipe gets one line each
    assert len(CliRunner().invoke(app, []).stdout.splitlines()) == 2
