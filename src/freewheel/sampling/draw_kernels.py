"""One read of the logits, and the draw from what it leaves.

draw        [parts, rows]  rows that ask for more than a plain token
draw_plain  [tiles, rows]  the other rows

Each program leaves the maximum and the sum of exponentials of its blocks; the last of a row to arrive draws a block in
proportion to its sum, and an id inside it. What truncation keeps of the row is found in truncation_kernels.py.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from freewheel.sampling.kernels import (
    ASKS_LOGPROBS,
    ATTEMPTS,
    BLOCK,
    EDITED_UNTIL,
    EMPTY,
    LOG2E,
    LOWEST,
    MIN_P,
    NAN,
    NEEDS,
    NUCLEUS,
    OK,
    PROCESSED,
    TEMPERATURE,
    TOP_K,
    TRUNCATED,
    _changes,
    _last,
    _load,
    _read_blocks,
    _real,
    _scale,
    _setting,
    _share,
    _units,
    _words,
)
from freewheel.sampling.truncation_kernels import _draw_kept, _list_blocks, _min_p_bound, _reached_by


@triton.jit
def _demands(inputs, row, slot, position, MASKED: tl.constexpr):
    """Whether a row, or each of several, asks for more than a plain draw or the first of the largest."""
    demands = (_setting(inputs.settings, slot, NEEDS) & (TRUNCATED | ASKS_LOGPROBS)) != 0
    demands = demands | (position < _setting(inputs.settings, slot, EDITED_UNTIL))
    if MASKED:
        demands = demands | (tl.load(inputs.mask_rows + row) >= 0)
    return demands


@triton.jit
def _find(inputs, rows, number, ROWS: tl.constexpr):
    """The demanding row with this number, and how many there are."""
    row = tl.arange(0, ROWS)
    exists = row < rows
    slot = tl.load(inputs.slots + row, mask=exists, other=0)
    position = tl.load(inputs.positions + row, mask=exists, other=0)
    place = tl.cumsum((exists & _demands(inputs, row, slot, position, False)).to(tl.int32), 0)
    return tl.sum((place <= number).to(tl.int32), 0).to(tl.int64), tl.max(place, 0)


@triton.jit
def _measure(values, scale, maxima, sums, row, blocks, block_count):
    """Leave each block's maximum and, relative to it, its sum of exponentials: NaN for a block with NaN or +inf."""
    peaks = tl.max(values, 1)
    level = tl.where(peaks == -float("inf"), 0.0, peaks)
    total = tl.sum(tl.exp2((values - level[:, None]) * scale), 1)
    tl.store(
        maxima + row * block_count + blocks, tl.where(total == total, peaks, float("nan")), mask=blocks < block_count
    )
    tl.store(sums + row * block_count + blocks, total, mask=blocks < block_count)


@triton.jit
def _measure_more(values, leaders, seconds, row, blocks, block_count):
    """Leave where in each block its first largest value is, and how large the next one is."""
    leader = tl.argmax(values, 1)
    rest = tl.where(tl.arange(0, BLOCK)[None, :] == leader[:, None], -float("inf"), values)
    tl.store(leaders + row * block_count + blocks, leader, mask=blocks < block_count)
    tl.store(seconds + row * block_count + blocks, tl.max(rest, 1), mask=blocks < block_count)


@triton.jit
def _report(statuses, row, peak):
    """Store the row's status; whether it is healthy."""
    healthy = peak > -float("inf")
    tl.store(statuses + row, tl.where(healthy, OK, tl.where(peak == peak, EMPTY, NAN)).to(tl.uint8))
    return healthy


@triton.jit
def _plan(settings, slot, position, DRAWS: tl.constexpr):
    """Whether the row is greedy, and two random words for each of its draws, 0 if it is."""
    greedy = _real(settings, slot, TEMPERATURE) == 0
    first, second, _, _ = _words(settings, slot, position, tl.arange(0, DRAWS))
    return greedy, tl.where(greedy, 0, first), tl.where(greedy, 0, second)


@triton.jit
def _place(weights, word):
    """The index that a random word draws in proportion to the weights, int64 [n]; n if all are 0."""
    return tl.sum((tl.cumsum(weights, 0) <= _share(tl.sum(weights, 0), word)).to(tl.int32), 0)


@triton.jit
def _attempts(
    inputs, maxima, row, changes, scale, greedy, first, second, block_maxima, peak, units, block_count,
    EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Draw from the whole row, once for each word: a block in proportion to its weight, then an id inside it.

    Plain rows do so in one dimension, with fewer moves between layouts.

    Returns:
        blocks int32 [draws], places in them int32 [draws], the blocks' values float32 [draws, BLOCK], and the row's
        weight int64.
    """
    # Greedy: all weight is on the largest ones, and the smallest word draws the first of them.
    units = tl.where(greedy, (block_maxima == peak).to(tl.int64), units)
    total = tl.sum(units, 0)
    cumulative = tl.cumsum(units, 0)
    drawn = tl.sum((cumulative[None, :] <= _share(total, first)[:, None]).to(tl.int32), 1)
    inside = drawn < block_count
    level = tl.load(maxima + row * block_count + drawn, mask=inside, other=0.0)
    values = _load(inputs, row, changes, drawn, inside, EDITS, MASKED)
    shares = _units(tl.exp2((values - level[:, None]) * scale))
    shares = tl.where(greedy, (values == level[:, None]).to(tl.int64), shares)
    within = (tl.cumsum(shares, 1) <= _share(tl.sum(shares, 1), second)[:, None]).to(tl.int32)
    return drawn, tl.sum(within, 1), values, total


@triton.jit
def draw_plain(
    inputs, work, tokens, statuses, block_count,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, DEMANDS: tl.constexpr, MASKED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Tokens of the rows that ask for a plain draw or the first of the largest; the others leave at once."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    if CHAINED:
        gdc_launch_dependents()
    if DEMANDS:
        if _demands(inputs, row, slot, position, MASKED):
            if CHAINED:
                if tl.program_id(0) == 0:
                    gdc_wait()
            return
    changes = _changes(inputs, row, slot, position, False, False)
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    values = _load(inputs, row, changes, blocks, blocks < block_count, False, False)
    scale = _scale(inputs.settings, slot)
    greedy, first, second = _plan(inputs.settings, slot, position, 1)
    _measure(values, scale, work.maxima, work.sums, row, blocks, block_count)
    if _last(work.tickets, row, tl.num_programs(0)):
        block_maxima, peak, units = _read_blocks(work.maxima, work.sums, row, scale, block_count, BLOCKS)
        healthy = _report(statuses, row, peak)
        units = tl.where(greedy, (block_maxima == peak).to(tl.int64), units)
        drawn = _place(units, tl.sum(first.to(tl.int64), 0))
        level = tl.load(work.maxima + row * block_count + drawn, mask=drawn < block_count, other=0.0)
        ids = drawn * BLOCK + tl.arange(0, BLOCK)
        inner = tl.load(inputs.logits + row * inputs.stride + ids, mask=ids < inputs.drawable, other=-float("inf"))
        inner = inner.to(tl.float32)
        shares = tl.where(greedy, (inner == level).to(tl.int64), _units(tl.exp2((inner - level) * scale)))
        token = drawn * BLOCK + _place(shares, tl.sum(second.to(tl.int64), 0))
        tl.store(tokens + row, tl.where(healthy, token, -1).to(tl.int64))
    if DEMANDS and CHAINED:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            gdc_wait()


@triton.jit
def _draw_row(
    inputs, work, tokens, statuses, row, block_count,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr, LOGPROBS: tl.constexpr,
    FINISH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A program's part of a demanding row."""
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    changes = _changes(inputs, row, slot, position, EDITS, MASKED)
    scale = _scale(inputs.settings, slot)
    needs = _setting(inputs.settings, slot, NEEDS)
    top_k = _setting(inputs.settings, slot, TOP_K)
    min_p = _real(inputs.settings, slot, MIN_P)
    greedy, first, second = _plan(inputs.settings, slot, position, ATTEMPTS)
    for start in range(tl.program_id(0) * TILE, block_count, tl.num_programs(0) * TILE):
        blocks = start + tl.arange(0, TILE)
        values = _load(inputs, row, changes, blocks, blocks < block_count, EDITS, MASKED, EDITS, CHAINED)
        _measure(values, scale, work.maxima, work.sums, row, blocks, block_count)
        if FINISH:
            if (needs & TRUNCATED) != 0:
                _measure_more(values, work.leaders, work.seconds, row, blocks, block_count)
        if LOGPROBS:
            if (needs & (ASKS_LOGPROBS | PROCESSED)) == ASKS_LOGPROBS:
                raw = _load(inputs, row, changes, blocks, blocks < block_count, False, False)
                _measure(raw, LOG2E, work.raw_maxima, work.raw_sums, row, blocks, block_count)
    if _last(work.tickets, row, tl.num_programs(0)):
        block_maxima, peak, units = _read_blocks(work.maxima, work.sums, row, scale, block_count, BLOCKS)
        healthy = _report(statuses, row, peak)
        token = tl.full([], -1, tl.int64)
        pending = tl.zeros([], tl.int32)
        bound = tl.zeros([], tl.float32)
        total = tl.zeros([], tl.int64)
        if healthy & ((needs & TRUNCATED) != 0) & (top_k < inputs.drawable):
            pending += 1
            bound += LOWEST
            if top_k <= block_count:
                if FINISH:
                    block = tl.arange(0, BLOCKS)
                    seconds = work.seconds + row * block_count + block
                    more = tl.load(seconds, mask=block < block_count, other=-float("inf"))
                    bound = _reached_by(block_maxima, more, peak, top_k)
                else:
                    bound = _reached_by(block_maxima, None, peak, top_k)
        elif healthy:
            attempt = tl.arange(0, ATTEMPTS)
            drawn, chosen, values, total = _attempts(
                inputs, work.maxima, row, changes, scale, greedy, first, second, block_maxima, peak, units,
                block_count, EDITS, MASKED,
            )  # fmt: skip
            draws = drawn * BLOCK + chosen
            accepted = tl.zeros([], tl.int32)
            if (needs & TRUNCATED) != 0:
                within = tl.arange(0, BLOCK)[None, :]
                draw_values = tl.sum(tl.where(within == chosen[:, None], values, 0.0), 1)
                likely = tl.exp2((draw_values - peak) * scale).to(tl.float64) >= min_p
                accepted = tl.min(tl.where(likely, attempt, ATTEMPTS), 0)
                if (needs & NUCLEUS) != 0:
                    accepted = tl.full([], ATTEMPTS, tl.int32)
                    tl.store(work.totals + row, total)
                    tl.store(work.peaks + row, peak)
                    tl.store(work.drafts + row * ATTEMPTS + attempt, tl.where(likely, draws, -1))
                    tl.store(work.draft_values + row * ATTEMPTS + attempt, draw_values)
                    # The mass before the draw within its own block, where ids decide between equal values.
                    value = draw_values[:, None]
                    ahead = (values > value) | ((values == value) & (within < chosen[:, None]))
                    shares = tl.where(ahead, _units(tl.exp2((values - peak) * scale)), 0)
                    tl.store(work.masses + row * ATTEMPTS + attempt, tl.sum(shares, 1))
                    _list_blocks(work, row, block_maxima >= tl.min(draw_values, 0), block_count, BLOCKS)
                elif accepted == ATTEMPTS:
                    pending += 1
                    bound = tl.maximum(tl.max(draw_values, 0), _min_p_bound(peak, scale, min_p))
            if accepted < ATTEMPTS:
                token = tl.sum(tl.where(attempt == accepted, draws, 0), 0).to(tl.int64)
        if FINISH:
            if pending > 0:
                pending -= 1
                token = _draw_kept(
                    inputs, work, row, slot, position, changes, bound, block_maxima, peak, scale, total, block_count,
                    BLOCKS, True, EDITS, MASKED,
                )  # fmt: skip
        else:
            tl.store(work.bounds + row, bound)
            tl.store(work.peaks + row, peak)
            tl.store(work.totals + row, total)
        tl.store(work.pending + row, pending)
        tl.store(tokens + row, token)


@triton.jit(do_not_specialize=["rows"])
def draw(
    inputs, work, tokens, statuses, rows, block_count,
    TILE: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, ALL: tl.constexpr, EDITS: tl.constexpr,
    MASKED: tl.constexpr, LOGPROBS: tl.constexpr, FINISH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Tokens of the rows that ask for more than a plain draw, or of ALL, but for those left to the kernels after it.

    ROWS is 0 where the grid has programs for each row, demanding or not; else it is a power of two, at least their
    number, and the programs share the demanding ones.
    """
    if CHAINED:
        gdc_launch_dependents()
    number = tl.program_id(1).to(tl.int64)
    if ROWS:
        demanding = number.to(tl.int32) + 1  # at least, until they are counted
        while number < demanding:
            row, demanding = _find(inputs, rows, number, ROWS)
            if number < demanding:
                _draw_row(
                    inputs, work, tokens, statuses, row, block_count, TILE, BLOCKS, EDITS, MASKED, LOGPROBS, FINISH,
                    CHAINED,
                )  # fmt: skip
            number += tl.num_programs(1)
    else:
        slot = tl.load(inputs.slots + number)
        if ALL or _demands(inputs, number, slot, tl.load(inputs.positions + number), MASKED):
            _draw_row(
                inputs, work, tokens, statuses, number, block_count, TILE, BLOCKS, EDITS, MASKED, LOGPROBS, FINISH,
                CHAINED,
            )  # fmt: skip
    if EDITS and CHAINED:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            gdc_wait()
