"""Attention over a paged key-value cache on the device. Launched by attention_gpu.py.

    attend_decode     [splits, kv_heads, rows]    a row that is alone in its sequence: normalise, rotate, store, attend
    rotate_and_store  [parts, rows]               any rows: normalise, rotate, store; leaves the queries
    attend_chunks     [splits, kv_heads, tiles]   rows whose keys are stored: prefill chunks and draft trees
    combine           [heads, rows]               what the splits left, added up

A layer's cache is [2 (keys, values), kv_heads, num_pages, page_size, head_dim]; place i of a sequence is in page
``page_table[slot, i // page_size]``. Only places that some row sees are read: what else a page holds may be anything.
Queries, keys and values come side by side from one product::

    a row       query heads | key heads | value heads     query head h goes with key head h // group
    a head      x0 y0 x1 y1 x2 y2 ...                     pairs x, y are rotated as complex numbers
    rotations   float32 [rows, head_dim / 2, 2]           cosine and sine for each pair

The context is cut at multiples of TILE places, and tile i belongs to split i % SPLITS. So splits are even, short
contexts fill few of them, and with equal SPLITS neither the batch nor how a chunk was cut changes a row's sums::

    tile        | 0       | 1       | 2       | 3       | 4       |
    split       | 0       | 1       | 0       | 1       | 0       |      SPLITS = 2
    row sees                  [first ............. position]             bounds may lie inside tiles

Each split leaves its softmax over what it saw (FlashAttention, arXiv 2205.14135, cut along the context as in
Flash-Decoding; pages as in PagedAttention, arXiv 2309.06180)::

    peaks       float32 [rows, heads, splits]             largest score, in units of ln 2; -inf if there is none
    sums        float32 [rows, heads, splits]             of 2 ** (score - peak)
    attended    [rows, heads, splits, head_dim]           of 2 ** (score - peak) * value, of any floating type

All three may be unwritten where a row sees nothing of a split (:func:`tiles_seen`), and ``attended`` where
``attend_chunks`` left a peak of -inf. :func:`merged` says what to multiply ``attended`` by. Idle rows, whose slot is
negative, attend to 0.

Scores, sums and weighted values are float32; products take the cache's dtype, as tensor cores do.

CHAINED kernels start before the one ahead of them has ended, when all its programs are past their own wait
(programmatic dependent launch), and go on at ``gdc_wait`` when it has. Before that they read only what was written at
least two launches ago: page tables, slots, positions, places, rotations, tiles, and keys and values of earlier steps.
Every program waits, so that no kernel ends before the one ahead of it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _rotation(rotations, row, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Cosines and sines of a row, float32 [1, DIM / 2] each."""
    pair = tl.arange(0, DIM // 2)[None, :]
    at, inside = (row * (HEAD_DIM // 2) + pair) * 2, pair < HEAD_DIM // 2
    return tl.load(rotations + at, mask=inside, other=0.0), tl.load(rotations + at + 1, mask=inside, other=0.0)


@triton.jit
def _load_heads(matrix, heads, wanted, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Rows ``heads`` [n] of a matrix of head_dim columns, float32 [n, DIM]; 0 where not ``wanted`` [n]."""
    d = tl.arange(0, DIM)
    inside = wanted[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(matrix + heads[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normalised(x, weight, eps, HEAD_DIM: tl.constexpr):
    """Heads, float32 [n, DIM]: divided by their root mean square, times ``weight`` [n, DIM]."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None] * weight


@triton.jit
def _rotated(x, cosine, sine):
    """Heads, float32 [n, DIM], each pair of neighbours rotated."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return tl.reshape(tl.join(even * cosine - odd * sine, odd * cosine + even * sine), [x.shape[0], x.shape[1]])


@triton.jit
def _entries(pages, places, wanted, PAGE_SIZE: tl.constexpr):
    """Where ``places`` of a sequence are in what a head has in all pages, int64; that of page 0 if not ``wanted``."""
    page = tl.load(pages + places // PAGE_SIZE, mask=wanted, other=0)
    return page.to(tl.int64) * PAGE_SIZE + places % PAGE_SIZE


@triton.jit
def _load_tile(
    keys, values, pages, places, wanted,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """A head's keys and values at ``places`` [t], each [t, DIM]; 0 if not ``wanted``."""
    d = tl.arange(0, DIM)
    entries = _entries(pages, places, wanted, PAGE_SIZE)
    at = entries[:, None] * HEAD_DIM + d[None, :]
    inside = wanted[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(keys + at, mask=inside, other=0.0), tl.load(values + at, mask=inside, other=0.0)


@triton.jit
def _scaled(products, scale, CAP: tl.constexpr):
    """Scores in units of ln 2, capped to CAP * tanh(score / CAP) if CAP is not 0."""
    scores = products * (scale * LOG2E)
    if CAP != 0:
        tanh = 1 - 2 / (tl.exp2(scores * (2 / CAP)) + 1)
        scores = tanh * (CAP * LOG2E)
    return scores


@triton.jit
def _dot(a, b, total):
    """``total`` + a @ b, added in float32."""
    if INTERPRETED:  # it would multiply the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="tf32x3")


@triton.jit
def _attend(query, keys, values, visible, peak, total, attended, scale, CAP: tl.constexpr):
    """Takes a tile into the running softmax.

    ``query`` is [m, DIM], ``visible`` [m or 1, t]; ``peak`` and ``total`` are [m], ``attended`` [m, DIM].
    """
    products = _dot(query, tl.trans(keys), tl.zeros([query.shape[0], keys.shape[0]], tl.float32))
    scores = tl.where(visible, _scaled(products, scale, CAP), -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    level = tl.where(higher == -float("inf"), 0.0, higher)  # nothing seen yet
    kept = tl.exp2(peak - level)
    weights = tl.exp2(scores - level[:, None])
    total = total * kept + tl.sum(weights, 1)
    attended = _dot(weights.to(values.dtype), values, attended * kept[:, None])
    return higher, total, attended


@triton.jit
def tiles_seen(position, place, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile with a place that a row at this position and place sees, and how many there are."""
    first = tl.maximum(position + 1 - WINDOW, 0) // TILE if WINDOW > 0 else position * 0
    return first, place // TILE - first + 1


@triton.jit
def _first_tile(first, split, SPLITS: tl.constexpr, TILE: tl.constexpr):
    """Where the first tile of a split starts, among those that hold places from ``first`` on."""
    tile = first // TILE
    return (tile + (split + SPLITS - tile % SPLITS) % SPLITS) * TILE


@triton.jit
def _leave(partials, index, wanted, peak, total, attended, HEAD_DIM: tl.constexpr, DIM: tl.constexpr):
    """Stores a split's softmax at ``index`` [m] of the partials."""
    d = tl.arange(0, DIM)
    inside = (wanted & (peak > -float("inf")))[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(partials.peaks + index, peak, mask=wanted)
    tl.store(partials.sums + index, total, mask=wanted)
    attended = attended.to(partials.attended.dtype.element_ty)
    tl.store(partials.attended + index[:, None] * HEAD_DIM + d[None, :], attended, mask=inside)


@triton.jit
def attend_decode(
    out, partials, qkv, norm_weight, rotations, cache, page_table, slots, positions,
    eps, scale, num_pages, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    SHARES: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """The group of a key head: one split of what a row sees. The split that holds the row's own place also stores it.

    Queries, keys and values are the sum of SHARES.

    Leaves partials, or the attended rows in ``out`` if there are none (SPLITS is 1). GROUP and DIM are heads of a group
    and HEAD_DIM, padded to powers of two. Tiles pass through shared memory in STAGES; if EARLY, the first one through
    registers, into which it is read before the wait. In a short context that is all there is.
    """
    split, kv_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    position = tl.load(positions + row).to(tl.int32)
    heads = kv_head * (HEADS // KV_HEADS) + tl.arange(0, GROUP)
    wanted = tl.arange(0, GROUP) < HEADS // KV_HEADS
    index = (row * HEADS + heads) * SPLITS + split
    first = tl.maximum(position + 1 - WINDOW, 0) if WINDOW > 0 else position * 0
    start = _first_tile(first, split, SPLITS, TILE)
    d = tl.arange(0, DIM)
    out_at = (row * HEADS + heads)[:, None] * HEAD_DIM + d[None, :]
    inside = wanted[:, None] & (d < HEAD_DIM)[None, :]
    if (slot < 0) | (start > position):
        if CHAINED:
            gdc_wait()
            gdc_launch_dependents()
        if partials is None:
            tl.store(out + out_at, tl.zeros([GROUP, DIM], out.dtype.element_ty), mask=inside)
        elif slot < 0:
            nothing = tl.zeros([GROUP, DIM], partials.attended.dtype.element_ty)
            tl.store(partials.peaks + index, tl.full([GROUP], -float("inf"), tl.float32), mask=wanted)
            tl.store(partials.sums + index, tl.zeros([GROUP], tl.float32), mask=wanted)
            tl.store(partials.attended + index[:, None] * HEAD_DIM + d[None, :], nothing, mask=inside)
        return
    pages = page_table + slot * max_pages
    keys = cache + kv_head.to(tl.int64) * num_pages * (PAGE_SIZE * HEAD_DIM)
    values = cache + (kv_head + KV_HEADS).to(tl.int64) * num_pages * (PAGE_SIZE * HEAD_DIM)
    places = start + tl.arange(0, TILE)
    if EARLY:
        seen = (places >= first) & (places < position)
        tile_keys, tile_values = _load_tile(keys, values, pages, places, seen, HEAD_DIM, DIM, PAGE_SIZE)
    cosine, sine = _rotation(rotations, row, HEAD_DIM, DIM)
    own = (position // TILE) % SPLITS == split
    own_at = _entries(pages, position, own, PAGE_SIZE) * HEAD_DIM + d[None, :]
    own_head = HEADS + kv_head + tl.arange(0, 1)
    is_own = own_head == tl.where(own, HEADS + kv_head, -1)
    if norm_weight is not None:
        query_weight = _load_heads(norm_weight, heads, wanted, HEAD_DIM, DIM)
        key_weight = _load_heads(norm_weight, own_head, is_own, HEAD_DIM, DIM)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    query = _load_heads(qkv + row * width, heads, wanted, HEAD_DIM, DIM)
    key = _load_heads(qkv + row * width, own_head, is_own, HEAD_DIM, DIM)
    value = _load_heads(qkv + row * width, own_head + KV_HEADS, is_own, HEAD_DIM, DIM)
    for share in tl.static_range(1, SHARES):
        more = qkv + (share * tl.num_programs(2) + row) * width
        query += _load_heads(more, heads, wanted, HEAD_DIM, DIM)
        key += _load_heads(more, own_head, is_own, HEAD_DIM, DIM)
        value += _load_heads(more, own_head + KV_HEADS, is_own, HEAD_DIM, DIM)
    value = value.to(values.dtype.element_ty)
    if norm_weight is not None:
        query = _normalised(query, query_weight, eps, HEAD_DIM)
        key = _normalised(key, key_weight, eps, HEAD_DIM)
    query = _rotated(query, cosine, sine)
    key = _rotated(key, cosine, sine).to(keys.dtype.element_ty)
    tl.store(keys + own_at, key, mask=is_own[:, None] & (d < HEAD_DIM)[None, :])
    tl.store(values + own_at, value, mask=is_own[:, None] & (d < HEAD_DIM)[None, :])
    query = query.to(keys.dtype.element_ty)
    # The softmax starts from the row itself, or from nothing.
    score = _scaled(tl.sum(query.to(tl.float32) * key.to(tl.float32), 1), scale, CAP)
    peak = tl.where(own, score, -float("inf"))
    total = tl.where(own, tl.full([GROUP], 1.0, tl.float32), 0.0)
    attended = tl.zeros([GROUP, DIM], tl.float32) + value.to(tl.float32)
    if EARLY:
        if start < position:
            peak, total, attended = _attend(
                query, tile_keys, tile_values, seen[None, :], peak, total, attended, scale, CAP
            )
        start += SPLITS * TILE
    if start < position:
        for begin in tl.range(start, position, SPLITS * TILE, num_stages=STAGES):
            places = begin + tl.arange(0, TILE)
            seen = (places >= first) & (places < position)
            tile_keys, tile_values = _load_tile(keys, values, pages, places, seen, HEAD_DIM, DIM, PAGE_SIZE)
            peak, total, attended = _attend(
                query, tile_keys, tile_values, seen[None, :], peak, total, attended, scale, CAP
            )
    if partials is None:
        tl.store(out + out_at, (attended / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        _leave(partials, index, wanted, peak, total, attended, HEAD_DIM, DIM)


@triton.jit
def rotate_and_store(
    queries, qkv, norm_weight, rotations, cache, page_table, slots, places,
    eps, num_pages, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr, PART: tl.constexpr, SHARES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """PART heads of a row, the sum of SHARES: normalise and rotate queries and keys, put them and values in place."""
    head, row = tl.program_id(0) * PART + tl.arange(0, PART), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    place = tl.load(places + row)
    end = tl.where(slot >= 0, HEADS + 2 * KV_HEADS, 0)  # an idle row has no heads
    d = tl.arange(0, DIM)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    entry = _entries(page_table + slot * max_pages, place, slot >= 0, PAGE_SIZE)
    cosine, sine = _rotation(rotations, row, HEAD_DIM, DIM)
    if norm_weight is not None:
        weight = _load_heads(norm_weight, head, is_value == 0, HEAD_DIM, DIM)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    qkv += row * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    x = _load_heads(qkv, head, head < end, HEAD_DIM, DIM)
    for share in tl.static_range(1, SHARES):
        others = share * tl.num_programs(1).to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
        x += _load_heads(qkv + others, head, head < end, HEAD_DIM, DIM)
    turned = x
    if norm_weight is not None:
        turned = _normalised(x, weight, eps, HEAD_DIM)
    turned = _rotated(turned, cosine, sine)
    inside = (d < HEAD_DIM)[None, :]
    query_at = (row * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(queries + query_at, turned.to(queries.dtype.element_ty), mask=is_query[:, None] & inside)
    # Keys of all heads are followed by values of all heads, in a row as in the cache.
    cache_at = ((head - HEADS).to(tl.int64) * num_pages * PAGE_SIZE + entry)[:, None] * HEAD_DIM + d[None, :]
    stored = (head >= HEADS) & (head < end)
    x = tl.where(is_value[:, None], x, turned).to(cache.dtype.element_ty)
    tl.store(cache + cache_at, x, mask=stored[:, None] & inside)


@triton.jit
def attend_chunks(
    out, partials, queries, cache, page_table, tiles, positions, places, ancestors,
    scale, num_pages, max_pages,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr,
    M: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The group of a key head for a tile of rows, M queries or fewer: one split of what they see, read in STAGES.

    Leaves partials, or the attended rows in ``out`` if there are none (SPLITS is 1). Query i of the tile is that of its
    row i // group.
    """
    split, kv_head, tile = tl.program_id(0), tl.program_id(1), tiles + 4 * tl.program_id(2)
    first_row = tl.load(tile).to(tl.int64)
    count = tl.load(tile + 1)
    slot = tl.load(tile + 2)
    group: tl.constexpr = HEADS // KV_HEADS
    member = tl.arange(0, M) // group
    row = first_row + member
    wanted = member < count
    active = member < tl.where(slot >= 0, count, 0)
    position = tl.load(positions + row, mask=active, other=1 << 30).to(tl.int32)
    place = tl.load(places + row, mask=active, other=-1).to(tl.int32)
    end = tl.max(place, 0) + 1
    first = tl.maximum(tl.min(position, 0) + 1 - WINDOW, 0) if WINDOW > 0 else end * 0
    if ancestors is not None:
        origin = tl.load(tile + 3).to(tl.int64)
        origin_place = tl.load(places + origin).to(tl.int32)
        bits = tl.load(ancestors + row, mask=active, other=0)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    d = tl.arange(0, DIM)
    query_head = row * HEADS + kv_head * group + tl.arange(0, M) % group
    query_at = query_head[:, None] * HEAD_DIM + d[None, :]
    inside = (d < HEAD_DIM)[None, :]
    query = tl.load(queries + query_at, mask=active[:, None] & inside, other=0.0).to(cache.dtype.element_ty)
    pages = page_table + slot.to(tl.int64) * max_pages
    keys = cache + kv_head.to(tl.int64) * num_pages * (PAGE_SIZE * HEAD_DIM)
    values = cache + (kv_head + KV_HEADS).to(tl.int64) * num_pages * (PAGE_SIZE * HEAD_DIM)
    peak = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    attended = tl.zeros([M, DIM], tl.float32)
    for start in tl.range(_first_tile(first, split, SPLITS, TILE), end, SPLITS * TILE, num_stages=STAGES):
        there = start + tl.arange(0, TILE)
        exists = there < end
        tile_keys, tile_values = _load_tile(keys, values, pages, there, exists, HEAD_DIM, DIM, PAGE_SIZE)
        visible = there[None, :] <= place[:, None]
        there_position = there
        if ancestors is not None:
            j = there - origin_place  # in the step, if not negative
            path = (bits[:, None] >> tl.minimum(tl.maximum(j, 0), 63).to(tl.int64)[None, :]) & 1
            visible = visible & ((j < 0)[None, :] | (path != 0))
            if WINDOW > 0:
                new = tl.load(positions + origin + j, mask=exists & (j >= 0), other=0).to(tl.int32)
                there_position = tl.where(j < 0, there, new)
        if WINDOW > 0:
            visible = visible & (there_position[None, :] > position[:, None] - WINDOW)
        peak, total, attended = _attend(query, tile_keys, tile_values, visible, peak, total, attended, scale, CAP)
    if partials is None:
        attended = attended / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + query_at, attended.to(out.dtype.element_ty), mask=wanted[:, None] & inside)
    else:
        _leave(partials, query_head * SPLITS + split, wanted, peak, total, attended, HEAD_DIM, DIM)


@triton.jit
def merged(peaks, sums):
    """Of the splits of heads, both [n, splits]: their peak and the sum relative to it, both [n]; 0 and 1 of idle rows.

    A split's share of the attended value is then ``2 ** (its peak - peak) / sum``.
    """
    peak = tl.max(peaks, 1)
    peak = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.sum(tl.exp2(peaks - peak[:, None]) * sums, 1)
    return peak, tl.where(total == 0, 1.0, total)


@triton.jit
def combine(
    out, partials, positions, places,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A head of a row: the sum of its splits."""
    row = tl.program_id(1).to(tl.int64)
    head = row * tl.num_programs(0) + tl.program_id(0)
    split, d = tl.arange(0, SPLITS), tl.arange(0, DIM)
    position, place = tl.load(positions + row).to(tl.int32), tl.load(places + row).to(tl.int32)
    first, tiles = tiles_seen(position, place, TILE, WINDOW)
    seen = (split + SPLITS - first % SPLITS) % SPLITS < tiles
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    index = head * SPLITS + split
    peaks = tl.load(partials.peaks + index, mask=seen, other=-float("inf"))
    sums = tl.load(partials.sums + index, mask=seen, other=0.0)
    peak, total = merged(peaks[None, :], sums[None, :])
    weights = tl.exp2(peaks[None, :] - peak[:, None]) / total[:, None]
    inside = (peaks > -float("inf"))[:, None] & (d < HEAD_DIM)[None, :]
    parts = tl.load(partials.attended + index[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0).to(tl.float32)
    attended = tl.sum(parts * tl.reshape(weights, [SPLITS])[:, None], 0)
    tl.store(out + head * HEAD_DIM + d, attended.to(out.dtype.element_ty), mask=d < HEAD_DIM)
