"""Decode steps that draft for themselves: the host launches the next before it knows what the last one brought."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.engine import draft_kernels as kernels
from freewheel.engine.draft_kernels import DraftInputs, DraftRows
from freewheel.engine.ring import Ring
from freewheel.engine.runner import by_row, on_its_way
from freewheel.models.fused_decoder import Rows
from freewheel.ops.launch import power
from freewheel.request import TokenLogprobs
from freewheel.sampling import Logprobs, SampleRows, Samples, SamplingState
from freewheel.sampling.fused import sequences_of
from freewheel.speculative.device import DeviceIndex, make_trees


@dataclass(frozen=True)
class Run:
    """What a step brought one sequence, on the host.

    Attributes:
        drafted: nodes of its tree.
        tokens: the accepted ones and one more; -1 where the status is not OK, which ends it.
        statuses: for each token, a :class:`freewheel.sampling.Status`.
        logprobs: for each token, if the sequence asked for them.
    """

    drafted: int
    tokens: list[int]
    statuses: list[int]
    logprobs: list[TokenLogprobs | None]


class DeviceDrafts:
    """What the steps of an engine share: the index of all sequences, and how long these are.

    Args:
        state: of the sampler, which has the tokens.
        pool: with a storage.
        page_table: int32 [slots, pages], of the pool, on the device.
        width, depth: most leaves of a tree, and its longest path.

    Attributes:
        lengths: int64 [slots], of the tokens that are known on the device.
    """

    def __init__(self, state: SamplingState, pool: KVPool, page_table: Tensor, *, width: int, depth: int) -> None:
        self.state, self.pool, self.page_table = state, pool, page_table
        self.width, self.depth = width, depth
        self.lengths = torch.zeros(len(state.history), dtype=torch.int64, device=pool.device)
        self.index = DeviceIndex(state.history, self.lengths)

    def enter(self, slots: Tensor, lengths: Tensor) -> None:
        """Other sequences are in these slots now: int64 [n] both, with so many tokens known."""
        self.index.clear(slots)
        self.lengths[slots] = lengths
        self.index.extend(slots, many=True)


class DraftStep:
    """A decode step of some sequences with room for drafts.

    Args:
        drafts: what it shares with others.
        sequences: most of them.
        rows: of the step, more than sequences.
        nodes: most of a tree; rows permitting.
        places: of its ring.

    Attributes:
        rows, sample_rows: for decoder and sampler.
        ring: where the results go.
    """

    def __init__(self, drafts: DeviceDrafts, sequences: int, rows: int, nodes: int, places: int) -> None:
        device, self._drafts = drafts.pool.device, drafts
        self._sequences, self._nodes = sequences, min(nodes, rows - sequences)

        def room(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Numbers that lie one behind the other begin at multiples of 16 bytes, or kernels were compiled anew.
        self._inputs = room(torch.int64, len(DraftInputs._fields), sequences + sequences % 2)
        self._columns = DraftInputs(*self._inputs[:, :sequences].unbind())
        self._trees = make_trees(sequences, self._nodes, device)
        self._depths = torch.full((sequences,), drafts.depth, dtype=torch.int32, device=device)
        self._paths = room(torch.int32, sequences, 1 + self._nodes)
        self._laid = DraftRows(
            *room(torch.int64, 6, rows + rows % 2)[:, :rows].unbind(),
            tiles=room(torch.int32, sequences, 4),
            starts=room(torch.int32, sequences),
            counts=room(torch.int32, sequences),
        )
        laid = self._laid
        self.rows = Rows(laid.slots, laid.positions, laid.tiles, laid.places, laid.ancestors)
        self.sample_rows = SampleRows(laid.sample_slots, laid.following)
        self.ring = Ring(places, (sequences, 2 + 3 * (1 + self._nodes)), device)

    def put(self, slots: list[int], most_nodes: list[int]) -> None:
        """Let it have these sequences, and so many nodes for each; the others are idle."""
        idle = self._inputs.shape[1] - len(slots)
        columns = DraftInputs(
            slots=slots + [-1] * idle,
            most_nodes=most_nodes + [0] * idle,
            places=[self.ring.place] * self._inputs.shape[1],
        )
        numbers = torch.tensor(columns)
        self._inputs.copy_(numbers.pin_memory() if self._inputs.is_cuda else numbers, non_blocking=True)

    def begin(self) -> None:
        """Draft, and lay out the rows."""
        drafts, slots = self._drafts, self._columns.slots
        drafts.index.extend(slots)
        drafts.index.draft(slots, self._columns.most_nodes, self._depths, self._trees, width=drafts.width)
        total, history = len(self._laid.slots), drafts.state.history
        _launch(
            kernels.lay_out, (self._sequences,), 1,
            self._columns, drafts.lengths, self._trees, self._laid, history, history.shape[1], len(history) - 1, total,
            power(self._sequences), self._nodes, power(1 + self._nodes), power(total),
        )  # fmt: skip

    def end(self, samples: Samples) -> None:
        """Verify the drafts by what was sampled; sequences grow by what is accepted."""
        drafts, sequences = self._drafts, (self._sequences,)
        _launch(
            kernels.settle, sequences, 1,
            self._columns, drafts.lengths, self._trees, self._laid, samples.tokens, samples.status, self.ring.words,
            self._paths, sequences_of(drafts.state), len(self.ring.words), self._nodes, power(1 + self._nodes),
        )  # fmt: skip
        if drafts.width > 1:  # a chain is where it belongs
            pool = drafts.pool
            planes = pool.planes
            _launch(
                kernels.compact, (self._sequences, len(planes)), 1,
                self._columns, self._laid, self._paths, planes, drafts.page_table, pool.num_pages,
                drafts.page_table.shape[1], self._nodes, pool.page_size, planes.shape[-1], power(planes.shape[-1]),
            )  # fmt: skip

    def launched(self, count: int, logprobs: Logprobs | None) -> "Drafted":
        """Take note of a launch of so many sequences."""
        return Drafted(self.ring, count, logprobs)


class Drafted:
    """A step that drafted, whose results may not have arrived yet."""

    def __init__(self, ring: Ring, count: int, logprobs: Logprobs | None) -> None:
        self._ring, self._count = ring, count
        self._logprobs: Logprobs | None = on_its_way(logprobs)
        self._number = ring.launched()

    def take_back(self) -> None:
        """Nobody is going to read the results."""
        self._ring.take_back()

    def result(self) -> list[Run]:
        """Wait for the results."""
        results = self._ring.result(self._number)[: self._count].tolist()
        paths = [[words[first : 2 + 3 * words[1] : 3] for first in (2, 3, 4)] for words in results]
        by_rows: list[TokenLogprobs | None] | None = None
        if self._logprobs is not None:
            tokens = torch.zeros(len(self._logprobs.rows), dtype=torch.int64)
            for drawn, _, rows in paths:
                tokens[rows] = torch.tensor(drawn)
            by_rows = by_row(tokens, self._logprobs)
        return [
            Run(words[0], drawn, statuses, [by_rows[row] if by_rows else None for row in rows])
            for words, (drawn, statuses, rows) in zip(results, paths)
        ]


def _launch(kernel: Any, grid: tuple[int, ...], warps: int, *args: Any) -> None:
    kernel[grid](*args, num_warps=warps)
