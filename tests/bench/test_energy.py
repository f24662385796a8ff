"""Energy is right where a card can tell, and null with a reason where it cannot."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest

from dsbd_cli import energy_probes
from dsbd_cli.energy import EnergyMeter


class FakeNvml(types.SimpleNamespace):
    """Two cards under NVML's numbering; card 1 draws twice what card 0 draws."""

    class NVMLError(Exception):
        pass

    def __init__(self, mode: str) -> None:
        super().__init__(mode=mode, began=time.perf_counter(), reads=0)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        numbers = {"GPU-zero": 0, "GPU-one": 1}
        if uuid not in numbers:
            raise self.NVMLError("Not Found")
        return numbers[uuid]

    def nvmlDeviceGetHandleByPciBusId(self, bus):
        if bus != "00000000:1b:00.0":
            raise self.NVMLError("Not Found")
        return 0

    def nvmlDeviceGetName(self, handle):
        return b"Fake GPU" if handle else "Fake GPU"

    def nvmlDeviceGetUUID(self, handle):
        return ["GPU-zero", "GPU-one"][handle]

    def nvmlDeviceGetPowerUsage(self, handle):
        if self.mode == "nothing":
            raise self.NVMLError("Not Supported")
        return 50_000 * (handle + 1)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        if self.mode in ("noenergy", "nothing"):
            raise self.NVMLError("Not Supported")
        spent = 50_000 * (handle + 1) * (time.perf_counter() - self.began)
        return {"frozen": 1_000_000, "reset": int(1e6 - spent)}.get(self.mode, int(1e6 + spent))


@pytest.fixture
def nvml(monkeypatch):
    """Install a stand-in in `mode`; torch's cuda:0 is NVML's card 1, as under CUDA_VISIBLE_DEVICES=1."""

    def install(mode, identity=None):
        fake = FakeNvml(mode)
        monkeypatch.setattr(energy_probes, "_nvml", lambda: (fake, None))
        known = identity or {0: ("GPU-one", None), 1: ("GPU-zero", None)}
        monkeypatch.setattr(energy_probes, "card_identity", lambda index: known[index])
        monkeypatch.setattr(EnergyMeter, "_sync", lambda self: None)
        return fake

    return install


def window(meter, seconds=0.12):
    meter.start()
    time.sleep(seconds)
    return meter.stop()


def test_the_card_is_found_by_its_uuid_not_by_its_number(nvml):
    nvml("ok")
    meter = EnergyMeter.for_devices(["cuda:0"])
    reading = window(meter)
    assert reading.joules == pytest.approx(100 * reading.seconds, rel=0.1)
    assert meter.devices == ["Fake GPU (GPU-one)"]
    assert reading.source == energy_probes.COUNTER
    assert meter.idle_watts == 100


def test_without_a_uuid_the_pci_bus_id_finds_it(nvml):
    nvml("ok", {0: (None, "00000000:1b:00.0")})
    assert EnergyMeter.for_devices(["cuda:0"]).devices == ["Fake GPU (GPU-zero)"]


def test_two_cards_give_sum_and_parts_and_one_card_named_twice_counts_once(nvml):
    nvml("ok")
    reading = window(EnergyMeter.for_devices(["cuda:0", "cuda:1", "cuda:0"]))
    assert set(reading.parts) == {"Fake GPU (GPU-one)", "Fake GPU (GPU-zero)"}
    assert reading.joules == pytest.approx(sum(reading.parts.values()))
    assert reading.joules == pytest.approx(150 * reading.seconds, rel=0.1)


def test_cards_of_other_processes_count_and_are_not_waited_for(nvml):
    nvml("ok")
    meter = EnergyMeter.for_devices(["cuda:0"], ["cuda:0", "cuda:1"])
    reading = window(meter)
    assert set(reading.parts) == {"Fake GPU (GPU-one)", "Fake GPU (GPU-zero)"}
    assert meter._cuda == [0]


def test_without_the_counter_power_is_integrated_and_labelled_an_estimate(nvml):
    nvml("noenergy")
    reading = window(EnergyMeter.for_devices(["cuda:0"]), 0.2)
    assert reading.joules == pytest.approx(100 * reading.seconds, rel=0.05)
    assert "estimate" in reading.source


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("nothing", "neither energy counter nor power"),
        ("frozen", "did not move"),
        ("reset", "went backwards"),
    ],
)
def test_what_cannot_be_measured_is_null_with_a_reason(nvml, mode, reason):
    nvml(mode)
    reading = window(EnergyMeter.for_devices(["cuda:0"]))
    assert reading.joules is None
    assert reason in reading.reason


def test_an_unknown_part_makes_the_sum_unknown(nvml, monkeypatch, tmp_path):
    nvml("ok")
    monkeypatch.setattr(energy_probes, "POWERCAP", tmp_path)
    reading = window(EnergyMeter.for_devices(["cuda:0", "cpu"]))
    assert reading.joules is None
    assert reading.source is None
    assert reading.parts["Fake GPU (GPU-one)"] > 0
    assert "RAPL" in reading.reason


def test_a_card_nvml_does_not_know_is_not_replaced_by_another(nvml):
    nvml("ok", {0: ("GPU-other", "0000ffff:00:00.0")})
    reading = window(EnergyMeter.for_devices(["cuda:0"]))
    assert reading.joules is None
    assert "does not know" in reading.reason


@pytest.mark.parametrize("missing", ["library", "module"])
def test_without_nvml_the_reason_says_so(monkeypatch, missing):
    broken = types.ModuleType("pynvml")

    def init():
        raise RuntimeError("NVML Shared Library Not Found")

    broken.nvmlInit = init
    monkeypatch.setitem(sys.modules, "pynvml", broken if missing == "library" else None)
    energy_probes._nvml.cache_clear()
    monkeypatch.setattr(EnergyMeter, "_sync", lambda self: None)
    reading = window(EnergyMeter.for_devices(["cuda:0"]), 0)
    energy_probes._nvml.cache_clear()
    assert reading.joules is None
    assert ("Not Found" if missing == "library" else "not installed") in reading.reason


def rapl(folder, spent, name="package-0", wrap=10**9):
    folder.mkdir(parents=True)
    (folder / "name").write_text(name)
    (folder / "energy_uj").write_text(str(spent))
    (folder / "max_energy_range_uj").write_text(str(wrap))
    return folder / "energy_uj"


def test_rapl_packages_are_summed_parts_of_packages_are_not_and_a_wrap_is_undone(monkeypatch, tmp_path):
    first = rapl(tmp_path / "intel-rapl:0", 1_000_000)
    second = rapl(tmp_path / "intel-rapl:1", 999_000_000, "package-1")
    inner = rapl(tmp_path / "intel-rapl:0:0", 0, "core")
    monkeypatch.setattr(energy_probes, "POWERCAP", tmp_path)
    meter = EnergyMeter.for_devices(["cpu"])
    meter.start()
    first.write_text("3000000")
    second.write_text("4000000")
    inner.write_text("700000")
    reading = meter.stop()
    assert reading.joules == pytest.approx(2 + 5)
    assert "RAPL" in reading.source


def test_no_rapl_is_null(monkeypatch, tmp_path):
    monkeypatch.setattr(energy_probes, "POWERCAP", tmp_path)
    reading = window(EnergyMeter.for_devices(["cpu", "cpu"]), 0)
    assert reading.joules is None
    assert "RAPL" in reading.reason


def test_importing_the_meter_loads_neither_torch_nor_nvml():
    code = "import sys, dsbd_cli.energy as e; e.EnergyMeter.for_devices(['cpu']); " \
           "sys.exit('torch' in sys.modules or 'pynvml' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("said", [[1, 1], (1, 0)])
def test_a_slice_of_a_card_is_not_given_the_whole_cards_joules(nvml, said):
    fake = nvml("ok")
    fake.nvmlDeviceGetMigMode = lambda handle: said
    reading = window(EnergyMeter.for_devices(["cuda:0"]))
    assert (reading.joules, reading.source) == (None, None)
    assert (
        reading.reason == "cuda:0: a MIG slice of Fake GPU (GPU-one); only the whole card's energy is counted"
    )


def test_a_handle_of_a_slice_is_known_as_such_and_a_whole_card_is_measured(nvml):
    fake = nvml("ok")
    fake.nvmlDeviceIsMigDeviceHandle = lambda handle: 0
    fake.nvmlDeviceGetMigMode = lambda handle: [0, 1]
    assert window(EnergyMeter.for_devices(["cuda:0"])).joules > 0
    fake.nvmlDeviceIsMigDeviceHandle = lambda handle: 1
    assert "MIG slice" in window(EnergyMeter.for_devices(["cuda:0"])).reason


def package(tmp_path, monkeypatch, **files):
    """A RAPL package domain of these files."""
    folder = tmp_path / "intel-rapl:0"
    folder.mkdir()
    for name, text in {"name": "package-0", "energy_uj": "5000000", **files}.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(energy_probes, "POWERCAP", tmp_path)
    return folder


@pytest.mark.parametrize("files", [{}, {"max_energy_range_uj": ""}, {"max_energy_range_uj": "many"}])
def test_a_wrapped_counter_without_its_range_is_null_with_a_reason(tmp_path, monkeypatch, files):
    folder = package(tmp_path, monkeypatch, **files)
    meter = EnergyMeter.for_devices(["cpu"])
    meter.start()
    (folder / "energy_uj").write_text("1000000")
    reading = meter.stop()
    assert reading.joules is None
    assert reading.reason == "cpu package-0: the RAPL counter wrapped round, and its range could not be read"


def test_a_wrapped_counter_with_its_range_is_measured(tmp_path, monkeypatch):
    folder = package(tmp_path, monkeypatch, max_energy_range_uj="6000000")
    meter = EnergyMeter.for_devices(["cpu"])
    meter.start()
    (folder / "energy_uj").write_text("1000000")
    assert meter.stop().joules == pytest.approx(2.0)


@pytest.mark.parametrize("moment", ["start", "stop", "watts"])
def test_a_probe_that_breaks_costs_its_number_and_nothing_else(moment):
    class Breaks:
        name, source = "odd", "odd"

        def start(self):
            if moment == "start":
                raise OSError("gone")

        def stop(self):
            if moment == "stop":
                raise ValueError("gone")
            return 1.0, None

        def watts(self):
            raise RuntimeError("gone")

    meter = EnergyMeter([Breaks()])
    assert meter.idle_watts is None
    for _ in range(2):
        meter.start()
        reading = meter.stop()
        if moment == "watts":
            assert reading.joules == 1.0
        else:
            assert (reading.joules, reading.reason) == (None, "odd: energy could not be read (gone)")


def test_a_device_that_cannot_be_looked_at_is_unknown(nvml, monkeypatch):
    nvml("ok")
    monkeypatch.setattr(energy_probes, "card_identity", lambda index: 1 / 0)
    reading = window(EnergyMeter.for_devices(["cuda:0"]))
    assert (reading.joules, reading.reason) == (None, "cuda:0: energy cannot be read (division by zero)")
