"""Products of a few rows with a weight, and what stands around them in a decoder, in one launch each.

    product       [tiles of outputs]          y = rows @ weight.T on CUDA cores, with a norm or the merging of
                                              attention's splits ahead of it, and bias, gated activation, soft cap or an
                                              addition to the residual stream behind it
    wide_product  [tiles of outputs, shares]  the same of more rows on tensor cores, with bias or gated activation; or
                                              shares of it, by columns
    embed         [rows]                      a step begins: rows' embeddings, and the rotations of their positions
    add_norm      [rows]                      additions to the residual stream, of shares too, and norms
    gated         [chunks, rows]              act(gate) * up, where it stands alone

With so few rows, reading the weight is all that costs time. So products have their first weights on their way before
they wait for the kernel ahead of them (CHAINED: programmatic dependent launch, see sampling/kernels.py), and read rows
only after that. What a kernel reads before it waits never changes, weights, norms and biases, or is older than the
launch ahead: positions, and the stream that ``add_norm`` adds to, which was written three launches ago or more.

Sizes: rows [rows, INPUTS], weight [outputs, INPUTS] or, gated, [2 * outputs, INPUTS] with the gates first, all dense.
Sums, norms and activations are float32. Norm weights are float32 and plain: ``x / sqrt(mean(x²) + eps) * weight``.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from freewheel.ops.attention_kernels import merged, tiles_seen

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gate(gate, up, ACTIVATION: tl.constexpr):
    """``act(gate) * up``; the tanh of GELU's approximation is a sigmoid of twice its argument."""
    slope = gate
    if ACTIVATION == "gelu_tanh":
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate * _sigmoid(slope) * up


@triton.jit
def _finish(y, at, inside, values, ups, added, biases, cap, ACTIVATION: tl.constexpr):
    """Store what becomes of sums [..., OUTPUTS] at offsets ``at``: bias, gate, soft cap, addition."""
    if biases is not None:
        values += biases[0]
    if ACTIVATION is not None:
        values = _gate(values, ups if biases is None else ups + biases[1], ACTIVATION)
    if cap is not None:
        values = (2.0 * _sigmoid(2.0 / cap * values) - 1.0) * cap
    if added is not None:
        values += added
    tl.store(y + at, values.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _weights(weight, n, present, start, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr):
    """Columns ``start + [0, COLUMNS)`` of the weight's rows ``n``, [OUTPUTS, COLUMNS]; 0 outside.

    Some may be outside unless INPUTS is a multiple of SHARE, itself one of COLUMNS.
    """
    k = start + tl.arange(0, COLUMNS)
    inside = present[:, None]
    if INPUTS % SHARE != 0:
        inside = inside & (k < INPUTS)[None, :]
    at = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")  # it is not read again in this step


@triton.jit
def _unpacked(tile, CHAINED: tl.constexpr):
    """The tile in float32. Not before what stands ahead of this: a thread stops where it first touches what is late."""
    if CHAINED:
        pack: tl.constexpr = 32 // tile.dtype.primitive_bitwidth
        tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=pack
        )  # fmt: skip
    return tile.to(tl.float32)


@triton.jit
def _vector(x, start, INPUTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Entries ``start + [0, COLUMNS)`` of a vector, [COLUMNS]; 0 outside."""
    k = start + tl.arange(0, COLUMNS)
    if INPUTS % COLUMNS != 0:
        return tl.load(x + k, mask=k < INPUTS, other=0.0)
    else:
        return tl.load(x + k)


@triton.jit
def _splits(attended, peaks, base, first, tiles, i, inside, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """What a row's ``i``-th splits left of its heads, float32 [heads, splits, HEAD_DIM]; and their peaks."""
    at = base + ((first + i) % SPLITS)[None, :]
    here = inside & (i < tl.minimum(tiles, SPLITS))[None, :]
    places = at.to(tl.int64)[:, :, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, None, :]
    return (
        tl.load(attended + places, mask=here[:, :, None], other=0.0).to(tl.float32),
        tl.load(peaks + at, mask=here, other=-float("inf")),
    )


@triton.jit
def _combined(
    attended, peaks, sums, position, row, start,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Entries ``start + [0, COLUMNS)`` of a row's attention, its splits added up, float32 [COLUMNS]; 0 outside.

    The first of them, GROUP, are read while it is found out what to multiply them by.
    """
    group: tl.constexpr = min(SPLITS, GROUP)
    head = start // HEAD_DIM + tl.arange(0, COLUMNS // HEAD_DIM)
    inside = (head < INPUTS // HEAD_DIM)[:, None]
    base = ((row * (INPUTS // HEAD_DIM) + head) * SPLITS)[:, None]
    first, tiles = tiles_seen(position, position, TILE, WINDOW)
    every = tl.arange(0, SPLITS)
    whole = base + ((first + every) % SPLITS)[None, :]
    seen = inside & (every < tiles)[None, :]
    some = tl.arange(0, group)
    near, levels = _splits(attended, peaks, base, first, tiles, some, inside, SPLITS, HEAD_DIM)
    peak, total = merged(
        tl.load(peaks + whole, mask=seen, other=-float("inf")), tl.load(sums + whole, mask=seen, other=0.0)
    )
    combined = tl.sum(near * tl.exp2(levels - peak[:, None])[:, :, None], 1)
    if group < SPLITS:
        for begin in range(group, tl.minimum(tiles, SPLITS), group):  # short contexts fill few splits
            near, levels = _splits(attended, peaks, base, first, tiles, begin + some, inside, SPLITS, HEAD_DIM)
            combined += tl.sum(near * tl.exp2(levels - peak[:, None])[:, :, None], 1)
    return tl.reshape(combined / total[:, None], [COLUMNS])


@triton.jit
def _rows(
    x, peaks, sums, places, start,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Columns ``start + [0, COLUMNS)`` of each row, a tuple of [COLUMNS]: of x itself, or of attention."""
    rows = ()
    for row in tl.static_range(ROWS):
        if peaks is not None:
            rows += (
                _combined(
                    x, peaks, sums, places[row], row, start, INPUTS, COLUMNS, SPLITS, HEAD_DIM, TILE, WINDOW,
                    8 if ROWS == 1 else 4,
                ),
            )  # fmt: skip
        else:
            rows += (_vector(x + row * INPUTS, start, INPUTS, COLUMNS),)
    return rows


@triton.jit
def _sums(parts, axis: tl.constexpr):
    """The sums of tensors of one shape along an axis: all at once, for warps to wait for each other but once."""
    count: tl.constexpr = len(parts)
    levels: tl.constexpr = triton.next_power_of_2(count).bit_length() - 1
    for _ in tl.static_range(2**levels - count):
        parts += (parts[0],)
    for _ in tl.static_range(levels):
        joined = ()
        for i in tl.static_range(len(parts) // 2):
            joined += (tl.join(parts[2 * i], parts[2 * i + 1]),)
        parts = joined
    sums = (tl.sum(parts[0], axis),)
    for _ in tl.static_range(levels):
        parted = ()
        for i in tl.static_range(len(sums)):
            parted += tl.split(sums[i])
        sums = parted
    return sums


@triton.jit
def _wait(EARLY: tl.constexpr):
    """Wait for the kernel ahead, and let the next one start: then, or EARLY, before the one ahead has ended."""
    if EARLY:
        gdc_launch_dependents()
    gdc_wait()
    if not EARLY:
        gdc_launch_dependents()


@triton.jit
def _products(
    y, x, peaks, sums, positions, weight, norm, n, present, outputs, eps,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, HALVES: tl.constexpr,
    ADD: tl.constexpr, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The products of ROWS rows on CUDA cores: a tuple of float32 [OUTPUTS], for each row its HALVES; and with ADD what
    y [OUTPUTS] holds of each row, read early.

    A thread adds up the products of its own columns: VECTOR at a time, chunk by chunk; then threads, then warps add up.
    Weights are read AHEAD chunks in advance, rows one chunk.
    """
    chunks: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    vector: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    tiles = ()
    scales = ()
    for chunk in tl.static_range(min(AHEAD, chunks)):
        for half in tl.static_range(HALVES):
            tiles += (_weights(weight, n + half * outputs, present, chunk * COLUMNS, INPUTS, COLUMNS, COLUMNS),)
        if norm is not None:
            scales += (_vector(norm, chunk * COLUMNS, INPUTS, COLUMNS),)
    places = ()
    if positions is not None:
        for row in tl.static_range(ROWS):
            places += (tl.load(positions + row).to(tl.int32),)
    if CHAINED:
        _wait(EARLY)
    rows = _rows(x, peaks, sums, places, 0, ROWS, INPUTS, COLUMNS, SPLITS, HEAD_DIM, TILE, WINDOW)
    added = ()
    if ADD:
        for row in tl.static_range(ROWS):
            added += (tl.load(y + row * outputs + n, mask=present, other=0.0),)
    products = ()
    squares = ()
    for _ in tl.static_range(ROWS):
        squares += (tl.zeros([COLUMNS // vector], tl.float32),)
        for _ in tl.static_range(HALVES):
            products += (tl.zeros([n.shape[0], COLUMNS // vector], tl.float32),)
    for chunk in tl.static_range(chunks):
        if chunk + AHEAD < chunks:
            for half in tl.static_range(HALVES):
                tiles += (
                    _weights(
                        weight, n + half * outputs, present, (chunk + AHEAD) * COLUMNS, INPUTS, COLUMNS, COLUMNS
                    ),
                )  # fmt: skip
            if norm is not None:
                scales += (_vector(norm, (chunk + AHEAD) * COLUMNS, INPUTS, COLUMNS),)
        if chunk + 1 < chunks:
            rows += _rows(
                x, peaks, sums, places, (chunk + 1) * COLUMNS, ROWS, INPUTS, COLUMNS, SPLITS, HEAD_DIM, TILE, WINDOW
            )  # fmt: skip
        loaded = ()
        for half in tl.static_range(HALVES):
            loaded += (_unpacked(tiles[chunk * HALVES + half], CHAINED),)
        longer = ()
        wider = ()
        for row in tl.static_range(ROWS):
            h = rows[chunk * ROWS + row].to(tl.float32)
            if norm is not None:
                wider += (squares[row] + tl.sum(tl.reshape(h * h, [COLUMNS // vector, vector]), 1),)
                h *= scales[chunk]
            for half in tl.static_range(HALVES):
                product = loaded[half] * h[None, :]
                product = tl.reshape(product, [n.shape[0], COLUMNS // vector, vector])
                longer += (products[row * HALVES + half] + tl.sum(product, 2),)
        products = longer
        if norm is not None:
            squares = wider
    products = _sums(products, 1)
    if norm is None:
        return products, added
    else:
        squares = _sums(squares, 0)
        results = ()
        for row in tl.static_range(ROWS):
            for half in tl.static_range(HALVES):
                results += (products[row * HALVES + half] * tl.rsqrt(squares[row] / INPUTS + eps),)
        return results, added


@triton.jit
def _four(pointers, CHAINED: tl.constexpr):
    """The four words at each address, a multiple of 16, of which others are left unread until they are asked for."""
    if CHAINED:  # by one instruction, and where the address is: four loads, or one to be divided, take several more
        return tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [pointers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2), tl.load(pointers + 3)


@triton.jit
def _eight(x, k, CHAINED: tl.constexpr):
    """Entries k to k + 7 of a float32 vector."""
    pointers = x.to(tl.pointer_type(tl.int32), bitcast=True) + k
    words = _four(pointers, CHAINED) + _four(pointers + 4, CHAINED)
    entries = ()
    for i in tl.static_range(8):
        entries += (words[i].to(tl.float32, bitcast=True),)
    return entries


@triton.jit
def _word_products(
    x, weight, norm, n, outputs, eps,
    INPUTS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``_products`` of one float32 row and a bfloat16 weight, read in words of two numbers, all of it in advance.

    A shift or a mask makes a number of half a word, and a thread reads those eight of the row that it needs: what a
    program has yet to do once the row is there takes a fifth fewer instructions.
    """
    chunks: tl.constexpr = (INPUTS + COLUMNS - 1) // COLUMNS
    k = tl.arange(0, COLUMNS // 8) * 8
    line = tl.minimum(n, outputs - 1).to(tl.int64)[:, None] * (INPUTS // 2)
    pointers = weight.to(tl.pointer_type(tl.int32), bitcast=True) + line
    words = ()
    for chunk in tl.static_range(chunks):
        at = chunk * COLUMNS + k
        words += (_four(pointers + tl.where(at < INPUTS, at, 0)[None, :] // 2, CHAINED),)
    scales = ()
    if norm is not None:
        scales = _eight(norm, tl.where(k < INPUTS, k, 0), CHAINED)
    if CHAINED:
        _wait(EARLY)
    products = tl.zeros([n.shape[0], COLUMNS // 8], tl.float32)
    squares = tl.zeros([COLUMNS // 8], tl.float32)
    for chunk in tl.static_range(chunks):
        at = chunk * COLUMNS + k
        inside = at < INPUTS
        at = tl.where(inside, at, 0)
        entries = _eight(x, at, CHAINED)
        if norm is not None and chunk > 0:
            scales = _eight(norm, at, CHAINED)
        for i in tl.static_range(8):
            entry = entries[i]
            if INPUTS % COLUMNS != 0:
                entry = tl.where(inside, entry, 0.0)
            if norm is not None:
                squares += entry * entry
                entry *= scales[i]
            word = words[chunk][i // 2]
            bits = word << 16 if i % 2 == 0 else word & -65536  # of two numbers the first is the lower one
            products += bits.to(tl.float32, bitcast=True) * entry[None, :]
    results = tl.sum(products, 1)
    if norm is not None:
        results *= tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
    return results


@triton.jit
def product(
    y, x, weight, norm, bias, peaks, sums, positions, outputs, eps, cap,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr,
    ACTIVATION: tl.constexpr, ADD: tl.constexpr, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, EARLY: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """y [ROWS, outputs] = what the optional parts make of x [ROWS, INPUTS] and the weight.

    Each program computes OUTPUTS outputs of all rows, COLUMNS columns of the weight at a time, AHEAD of these chunks
    read in advance; or all, in words, if AHEAD is 0: see ``_word_products``. A row's bits depend on these numbers, not
    on other rows.

    Parts, None if absent: norm [INPUTS]; peaks, sums and positions, and then x is what attention's SPLITS of TILE
    places left with WINDOW (see attention_kernels.py); bias, float32; cap; ACTIVATION "silu" or "gelu_tanh"; ADD to y.
    """
    halves: tl.constexpr = 1 if ACTIVATION is None else 2
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    present = n < outputs
    biases = None
    if bias is not None:
        biases = ()
        for half in tl.static_range(halves):
            biases += (tl.load(bias + half * outputs + n, mask=present, other=0.0),)
    if AHEAD == 0:
        added = ()
        results = (_word_products(x, weight, norm, n, outputs, eps, INPUTS, COLUMNS, EARLY, CHAINED),)
    else:
        results, added = _products(
            y, x, peaks, sums, positions, weight, norm, n, present, outputs, eps,
            ROWS, INPUTS, COLUMNS, AHEAD, halves, ADD, SPLITS, HEAD_DIM, TILE, WINDOW, EARLY, CHAINED,
        )  # fmt: skip
    for row in tl.static_range(ROWS):
        values, ups = results[row * halves], results[row * halves + halves - 1]
        _finish(y, row * outputs + n, present, values, ups, added[row] if ADD else None, biases, cap, ACTIVATION)


@triton.jit
def _dot(tile, x, total):
    """``total`` + tile @ x.T, added in float32."""
    if INTERPRETED:  # it would multiply the bits of bfloat16
        x, tile = x.to(tl.float32), tile.to(tl.float32)
    return tl.dot(tile, tl.trans(x), total, input_precision="tf32x3")


@triton.jit
def _tile(
    x, rows, start, ROWS: tl.constexpr, INPUTS: tl.constexpr, COLUMNS: tl.constexpr, SHARE: tl.constexpr
):  # fmt: skip
    """Columns ``start + [0, COLUMNS)`` of the rows, [ROWS, COLUMNS]; 0 outside, as for ``_weights``."""
    row, k = tl.arange(0, ROWS), start + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None]
    if INPUTS % SHARE != 0:
        inside = inside & (k < INPUTS)[None, :]
    return tl.load(x + row[:, None] * INPUTS + k[None, :], mask=inside, other=0.0)


@triton.jit
def wide_product(
    y, x, weight, bias, rows, outputs,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, LINES: tl.constexpr, SHARE: tl.constexpr, COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """y [rows, outputs] = x [rows, INPUTS] @ weight.T for rows of the weight's type; plus bias; gated.

    Each program takes ROWS of the rows, and LINES rows of the weight, COLUMNS columns at a time, AHEAD of these chunks
    read in advance. The weight is the left factor: 64 of its lines fill a tensor core's instruction, however few rows
    there are. Where gated, the first half of the lines are gates, the others their ups. With SHARE below INPUTS each
    program computes what so many columns add: y is [shares, rows, outputs], and the launch that follows adds them up.
    """
    each: tl.constexpr = LINES if ACTIVATION is None else LINES // 2
    line = tl.arange(0, LINES)
    output = tl.program_id(0) * each + line % each
    present = output < outputs
    n = output + line // each * outputs
    share = tl.program_id(1)
    begin = share * SHARE
    above = tl.program_id(2) * ROWS
    x += above.to(tl.int64) * INPUTS
    first: tl.constexpr = min(AHEAD * COLUMNS, SHARE)
    tiles = ()
    for start in tl.static_range(0, first, COLUMNS):
        tiles += (_weights(weight, n, present, begin + start, INPUTS, COLUMNS, SHARE),)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    parts = ()
    for start in tl.static_range(0, first, COLUMNS):
        parts += (_tile(x, rows - above, begin + start, ROWS, INPUTS, COLUMNS, SHARE),)
    sums = tl.zeros([LINES, ROWS], tl.float32)
    for chunk in tl.static_range(first // COLUMNS):
        sums = _dot(tiles[chunk], parts[chunk], sums)
    for start in tl.range(begin + first, begin + SHARE, COLUMNS, num_stages=STAGES):
        part = _tile(x, rows - above, start, ROWS, INPUTS, COLUMNS, SHARE)
        sums = _dot(_weights(weight, n, present, start, INPUTS, COLUMNS, SHARE), part, sums)
    if bias is not None:
        sums += tl.load(bias + n, mask=output < tl.where(share == 0, outputs, 0), other=0.0)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(sums, [2, each, ROWS]), [1, 2, 0]))
        sums = _gate(gate, up, ACTIVATION)
    output, row = tl.program_id(0) * each + tl.arange(0, each), above + tl.arange(0, ROWS)
    at = (share * rows + row).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), mask=(row < rows)[None, :] & (output < outputs)[:, None])


@triton.jit
def embed(
    stream, table, history, slots, positions, places, frequencies, factors, rotations, max_length, hidden, scale,
    ROPES: tl.constexpr, PAIRS: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """stream [rows, hidden] = scale * table[token], the token at a row's slot and place; 0 where the slot is < 0.

    rotations [ROPES, rows, PAIRS, 2] = cosines and sines of the position times frequencies [ROPES, PAIRS], times
    factors [ROPES]. PADDED is PAIRS, to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, COLUMNS)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.load(slots + row)
    position = tl.load(positions + row)
    place = tl.load(places + row)
    token = tl.load(history + tl.where(slot >= 0, slot * max_length + place, 0))
    entries = tl.load(table + token * hidden + k, mask=k < tl.where(slot >= 0, hidden, 0), other=0.0)
    tl.store(stream + row * hidden + k, entries.to(tl.float32) * scale, mask=k < hidden)
    pair = tl.arange(0, PADDED)
    inside = pair < PAIRS
    for rope in tl.static_range(ROPES):
        angles = position.to(tl.float32) * tl.load(frequencies + rope * PAIRS + pair, mask=inside, other=0.0)
        factor = tl.load(factors + rope)
        at = rotations + ((tl.num_programs(0) * rope + row) * PAIRS + pair) * 2
        tl.store(at, tl.cos(angles) * factor, mask=inside)
        tl.store(at + 1, tl.sin(angles) * factor, mask=inside)


@triton.jit
def _normalised(x, norm, size, eps):
    return x * tl.rsqrt(tl.sum(x * x, 0) / size + eps) * norm


@triton.jit
def add_norm(
    stream, out, delta, delta_norm, norm, size, eps,
    SHARES: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Add rows to the stream and normalise what comes of it: each where its arguments are not None.

    stream [rows, size] += the sum of delta [SHARES, rows, size], normalised with delta_norm if that is there; out
    [rows, size] = the stream, normalised with norm. One program has a whole row.
    """
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, COLUMNS)
    k = tl.arange(0, COLUMNS)
    inside = k < size
    before = None if delta_norm is None else tl.load(delta_norm + k, mask=inside, other=0.0)
    after = None if norm is None else tl.load(norm + k, mask=inside, other=0.0)
    if delta is not None:  # the stream is as three launches ago or more
        values = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if delta is None:
        values = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    else:
        added = tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        for share in tl.static_range(1, SHARES):
            further = tl.num_programs(0).to(tl.int64) * size * share
            added += tl.load(delta + further + at, mask=inside, other=0.0).to(tl.float32)
        if before is not None:
            added = _normalised(added, before, size, eps)
        values += added
        tl.store(stream + at, values, mask=inside)
    if after is not None:
        tl.store(out + at, _normalised(values, after, size, eps).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gated(out, gate_up, size, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr, CHAINED: tl.constexpr):
    """out [rows, size] = act(gate) * up, from rows [rows, 2 * size] of gates and ups."""
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = k < size
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    gate = tl.load(gate_up + row * 2 * size + k, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + k, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + k, _gate(gate, up, ACTIVATION).to(out.dtype.element_ty), mask=inside)
