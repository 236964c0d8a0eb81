"""Where results arrive on the host, and where the device finds what it is told: host memory, used again and again."""

from collections.abc import Sequence

import numpy as np
import torch

from freewheel.engine.step_kernels import tell
from freewheel.ops.launch import Direct

OUTBOX_PLACES = 32
OUTBOX_WORDS = 8192
WORDS_A_PROGRAM = 128  # that are told


class Outbox:
    """Places in host memory for what the host tells the device, taken in turn.

    One is taken again only when the device has read it, which it did long ago as a rule. To allocate such memory each
    time takes longer than all that happens here.
    """

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._words = torch.zeros(OUTBOX_PLACES, OUTBOX_WORDS, dtype=torch.int64, pin_memory=cuda)
        self._numbers: list[np.ndarray] = list(self._words.numpy())
        self._read = [torch.cuda.Event() for _ in range(OUTBOX_PLACES)] if cuda else []
        self._device = device
        self._next = 0
        self._teller = Direct(tell, warps=1)

    def tell(self, numbers: torch.Tensor, columns: Sequence[Sequence[int]]) -> None:
        """Let the device write lists of one length into int64 ``numbers`` of as many rows, with room for them."""
        told = self.write(columns)
        count = told.numel()
        self._teller(-(-count // WORDS_A_PROGRAM), told, numbers, count, WORDS_A_PROGRAM)
        self.sent()

    def write(self, columns: Sequence[Sequence[int]]) -> torch.Tensor:
        """Lists of one length, of ``OUTBOX_WORDS`` in all at most, as int64 [columns, length] in the next place.

        Call :meth:`sent` when what reads it has been launched.
        """
        if self._read and not self._read[self._next].query():  # a trace shows the wait only if there is one
            self._read[self._next].synchronize()
        count, length = len(columns), len(columns[0])
        self._numbers[self._next][: count * length].reshape(count, length)[:] = columns
        return self._words[self._next, : count * length].view(count, length)

    def sent(self) -> None:
        """Go on to the next place."""
        if self._read:
            self._read[self._next].record(torch.cuda.current_stream(self._device))
        self._next = (self._next + 1) % OUTBOX_PLACES


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
