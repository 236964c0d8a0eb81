"""The other two draws on the device, kept for comparison: they read the logits twice, and then draw token by token.

edit, draw                  as ever: block statistics of all rows; the tokens of greedy ones
threshold   [rows]          the key of the last token that top-k and top-p keep
race        [parts, rows]   gumbel: the largest of the kept logits once noise is added
spread      [tiles, rows]   multinomial: the weights of the kept tokens, for torch to draw from
finish                      as ever: log probabilities
"""

import triton
import triton.language as tl

from freewheel.sampling import rng, state
from freewheel.sampling.kernels import (
    ABOVE,
    BLOCK,
    CAPACITY,
    FEW,
    MIN_P,
    NEEDS,
    OK,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TRUNCATED,
    _changes,
    _key,
    _last,
    _load,
    _read_blocks,
    _real,
    _scale,
    _setting,
)
from freewheel.sampling.truncation_kernels import _gather, _keep, _kept_bound, _narrow, _search

NOISE = tl.constexpr(rng.NOISE)
RANDOM = tl.constexpr(state.RANDOM)
PARTS = tl.constexpr(64)  # at most


@triton.jit
def _last_kept(work, row, count, peak, scale, total, top_k, top_p, min_p, drawable, SIZE: tl.constexpr):
    """The smallest key of the candidates that are kept."""
    ids, values, _, _, _, kept = _keep(work, row, count, peak, scale, total, top_k, top_p, min_p, drawable, SIZE)
    return tl.min(tl.where(kept, _key(values, ids), ABOVE), 0)


@triton.jit
def threshold(inputs, work, statuses, block_count, BLOCKS: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr):
    """For each row with truncation the key of the last token that it keeps, for the others 0."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    changes = _changes(inputs, row, slot, tl.load(inputs.positions + row), EDITS, MASKED)
    floor = tl.zeros([], tl.int64)
    truncated = (_setting(inputs.settings, slot, NEEDS) & TRUNCATED) != 0
    if truncated & (tl.load(statuses + row) == OK):
        scale = _scale(inputs.settings, slot)
        top_k = _setting(inputs.settings, slot, TOP_K)
        top_p = _real(inputs.settings, slot, TOP_P)
        min_p = _real(inputs.settings, slot, MIN_P)
        block_maxima, peak, units = _read_blocks(work.maxima, work.sums, row, scale, block_count, BLOCKS)
        total = tl.sum(units, 0)
        bound = _kept_bound(block_maxima, peak, scale, total, top_k, top_p, min_p, inputs.drawable, block_count, BLOCKS)
        count = _gather(inputs, work, row, changes, bound, block_maxima, block_count, BLOCKS, False, EDITS, MASKED)
        if (count > FEW) & (count <= CAPACITY) & (top_k < inputs.drawable):
            count = _narrow(work, row, count, peak, top_k)
        if count <= FEW:
            floor = _last_kept(work, row, count, peak, scale, total, top_k, top_p, min_p, inputs.drawable, FEW)
        elif count <= CAPACITY:
            floor = _last_kept(work, row, count, peak, scale, total, top_k, top_p, min_p, inputs.drawable, CAPACITY)
        else:
            word = tl.zeros([], tl.int64)
            floor = _search(
                inputs, row, changes, peak, scale, total, top_k, top_p, min_p, word, block_count, 2, 8, EDITS, MASKED
            )
    tl.store(work.floors + row, floor)
    tl.store(work.pending + row, 0)


@triton.jit
def _kept_values(
    inputs, work, row, slot, changes, blocks, wanted, peak, scale, EDITS: tl.constexpr, MASKED: tl.constexpr
):
    """Ids and values of the row's blocks; -inf where truncation drops the id."""
    values = _load(inputs, row, changes, blocks, wanted, EDITS, MASKED)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    likely = tl.exp2((values - peak) * scale).to(tl.float64) >= _real(inputs.settings, slot, MIN_P)
    kept = likely & (_key(values, ids) >= tl.load(work.floors + row))
    return ids, tl.where(kept, values, -float("inf"))


@triton.jit
def race(inputs, work, tokens, statuses, block_count, TILE: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr):
    """Tokens of the random rows by the Gumbel-max trick; a token's noise is keyed by seed, position and its id."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    if ((_setting(inputs.settings, slot, NEEDS) & RANDOM) == 0) | (tl.load(statuses + row) != OK):
        return
    changes = _changes(inputs, row, slot, position, EDITS, MASKED)
    scale = _scale(inputs.settings, slot)
    temperature = _real(inputs.settings, slot, TEMPERATURE)
    seed = _setting(inputs.settings, slot, SEED)
    peak = tl.load(work.peaks + row)
    best = tl.full([], -float("inf"), tl.float64)
    winner = tl.full([], 0, tl.int32)
    for start in range(part * TILE, block_count, tl.num_programs(0) * TILE):
        blocks = start + tl.arange(0, TILE)
        ids, values = _kept_values(
            inputs, work, row, slot, changes, blocks, blocks < block_count, peak, scale, EDITS, MASKED
        )
        zero = tl.zeros_like(ids)
        one, two, three, four = tl.philox(seed, zero + position.to(tl.int32), ids >> 2, zero + NOISE, zero)
        word = tl.where((ids & 1) == 0, tl.where((ids & 2) == 0, one, three), tl.where((ids & 2) == 0, two, four))
        uniform = (word.to(tl.float64) + 0.5) / 4294967296.0
        scores = (values.to(tl.float64) - peak) / temperature - tl.log(-tl.log(1.0 - uniform))
        first = tl.max(tl.max(scores, 1), 0)
        if first > best:
            best = first
            winner = tl.min(tl.min(tl.where(scores == first, ids, 2147483647), 1), 0)
    tl.store(work.race_scores + row * PARTS + part, best)
    tl.store(work.race_ids + row * PARTS + part, winner)
    if _last(work.tickets, row, tl.num_programs(0)):
        lane = tl.arange(0, PARTS)
        ran = lane < tl.num_programs(0)
        scores = tl.load(work.race_scores + row * PARTS + lane, mask=ran, other=-float("inf"))
        ids = tl.load(work.race_ids + row * PARTS + lane, mask=ran, other=2147483647)
        tl.store(tokens + row, tl.min(tl.where(scores == tl.max(scores, 0), ids, 2147483647), 0).to(tl.int64))


@triton.jit
def spread(
    inputs, work, weights, random, statuses, block_count, TILE: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr
):
    """Weights float32 [rows, drawable] of the random rows' kept tokens, and which rows these are.

    The others get all weight on id 0, as torch draws from every row.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    changes = _changes(inputs, row, slot, tl.load(inputs.positions + row), EDITS, MASKED)
    draws = ((_setting(inputs.settings, slot, NEEDS) & RANDOM) != 0) & (tl.load(statuses + row) == OK)
    scale = _scale(inputs.settings, slot)
    peak = tl.load(work.peaks + row)
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids, values = _kept_values(
        inputs, work, row, slot, changes, blocks, blocks < block_count, peak, scale, EDITS, MASKED
    )
    shares = tl.where(draws, tl.exp2((values - peak) * scale), (ids == 0).to(tl.float32))
    tl.store(weights + row * inputs.drawable + ids, shares, mask=ids < inputs.drawable)
    tl.store(random + row, draws)
