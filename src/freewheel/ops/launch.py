"""What launching a Triton kernel takes to know."""

from typing import Any

import torch


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the one ahead ends: on CUDA devices of compute capability 9.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(kernel: Any, grid: tuple[int, ...], warps: int, *args: Any) -> None:
    """A kernel, of so many warps a program; its constants are the last arguments."""
    kernel[grid](*args, num_warps=warps)


def power(number: int) -> int:
    """The next power of two. Triton's own function takes 2 µs."""
    return 1 << max(number - 1, 0).bit_length()
