"""Copies between host and device that wait for nothing that is in flight there.

A copy from or to ordinary memory waits until all of the device's work before it is done; one with pinned memory
is queued like a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Integers as an int64 tensor on `device`."""
    here = torch.tensor(numbers, dtype=torch.long)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)


class Landing:
    """A tensor on its way to the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> np.ndarray:
        """It, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
