"""How much memory is free, here or on a card."""

from __future__ import annotations

from pathlib import Path

import torch

from dsbd_cli.errors import let_by

# Where a system does not say.
_UNKNOWN = 2 << 30


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on `device` without pushing anything else out."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch holds and does not use is free as well.
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError as error:
        let_by(error)
        return _UNKNOWN
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable")), None)
    free = _UNKNOWN if found is None else int(found) * 1024
    limits = [limit - used for limit, used in (_cgroup(),) if limit is not None]
    return max(0, min([free, *limits]))


def _cgroup() -> tuple[int | None, int]:
    """What a container may use and uses; None: no limit."""
    root = Path("/sys/fs/cgroup")
    try:
        return int((root / "memory.max").read_text()), int((root / "memory.current").read_text())
    except (OSError, ValueError) as error:
        let_by(error)
        return None, 0
