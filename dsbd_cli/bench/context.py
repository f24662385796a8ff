"""The circumstances of a session: hardware, versions, commit. Results without them cannot be compared."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from dsbd_cli.version import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "nvidia-ml-py")


def session(devices: list[str], command: list[str]) -> dict[str, Any]:
    """What is true of this process; unknown is None.

    Args:
        devices: torch devices of the pair.
        command: the command line.
    """
    import torch

    from dsbd_cli.decoding import kernel_names

    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "load": load(),
        "threads": torch.get_num_threads(),
        "devices": {name: device_name(name) for name in dict.fromkeys(devices)},
        "cuda": torch.version.cuda,
        "attention": kernel_names(),
        "driver": driver(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "dsbd": __version__,
        "commit": commit(),
        "command": command,
    }


def usable_cores() -> int | None:
    """Cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count()


def load() -> float | None:
    """Load average of the last minute, this process's own share in it; None where the system has none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def device_name(name: str) -> str:
    """A card's product name; the CPU's model for `cpu`."""
    import torch

    device = torch.device(name)
    if device.type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    return cpu_name() if device.type == "cpu" else name


def cpu_name() -> str:
    """The CPU's model, as far as the system tells."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def driver() -> str | None:
    """Version of the NVIDIA driver, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # the bindings raise kinds of their own, or are not there
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def commit() -> str | None:
    """The commit of the checkout this package runs from, `+` if it was changed; None for an installed one."""
    folder = Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    head = _git(folder, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", "dsbd_cli", "presets")
    return f"{head}+" if changed else head


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def command_line() -> list[str]:
    """How this process was called, the program by its bare name."""
    return ["dsbd", *sys.argv[1:]]
