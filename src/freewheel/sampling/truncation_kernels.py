"""What top-k, top-p and min-p keep of a row, and the draw from it: exact, without a sort.

check       [parts, rows]  the mass before each draw of a nucleus: the first draw inside it

The rest is what the other kernels call where that is not enough. First a bound that all reaches which is kept; what
reaches it is listed, and the few on the list are compared in pairs. If they are more than CAPACITY, the whole row is
searched, slowly.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from freewheel.sampling.kernels import (
    ATTEMPTS,
    BLOCK,
    CAPACITY,
    FEW,
    KEY_BITS,
    LOWEST,
    MIN_P,
    NEEDS,
    NUCLEUS,
    OK,
    TOP_K,
    TOP_P,
    UNIT,
    WORDS,
    _changes,
    _id,
    _key,
    _last,
    _load,
    _load_at,
    _popcount,
    _real,
    _scale,
    _setting,
    _share,
    _units,
    _words,
)


@triton.jit
def _reached_by(values, more, peak, k):
    """A number that at least k of ``values`` and ``more`` [n] reach, and few others, by cutting a range into fifths.

    ``more`` are no larger than ``values``, or None; n is below 2**14. LOWEST if too few are finite.
    """
    low = tl.min(tl.where(values > -float("inf"), values, peak), 0)
    step = (peak - low) * 0.2
    unknown: tl.constexpr = 1 << 20
    count = tl.full([], unknown, tl.int32)  # how many reach ``low``
    cuts = tl.zeros([], tl.int32)
    while (cuts < 5) & (count > k + k // 4):  # a reduction each: what it adds up costs less than its barriers
        counts = tl.zeros(values.shape, tl.int64)  # of what reaches each of four cuts, in 15 bits each
        for i in tl.static_range(4):
            counts += (values >= low + (i + 1) * step).to(tl.int64) << (15 * i)
            if more is not None:
                counts += (more >= low + (i + 1) * step).to(tl.int64) << (15 * i)
        counts = tl.sum(counts, 0)
        reached = tl.zeros([], tl.int32)
        for i in tl.static_range(4):
            here = ((counts >> (15 * i)) & 0x7FFF).to(tl.int32)
            count = tl.where(here >= k, here, count)
            reached += (here >= k).to(tl.int32)
        low = tl.where(reached > 0, low + reached * step, low)  # of an infinite step none is reached
        step *= 0.2
        cuts += 1
    if count == unknown:  # fewer reach any cut: ``low`` is the least of ``values``, below which ``more`` may lie
        counted = (values >= low).to(tl.int32)
        if more is not None:
            counted += (more >= low).to(tl.int32)
        low = tl.where(tl.sum(counted, 0) >= k, low, LOWEST)
    return low


@triton.jit
def _min_p_bound(peak, scale, min_p):
    """A number that every token reaches which min-p keeps."""
    reached = peak + (tl.log2(tl.maximum(min_p.to(tl.float32), 1e-37)) - 0.01) / scale - tl.abs(peak) * 1e-6
    return tl.where(min_p > 1e-37, reached, LOWEST)


@triton.jit
def _kept_bound(block_maxima, peak, scale, total, top_k, top_p, min_p, drawable, block_count, BLOCKS: tl.constexpr):
    """A number that everything reaches which truncation keeps."""
    bound = tl.full([], LOWEST, tl.float32)
    if top_k == drawable:
        # What lies below can't hold all that top-p leaves out, even if everything did.
        rest = ((1.0 - top_p) * (total / UNIT) / drawable).to(tl.float32)
        nucleus = peak + (tl.log2(rest) - 0.01) / scale - tl.abs(peak) * 1e-6
        bound = tl.maximum(bound, tl.maximum(nucleus, _min_p_bound(peak, scale, min_p)))
    elif top_k <= block_count:
        bound = _reached_by(block_maxima, None, peak, top_k)
    return bound


@triton.jit
def _list_blocks(work, row, listed, block_count, BLOCKS: tl.constexpr):
    """Leave the blocks that are ``listed`` [BLOCKS] in ``block_list``, ascending; how many these are."""
    block = tl.arange(0, BLOCKS)
    listed = listed & (block < block_count)
    place = tl.cumsum(listed.to(tl.int32), 0)
    tl.store(work.block_list + row * block_count + place - 1, block, mask=listed)
    tl.store(work.listed + row, tl.max(place, 0))
    tl.debug_barrier()
    return tl.max(place, 0)


@triton.jit
def _listed(work, row, start, count, block_count, TILE: tl.constexpr):
    """TILE of the row's listed blocks, and which of them exist."""
    place = start + tl.arange(0, TILE)
    blocks = tl.load(work.block_list + row * block_count + place, mask=place < count, other=block_count)
    return blocks, place < count


@triton.jit
def _gather(
    inputs, work, row, changes, bound, block_maxima, block_count,
    BLOCKS: tl.constexpr, KNOWN: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Leave the ids that reach the bound in ``candidates``, with their values; how many, or more than CAPACITY.

    KNOWN: ``_measure_more`` has seen the row. Then only blocks are read again where a second value reaches the bound.
    """
    block = tl.arange(0, BLOCKS)
    index = row * block_count + block
    ids = work.candidates + row * CAPACITY
    values = work.candidate_values + row * CAPACITY
    tile: tl.constexpr = 8 if KNOWN else 32
    reaches = block_maxima >= bound
    again = reaches
    if KNOWN:
        again = reaches & (tl.load(work.seconds + index, mask=reaches, other=0.0) >= bound)
        leaders = tl.load(work.leaders + index, mask=reaches, other=0)
    # How many blocks have one such id, in the low half, and how many are to be read again, in the high half.
    places = tl.cumsum(tl.where(again, 1 << 16, reaches.to(tl.int32)), 0)
    known = tl.max(places & 0xFFFF, 0)
    blocks_left = tl.max(places >> 16, 0)
    if KNOWN:
        alone = reaches & (again == 0) & ((places & 0xFFFF) <= CAPACITY)
        tl.store(ids + (places & 0xFFFF) - 1, block * BLOCK + leaders, mask=alone)
        tl.store(values + (places & 0xFFFF) - 1, block_maxima, mask=alone)
    tl.store(work.block_list + row * block_count + (places >> 16) - 1, block, mask=again)
    tl.debug_barrier()
    count = known
    for start in range(0, blocks_left, tile):
        blocks, wanted = _listed(work, row, start, blocks_left, block_count, tile)
        read = _load(inputs, row, changes, blocks, wanted, EDITS, MASKED)
        # The kept ones as bits, 32 ids a word: few are set, so the loop over a word's bits is short.
        kept = tl.reshape((read >= bound).to(tl.int32), [tile, WORDS, 32])
        rest = tl.sum(kept << tl.arange(0, 32)[None, None, :], 2)
        in_word = _popcount(rest)
        in_block = tl.sum(in_word, 1)
        at = (count + tl.cumsum(in_block, 0) - in_block)[:, None] + tl.cumsum(in_word, 1) - in_word
        first = blocks[:, None] * BLOCK + tl.arange(0, WORDS)[None, :] * 32
        count += tl.sum(in_block, 0)
        if count <= CAPACITY:
            for i in range(tl.max(tl.max(in_word, 1), 0)):
                lowest = rest & -rest
                tl.store(ids + at + i, first + _popcount(lowest - 1), mask=rest != 0)
                rest = rest ^ lowest
    tl.debug_barrier()
    if count <= CAPACITY:
        for start in range(known, count, FEW):
            i = start + tl.arange(0, FEW)
            found = tl.load(ids + i, mask=i < count, other=0)
            tl.store(values + i, _load_at(inputs, row, changes, found, i < count, EDITS), mask=i < count)
    tl.debug_barrier()
    return count


@triton.jit
def _candidates(work, row, i, count):
    """Ids and values of the row's candidates number ``i`` [n]; -inf past ``count``."""
    ids = tl.load(work.candidates + row * CAPACITY + i, mask=i < count, other=0)
    return ids, tl.load(work.candidate_values + row * CAPACITY + i, mask=i < count, other=-float("inf"))


@triton.jit
def _narrow(work, row, count, peak, k):
    """Leave out candidates that are not among the first k, but for a few; how many are left."""
    i = tl.arange(0, CAPACITY)
    ids, values = _candidates(work, row, i, count)
    left = values >= _reached_by(values, None, peak, k)
    place = tl.cumsum(left.to(tl.int32), 0) - 1
    tl.debug_barrier()  # all have been read
    tl.store(work.candidates + row * CAPACITY + place, ids, mask=left)
    tl.store(work.candidate_values + row * CAPACITY + place, values, mask=left)
    tl.debug_barrier()
    return tl.max(place, 0) + 1


@triton.jit
def _keep(work, row, count, peak, scale, total, top_k, top_p, min_p, drawable, SIZE: tl.constexpr):
    """What truncation keeps of ``count`` candidates, at most SIZE: by comparing pairs, without a sort.

    Returns:
        for each candidate [SIZE] its id, value, weight int64, rank in the total order, the weight before it, and
        whether it is kept.
    """
    step: tl.constexpr = 16 if SIZE == FEW else 4
    i = tl.arange(0, SIZE)
    ids, values = _candidates(work, row, i, count)
    ranks = tl.zeros([step, SIZE], tl.int32)
    befores = tl.zeros([step, SIZE], tl.int64)
    # A few at a time: code that is run but once costs more to fetch than to execute. Threads meet only at the end.
    for start in range(0, count, step):
        other_ids, others = _candidates(work, row, start + tl.arange(0, step), count)
        others, other_ids = others[:, None], other_ids[:, None]
        ahead = (others > values[None, :]) | ((others == values[None, :]) & (other_ids < ids[None, :]))
        ranks += ahead.to(tl.int32)
        befores += tl.where(ahead, _units(tl.exp2((others - peak) * scale)), 0)
    rank, before = tl.sum(ranks, 0), tl.sum(befores, 0)
    shares = tl.exp2((values - peak) * scale)
    weights = _units(shares)
    kept = (i < count) & (rank < top_k)
    reference = tl.where(top_k < drawable, tl.sum(tl.where(kept, weights, 0), 0), total).to(tl.float64)
    nucleus = tl.where(top_p < 1, top_p * reference, float("inf"))
    kept = kept & (before.to(tl.float64) < nucleus) & (shares.to(tl.float64) >= min_p)
    return ids, values, weights, rank, before, kept


@triton.jit
def _pick(work, row, count, peak, scale, total, top_k, top_p, min_p, drawable, word, SIZE: tl.constexpr):
    """Draw among the candidates that are kept: by the inverse of their cumulative distribution in the total order."""
    ids, _, weights, rank, before, kept = _keep(
        work, row, count, peak, scale, total, top_k, top_p, min_p, drawable, SIZE
    )
    # The largest kept token comes first and is always kept: the mass before a token grows with its rank.
    target = _share(tl.sum(tl.where(kept, weights, 0), 0), word)
    drawn = tl.max(tl.where(kept & (before <= target) & (weights > 0), rank, 0), 0)
    return tl.sum(tl.where(kept & (rank == drawn), ids, 0), 0)


@triton.jit
def _search(
    inputs, row, changes, peak, scale, total, top_k, top_p, min_p, word, block_count,
    STAGES: tl.constexpr, TILE: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Truncate and draw over the whole row, for any number of candidates: three searches, two bits of the key a pass.

    Each finds the largest key such that the elements at or above it measure at least ``limit``: the k-th element, the
    last of the nucleus, and the drawn one. One program reads the row 26 times a search: exact for any input, and slow.
    With two STAGES: the key of the last element that top-k and top-p keep, 0 if they keep all.
    """
    floor = tl.zeros([], tl.int64)
    found = tl.zeros([], tl.int64)
    for stage in range(STAGES):
        # One pass more, the first, measures the whole.
        limit = tl.zeros([], tl.int64)
        least = tl.where(stage < 2, 0.0, min_p)
        if ((stage == 0) & (top_k < inputs.drawable)) | ((stage == 1) & (top_p < 1)) | (stage == 2):
            found = tl.zeros([], tl.int64)
            for digit in range(-1, KEY_BITS // 2):
                unit = tl.full([], 1, tl.int64) << (KEY_BITS - 2 - 2 * tl.maximum(digit, 0))
                reach1 = tl.zeros([], tl.int64)
                reach2 = tl.zeros([], tl.int64)
                reach3 = tl.zeros([], tl.int64)
                whole = tl.zeros([], tl.int64)
                for start in range(0, block_count, TILE):
                    blocks = start + tl.arange(0, TILE)
                    values = _load(inputs, row, changes, blocks, blocks < block_count, EDITS, MASKED)
                    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                    keys = _key(values, ids)
                    weights = tl.exp2((values - peak) * scale)
                    amounts = tl.where(stage == 0, 1, _units(weights))
                    counted = (ids < inputs.drawable) & (keys >= floor) & (weights.to(tl.float64) >= least)
                    amounts = tl.where(counted, amounts, 0)
                    reach1 += tl.sum(tl.sum(tl.where(keys >= found + unit, amounts, 0), 1), 0)
                    reach2 += tl.sum(tl.sum(tl.where(keys >= found + 2 * unit, amounts, 0), 1), 0)
                    reach3 += tl.sum(tl.sum(tl.where(keys >= found + 3 * unit, amounts, 0), 1), 0)
                    whole += tl.sum(tl.sum(amounts, 1), 0)
                if digit < 0:
                    nucleus = tl.ceil(top_p * tl.where(top_k < inputs.drawable, whole, total).to(tl.float64)).to(
                        tl.int64
                    )
                    limit = tl.where(stage == 0, top_k, tl.where(stage == 1, nucleus, _share(whole, word) + 1))
                else:
                    reached = (reach1 >= limit).to(tl.int64) + (reach2 >= limit).to(tl.int64)
                    found += unit * (reached + (reach3 >= limit).to(tl.int64))
            floor = found
    return found


@triton.jit
def _draw_kept(
    inputs, work, row, slot, position, changes, bound, block_maxima, peak, scale, total, block_count,
    BLOCKS: tl.constexpr, KNOWN: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Draw from what truncation keeps, all of which reaches the bound."""
    top_k = _setting(inputs.settings, slot, TOP_K)
    top_p = _real(inputs.settings, slot, TOP_P)
    min_p = _real(inputs.settings, slot, MIN_P)
    _, _, words, _ = _words(inputs.settings, slot, position, tl.arange(0, 1))
    word = tl.sum(words.to(tl.int64), 0)
    count = _gather(inputs, work, row, changes, bound, block_maxima, block_count, BLOCKS, KNOWN, EDITS, MASKED)
    if (count > FEW) & (count <= CAPACITY) & (top_k < inputs.drawable):
        count = _narrow(work, row, count, peak, top_k)
    token = tl.zeros([], tl.int64)
    if count <= FEW:
        token += _pick(work, row, count, peak, scale, total, top_k, top_p, min_p, inputs.drawable, word, FEW)
    elif count <= CAPACITY:
        token += _pick(work, row, count, peak, scale, total, top_k, top_p, min_p, inputs.drawable, word, CAPACITY)
    else:
        token += _id(
            _search(
                inputs, row, changes, peak, scale, total, top_k, top_p, min_p, word, block_count, 3, 8, EDITS, MASKED
            )
        )
    return token


@triton.jit
def check(
    inputs, work, tokens, statuses, block_count,
    TILE: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Tokens of the rows with a nucleus: the first draw before which less than its share of the mass lies."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    changes = _changes(inputs, row, slot, position, EDITS, MASKED)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if (_setting(inputs.settings, slot, NEEDS) & NUCLEUS) == 0:
        return
    if tl.load(statuses + row) != OK:
        return
    scale = _scale(inputs.settings, slot)
    peak = tl.load(work.peaks + row)
    count = tl.load(work.listed + row)
    for start in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
        blocks, wanted = _listed(work, row, start, count, block_count, TILE)
        values = _load(inputs, row, changes, blocks, wanted, EDITS, MASKED)
        weights = tl.exp2((values - peak) * scale)
        for i in tl.static_range(ATTEMPTS):
            own = tl.load(work.drafts + row * ATTEMPTS + i) // BLOCK
            value = tl.load(work.draft_values + row * ATTEMPTS + i)
            # Equal values come first in the blocks before the draw's own one, which ``draw`` has weighed.
            ahead = (values > value) | ((values == value) & (blocks < own)[:, None])
            ahead = ahead & (blocks != own)[:, None]
            # Rounded a block at a time: no tile size changes the sum.
            mass = tl.sum(_units(tl.sum(tl.where(ahead, weights, 0.0), 1)), 0)
            tl.atomic_add(work.masses + row * ATTEMPTS + i, mass, sem="relaxed")
    if _last(work.tickets, row, tl.num_programs(0)):
        attempt = tl.arange(0, ATTEMPTS)
        drafts = tl.load(work.drafts + row * ATTEMPTS + attempt)
        mass = tl.load(work.masses + row * ATTEMPTS + attempt)
        total = tl.load(work.totals + row)
        nucleus = _real(inputs.settings, slot, TOP_P) * total.to(tl.float64)
        accepted = tl.min(tl.where((drafts >= 0) & (mass.to(tl.float64) < nucleus), attempt, ATTEMPTS), 0)
        token = tl.sum(tl.where(attempt == accepted, drafts, 0), 0).to(tl.int64)
        tl.store(tokens + row, token)
        if accepted == ATTEMPTS:
            # All draws fell outside: what is left begins above the largest of them.
            bound = tl.max(tl.load(work.draft_values + row * ATTEMPTS + attempt), 0)
            bound = tl.maximum(bound, _min_p_bound(peak, scale, _real(inputs.settings, slot, MIN_P)))
            tl.store(work.bounds + row, bound)
            tl.store(work.pending + row, 1)
