"""Which device and number format `auto` means, and whether the ones asked for exist."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dsbd_cli.errors import UserError
from dsbd_cli.loading import processor

INT8 = "int8"


class NumberFormat(NamedTuple):
    """What a model computes in.

    Attributes:
        dtype: of its weights, and of activations where they are not rounded.
        int8_activations: activations are rounded to 8 bits where they meet 4-bit blocks (docs/speed.md); a CPU's.
    """

    dtype: torch.dtype
    int8_activations: bool = False

    @property
    def name(self) -> str:
        """What it is called in options and results."""
        return INT8 if self.int8_activations else str(self.dtype).removeprefix("torch.")

    @classmethod
    def called(cls, name: str) -> NumberFormat:
        """The one of this name."""
        return cls(torch.float32, True) if name == INT8 else cls(getattr(torch, name))


def pick_device(name: str, role: str) -> torch.device:
    """The device called `name`; `auto` is the first of cuda, mps, cpu that is there.

    Raises:
        UserError: a device that this machine does not have.
    """
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    mps = torch.backends.mps.is_available()
    if name == "auto":
        name = "cuda" if cuda else "mps" if mps else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        index = device.index if device.index is not None else (torch.cuda.current_device() if cuda else 0)
        if index >= cuda:
            there = f"{cuda} CUDA device{'' if cuda == 1 else 's'}" if cuda else "no CUDA device"
            raise UserError(f"{role} device {name} is not there: torch sees {there} (dsbd doctor lists them)")
        return torch.device("cuda", index)
    if device.type == "mps" and not mps:
        raise UserError(f"{role} device mps is not there: it needs a Mac with Apple silicon")
    return device


def pick_dtype(name: str, device: torch.device, coarse: bool = False) -> torch.dtype:
    """The number format called `name`; `auto` is what `device` runs well, as far as that is known beforehand.

    On a CPU that leaves a `choice` it is measured instead where the verdict can be kept (`number_format.pick`). On
    a GPU nothing is: bfloat16 halves the bytes that every forward reads, and no product there is quicker.

    float16 is never chosen where bfloat16 runs: activations of models trained in bfloat16 overflow it.

    Args:
        coarse: the weights are stored in bfloat16 or fewer bits, so that they lose nothing in bfloat16.
    """
    if name != "auto":
        return NumberFormat.called(name).dtype
    if device.type == "cuda":
        with torch.cuda.device(device):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if bf16 else torch.float16
    if device.type == "mps":
        return torch.bfloat16 if torch.backends.mps.is_macos_or_newer(14, 0) else torch.float16
    return torch.bfloat16 if coarse and processor.amx_likely() else torch.float32


def choice(device: torch.device, coarse: bool, blocks: bool = False) -> tuple[NumberFormat, ...]:
    """The number formats that `auto` may be, what rounds least first; one of them leaves nothing to measure.

    Args:
        coarse: as for `pick_dtype`: other weights would lose digits.
        blocks: the weights may be stored in blocks of 4 bits, of a model that is no draft (which has formats of its
            own: it may say anything).
    """
    found = [pick_dtype("auto", device, coarse)]
    if device.type == "cpu" and coarse and processor.bf16_likely():
        found = [torch.float32, torch.bfloat16]
    short = device.type == "cpu" and blocks and processor.int8_likely()
    if short and torch.float32 not in found:
        found.insert(0, torch.float32)
    return *map(NumberFormat, found), *([NumberFormat.called(INT8)] if short else [])
