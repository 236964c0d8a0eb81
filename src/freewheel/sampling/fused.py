"""Launches the kernels: the sampler of devices that Triton serves."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from freewheel.sampling import kernels as triton_kernels
from freewheel.sampling.draw import ATTEMPTS, BLOCK
from freewheel.sampling.state import EDITED, NUCLEUS, TRUNCATED, SamplingState

kernels: Any = triton_kernels  # whose constants are numbers here


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
    pending: Any
    bounds: Any
    peaks: Any
    totals: Any
    drafts: Any
    draft_values: Any
    masses: Any
    reaching: Any
    reaching_blocks: Any
    candidates: Any


def workspace(rows: int, blocks: int, device: torch.device) -> Workspace:
    """Room for ``rows``, whose vocabulary has so many blocks."""

    def room(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, device=device)

    return Workspace(
        maxima=room(torch.float32, blocks),
        sums=room(torch.float32, blocks),
        pending=room(torch.int32),
        bounds=room(torch.float32),
        peaks=room(torch.float32),
        totals=room(torch.int64),
        drafts=room(torch.int32, ATTEMPTS),
        draft_values=room(torch.float32, ATTEMPTS),
        masses=room(torch.int64, ATTEMPTS),
        reaching=room(torch.int32),
        reaching_blocks=room(torch.int32, blocks),
        candidates=room(torch.int32, kernels.CAPACITY.value),
    )


def _addresses(places: Any) -> Any:
    """The same tuple with addresses in place of tensors."""
    return type(places)(*(place.data_ptr() if isinstance(place, Tensor) else place for place in places))


class FusedSampler:
    """Tokens of a batch in two to five launches, without a look at the device.

    Which kernels are launched follows from what the slots in use may ask, known on the host; what a row gets, on the
    device. A captured graph serves as long as these needs stay and the storage of ``state.tables`` does not move.
    """

    def __init__(self, state: SamplingState) -> None:
        """Sample for the sequences of ``state``, which has tables.

        Raises:
            ValueError: a vocabulary of more than 2**20 ids.
        """
        assert state.tables is not None
        if state.vocab_size > 1 << kernels.ID_BITS.value:
            raise ValueError(f"the vocabulary has {state.vocab_size} ids, more than the kernels' limit of 2**20")
        self.state = state
        self.tables = state.tables
        self.cuda = state.device.type == "cuda"
        self._workspaces: dict[int, Workspace] = {}
        self._addresses: dict[int, Workspace] = {}
        self._compiled: dict[tuple[Any, ...], Any] = {}
        self._none = torch.zeros(1, dtype=torch.int64, device=state.device)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, masks: Tensor | None, mask_rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 [rows] and statuses uint8 [rows]; see ``Sampler.sample``."""
        state, tables = self.state, self.tables
        edits, truncated, nucleus = (state.asked(need) for need in (EDITED, TRUNCATED, NUCLEUS))
        masked = masks is not None
        rows, drawable = len(slots), state.valid_vocab_size
        blocks = triton.cdiv(drawable, BLOCK)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        statuses = torch.empty(rows, dtype=torch.uint8, device=logits.device)
        if not rows:
            return tokens, statuses
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        slots, positions = slots.long().contiguous(), positions.long().contiguous()
        if masks is not None and mask_rows is not None:
            masks, mask_rows = masks.contiguous(), mask_rows.long().contiguous()
        inputs = Inputs(
            logits, logits.stride(0), slots, positions, state.history, state.max_length,
            masks if masked else self._none, mask_rows if masked else self._none,
            tables.settings, tables.bits, tables.lists.entries, tables.counts, tables.values,
            tables.words, state.vocab_size, drawable,
        )  # fmt: skip
        # What a compiled kernel takes for granted besides what never changes: types, and addresses and strides that are
        # multiples of 16.
        aligned = [tensor.data_ptr() % 16 == 0 for tensor in (logits, slots, positions, inputs.masks, inputs.mask_rows)]
        key = (rows, logits.dtype, inputs.stride, *aligned, edits, truncated, masked)
        launch = self._launcher(key, inputs, rows, logits.device.index)
        draws = ATTEMPTS if truncated or edits or masked else 1
        chained = self.cuda
        if edits:
            launch(kernels.edit, (8, rows), (), (128, 8, chained), 4, False)
        tile = 4 if rows < 8 else 8 if rows < 64 or edits else 16
        grid = triton.cdiv(blocks, tile), rows
        launch(kernels.block_stats, grid, (blocks,), (tile, edits, masked, chained), 4, edits)
        constants = draws, edits, masked, chained
        padded = triton.next_power_of_2(blocks)
        launch(kernels.choose, (rows, 1), (tokens, statuses, blocks), (padded, *constants), 4 if rows < 64 else 8, True)
        if truncated:
            if nucleus:
                parts = 64 if rows < 8 else 32 if rows < 64 else 16
                launch(kernels.scan, (parts, rows), (blocks,), (8, parts, *constants), 4, True)
            launch(kernels.resolve, (rows, 1), (tokens, blocks), (32, *constants), 4, True)
        return tokens, statuses

    def _launcher(self, key: tuple[Any, ...], inputs: Inputs, rows: int, device: int | None) -> Callable[..., None]:
        """A function that launches a kernel on these inputs: by its handle and addresses alone once it is compiled.

        Triton's own launch looks at every argument each time, which takes longer than the kernels do.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if self.cuda else None
        addresses = _addresses(inputs) if self.cuda else ()
        # A few sizes serve all batches. None is ever freed: a captured graph may hold its addresses.
        room = triton.next_power_of_2(rows)
        if room not in self._workspaces:
            self._workspaces[room] = workspace(room, triton.cdiv(inputs.drawable, BLOCK), inputs.logits.device)
            self._addresses[room] = _addresses(self._workspaces[room])
        places, place_addresses = self._workspaces[room], self._addresses[room]

        def launch(
            kernel: Any,
            grid: tuple[int, int],
            args: tuple[Any, ...],
            constants: tuple[Any, ...],
            warps: int,
            chained: bool,
        ) -> None:
            compiled = self._compiled.get((key, id(kernel)))
            if compiled is None:
                options: dict[str, Any] = {"enable_fp_fusion": False, "launch_pdl": chained} if self.cuda else {}
                work = () if kernel is kernels.edit else (places,)
                compiled = kernel[grid](inputs, *work, *args, *constants, num_warps=warps, **options)
                self._compiled[key, id(kernel)] = compiled  # None where kernels are interpreted
                return
            work = () if kernel is kernels.edit else (place_addresses,)
            args = tuple(arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args)
            compiled.run(
                *grid, 1, stream, compiled.function, compiled.packed_metadata, None, None, None,
                addresses, *work, *args, *constants,
            )  # fmt: skip

        return launch


def append(state: SamplingState, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
    """``SamplingState.append`` of a state with tables, by a kernel."""
    tables = state.tables
    assert tables is not None
    kernels.append[(len(slots),)](
        slots, positions, tokens, state.history, state.max_length, tables.settings, tables.bits, tables.counts,
        tables.words, state.vocab_size,
    )  # fmt: skip


def softmax_into(out: Tensor, logits: Tensor, temperature: float | Tensor, one_pass: bool) -> None:
    """``softmax`` by kernels, in one pass over the logits or in two."""
    (rows, vocab), stride = logits.shape, logits.stride(0)
    varied = isinstance(temperature, Tensor)
    temperatures = temperature if varied else torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    if one_pass:
        size = triton.next_power_of_2(vocab)
        warps = min(max(size // 2048, 1), 16)
        kernels.softmax_row[(rows,)](out, logits, stride, temperatures, vocab, varied, size, num_warps=warps)
        return
    blocks = triton.cdiv(vocab, BLOCK)
    maxima, sums = (torch.empty(rows, blocks, device=logits.device) for _ in range(2))
    tile = 4 if rows < 8 else 16
    grid = triton.cdiv(blocks, tile), rows
    kernels.softmax_stats[grid](maxima, sums, logits, stride, temperatures, vocab, blocks, varied, tile)
    kernels.softmax_write[grid](
        out, maxima, sums, logits, stride, temperatures, vocab, blocks, varied, tile, triton.next_power_of_2(blocks)
    )
