"""Launches the kernels: the sampler of devices that Triton serves."""

from collections.abc import Callable
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


class Inputs(NamedTuple):
    """What all kernels read: tensors, or their addresses, and sizes."""

    logits: Any
    stride: int
    slots: Any
    positions: Any
    history: Any
    max_length: int
    masks: Any
    mask_rows: Any
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


def _address(place: Any) -> Any:
    """A tensor's address, or a number itself; of each one in a tuple."""
    if isinstance(place, tuple):
        return tuple([one if type(one) is int else one.data_ptr() for one in place])
    return place if type(place) is int else place.data_ptr()


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
        self._workspaces: dict[int, tuple[Workspace, Any]] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._blocks = -(-state.valid_vocab_size // BLOCK)
        self._aligned = state.vocab_size % 16 == 0  # rows that lie one behind the other
        self._chained = dependent_launch(state.device)
        self._none = torch.zeros(1, dtype=torch.int64, device=state.device)
        self._nothing = Described(*[self._none] * 5)

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
        each: int = 1,
    ) -> Described | None:
        """Write tokens int64 [rows] and statuses uint8 [rows]; the log probabilities. See ``Sampler.sample``."""
        state, tables = self.state, self.tables
        plain, demanding, edits, truncated, nucleus, width, _ = self.demand
        logprobs, masked = width >= 0, masks is not None
        rows, drawable = len(slots), state.valid_vocab_size
        demanding = min(power(demanding * each), power(rows)) if demanding else 0
        described = self._room(rows, width) if logprobs else None
        if not rows:
            return described
        logits, stride = self._lay_out(logits)
        slots, positions = slots.long().contiguous(), positions.long().contiguous()
        if masks is None or mask_rows is None:
            masks = mask_rows = self._none
        else:
            masks, mask_rows = masks.contiguous(), mask_rows.long().contiguous()
        inputs = Inputs(
            logits, stride, slots, positions, state.history, state.max_length, masks, mask_rows,
            tables.settings, tables.bits, tables.lists.entries, tables.counts, tables.values,
            tables.words, state.vocab_size, drawable,
        )  # fmt: skip
        # What a compiled kernel takes for granted besides what never changes: types, and addresses and strides that are
        # multiples of 16.
        aligned = [tensor.data_ptr() % 16 for tensor in (logits, slots, positions, masks, mask_rows)]
        width = max(width, 0)
        blocks, padded = self._blocks, power(self._blocks)
        changes = edits, masked
        # A few demanding rows are finished where they start; many, in a kernel of their own that leaves room to read.
        apart = self.draw != "two_level"
        few = not apart and (rows < 8 or (not masked and 4 * demanding <= rows))
        sought = max(256, power(rows)) if rows >= 8 and few else 0
        ahead = apart or demanding > 0 or masked
        key = (rows, logits.dtype, stride, *aligned, *changes, ahead, few, logprobs, width)
        launch = self._launcher(key, inputs, rows, logits.device.index)
        chained = self._chained
        if edits:
            launch(edit_kernels.edit, (8, rows), (), (128, chained), 4, False)
        if ahead:
            tile = 8 if few or rows < 64 else 16
            tiles = -(-blocks // tile)
            grid = (tiles, demanding) if sought else (min(tiles, max(8, 2048 // rows)), rows)
            constants = (tile, padded, sought, apart, *changes, logprobs, few, chained)
            # Rows that are read in pieces of a few bytes are summed in an order that depends on the number of warps.
            warps = 8 if few and self._aligned else 4
            launch(draw_kernels.draw, grid, (tokens, statuses, rows, blocks), constants, warps, edits)
        if apart:
            self._draw_apart(launch, tokens, statuses, rows, changes)
        elif plain:
            tile = 8 if rows < 8 else 32
            constants = tile, padded, ahead, masked, chained
            launch(draw_kernels.draw_plain, (-(-blocks // tile), rows), (tokens, statuses, blocks), constants, 4, ahead)
        if nucleus and not apart:
            parts = 64 if rows < 8 else 32 if rows < 64 else 16
            launch(truncation_kernels.check, (parts, rows), (tokens, statuses, blocks), (8, *changes, chained), 4, True)
        if logprobs or (not apart and (nucleus or (truncated and not few))):
            args = described or self._nothing, tokens, width, blocks
            constants = (padded, *changes, logprobs, chained)
            launch(finish_kernels.finish, (rows, 1), args, constants, 8, not apart)
        return described

    def _lay_out(self, logits: Tensor) -> tuple[Tensor, int]:
        """The logits and their stride, copied if they lie in memory such that a row's bits could follow from it.

        A kernel reads in larger pieces, and adds up in another order, where it takes for granted that rows begin at
        multiples of 16. So it does for vocabularies of such a size, and for no others.
        """
        stride = logits.stride(0) if len(logits) > 1 else self.state.vocab_size
        begins = stride % 16 == 0
        if logits.stride(1) == 1 and begins == self._aligned and not (begins and logits.data_ptr() % 16):
            return logits, stride
        return logits.clone(memory_format=torch.contiguous_format), self.state.vocab_size

    def _draw_apart(
        self, launch: Callable[..., None], tokens: Tensor, statuses: Tensor, rows: int, changes: tuple[bool, bool]
    ) -> None:
        """Write the tokens, by Gumbel noise or by torch's multinomial draw; those of greedy rows are there."""
        blocks = self._blocks
        launch(baseline_kernels.threshold, (rows, 1), (statuses, blocks), (power(blocks), *changes), 8, False)
        if self.draw == "gumbel":
            parts = min(-(-blocks // 8), baseline_kernels.PARTS.value)
            launch(baseline_kernels.race, (parts, rows), (tokens, statuses, blocks), (8, *changes), 4, False)
            return
        weights = torch.empty(rows, self.state.valid_vocab_size, device=tokens.device)
        random = torch.empty(rows, dtype=torch.bool, device=tokens.device)
        args = weights, random, statuses, blocks
        launch(baseline_kernels.spread, (-(-blocks // 8), rows), args, (8, *changes), 4, False)
        torch.where(random, weights.multinomial(1)[:, 0], tokens, out=tokens)  # a kernel, that others may be chained to

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

    def _launcher(self, key: tuple[Any, ...], inputs: Inputs, rows: int, device: int | None) -> Callable[..., None]:
        """A function that launches a kernel on these inputs: by its handle and addresses alone once it is compiled.

        Triton's own launch looks at every argument each time, which takes longer than the kernels do.
        """
        stream = driver.active.get_current_stream(device) if self.cuda else None
        addresses = _address(inputs) if self.cuda else ()
        # A few sizes serve all batches. None is ever freed: a captured graph may hold its addresses.
        room = power(rows)
        if room not in self._workspaces:
            if self.cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"sample {rows} rows once before a graph is captured: kernels and memory are made then"
                )
            places = workspace(room, self._blocks, inputs.logits.device)
            self._workspaces[room] = places, _address(places)
        work, work_addresses = self._workspaces[room]

        def launch(
            kernel: Any,
            grid: tuple[int, int],
            args: tuple[Any, ...],
            constants: tuple[Any, ...],
            warps: int,
            chained: bool,
        ) -> None:
            compiled = self._compiled.get((key, id(kernel)))
            alone = kernel is edit_kernels.edit
            if compiled is None:
                options: dict[str, Any] = (
                    {"enable_fp_fusion": False, "launch_pdl": chained and self._chained} if self.cuda else {}
                )
                places = () if alone else (work,)
                compiled = kernel[grid](inputs, *places, *args, *constants, num_warps=warps, **options)
                self._compiled[key, id(kernel)] = compiled  # None where kernels are interpreted
                return
            compiled.run(
                *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                addresses, *(() if alone else (work_addresses,)), *map(_address, args), *constants,
            )  # fmt: skip

        return launch


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
