"""Copies that wait for nothing say the same as those that do."""

from __future__ import annotations

import pytest
import torch

from dsbd_cli.decoding.cache.transfer import Landing, to_device

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("numbers", [[], [3], [1, 2, -7], [[1, 2], [3, 1 << 40]]])
def test_numbers_arrive_as_they_were_given(device: str, numbers: list[int]) -> None:
    there = to_device(numbers, torch.device(device))
    assert there.device.type == device
    assert there.dtype == torch.long
    assert there.tolist() == numbers


@pytest.mark.parametrize("device", DEVICES)
def test_what_lands_is_what_was_there_when_it_left(device: str) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32, device=device)
    landing = Landing(tensor + 1)
    tensor.zero_()
    assert (landing.wait() == torch.arange(1, (1 << 20) + 1).float().numpy()).all()
