"""Energy of a window of time, per device, or the reason why it is unknown. Never 0 for unknown.

Importing this module costs nothing: torch and pynvml are touched when a cuda device is asked for.
How each kind of device is measured: `energy_probes.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dsbd_cli.energy_probes import Probe, Unknown, probes_of
from dsbd_cli.energy_probes import words as _words
from dsbd_cli.errors import let_by


@dataclass(frozen=True)
class EnergyReading:
    """One window.

    Attributes:
        joules: sum over the devices, or None if any of them is unknown.
        source: how it was measured, or None.
        reason: why `joules` is None, else None.
        parts: device name -> joules (0.0 where a counter did not move within a short window).
        seconds: length of the window.
    """

    joules: float | None
    source: str | None
    reason: str | None
    parts: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0


class EnergyMeter:
    """Measures windows over a set of devices; `start`, work, `stop`; may be used again."""

    def __init__(self, probes: Sequence[Probe], cuda: Sequence[Any] = ()) -> None:
        self.probes = list(probes)
        self._cuda = list(cuda)
        self._at = 0.0
        self._idle: float | None = None
        self._broken: dict[str, Exception] = {}

    @classmethod
    def for_devices(cls, devices: Sequence[Any], others: Sequence[Any] = ()) -> EnergyMeter:
        """A meter over the physical devices behind some torch devices; each is counted once.

        Args:
            devices: `torch.device`s, or anything with `type` and `index`. Strings such as "cpu" work too.
            others: those on which other processes work for the same run; their work is not waited for.
        """
        own = dict.fromkeys(_key(device) for device in devices)
        keys = own | dict.fromkeys(_key(device) for device in others)
        probes: dict[str, Probe] = {}
        for kind, index in keys:
            try:
                found = probes_of(kind, index)
            except Exception as error:  # a driver's or a file system's; energy never costs an answer
                let_by(error)
                found = [
                    Unknown(f"{kind}:{index}", f"{kind}:{index}: energy cannot be read ({_words(error)})")
                ]
            for probe in found:
                probes.setdefault(probe.name, probe)
        return cls(list(probes.values()), [index for kind, index in own if kind == "cuda"])

    def start(self) -> None:
        """Open the window: all work queued on the devices before it is waited for."""
        self._sync()
        self._at = time.perf_counter()
        self._broken = {}
        for probe in self.probes:
            try:
                probe.start()
            except Exception as error:
                let_by(error)
                self._broken[probe.name] = error

    def stop(self) -> EnergyReading:
        """Close the window: all work queued on the devices is waited for."""
        self._sync()
        seconds = time.perf_counter() - self._at
        parts: dict[str, float | None] = {}
        reasons = []
        for probe in self.probes:
            parts[probe.name], reason = self._stopped(probe)
            if reason:
                reasons.append(reason)
        if not self.probes:
            reasons = ["no device to measure"]
        known = [joules for joules in parts.values() if joules is not None]
        total = None if reasons else sum(known)
        return EnergyReading(total, self.source, "; ".join(reasons) or None, parts, seconds)

    def _stopped(self, probe: Probe) -> tuple[float | None, str | None]:
        error: Exception | None = self._broken.get(probe.name)
        if error is None:
            try:
                return probe.stop()
            except Exception as found:
                let_by(found)
                error = found
        return None, f"{probe.name}: energy could not be read ({_words(error)})"

    @property
    def source(self) -> str | None:
        """How energy is measured, over all devices; None if any of them is unknown."""
        sources = [probe.source for probe in self.probes]
        known = [source for source in sources if source is not None]
        return " + ".join(dict.fromkeys(known)) if known and len(known) == len(sources) else None

    @property
    def reason(self) -> str | None:
        """Why nothing can be measured, known before the first window; None if it can."""
        reasons = [probe.reason for probe in self.probes if isinstance(probe, Unknown)]
        return "; ".join(reasons) or None

    @property
    def devices(self) -> list[str]:
        """Names of what is measured."""
        return [probe.name for probe in self.probes]

    @property
    def idle_watts(self) -> float | None:
        """Power drawn by the devices now (first call; kept): ask before any work runs."""
        if self._idle is None:
            powers = [_watts(probe) for probe in self.probes]
            known = [watts for watts in powers if watts is not None]
            self._idle = sum(known) if known and len(known) == len(powers) else None
        return self._idle

    def _sync(self) -> None:
        if self._cuda:
            import torch

            if torch.cuda.is_available():
                for index in self._cuda:
                    torch.cuda.synchronize(index)


def _watts(probe: Probe) -> float | None:
    try:
        return probe.watts()
    except Exception as error:
        let_by(error)
        return None


def _key(device: Any) -> tuple[str, int]:
    """(type, index) of a torch device or its name; cuda without an index is the current device."""
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        index = int(number) if number else None
    else:
        kind, index = device.type, device.index
    if kind == "cuda" and index is None:
        import torch

        index = torch.cuda.current_device()
    return kind, index or 0
