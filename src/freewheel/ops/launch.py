"""What launching a Triton kernel takes to know."""

from typing import Any

import torch


def dependent_launch(device: torch.device) -> bool:
    """Whether kernels may start before the one ahead ends: on CUDA devices of compute capability 9.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch(kernel: Any, grid: tuple[int, ...], warps: int, *args: Any) -> None:
    """A kernel, of so many warps a program; its constants are the last arguments."""
    kernel[grid](*args, num_warps=warps)


class Direct:
    """A kernel that takes arguments of the same kinds each time: by its handle, once it is compiled.

    Triton's own launch looks at every argument, which takes the host longer than such a kernel takes the device.

    Args:
        kernel: that takes no number for a special one: its sizes are ``do_not_specialize``.
        warps: of a program.
    """

    def __init__(self, kernel: Any, warps: int) -> None:
        import triton  # only here, as the rest needs none

        self._kernel, self._warps = kernel, warps
        self._driver: Any = triton.runtime.driver
        self._compiled: Any = None  # None as well where kernels are interpreted

    def __call__(self, programs: int, *args: Any) -> None:
        """Launch so many programs; constants are the last arguments, tensors begin at multiples of 16 bytes."""
        compiled = self._compiled
        if compiled is None:
            self._compiled = self._kernel[(programs,)](*args, num_warps=self._warps)
            return
        device = self._driver.active
        stream = device.get_current_stream(device.get_current_device())
        compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)


def power(number: int) -> int:
    """The next power of two. Triton's own function takes 2 µs."""
    return 1 << max(number - 1, 0).bit_length()
