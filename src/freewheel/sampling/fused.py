"""Launches the kernels: the sampler of devices that Triton serves."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from freewheel.ops.launch import dependent_launch, power
from freewheel.sampling import (
    baseline_kernels,
    draw_kernels,
    edit_kernels,
    finish_kernels,
    kernels,
    truncation_kernels,
)
from freewheel.sampling.draw import ATTEMPTS, BLOCK
from freewheel.sampling.state import DEMANDING, EDITED, LOGPROBS, NUCLEUS, PLAIN, TRUNCATED, SamplingState

driver: Any = triton.runtime.driver

MOST_PLANS = 1024  # kept


class Inputs(NamedTuple):
    """What all kernels read: tensors, or their addresses, and sizes. The state's come after the call's own."""

    logits: Any
    stride: int
    slots: Any
    positions: Any
    masks: Any
    mask_rows: Any
    paths: Any
    history: Any
    max_length: int
    settings: Any
    bits: Any
    lists: Any
    counts: Any
    edited_values: Any
    words: int
    vocab_size: int
    drawable: int


class Workspace(NamedTuple):
    """What the kernels hand to each other: tensors, or their addresses."""

    maxima: Any
    sums: Any
    raw_maxima: Any
    raw_sums: Any
    leaders: Any
    seconds: Any
    tickets: Any
    pending: Any
    bounds: Any
    peaks: Any
    totals: Any
    drafts: Any
    draft_values: Any
    masses: Any
    listed: Any
    block_list: Any
    candidates: Any
    candidate_values: Any
    floors: Any
    race_scores: Any
    race_ids: Any


class Described(NamedTuple):
    """Log probabilities of all rows, as ``Logprobs`` has them: tensors, or their addresses."""

    token_logprobs: Any
    ranks: Any
    top_ids: Any
    top_logprobs: Any
    top_ranks: Any


class Sequences(NamedTuple):
    """What ``edit_kernels.add_token`` adds a token to: tensors, and sizes."""

    history: Tensor
    max_length: int
    settings: Tensor
    bits: Tensor
    counts: Tensor
    words: int
    vocab_size: int


class Demand(NamedTuple):
    """What the sequences in slots may ask together; kernels and grids of a call follow from it and its rows.

    ``plain`` is whether a plain draw or the first of the largest may satisfy any. ``demanding``, how many ask for more,
    is rounded up to a power of two, ``alternatives`` is -1 where none asks for log probabilities, and ``moves`` counts
    how often tables that grow have moved, where any has edits.
    """

    plain: bool
    demanding: int
    edits: bool
    truncated: bool
    nucleus: bool
    alternatives: int
    moves: int


def workspace(rows: int, blocks: int, device: torch.device) -> Workspace:
    """Room for ``rows``, whose vocabulary has so many blocks. Tickets are 0 between calls."""

    def room(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, device=device)

    return Workspace(
        maxima=room(torch.float32, blocks),
        sums=room(torch.float32, blocks),
        raw_maxima=room(torch.float32, blocks),
        raw_sums=room(torch.float32, blocks),
        leaders=room(torch.int32, blocks),
        seconds=room(torch.float32, blocks),
        tickets=room(torch.int32),
        pending=room(torch.int32),
        bounds=room(torch.float32),
        peaks=room(torch.float32),
        totals=room(torch.int64),
        drafts=room(torch.int32, ATTEMPTS),
        draft_values=room(torch.float32, ATTEMPTS),
        masses=room(torch.int64, ATTEMPTS),
        listed=room(torch.int32),
        block_list=room(torch.int32, blocks),
        candidates=room(torch.int32, kernels.CAPACITY.value),
        candidate_values=room(torch.float32, kernels.CAPACITY.value),
        floors=room(torch.int64),
        race_scores=room(torch.float64, baseline_kernels.PARTS.value),
        race_ids=room(torch.int32, baseline_kernels.PARTS.value),
    )


TOKENS, STATUSES, DESCRIBED, WEIGHTS, RANDOM = range(5)
"""What a call writes: tokens, statuses, log probabilities, and what torch draws from, for which rows."""


@dataclass(slots=True)
class Launch:
    """A kernel of a call.

    Attributes:
        kernel, grid, warps: what is launched.
        results: which of those above it gets.
        sizes, constants: its other arguments.
        chained: it may start before the kernel ahead of it ends.
        compiled: its handle, once it was launched; None where kernels are interpreted.
    """

    kernel: Any
    grid: tuple[int, int]
    results: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: tuple[Any, ...]
    warps: int
    chained: bool
    compiled: Any = None


class Plan(NamedTuple):
    """The kernels of calls that are alike, None where torch draws, and what they read: tensors, and the addresses."""

    launches: list[Launch | None]
    tables: tuple[Any, ...]
    work: Workspace
    table_addresses: tuple[int, ...]
    work_addresses: tuple[int, ...]


def _addresses(places: tuple[Any, ...]) -> tuple[int, ...]:
    """Of tensors; numbers as they are."""
    return tuple([one if type(one) is int else one.data_ptr() for one in places])


class FusedSampler:
    """Tokens of a batch in one to five launches, without a look at the device.

    Which kernels are launched follows from what the slots in use may ask, known on the host; what a row gets, on the
    device. A captured graph serves as long as this ``demand`` stays.
    """

    def __init__(self, state: SamplingState, draw: str = "two_level") -> None:
        """Sample for the sequences of ``state``, which has tables, in one of the three ways of ``Sampler``.

        Raises:
            ValueError: a vocabulary of more than 2**20 ids.
        """
        assert state.tables is not None
        if state.vocab_size > 1 << kernels.ID_BITS.value:
            raise ValueError(f"the vocabulary has {state.vocab_size} ids, more than the kernels' limit of 2**20")
        self.state = state
        self.draw = draw
        self.tables = state.tables
        self.cuda = state.device.type == "cuda"
        self._seen: tuple[int, int] | None = None
        self._workspaces: dict[int, Workspace] = {}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._planned = 0  # moves of the tables that the plans know
        self._blocks = -(-state.valid_vocab_size // BLOCK)
        self._aligned = state.vocab_size % 16 == 0  # rows that lie one behind the other
        self._chained = dependent_launch(state.device)
        self._none = torch.zeros(1, dtype=torch.int64, device=state.device)
        self._nothing = Described(*[self._none] * 5)
        self._nothing_addresses = _addresses(self._nothing)

    @property
    def demand(self) -> Demand:
        """What the sequences in slots ask now."""
        seen = self.state.changes, self.tables.moves
        if seen != self._seen:
            self._demand, self._seen = self._ask(), seen
        return self._demand

    def _ask(self) -> Demand:
        plain, demanding, edits, truncated, nucleus, logprobs = map(
            self.state.asked, (PLAIN, DEMANDING, EDITED, TRUNCATED, NUCLEUS, LOGPROBS)
        )
        alternatives = max(asked.alternatives for asked in self.state.settings) if logprobs else -1
        kinds = edits > 0, truncated > 0, nucleus > 0
        moves = self.tables.moves if edits else 0  # nothing else reads tables that grow
        if not demanding:
            return Demand(True, 0, *kinds, alternatives, moves)
        return Demand(plain > 0, power(demanding), *kinds, alternatives, moves)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        masks: Tensor | None,
        mask_rows: Tensor | None,
        tokens: Tensor,
        statuses: Tensor,
        *,
        paths: Tensor | None = None,
        each: int = 1,
    ) -> Described | None:
        """Write tokens int64 [rows] and statuses uint8 [rows]; the log probabilities. See ``Sampler.sample``."""
        rows = slots.shape[0]
        if rows > len(self.tables.values) and self.state.asked(EDITED):
            self.tables.make_room(power(rows))
        demand = self.demand
        described = self._room(rows, demand.alternatives) if demand.alternatives >= 0 else None
        if not rows:
            return described
        logits, stride = self._lay_out(logits)
        slots, positions = slots.long().contiguous(), positions.long().contiguous()
        masked = masks is not None
        if masks is None or mask_rows is None:
            masks = mask_rows = self._none
        else:
            masks, mask_rows = masks.contiguous(), mask_rows.long().contiguous()
        depth = paths.shape[1] if paths is not None and demand.edits else 0
        paths = paths.long().contiguous() if paths is not None and depth else self._none
        given = logits, stride, slots, positions, masks, mask_rows, paths
        addresses = _addresses(given)
        # A compiled kernel takes types for granted, and which addresses and strides are multiples of 16.
        key = demand, rows, each, depth, masked, logits.dtype, stride, *[address & 15 for address in addresses]
        plan = self._plans.get(key)
        if plan is None:
            if self._planned != self.tables.moves or len(self._plans) == MOST_PLANS:
                self._plans.clear()  # some have what was replaced: nobody asks for them again
                self._planned = self.tables.moves
            plan = self._plan(demand, rows, each, depth, masked)
        self._run(plan, given, addresses, tokens, statuses, described)
        self._plans[key] = plan  # only now: a kernel may have failed
        return described

    def _plan(self, demand: Demand, rows: int, each: int, depth: int, masked: bool) -> Plan:
        """What a call launches."""
        plain, demanding, edits, truncated, nucleus, width, _ = demand
        logprobs, width, blocks = width >= 0, max(width, 0), self._blocks
        demanding = min(power(demanding * each), power(rows)) if demanding else 0
        changes, padded, chained = (edits, masked), power(blocks), self._chained
        # A few demanding rows are finished where they start; many, in a kernel of their own that leaves room to read.
        apart = self.draw != "two_level"
        few = not apart and (rows < 8 or (not masked and 4 * demanding <= rows))
        sought = max(256, power(rows)) if rows >= 8 and few else 0
        ahead = apart or demanding > 0 or masked
        drawn = TOKENS, STATUSES
        launches: list[Launch | None] = []
        if edits:
            if depth:
                launches.append(Launch(edit_kernels.touch, (rows, 1), (), (), (depth,), 1, False))
            # Not chained to it: what comes after looks at marks before it waits.
            constants = (128, depth, power(depth), power(each), chained)
            launches.append(Launch(edit_kernels.edit, (8, rows), (), (rows,), constants, 4, False))
        if ahead:
            tile = 8 if few or rows < 64 else 16
            tiles = -(-blocks // tile)
            grid = (tiles, demanding) if sought else (min(tiles, max(8, 2048 // rows)), rows)
            constants = (tile, padded, sought, apart, *changes, logprobs, few, chained)
            # Rows that are read in pieces of a few bytes are summed in an order that depends on the number of warps.
            warps = 8 if few and self._aligned else 4
            launches.append(Launch(draw_kernels.draw, grid, drawn, (rows, blocks), constants, warps, edits))
        if apart:
            launches += self._draw_apart(rows, changes)
        elif plain:
            tile = 8 if rows < 8 else 32
            grid, constants = (-(-blocks // tile), rows), (tile, padded, ahead, masked, chained)
            launches.append(Launch(draw_kernels.draw_plain, grid, drawn, (blocks,), constants, 4, ahead))
        if nucleus and not apart:
            grid = min(-(-blocks // 8), 64 if rows < 8 else 32 if rows < 64 else 16), rows
            constants = (8, *changes, chained)
            launches.append(Launch(truncation_kernels.check, grid, drawn, (blocks,), constants, 4, True))
        if logprobs or (not apart and (nucleus or (truncated and not few))):
            constants = (padded, *changes, logprobs, chained)
            results = DESCRIBED, TOKENS
            launches.append(Launch(finish_kernels.finish, (rows, 1), results, (width, blocks), constants, 8, not apart))
        if depth:
            launches.append(Launch(edit_kernels.untouch, (rows, 1), (), (), (depth,), 1, False))
        state, tables = self.state, self.tables
        read = (
            state.history, state.max_length, tables.settings, tables.bits, tables.lists.entries, tables.counts,
            tables.values, tables.words, state.vocab_size, state.valid_vocab_size,
        )  # fmt: skip
        work = self._workspace(power(rows))  # a few sizes serve all batches
        return Plan(launches, read, work, _addresses(read), _addresses(work))

    def _workspace(self, rows: int) -> Workspace:
        """Room for so many rows. None is ever freed: a captured graph may hold its addresses."""
        if rows not in self._workspaces:
            if self.cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"sample {rows} rows once before a graph is captured: kernels and memory are made then"
                )
            self._workspaces[rows] = workspace(rows, self._blocks, self.state.history.device)
        return self._workspaces[rows]

    def _run(
        self, plan: Plan, given: tuple[Any, ...], addresses: tuple[int, ...], tokens: Tensor, statuses: Tensor,
        described: Described | None,
    ) -> None:  # fmt: skip
        """Launch the kernels on what a call gives: by handles and addresses alone once they are compiled.

        Triton's own launch looks at every argument each time, which takes longer than the kernels do.
        """
        results: tuple[Any, ...] = tokens, statuses, described or self._nothing
        if self.draw == "multinomial":
            rows, device = len(tokens), tokens.device
            weights = torch.empty(rows, self.state.valid_vocab_size, device=device)
            results += weights, torch.empty(rows, dtype=torch.bool, device=device)
        stream = driver.active.get_current_stream(tokens.get_device()) if self.cuda else None
        inputs, work = (*addresses, *plan.table_addresses), plan.work_addresses
        places = (
            tokens.data_ptr(), statuses.data_ptr(),
            _addresses(described) if described else self._nothing_addresses, *_addresses(results[WEIGHTS:]),
        )  # fmt: skip
        for one in plan.launches:
            if one is None:  # a kernel writes, that others may be chained to
                drawn = results[WEIGHTS].multinomial(1)[:, 0]
                torch.where(results[RANDOM], drawn, tokens, out=tokens)
            elif one.compiled is None:
                one.compiled = self._launch(one, Inputs(*given, *plan.tables), plan.work, results)
            else:
                compiled = one.compiled
                compiled.run(
                    *one.grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                    inputs, *((work,) if one.results else ()), *[places[i] for i in one.results], *one.sizes,
                    *one.constants,
                )  # fmt: skip

    def _launch(self, one: Launch, inputs: Inputs, work: Workspace, results: tuple[Any, ...]) -> Any:
        """Launch a kernel by way of Triton, which compiles it if need be; its handle."""
        pdl = {"enable_fp_fusion": False, "launch_pdl": one.chained and self._chained} if self.cuda else {}
        places = (work,) if one.results else ()  # the kernel that writes no results hands nothing on either
        arguments = *(results[i] for i in one.results), *one.sizes, *one.constants
        return one.kernel[one.grid](inputs, *places, *arguments, num_warps=one.warps, **pdl)

    def _lay_out(self, logits: Tensor) -> tuple[Tensor, int]:
        """The logits and their stride, copied if they lie in memory such that a row's bits could follow from it.

        A kernel reads in larger pieces, and adds up in another order, where it takes for granted that rows begin at
        multiples of 16. So it does for vocabularies of such a size, and for no others.
        """
        stride = logits.stride(0) if logits.shape[0] > 1 else self.state.vocab_size
        begins = stride % 16 == 0
        if logits.stride(1) == 1 and begins == self._aligned and not (begins and logits.data_ptr() % 16):
            return logits, stride
        return logits.clone(memory_format=torch.contiguous_format), self.state.vocab_size

    def _draw_apart(self, rows: int, changes: tuple[bool, bool]) -> list[Launch | None]:
        """Write the tokens, by Gumbel noise or by torch's multinomial draw; those of greedy rows are there."""
        blocks = self._blocks
        constants = (power(blocks), *changes)
        threshold = Launch(baseline_kernels.threshold, (rows, 1), (STATUSES,), (blocks,), constants, 8, False)
        tiles, constants = -(-blocks // 8), (8, *changes)
        if self.draw == "gumbel":
            grid = min(tiles, baseline_kernels.PARTS.value), rows
            return [threshold, Launch(baseline_kernels.race, grid, (TOKENS, STATUSES), (blocks,), constants, 4, False)]
        results = WEIGHTS, RANDOM, STATUSES
        return [
            threshold,
            Launch(baseline_kernels.spread, (tiles, rows), results, (blocks,), constants, 4, False),
            None,
        ]

    def _room(self, rows: int, width: int) -> Described:
        """Room for the log probabilities of so many rows and of ``width`` alternatives."""

        def room(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=self.state.device)

        return Described(
            token_logprobs=room(torch.float32),
            ranks=room(torch.int64),
            top_ids=room(torch.int64, width),
            top_logprobs=room(torch.float32, width),
            top_ranks=room(torch.int64, width),
        )


def append(state: SamplingState, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """``SamplingState.append`` of a state with tables, by a kernel."""
    slots, positions, tokens = (numbers.long().contiguous() for numbers in (slots, positions, tokens))
    if state.device.type == "cpu" and positions[tokens >= 0].ge(state.max_length).any():
        raise IndexError(f"a position is past the longest sequence of {state.max_length} tokens")
    edit_kernels.append[(len(slots),)](slots, positions, tokens, sequences_of(state))


def sequences_of(state: SamplingState) -> Sequences:
    """What a kernel adds the tokens of a state with tables to; a captured one, as long as the demand stays."""
    tables = state.tables
    assert tables is not None
    return Sequences(
        state.history, state.max_length, tables.settings, tables.bits, tables.counts, tables.words, state.vocab_size
    )
