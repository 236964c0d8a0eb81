"""Decode steps that draft for themselves: the host launches the next before it knows what the last one brought."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from freewheel.cache.pool import KVPool
from freewheel.engine import draft_kernels as kernels
from freewheel.engine.draft_kernels import DraftInputs, DraftRows, Guesses
from freewheel.engine.ring import Outbox, Ring
from freewheel.engine.runner import StepResult, by_row, on_its_way
from freewheel.engine.step import Graphs, even
from freewheel.models.fused_decoder import Rows
from freewheel.ops.launch import launch, power
from freewheel.request import TokenLogprobs
from freewheel.sampling import Logprobs, SampleRows, Samples, SamplingState
from freewheel.sampling.fused import sequences_of
from freewheel.speculative import DraftTree
from freewheel.speculative.device import DeviceIndex, make_trees

GUESSED = 8  # tokens of a guess


class DeviceDrafts:
    """What the steps of an engine share: the index of all sequences, and how long these are.

    Args:
        state: of the sampler, which has the tokens.
        pool: with a storage.
        page_table: int32 [slots, pages], of the pool, on the device.
        rows_per_tile: of attention, where a sequence has so many rows on average.
        width, depth: most leaves of a tree, and its longest path.

    Attributes:
        lengths: int64 [slots], of the tokens that are known on the device.
        guesses: what is thought to follow some of them, to see if drafts would pay.
    """

    def __init__(
        self,
        state: SamplingState,
        pool: KVPool,
        page_table: Tensor,
        *,
        rows_per_tile: Callable[[int], int],
        width: int,
        depth: int,
    ) -> None:
        self.state, self.pool, self.page_table = state, pool, page_table
        self.rows_per_tile, self.width, self.depth = rows_per_tile, width, depth
        self.lengths = torch.zeros(len(state.history), dtype=torch.int64, device=pool.device)
        self.index = DeviceIndex(state.history, self.lengths)
        self.guesses = Guesses(
            tokens=torch.zeros(len(state.history), GUESSED, dtype=torch.int64, device=pool.device),
            counts=torch.zeros(len(state.history), dtype=torch.int32, device=pool.device),
            lengths=torch.zeros_like(self.lengths),
        )

    def enter(self, slots: Tensor, lengths: Tensor) -> None:
        """Other sequences are in these slots, and so long; int64 [n] both. -1 for none."""
        self.index.clear(slots)
        self.guesses.lengths.index_fill_(0, slots, 0)  # -1 is the last slot, that of idle rows
        self.index.extend(slots, told=lengths, many=True)


class DraftStep:
    """A decode step of some sequences with room for drafts.

    Args:
        drafts: what it shares with others.
        sequences: most of them.
        rows: of the step.
        nodes: most of a tree; without effect if there are no more rows than sequences: then nobody drafts. The step is
            for those who have yet to learn how long they are, and for guesses, which take no rows.
        places: of its ring.
        outbox: by which it is told.

    Attributes:
        rows, sample_rows: for decoder and sampler.
        ring: where the results go.
    """

    def __init__(
        self, drafts: DeviceDrafts, sequences: int, rows: int, nodes: int, places: int, outbox: Outbox
    ) -> None:
        device, self._drafts, self._outbox = drafts.pool.device, drafts, outbox
        self._drafting = rows > sequences
        self._sequences, self._nodes = sequences, nodes if self._drafting else 1
        self._tile_rows = tile_rows = drafts.rows_per_tile(-(-rows // sequences))
        # Each sequence has a tile, idle ones too; those that are not idle, more than half of them, have a row at least.
        more = min((rows - 1 - sequences // 2) // tile_rows, sequences * (nodes // tile_rows))
        self._tiles = tiles = sequences + more

        def room(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._inputs = room(torch.int64, len(DraftInputs._fields), even(sequences))
        self._columns = DraftInputs(*self._inputs[:, :sequences].unbind())
        self._trees = make_trees(sequences, self._nodes, device)
        self._depths = torch.full((sequences,), drafts.depth if self._drafting else GUESSED, device=device)
        self._found = None if self._drafting else make_trees(sequences, GUESSED, device)
        self._paths = room(torch.int32, sequences, 1 + self._nodes)
        self._laid = DraftRows(
            *room(torch.int64, 6, even(rows))[:, :rows].unbind(),
            tiles=room(torch.int32, tiles, 4),
            starts=room(torch.int32, sequences),
            paths=room(torch.int64, rows, drafts.depth),
        )
        laid = self._laid
        self.rows = Rows(laid.slots, laid.positions)
        if self._drafting:
            self.rows = Rows(laid.slots, laid.positions, laid.tiles, laid.places, laid.ancestors, tile_rows)
        self.sample_rows = SampleRows(laid.sample_slots, laid.following)
        if self._drafting:
            self.sample_rows = replace(self.sample_rows, paths=laid.paths, each=1 + nodes)
        self.ring = Ring(places, (sequences, 3 + 3 * (1 + self._nodes)), device)
        self.graphs = Graphs()
        self._put: tuple[list[int], list[int]] = ([], [])
        self._expected: tuple[list[int], list[int]] | None = None  # slots and nodes that the inputs have
        self._laid_out = LaidOut(
            self._columns.slots, laid.starts, self._trees.counts, self._trees.tokens, self._trees.parents
        )

    def put(self, slots: list[int], lengths: list[int], most_nodes: list[int]) -> None:
        """Let it have these sequences, for which there are rows; the others are idle.

        Args:
            slots: of sequences.
            lengths: of each; -1 where the device knows.
            most_nodes: for each. Where nobody drafts, any number asks for a guess.
        """
        self._put, expected, self._expected = (slots, most_nodes), self._expected, None  # should anything below fail
        if expected == self._put and max(lengths, default=-1) < 0:
            return
        idle = [-1] * (self._inputs.shape[1] - len(slots))
        columns = DraftInputs(
            slots=slots + idle,
            lengths=lengths + idle,
            most_nodes=most_nodes + [0] * len(idle),
            places=[self.ring.place] * self._inputs.shape[1],
        )
        self._outbox.tell(self._inputs, columns)

    def forget(self) -> None:
        """A step failed: the device may have other inputs than expected."""
        self._expected = None

    def begin(self) -> None:
        """Draft, and lay out the rows."""
        drafts, slots = self._drafts, self._columns.slots
        drafts.index.extend(slots, told=self._columns.lengths)
        total, tiles, history = len(self._laid.slots), self._tiles, drafts.state.history
        if self._found is None:
            drafts.index.draft(slots, self._columns.most_nodes, self._depths, self._trees, width=drafts.width)
        else:
            drafts.index.draft(slots, self._columns.most_nodes, self._depths, self._found, width=1)
            launch(
                kernels.judge, (self._sequences,), 1,
                self._columns, drafts.lengths, history, history.shape[1], self._found, drafts.guesses, self.ring.words,
                len(self.ring.words), GUESSED,
            )  # fmt: skip
        launch(
            kernels.lay_out, (self._sequences,), 1,
            self._columns, drafts.lengths, self._trees, self._laid, history, history.shape[1], len(history) - 1, total,
            tiles, power(self._sequences), self._nodes, power(1 + self._nodes), power(total), power(tiles),
            self._tile_rows, drafts.depth, power(drafts.depth),
        )  # fmt: skip

    def laid_out(self) -> "OnItsWay":
        """What was drafted, on its way to the host."""
        return OnItsWay(self._laid_out)

    def end(self, samples: Samples) -> None:
        """Verify the drafts by what was sampled; sequences grow by what is accepted."""
        drafts, sequences = self._drafts, (self._sequences,)
        launch(
            kernels.settle, sequences, 1,
            self._columns, drafts.lengths, self._trees, self._laid, samples.tokens, samples.status, self.ring.words,
            self._paths, sequences_of(drafts.state), len(self.ring.words), self._nodes, power(1 + self._nodes),
            self._drafting,
        )  # fmt: skip
        if drafts.width > 1 and self._drafting:  # a chain is where it belongs
            pool = drafts.pool
            planes = pool.planes
            launch(
                kernels.compact, (self._sequences, len(planes)), 1,
                self._laid, self._paths, planes, drafts.page_table, pool.num_pages,
                drafts.page_table.shape[1], self._nodes, pool.page_size, planes.shape[-1], power(planes.shape[-1]),
            )  # fmt: skip

    def launched(self, logprobs: Logprobs | None) -> "Drafted":
        """Take note of a launch of what was put there."""
        drafted = Drafted(self.ring, self._put[1], logprobs)
        self._expected = self._put
        return drafted


class LaidOut(NamedTuple):
    """The drafts of a step: tensors.

    Attributes:
        slots: int64 [sequences]; -1 of idle ones, those that have ended as well.
        starts: int32 [sequences], see :class:`DraftRows`.
        counts, tokens, parents: see ``Trees``.
    """

    slots: Tensor
    starts: Tensor
    counts: Tensor
    tokens: Tensor
    parents: Tensor


class OnItsWay:
    """The drafts of a step, which may not have arrived yet. They set out when the decoder has not begun."""

    def __init__(self, laid_out: LaidOut) -> None:
        self._laid_out = LaidOut(*on_its_way([*laid_out]))
        self._arrived = torch.cuda.current_stream().record_event() if laid_out.slots.is_cuda else None

    def trees(self, wanted: Sequence[int]) -> list[tuple[int, DraftTree] | None]:
        """Wait for them: of these sequences by number the first row and the draft; None of one that has ended."""
        if self._arrived is not None:
            self._arrived.synchronize()
        slots, starts, counts, tokens, parents = (column.tolist() for column in self._laid_out)
        found: list[tuple[int, DraftTree] | None] = []
        for i in wanted:
            count = counts[i]
            tree = DraftTree(tuple(tokens[i][:count]), tuple(parents[i][:count]))
            found.append((starts[i], tree) if slots[i] >= 0 else None)
        return found


class Drafted:
    """A step that drafted, whose results may not have arrived yet."""

    def __init__(self, ring: Ring, most_nodes: list[int], logprobs: Logprobs | None) -> None:
        self._ring, self._most_nodes = ring, most_nodes
        self._logprobs: Logprobs | None = on_its_way(logprobs)
        self._number = ring.launched()

    def take_back(self) -> None:
        """Nobody is going to read the results."""
        self._ring.take_back()

    def result(self) -> StepResult:
        """Wait for the results."""
        words = self._ring.result(self._number)[: len(self._most_nodes)]
        results = words[:, : 3 + 3 * max(words[:, 2].max(), 1)].tolist()
        tokens: list[int] = []
        statuses: list[int] = []
        rows: list[int] = []
        runs: list[int] = []
        drafted: list[tuple[int, int]] = []
        for one, nodes in zip(results, self._most_nodes):
            # A row whose sequence has ended before leaves nothing: what earlier launches left is dropped later, but
            # there must be as much of it as the host expects. A row without a draft has one token.
            run = max(one[2], 1) if nodes else 1
            end = 3 + 3 * run
            tokens += one[3:end:3]
            statuses += one[4:end:3]
            if nodes:
                runs.append(run)
                drafted.append((one[0], one[1]))
            if self._logprobs is not None:
                rows += one[5:end:3]
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        if self._logprobs is not None:  # of all rows
            kept = Logprobs(*(getattr(self._logprobs, column.name)[rows] for column in fields(Logprobs)))
            logprobs = by_row(torch.tensor(tokens), replace(kept, rows=torch.arange(len(rows))))
        return StepResult(tokens, statuses, logprobs, [], runs, drafted)
