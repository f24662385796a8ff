"""What measures one device: NVML's energy counter, sampled power, RAPL, or a reason why nothing does.

Cards are found by UUID (or PCI bus id) of the torch device in use, because NVML numbers all cards of the
machine and torch only the visible ones. torch and pynvml are touched when a cuda device is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from pathlib import Path
from typing import Any, Protocol

from dsbd_cli.errors import let_by

POWERCAP = Path("/sys/class/powercap")
SAMPLE_S = 0.05
COUNTER = "NVML total-energy counter"
SAMPLED = "NVML power sampled every 50 ms and integrated (an estimate)"
RAPL = "RAPL package counters (whole CPU, other processes included)"


class Probe(Protocol):
    """What measures one device. `stop` gives (joules, None) or (None or 0.0, reason)."""

    name: str
    source: str | None

    def start(self) -> None: ...
    def stop(self) -> tuple[float | None, str | None]: ...
    def watts(self) -> float | None: ...


class Unknown:
    """A device whose energy cannot be read."""

    source: str | None = None

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def start(self) -> None:
        return None

    def stop(self) -> tuple[float | None, str | None]:
        return None, self.reason

    def watts(self) -> float | None:
        return None


class NvmlCounter:
    """The total-energy counter (millijoules since the driver was loaded)."""

    source: str | None = COUNTER

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self.nvml, self.handle, self.name = nvml, handle, name
        self._begin: int | None = None

    def read(self) -> int:
        return int(self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))

    def start(self) -> None:
        try:
            self._begin = self.read()
        except self.nvml.NVMLError:
            self._begin = None

    def stop(self) -> tuple[float | None, str | None]:
        try:
            end = self.read()
        except self.nvml.NVMLError as error:
            return None, f"{self.name}: the energy counter could not be read ({words(error)})"
        if self._begin is None:
            return None, f"{self.name}: the energy counter could not be read at the start of the window"
        if end < self._begin:
            return None, f"{self.name}: the energy counter went backwards"
        if end == self._begin:
            return 0.0, f"{self.name}: the energy counter did not move within the window"
        return (end - self._begin) / 1000.0, None

    def watts(self) -> float | None:
        return _power(self.nvml, self.handle)


class NvmlPower:
    """Power sampled by a thread, integrated by the trapezoid rule."""

    source: str | None = SAMPLED

    def __init__(self, nvml: Any, handle: Any, name: str) -> None:
        self.nvml, self.handle, self.name = nvml, handle, name
        self._samples: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def _sample(self) -> None:
        watts = _power(self.nvml, self.handle)
        if watts is not None:
            self._samples.append((time.perf_counter(), watts))

    def _loop(self, end: threading.Event) -> None:
        while not end.wait(SAMPLE_S):
            self._sample()

    def start(self) -> None:
        self._samples, self._end = [], threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._loop, args=(self._end,), daemon=True)
        self._thread.start()

    def stop(self) -> tuple[float | None, str | None]:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._sample()
        points = self._samples
        if len(points) < 2:
            return None, f"{self.name}: power could not be sampled"
        pairs = itertools.pairwise(points)
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs), None

    def watts(self) -> float | None:
        return _power(self.nvml, self.handle)


class Rapl:
    """One RAPL package domain (`energy_uj`, wrapping at `max_energy_range_uj`)."""

    source: str | None = RAPL

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._begin: int | None = None

    def read(self) -> int | None:
        try:
            return int((self.folder / "energy_uj").read_text())
        except (OSError, ValueError) as error:
            let_by(error)
            return None

    def start(self) -> None:
        self._begin = self.read()

    def stop(self) -> tuple[float | None, str | None]:
        end = self.read()
        if self._begin is None or end is None:
            return None, f"{self.name}: the RAPL counter could not be read"
        spent = end - self._begin
        if spent < 0:  # wrapped round
            try:
                spent += int((self.folder / "max_energy_range_uj").read_text())
            except (OSError, ValueError) as error:
                let_by(error)
                return None, f"{self.name}: the RAPL counter wrapped round, and its range could not be read"
        return (spent / 1e6, None) if spent > 0 else (0.0, f"{self.name}: the RAPL counter did not move")

    def watts(self) -> float | None:
        begin, at = self.read(), time.perf_counter()
        time.sleep(0.2)
        end, seconds = self.read(), time.perf_counter() - at
        return None if begin is None or end is None or end <= begin else (end - begin) / 1e6 / seconds


def probes_of(kind: str, index: int) -> list[Probe]:
    if kind == "cuda":
        return [_card(index)]
    if kind == "cpu":
        return _packages()
    return [Unknown(kind, f"{kind}: no energy counter known for this kind of device")]


def _card(index: int) -> Probe:
    """The probe of one torch cuda device. A fresh object each time: windows may nest."""
    label = f"cuda:{index}"
    nvml, reason = _nvml()
    if nvml is None:
        return Unknown(label, f"{label}: {reason}")
    handle, name_or_reason = _handle(nvml, index)
    if handle is None:
        return Unknown(label, f"{label}: {name_or_reason}")
    name = name_or_reason
    if is_sliced(nvml, handle):
        return Unknown(label, f"{label}: a MIG slice of {name}; only the whole card's energy is counted")
    try:
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return NvmlCounter(nvml, handle, name)
    except nvml.NVMLError as error:
        counter = words(error)
    if _power(nvml, handle) is not None:
        return NvmlPower(nvml, handle, name)
    return Unknown(name, f"{name}: neither energy counter nor power reading ({counter})")


@functools.cache
def _nvml() -> tuple[Any, str | None]:
    """The initialised NVML module, or None and the reason."""
    try:
        import pynvml
    except ImportError:
        return None, "the NVML bindings are not installed (nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
    except Exception as error:  # NVMLError kinds differ between versions of the bindings
        let_by(error)
        return None, f"NVML cannot be used ({words(error)})"
    return pynvml, None


def _handle(nvml: Any, index: int) -> tuple[Any, str]:
    """(NVML handle, name) of a torch device, or (None, reason)."""
    uuid, bus = card_identity(index)
    handle = None
    if uuid:
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    if handle is None and bus:
        with contextlib.suppress(nvml.NVMLError):
            handle = nvml.nvmlDeviceGetHandleByPciBusId(bus)
    if handle is None:
        return None, "NVML does not know this card (neither by UUID nor by PCI bus id)"
    try:
        name, found = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return handle, f"cuda:{index} ({uuid or bus})"
    return handle, f"{name} ({found})"


def is_sliced(nvml: Any, handle: Any) -> bool:
    """Whether a handle is of a MIG slice, or of a card that is cut into such."""
    for name in ("nvmlDeviceIsMigDeviceHandle", "nvmlDeviceGetMigMode"):
        try:
            said = getattr(nvml, name)(handle)
        except (nvml.NVMLError, AttributeError):  # a card or bindings without MIG
            continue
        if said[0] if isinstance(said, (list, tuple)) else said:
            return True
    return False


def card_identity(index: int) -> tuple[str | None, str | None]:
    """(UUID as NVML spells it, PCI bus id) of torch's cuda device `index`; None where torch does not say."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    numbers = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    bus = None if min(numbers) < 0 else "{:08x}:{:02x}:{:02x}.0".format(*numbers)
    text = None if uuid is None else str(uuid)
    return (text if text is None or text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"), bus


def _packages() -> list[Probe]:
    """One probe per CPU package, or one Unknown."""
    probes: list[Probe] = []
    for folder in sorted(POWERCAP.glob("*-rapl:[0-9]*")):
        if folder.name.count(":") != 1:
            continue  # a part of a package (core, dram): already in its package
        try:
            name = (folder / "name").read_text().strip()
            int((folder / "energy_uj").read_text())
        except (OSError, ValueError) as error:
            let_by(error)
            continue
        if name.startswith("package"):
            probes.append(Rapl(folder, f"cpu {name}"))
    return probes or [Unknown("cpu", "cpu: no readable RAPL counter (/sys/class/powercap)")]


def _power(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000.0
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
