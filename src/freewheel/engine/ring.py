"""Where results arrive on the host."""

import numpy as np
import torch


class Ring:
    """Places in host memory for what a decode step brings, taken in turn by its launches.

    The device writes there itself and counts the places as the host does: see :func:`step_kernels.advance`.

    Attributes:
        words: int64 [places, ...], what a launch brings.
    """

    def __init__(self, places: int, shape: tuple[int, ...], device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.words = torch.zeros(places, *shape, dtype=torch.int64, pin_memory=cuda)
        self._results: list[np.ndarray] = list(self.words.numpy())
        self._arrived = [torch.cuda.Event() for _ in range(places)] if cuda else []
        self._device = device
        self._launched = 0

    @property
    def place(self) -> int:
        """Where the results of the next launch go."""
        return self._launched % len(self._results)

    def launched(self) -> int:
        """Take note of a launch; its number."""
        if self._arrived:
            self._arrived[self.place].record(torch.cuda.current_stream(self._device))
        self._launched += 1
        return self._launched - 1

    def take_back(self) -> None:
        """Give the place of the latest launch to the next one: the device has to be told."""
        self._launched -= 1

    def result(self, number: int) -> np.ndarray:
        """Wait for the results of the launch of this number, to be copied before another launch.

        Raises:
            RuntimeError: there were so many launches since that the place was needed again.
        """
        if self._launched - number > len(self._results):
            raise RuntimeError(f"more than {len(self._results)} launches were in flight: results are overwritten")
        place = number % len(self._results)
        if self._arrived:
            self._arrived[place].synchronize()
        return self._results[place]
