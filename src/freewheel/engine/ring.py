"""Where results arrive on the host, and where the device finds what it is told: host memory, used again and again."""

from collections.abc import Sequence

import numpy as np
import torch

from freewheel.engine.captured import capture
from freewheel.engine.step_kernels import deliver
from freewheel.ops.launch import launch

OUTBOX_PLACES = 32
OUTBOX_WORDS = 2048
HEADER = 3  # words of a message before its numbers
MOST_SCATTERED = (OUTBOX_WORDS - HEADER) // 2  # numbers of a message


class Outbox:
    """Places in host memory for what the host tells the device, taken in turn by messages.

    One is taken again only when the device has read it, which it did long ago as a rule. To allocate such memory each
    time takes longer than all that happens here. Device and host count the places alike, so that one captured graph
    delivers any message.

    Args:
        device: where messages go.
        graphs: capture the delivery. A graph of one kernel, as what is launched without one between two of the same
            graph's runs makes these slower, on an H200: all their kernels start later.
    """

    def __init__(self, device: torch.device, *, graphs: bool = False) -> None:
        cuda = device.type == "cuda"
        self._words = torch.zeros(OUTBOX_PLACES, OUTBOX_WORDS, dtype=torch.int64, pin_memory=cuda)
        self._numbers: list[np.ndarray] = list(self._words.numpy())
        self._read = [torch.cuda.Event() for _ in range(OUTBOX_PLACES)] if cuda else []
        self._device = device
        self._next = 0
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._graphs = graphs
        self._delivery: torch.cuda.CUDAGraph | None = None
        self._unsure = False  # whether the device has taken the message in the next place

    def tell(self, numbers: torch.Tensor, columns: Sequence[Sequence[int]]) -> None:
        """Let the device write lists of one length into dense int64 ``numbers`` of as many rows, as long as they are.

        Raises:
            ValueError: more than there is room for.
        """
        self._send(numbers, len(columns) * len(columns[0]), 0, columns)

    def scatter(self, table: torch.Tensor, entries: Sequence[int], numbers: Sequence[int]) -> None:
        """Let the device write numbers to entries of the flat, dense int32 ``table``.

        Raises:
            ValueError: more than ``MOST_SCATTERED``.
        """
        self._send(table, len(entries), 1, (entries, numbers))

    def _send(self, to: torch.Tensor, count: int, scattered: int, columns: Sequence[Sequence[int]]) -> None:
        if self._unsure:
            self._agree()
        if self._read and not self._read[self._next].query():  # a trace shows the wait only if there is one
            self._read[self._next].synchronize()
        words, length = self._numbers[self._next], len(columns[0])
        words[:HEADER] = to.data_ptr(), count, scattered
        words[HEADER : HEADER + len(columns) * length].reshape(len(columns), length)[:] = columns
        self._unsure = True
        if self._delivery is not None:
            self._delivery.replay()
        else:
            self._deliver()
        if self._read:
            self._read[self._next].record(torch.cuda.current_stream(self._device))
        self._next = (self._next + 1) % OUTBOX_PLACES
        self._unsure = False
        if self._graphs and self._delivery is None:
            self._delivery = capture(self._deliver, self._device).graph

    def _agree(self) -> None:
        """After a failure: let the device go on where the host does."""
        if self._read:
            torch.cuda.synchronize(self._device)
        self._place.fill_(self._next)
        self._unsure = False

    def _deliver(self) -> None:
        launch(deliver, (1,), 8, self._words, self._place, OUTBOX_PLACES, OUTBOX_WORDS)


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
