"""Which of torch's attention kernels prompts run with, ours and those of references beside ours."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

# All but cuDNN's, which torch prefers on Hopper and which plans anew for every shape: 35 to 100 ms before
# the first token of a prompt whose length was not met before (docs/speed.md), and prompts nearly always are.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def without_planning() -> AbstractContextManager[None]:
    """Attention on a GPU that plans nothing, inside the block."""
    return sdpa_kernel(_KERNELS)


def kernel_names() -> str:
    """What may run inside `without_planning`, as facts of a run say it."""
    return ", ".join(kernel.name.lower().removesuffix("_attention") for kernel in _KERNELS)
