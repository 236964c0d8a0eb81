"""Lists of any length, one per slot, in one flat tensor."""

import torch
from torch import Tensor


def upload(place: Tensor, values: Tensor) -> None:
    """Copy values from the host without waiting for the device, which may read them after this returns."""
    place.copy_(values.pin_memory() if place.is_cuda else values, non_blocking=True)


class ListPool:
    """Per-slot lists packed into one tensor, each contiguous and in place until its slot drops it.

    Freed ranges are joined and reused, first fit; when none is long enough the storage doubles. Empty lists take no
    room.

    Attributes:
        entries: [capacity], the lists' entries.
        starts: int64 [slots], where each slot's list begins.
        lengths: int64 [slots], its length; 0 for slots without one.
    """

    def __init__(self, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.entries = torch.zeros(0, dtype=dtype, device=device)
        self.starts = torch.zeros(slots, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(slots, dtype=torch.int64, device=device)
        self._ranges: dict[int, tuple[int, int]] = {}
        self._free: list[tuple[int, int]] = []

    def put(self, slot: int, values: Tensor) -> int:
        """Give the slot, which has no list, a copy of ``values`` [length]; where it starts."""
        if not len(values):
            return 0
        start = self._allocate(len(values))
        self._ranges[slot] = (start, start + len(values))
        upload(self.entries[start : start + len(values)], values)
        self.starts[slot].fill_(start)  # to assign a number would wait for a device
        self.lengths[slot].fill_(len(values))
        return start

    def drop(self, slot: int) -> None:
        """Free the slot's list, if it has one."""
        if slot in self._ranges:
            self._release(self._ranges.pop(slot))
            self.lengths[slot].fill_(0)

    def get(self, slot: int) -> Tensor:
        """The slot's list, a view."""
        start, end = self._ranges.get(slot, (0, 0))
        return self.entries[start:end]

    def gather(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """All entries of the lists of ``slots`` [rows], end to end, each with its row: both [total]."""
        lengths = self.lengths[slots]
        rows = torch.repeat_interleave(lengths)
        within = torch.arange(len(rows), device=rows.device) - (lengths.cumsum(0) - lengths)[rows]
        return rows, self.entries[self.starts[slots][rows] + within]

    def _allocate(self, length: int) -> int:
        for i, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[i : i + 1] = [(start + length, end)] if end - start > length else []
                return start
        capacity = len(self.entries)
        grown = max(2 * capacity, capacity + length)
        self.entries = torch.cat([self.entries, self.entries.new_zeros(grown - capacity)])
        self._release((capacity, grown))
        return self._allocate(length)

    def _release(self, freed: tuple[int, int]) -> None:
        joined: list[tuple[int, int]] = []
        for start, end in sorted([*self._free, freed]):
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        self._free = joined
