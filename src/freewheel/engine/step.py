"""Decode steps on a device, of which each sequence has one row; and what all kinds of steps have that are captured."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from freewheel.engine.captured import Captured
from freewheel.engine.ring import Outbox, Ring
from freewheel.engine.runner import StepResult, by_row, on_its_way
from freewheel.engine.step_kernels import StepInputs, advance
from freewheel.models.fused_decoder import Rows
from freewheel.ops.launch import dependent_launch
from freewheel.sampling import Logprobs, SampleRows, Samples, SamplingState
from freewheel.sampling.fused import sequences_of


@dataclass
class Graphs:
    """Of a step.

    Attributes:
        begin: what comes before the decoder; None: nothing.
        decoder: to logits.
        whole: all of the step, down to log probabilities, for demands on the sampler that were met often.
        met: how often the others were, lately.
        refused: those that could not be captured.
    """

    begin: Captured[None] | None = None
    decoder: Captured[torch.Tensor] | None = None
    whole: dict[Hashable, Captured[Logprobs | None]] = field(default_factory=dict)
    met: Counter[Hashable] = field(default_factory=Counter)
    refused: set[Hashable] = field(default_factory=set)


class DecodeStep:
    """A decode step of some number of rows. What it is told of them moves on by itself, from launch to launch.

    Args:
        state: of the sampler.
        count: of rows.
        places: of its ring.
        outbox: by which it is told.

    Attributes:
        rows, sample_rows: for decoder and sampler.
        ring: where the results go.
    """

    def __init__(self, state: SamplingState, count: int, places: int, outbox: Outbox) -> None:
        device, self._outbox = state.device, outbox
        self._state, self._spare_slot = state, len(state.history) - 1
        self._inputs = torch.zeros(len(StepInputs._fields), even(count), dtype=torch.int64, device=device)
        self._columns = columns = StepInputs(*self._inputs[:, :count].unbind())
        self.rows = Rows(columns.slots, columns.positions)
        self.sample_rows = SampleRows(columns.sample_slots, columns.following)
        self.ring = Ring(places, (2, count), device)
        self.graphs = Graphs()
        chained = dependent_launch(device)
        self._options: dict[str, Any] = {"PLACES": places, "CHAINED": chained, "num_warps": 1}
        if chained:
            self._options["launch_pdl"] = True
        self._put: tuple[list[int], list[int]] = ([], [])
        self._expected: tuple[list[int], list[int]] | None = None  # slots and positions that the inputs have

    def put(self, slots: list[int], positions: list[int]) -> None:
        """Let it have these rows; the others are idle."""
        self._put, expected, self._expected = (slots, positions), self._expected, None  # should anything below fail
        if expected == self._put:
            return
        idle = [0] * (self._inputs.shape[1] - len(slots))
        columns = StepInputs(
            slots=[*slots, *(-1 for _ in idle)],
            positions=[*positions, *idle],
            following=[*(position + 1 for position in positions), *idle],
            sample_slots=[*slots, *(self._spare_slot for _ in idle)],
            places=[*(self.ring.place for _ in slots), *idle],
        )
        self._outbox.tell(self._inputs, columns)

    def forget(self) -> None:
        """A step failed: the device may have other inputs than expected."""
        self._expected = None

    def begin(self) -> None:
        """Nothing has to be done before the decoder."""

    def end(self, samples: Samples) -> None:
        """Let the tokens go to their sequences and to the host, and the rows move on."""
        # Chained: it starts early, whichever kernel the draw ends with.
        advance[(len(samples.tokens),)](
            self._columns, samples.tokens, samples.status, self.ring.words, sequences_of(self._state),
            self._spare_slot, **self._options,
        )  # fmt: skip

    def launched(self, logprobs: Logprobs | None) -> "Decoded":
        """Take note of a launch of what was put there."""
        slots, positions = self._put
        decoded = Decoded(self.ring, len(slots), logprobs)
        self._expected = slots, [position + 1 for position in positions]
        return decoded


class Decoded:
    """A decode step whose results may not have arrived yet. Log probabilities set out for the host at once."""

    def __init__(self, ring: Ring, rows: int, logprobs: Logprobs | None) -> None:
        """The results of the launch that was just made; the first ``rows`` are wanted."""
        self._ring = ring
        self._rows = rows
        self._logprobs: Logprobs | None = on_its_way(logprobs)
        self._number = ring.launched()

    def take_back(self) -> None:
        """Nobody is going to read the results."""
        self._ring.take_back()

    def result(self) -> StepResult:
        """Wait for the results."""
        results = self._ring.result(self._number)
        tokens, statuses = results[:, : self._rows].tolist()
        if self._logprobs is None:
            return StepResult(tokens, statuses, [None] * self._rows, [])
        return StepResult(tokens, statuses, by_row(torch.from_numpy(results[0]), self._logprobs)[: self._rows], [])


def even(count: int) -> int:
    """So many int64, or one more: what comes next begins at a multiple of 16 bytes, or kernels were compiled anew."""
    return count + count % 2


def pinned(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """In memory from where a copy to the device does not wait for what the device has yet to do."""
    return numbers.pin_memory() if device.type == "cuda" else numbers
