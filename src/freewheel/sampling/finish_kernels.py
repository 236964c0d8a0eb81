"""What the kernels before have left to do: tokens of rows that are still pending, and log probabilities.

finish      [rows]         one of the few candidates above a bound; what ``Logprobs`` reports
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from freewheel.sampling.kernels import (
    ABOVE,
    ALTERNATIVES,
    ASKS_LOGPROBS,
    BLOCK,
    CAPACITY,
    FEW,
    ID_BITS,
    LOG2E,
    MIN_P,
    NEEDS,
    PROCESSED,
    TOP_K,
    TOP_P,
    TRUNCATED,
    UNIT,
    _changes,
    _id,
    _key,
    _load,
    _load_at,
    _read_blocks,
    _real,
    _scale,
    _setting,
    _units,
)
from freewheel.sampling.truncation_kernels import (
    _candidates,
    _draw_kept,
    _gather,
    _keep,
    _kept_bound,
    _list_blocks,
    _listed,
    _narrow,
    _search,
)


@triton.jit
def _logprob(values, peak, scale, log_total):
    """Natural logarithms of probabilities; ``log_total`` is the binary one of the mass over the peak's weight."""
    return ((values - peak) * scale - log_total) / LOG2E


@triton.jit
def _show(out, row, width, at, ids, logprobs, larger, shown):
    """Store alternatives [n] at their places ``at`` in the row's list."""
    place = row * width + at
    tl.store(out.top_ids + place, ids.to(tl.int64), mask=shown)
    tl.store(out.top_logprobs + place, logprobs, mask=shown)
    tl.store(out.top_ranks + place, larger.to(tl.int64) + 1, mask=shown)


@triton.jit
def _describe_kept(
    inputs, work, out, row, width, changes, count, peak, scale, total, top_k, top_p, min_p, wanted, narrowed,
    SIZE: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store the first ``wanted`` of the kept candidates; the logarithm of the mass, theirs alone where ``narrowed``."""
    ids, values, weights, rank, _, kept = _keep(
        work, row, count, peak, scale, total, top_k, top_p, min_p, inputs.drawable, SIZE
    )
    mass = tl.where(narrowed, tl.sum(tl.where(kept, weights, 0), 0), total)
    log_total = tl.log2((mass / UNIT).to(tl.float32))
    step: tl.constexpr = 16 if SIZE == FEW else 4
    larger = tl.zeros([step, SIZE], tl.int32)
    for start in range(0, count, step):
        other_ids, others = _candidates(work, row, start + tl.arange(0, step), count)
        larger += (others[:, None] > values[None, :]).to(tl.int32)
    kept = kept & (rank < wanted)
    _show(out, row, width, rank, ids, _logprob(values, peak, scale, log_total), tl.sum(larger, 0), kept)
    listed = tl.sum(kept.to(tl.int32), 0)
    if listed < wanted:
        # Not so many can be drawn: the list goes on with the smallest other ids.
        last = tl.min(tl.where(kept, _key(values, ids), ABOVE), 0)
        blocks = tl.arange(0, CAPACITY // BLOCK)
        others = _load(inputs, row, changes, blocks, blocks >= 0, EDITS, MASKED)
        other_ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        free = (other_ids < inputs.drawable) & ((others == -float("inf")) | (_key(others, other_ids) < last))
        free = tl.reshape(free, [CAPACITY])
        place = listed + tl.cumsum(free.to(tl.int32), 0) - 1
        no_logprobs = tl.full([CAPACITY], -float("inf"), tl.float32)
        same = tl.zeros([CAPACITY], tl.int32) + listed
        _show(out, row, width, place, tl.reshape(other_ids, [CAPACITY]), no_logprobs, same, free & (place < wanted))
    return log_total


@triton.jit
def _describe_any(
    inputs, out, row, width, changes, peak, scale, total, top_k, top_p, min_p, wanted, narrowed, block_count,
    TILE: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The same for any number of candidates: one program reads the row once for each alternative."""
    floor = tl.zeros([], tl.int64)
    if narrowed:
        word = tl.zeros([], tl.int64)
        floor = _search(
            inputs, row, changes, peak, scale, total, top_k, top_p, min_p, word, block_count, 2, TILE, EDITS, MASKED
        )
    log_total = tl.zeros([], tl.float32)
    last = tl.full([], ABOVE, tl.int64)
    value = tl.full([], float("nan"), tl.float32)
    larger = tl.zeros([], tl.int64)
    for number in range(-1, wanted):
        mass = tl.zeros([], tl.int64)
        best = tl.zeros([], tl.int64)
        for start in range(0, block_count, TILE):
            blocks = start + tl.arange(0, TILE)
            values = _load(inputs, row, changes, blocks, blocks < block_count, EDITS, MASKED)
            ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            weights = tl.exp2((values - peak) * scale)
            kept = (_key(values, ids) >= floor) & (weights.to(tl.float64) >= min_p)
            mass += tl.sum(tl.sum(tl.where(kept, _units(weights), 0), 1), 0)
            keys = _key(tl.where(kept, values, -float("inf")), ids)
            keys = tl.where((ids < inputs.drawable) & (keys < last), keys, 0)
            best = tl.maximum(best, tl.max(tl.max(keys, 1), 0))
        if number < 0:
            log_total = tl.log2((mass / UNIT).to(tl.float32))
        else:
            bits = ((best >> ID_BITS) - 2147483648).to(tl.int32)
            found = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            larger = tl.where(found == value, larger, number)
            tl.store(out.top_ids + row * width + number, _id(best))
            tl.store(out.top_logprobs + row * width + number, _logprob(found, peak, scale, log_total))
            tl.store(out.top_ranks + row * width + number, larger + 1)
            value = found
            last = best
    return log_total


@triton.jit
def _describe(
    inputs, work, out, row, slot, needs, edits, token, width, block_count,
    BLOCKS: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Log probabilities of a row that asks for them: of the model's logits or, processed, of what was left of them."""
    processed = (needs & PROCESSED) != 0
    edit_row, mask_row, limited = edits
    top_k = tl.zeros([], tl.int64) + inputs.drawable
    top_p = tl.full([], 1.0, tl.float64)
    min_p = tl.zeros([], tl.float64)
    scale = tl.full([], LOG2E, tl.float32)
    maxima, sums = work.raw_maxima, work.raw_sums
    narrowed = processed & ((needs & TRUNCATED) != 0)
    if processed:
        maxima, sums = work.maxima, work.sums
        scale = _scale(inputs.settings, slot)
        if narrowed:
            top_k = _setting(inputs.settings, slot, TOP_K)
            top_p = _real(inputs.settings, slot, TOP_P)
            min_p = _real(inputs.settings, slot, MIN_P)
    else:
        edit_row = tl.full([], -1, tl.int64)
        mask_row = tl.full([], -1, tl.int64)
        limited = tl.zeros([], tl.int64)
    changes = (edit_row, mask_row, limited)
    block_maxima, peak, units = _read_blocks(maxima, sums, row, scale, block_count, BLOCKS)
    total = tl.sum(units, 0)
    wanted = tl.minimum(tl.minimum(_setting(inputs.settings, slot, ALTERNATIVES), width), inputs.drawable)
    log_total = tl.log2((total / UNIT).to(tl.float32))
    first = tl.where(narrowed, top_k, wanted)
    if first > 0:
        bound = _kept_bound(block_maxima, peak, scale, total, first, top_p, min_p, inputs.drawable, block_count, BLOCKS)
        count = _gather(inputs, work, row, changes, bound, block_maxima, block_count, BLOCKS, False, EDITS, MASKED)
        if (count > FEW) & (count <= CAPACITY) & (first < inputs.drawable):
            count = _narrow(work, row, count, peak, first)
        if count <= FEW:
            log_total = _describe_kept(
                inputs, work, out, row, width, changes, count, peak, scale, total, top_k, top_p, min_p, wanted,
                narrowed, FEW, EDITS, MASKED,
            )  # fmt: skip
        elif count <= CAPACITY:
            log_total = _describe_kept(
                inputs, work, out, row, width, changes, count, peak, scale, total, top_k, top_p, min_p, wanted,
                narrowed, CAPACITY, EDITS, MASKED,
            )  # fmt: skip
        else:
            log_total = _describe_any(
                inputs, out, row, width, changes, peak, scale, total, top_k, top_p, min_p, wanted, narrowed,
                block_count, 8, EDITS, MASKED,
            )  # fmt: skip
    tokens_here = tl.zeros([1], tl.int64) + token
    value = tl.sum(_load_at(inputs, row, changes, tokens_here, tokens_here >= 0, EDITS), 0)
    tl.store(out.token_logprobs + row, _logprob(value, peak, scale, log_total))
    larger = tl.full([], 1, tl.int64)
    blocks_left = _list_blocks(work, row, block_maxima > value, block_count, BLOCKS)
    for start in range(0, blocks_left, 8):
        blocks, here = _listed(work, row, start, blocks_left, block_count, 8)
        values = _load(inputs, row, changes, blocks, here, EDITS, MASKED)
        larger += tl.sum(tl.sum((values > value).to(tl.int32), 1), 0)
    tl.store(out.ranks + row, larger)


@triton.jit(do_not_specialize=["width"])
def finish(
    inputs, work, out, tokens, width, block_count,
    BLOCKS: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr, LOGPROBS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Tokens of the rows that are still pending; log probabilities."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    needs = _setting(inputs.settings, slot, NEEDS)
    changes = _changes(inputs, row, slot, position, EDITS, MASKED)
    if CHAINED:
        gdc_wait()
    if (needs & TRUNCATED) != 0:
        if tl.load(work.pending + row) > 0:
            scale = _scale(inputs.settings, slot)
            peak = tl.load(work.peaks + row)
            total = tl.load(work.totals + row)
            bound = tl.load(work.bounds + row)
            block = tl.arange(0, BLOCKS)
            block_maxima = tl.load(
                work.maxima + row * block_count + block, mask=block < block_count, other=-float("inf")
            )
            token = _draw_kept(
                inputs, work, row, slot, position, changes, bound, block_maxima, peak, scale, total, block_count,
                BLOCKS, False, EDITS, MASKED,
            )  # fmt: skip
            tl.store(tokens + row, token)
            tl.debug_barrier()
    if LOGPROBS:
        tl.store(out.token_logprobs + row, float("nan"))
        tl.store(out.ranks + row, tl.zeros([], tl.int64))
        for start in range(0, width, FEW):
            number = start + tl.arange(0, FEW)
            place, exists = row * width + number, number < width
            tl.store(out.top_ids + place, tl.full([FEW], -1, tl.int64), mask=exists)
            tl.store(out.top_logprobs + place, tl.full([FEW], -float("inf"), tl.float32), mask=exists)
            tl.store(out.top_ranks + place, tl.zeros([FEW], tl.int64), mask=exists)
        tl.debug_barrier()  # before others write the same places
        token = tl.load(tokens + row)
        if ((needs & ASKS_LOGPROBS) != 0) & (token >= 0):
            _describe(inputs, work, out, row, slot, needs, changes, token, width, block_count, BLOCKS, EDITS, MASKED)
