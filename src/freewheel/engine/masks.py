"""Masks of grammars for a draw: made in host memory, and read by the device."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from freewheel.grammar import Matcher
from freewheel.speculative import DraftTree


class Constrained(NamedTuple):
    """A sequence with a grammar, and its rows in a draw: from the first on those of its draft, the root before all."""

    row: int
    matcher: Matcher
    draft: DraftTree


class MaskBuffer:
    """Memory for the masks of one draw after the other. It grows with the most rows that were constrained at once.

    Args:
        vocab_size: width of the logits.
        device: where these are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._words, self._device = -(-vocab_size // 32), device
        self._cuda = device.type == "cuda"
        self._read = torch.cuda.Event() if self._cuda else None  # what was written there
        self._masks = self._mask_rows = torch.empty(0)
        self._on_device = self._masks, self._mask_rows

    def fill(self, constrained: Sequence[Constrained], rows: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What may be drawn at each of so many rows, as ``SampleRows`` has it, on the device; None where all may.

        The tensors hold until the next call.
        """
        if not constrained:
            return None, None
        count = sum(one.draft.rows for one in constrained)
        if self._read is not None:
            self._read.synchronize()
        if count > len(self._masks) or rows > len(self._mask_rows):
            self._grow(max(count, 2 * len(self._masks)), max(rows, 2 * len(self._mask_rows)))
        masks, mask_rows = self._masks.numpy(), self._mask_rows[:rows].numpy()
        mask_rows.fill(-1)
        first = 0
        for row, matcher, draft in constrained:
            last = first + draft.rows
            matcher.fill(masks[first:last], draft)
            mask_rows[row : row + draft.rows] = np.arange(first, last)
            first = last
        there, rows_there = self._on_device
        if self._read is not None:
            there[:count].copy_(self._masks[:count], non_blocking=True)
            rows_there[:rows].copy_(self._mask_rows[:rows], non_blocking=True)
            self._read.record(torch.cuda.current_stream(self._device))
        return there[:count], rows_there[:rows]

    def _grow(self, masks: int, rows: int) -> None:
        self._masks = torch.empty(masks, self._words, dtype=torch.int32, pin_memory=self._cuda)
        self._mask_rows = torch.empty(rows, dtype=torch.int64, pin_memory=self._cuda)
        self._on_device = self._masks.to(self._device), self._mask_rows.to(self._device)
