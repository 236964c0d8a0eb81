"""The sampler on the device: the whole tail from logits to tokens in a few launches, with no host in between.

    edit        [parts, rows]  the values of the few ids that a row's bias, penalties and bad words change
    draw        [parts, rows]  rows that ask for more than a plain token
    draw_plain  [tiles, rows]  the other rows
    check       [parts, rows]  the mass before each draw of a nucleus: the first draw inside it
    finish      [rows]         what is left: one of the few candidates above a bound; log probabilities

``draw`` and ``draw_plain`` read the logits once: each program leaves the maximum and the sum of exponentials of its
blocks, and the last program of a row to arrive draws from them. So no row waits for another, and the two run side by
side: a few demanding rows start first, finish their whole work there, and the plain ones stream past them.

What several programs add up are integers (weights in units of 2**-40 of the largest), which no order changes, and every
float sum is over one block or list in a fixed order: a row's bits never depend on the batch or the clock.

Masks are applied and edited values are put in place as the logits are read, by one function, wherever they are read.

All read ``inputs`` and hand each other what is in ``work``; see fused.py. Constants say what some row of the batch may
need: EDITS (bias, penalties, lists of ids), MASKED (grammar masks). CHAINED kernels start before the one ahead of them
ends, as soon as all its programs have started, and go on at ``gdc_wait`` when it has ended (programmatic dependent
launch). A kernel's end must not come before that of the one ahead of it, or the next would not wait for both: hence
the first program of each waits, if only at its end.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from freewheel.sampling import draw, state, tables

BLOCK = tl.constexpr(draw.BLOCK)
WORDS = tl.constexpr(draw.BLOCK // 32)
ATTEMPTS = tl.constexpr(draw.ATTEMPTS)
LOG2E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(2.0**40)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # but for -inf, which marks what is forbidden

OK, EMPTY, NAN = (tl.constexpr(status) for status in range(3))
CAPACITY = tl.constexpr(1024)
FEW = tl.constexpr(128)

# Composite keys order candidates by value and then by id, larger first: 32 bits of value, 20 bits of inverted id.
ID_BITS = tl.constexpr(20)
KEY_BITS = tl.constexpr(52)
LAST_ID = tl.constexpr(2**20 - 1)
ABOVE = tl.constexpr(2**52)  # all keys

COLUMNS = tl.constexpr(tables.COLUMNS)
SEED = tl.constexpr(tables.SEED)
NEEDS = tl.constexpr(tables.NEEDS)
EDITED_UNTIL = tl.constexpr(tables.EDITED_UNTIL)
TEMPERATURE = tl.constexpr(tables.TEMPERATURE)
SCALE = tl.constexpr(tables.SCALE)
TOP_K = tl.constexpr(tables.TOP_K)
TOP_P = tl.constexpr(tables.TOP_P)
MIN_P = tl.constexpr(tables.MIN_P)
PROMPT_LENGTH = tl.constexpr(tables.PROMPT_LENGTH)
MIN_TOKENS = tl.constexpr(tables.MIN_TOKENS)
REPETITION = tl.constexpr(tables.REPETITION)
FREQUENCY = tl.constexpr(tables.FREQUENCY)
PRESENCE = tl.constexpr(tables.PRESENCE)
EDIT_ROW = tl.constexpr(tables.EDIT_ROW)
EDIT_KINDS = tl.constexpr(tables.EDIT_KINDS)
EDIT_LIST = tl.constexpr(tables.EDIT_LIST)
LISTED_COUNT = tl.constexpr(tables.LISTED_COUNT)
ALTERNATIVES = tl.constexpr(tables.ALTERNATIVES)

ALLOWED = tl.constexpr(tables.ALLOWED)
SEEN = tl.constexpr(tables.SEEN)
TOUCHED = tl.constexpr(tables.TOUCHED)
LISTED = tl.constexpr(tables.LISTED)
RANKS = tl.constexpr(tables.RANKS)
PLANES = tl.constexpr(tables.PLANES)
LIMITED = tl.constexpr(tables.LIMITED)
PENALISED = tl.constexpr(tables.PENALISED)

TRUNCATED = tl.constexpr(state.TRUNCATED)
NUCLEUS = tl.constexpr(state.NUCLEUS)
ASKS_LOGPROBS = tl.constexpr(state.LOGPROBS)
PROCESSED = tl.constexpr(state.PROCESSED)


@triton.jit
def _setting(settings, slot, COLUMN: tl.constexpr):
    """An integer of the slot."""
    return tl.load(settings + slot * COLUMNS + COLUMN)


@triton.jit
def _real(settings, slot, COLUMN: tl.constexpr):
    """A float64 of the slot."""
    return tl.load(settings + slot * COLUMNS + COLUMN).to(tl.float64, bitcast=True)


@triton.jit
def _scale(settings, slot):
    """What turns a difference of logits into a binary logarithm of a ratio of weights, float32; that of 1 if greedy."""
    return _real(settings, slot, SCALE).to(tl.float32)


@triton.jit
def _units(weights):
    """Weights as integers."""
    return (weights * UNIT).to(tl.int64)


@triton.jit
def _share(total, word):
    """The random word's place in an integer total: floor(total * word / 2**32), below the total."""
    return tl.umulhi(total.to(tl.uint64), word.to(tl.uint64) << 32).to(tl.int64)


@triton.jit
def _ordered(values):
    """Integers, int32, in the order of the float32 values; -0 equals +0."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(values, ids):
    """Composite keys, int64, not negative, all different: larger values first, then smaller ids. NaN does not occur."""
    return ((_ordered(values).to(tl.int64) + 2147483648) << ID_BITS) + (LAST_ID - ids)


@triton.jit
def _id(key):
    """The id in a composite key."""
    return (key & LAST_ID) ^ LAST_ID


@triton.jit
def _words(settings, slot, position, lanes):
    """Random words of a row, four for each lane; see sampling.rng."""
    zero = tl.zeros_like(lanes)
    return tl.philox(_setting(settings, slot, SEED), zero + position.to(tl.int32), lanes, zero, zero)


@triton.jit
def _popcount(words):
    words = words.to(tl.uint32, bitcast=True)
    words = words - ((words >> 1) & 0x55555555)
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _bit(words, ids):
    return ((words >> (ids & 31)) & 1) == 1


@triton.jit
def edit(inputs, IDS: tl.constexpr, CHAINED: tl.constexpr):
    """For each id that its slot lists or has seen: the value after bias, held-back ends, bad words and penalties."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    if CHAINED:
        gdc_launch_dependents()
    if position >= _setting(inputs.settings, slot, EDITED_UNTIL):
        return
    edit_row = _setting(inputs.settings, slot, EDIT_ROW)
    plane = inputs.bits + edit_row * (PLANES * inputs.words)
    penalised = (_setting(inputs.settings, slot, EDIT_KINDS) & PENALISED) != 0
    start = _setting(inputs.settings, slot, EDIT_LIST)
    listed = _setting(inputs.settings, slot, LISTED_COUNT)
    seen_tokens = tl.where(penalised, position, 0)
    holds_back = position - _setting(inputs.settings, slot, PROMPT_LENGTH) < _setting(inputs.settings, slot, MIN_TOKENS)
    repetition = _real(inputs.settings, slot, REPETITION).to(tl.float32)
    frequency = _real(inputs.settings, slot, FREQUENCY).to(tl.float32)
    presence = _real(inputs.settings, slot, PRESENCE).to(tl.float32)
    # An id may turn up several times, in the history and in the list: each time it gets the same value.
    for part in range(tl.program_id(0) * IDS, listed + seen_tokens, tl.num_programs(0) * IDS):
        i = part + tl.arange(0, IDS)
        from_list = i < listed
        ids = tl.load(inputs.lists + start + 5 * i, mask=from_list, other=-1).to(tl.int64)
        ids = tl.where(
            from_list,
            ids,
            tl.load(
                inputs.history + slot * inputs.max_length + i - listed,
                mask=(i >= listed) & (i < listed + seen_tokens),
                other=-1,
            ),
        )
        inside = (ids >= 0) & (ids < inputs.drawable)
        values = tl.load(inputs.logits + row * inputs.stride + ids, mask=inside, other=0.0).to(tl.float32)
        if listed > 0:
            marks = tl.load(plane + LISTED * inputs.words + (ids >> 5), mask=inside, other=0)
            marked = inside & _bit(marks, ids.to(tl.int32))
            rank = tl.load(plane + RANKS * inputs.words + (ids >> 5), mask=marked, other=0)
            rank += _popcount(marks & ((1 << (ids.to(tl.int32) & 31)) - 1))
            entry = inputs.lists + start + 5 * rank
            bias = tl.load(entry + 1, mask=marked, other=0).to(tl.float32, bitcast=True)
            banned = marked & (tl.load(entry + 2, mask=marked, other=0) == 1) & holds_back
            first_word = tl.load(entry + 3, mask=marked, other=0)
            words = tl.load(entry + 4, mask=marked, other=0)
            for j in range(tl.max(words, 0)):
                here = marked & (j < words)
                word = inputs.lists + start + first_word + 2 * j
                before = tl.load(word, mask=here, other=0)
                length = tl.load(word + 1, mask=here, other=0)
                matches = here & (length <= position)
                for distance in range(1, tl.max(length, 0) + 1):
                    token = tl.load(inputs.history + slot * inputs.max_length + tl.maximum(position - distance, 0))
                    compared = matches & (distance <= length)
                    wanted = tl.load(inputs.lists + start + before + length - distance, mask=compared, other=0)
                    matches = matches & ((compared == 0) | (wanted == token))
                banned = banned | matches
            values = tl.where(banned, -float("inf"), values + bias)
        if penalised:
            seen = inside & _bit(
                tl.load(plane + SEEN * inputs.words + (ids >> 5), mask=inside, other=0), ids.to(tl.int32)
            )
            times = tl.load(inputs.counts + edit_row * inputs.vocab_size + ids, mask=seen, other=0).to(tl.float32)
            lowered = tl.where(values > 0, values / repetition, values * repetition)
            lowered = lowered - times * frequency - tl.where(times > 0, presence, 0.0)
            values = tl.where(seen, lowered, values)
        tl.store(inputs.edited_values + edit_row * inputs.vocab_size + ids, values, mask=inside)


@triton.jit
def _bits(mask, blocks, wanted, mask_words):
    """The bits of whole ``blocks`` [n], bool [n, BLOCK]. A thread reads one word for its eight ids."""
    eighth = tl.arange(0, BLOCK // 8)
    span = blocks[:, None] * WORDS + (eighth >> 2)[None, :]
    words = tl.load(mask + span, mask=(span < mask_words) & wanted[:, None], other=0)
    shift = ((eighth & 3) * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    return tl.reshape((words[:, :, None] >> shift) & 1, [blocks.shape[0], BLOCK]) != 0


@triton.jit
def _changes(inputs, row, slot, position, EDITS: tl.constexpr, MASKED: tl.constexpr):
    """What changes the row's logits: its row of edits and its mask, -1 for none; whether its slot limits the ids."""
    edit_row = tl.full([], -1, tl.int64)
    mask_row = tl.full([], -1, tl.int64)
    limited = tl.full([], 0, tl.int64)
    if EDITS:
        edited = position < _setting(inputs.settings, slot, EDITED_UNTIL)
        edit_row = tl.where(edited, _setting(inputs.settings, slot, EDIT_ROW), -1)
        limited = _setting(inputs.settings, slot, EDIT_KINDS) & LIMITED
    if MASKED:
        mask_row = tl.load(inputs.mask_rows + row)
    return edit_row, mask_row, limited


@triton.jit
def _load(
    inputs, row, changes, blocks, wanted,
    EDITS: tl.constexpr, MASKED: tl.constexpr, LOOK: tl.constexpr = False, WAIT: tl.constexpr = False,
):  # fmt: skip
    """Values of the row's ``blocks`` [n] that are ``wanted``, float32 [n, BLOCK]; -inf elsewhere.

    LOOK: first see whether the blocks hold any id that is touched, as most don't. WAIT: for the edited values, if so.
    """
    edit_row, mask_row, limited = changes
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (ids < inputs.drawable) & wanted[:, None]
    raw = tl.load(inputs.logits + row * inputs.stride + ids, mask=inside, other=-float("inf")).to(tl.float32)
    values = raw
    if EDITS:
        if edit_row >= 0:
            plane = inputs.bits + edit_row * (PLANES * inputs.words)
            some = 1
            if LOOK:
                spans = blocks[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
                words = tl.load(
                    plane + TOUCHED * inputs.words + spans, mask=(spans < inputs.words) & wanted[:, None], other=0
                )
                some = tl.max(tl.max((words != 0).to(tl.int32), 1), 0)
            if some > 0:
                touched = inside & _bits(plane + TOUCHED * inputs.words, blocks, wanted, inputs.words)
                if WAIT:
                    gdc_wait()
                edited = tl.load(inputs.edited_values + edit_row * inputs.vocab_size + ids, mask=touched, other=0.0)
                values = tl.where(touched, edited, values)
            if limited > 0:
                values = tl.where(
                    _bits(plane + ALLOWED * inputs.words, blocks, wanted, inputs.words), values, -float("inf")
                )
    if MASKED:
        if mask_row >= 0:
            values = tl.where(
                _bits(inputs.masks + mask_row * inputs.words, blocks, wanted, inputs.words), values, -float("inf")
            )
    if EDITS or MASKED:
        # A mask must not hide that the model has failed.
        values = tl.where((raw != raw) | (raw == float("inf")), float("nan"), values)
    return values


@triton.jit
def _load_at(inputs, row, changes, ids, wanted, EDITS: tl.constexpr):
    """Values of single ``ids`` [n] that no mask forbids, float32 [n]; -inf where not ``wanted``."""
    edit_row, _, _ = changes
    values = tl.load(inputs.logits + row * inputs.stride + ids, mask=wanted, other=-float("inf")).to(tl.float32)
    if EDITS:
        if edit_row >= 0:
            words = tl.load(
                inputs.bits + edit_row * (PLANES * inputs.words) + TOUCHED * inputs.words + (ids >> 5),
                mask=wanted,
                other=0,
            )
            touched = wanted & _bit(words, ids)
            edited = tl.load(inputs.edited_values + edit_row * inputs.vocab_size + ids, mask=touched, other=0.0)
            values = tl.where(touched, edited, values)
    return values


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
def _last(tickets, row, programs):
    """Whether this is the last of the row's programs to arrive: then it sees what all of them have stored."""
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets + row, 1, sem="acq_rel")
    last = arrived == programs - 1
    if last:
        tl.store(tickets + row, 0)
    return last


@triton.jit
def _read_blocks(maxima, sums, row, scale, block_count, BLOCKS: tl.constexpr):
    """A row's block maxima, its largest logit (NaN if any is NaN or +inf) and its blocks' weights, int64."""
    block = tl.arange(0, BLOCKS)
    block_maxima = tl.load(maxima + row * block_count + block, mask=block < block_count, other=-float("inf"))
    block_sums = tl.load(sums + row * block_count + block, mask=block < block_count, other=0.0)
    # As integers NaN is the largest: one reduction finds the peak and the sick rows.
    first = tl.max(_ordered(block_maxima), 0)
    peak = (first ^ ((first >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    level = tl.where(peak > -float("inf"), peak, 0.0)
    return block_maxima, peak, _units(block_sums * tl.exp2((block_maxima - level) * scale))


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
def _reached_by(values, more, peak, k):
    """A number that at least k of ``values`` and ``more`` [n] reach, and few others, by bisection.

    ``more`` are no larger than ``values``. LOWEST if too few are finite.
    """
    low = tl.min(tl.where(values > -float("inf"), values, peak), 0)
    high = peak
    for _ in range(11):
        middle = low + (high - low) * 0.5
        enough = tl.sum((values >= middle).to(tl.int32) + (more >= middle).to(tl.int32), 0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    enough = tl.sum((values >= low).to(tl.int32) + (more >= low).to(tl.int32), 0) >= k
    return tl.where(enough, low, LOWEST)


@triton.jit
def _min_p_bound(peak, scale, min_p):
    """A number that every token reaches which min-p keeps."""
    reached = peak + (tl.log2(tl.maximum(min_p.to(tl.float32), 1e-37)) - 0.01) / scale - tl.abs(peak) * 1e-6
    return tl.where(min_p > 1e-37, reached, LOWEST)


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
def _candidates(work, row, i, count):
    """Ids and values of the row's candidates number ``i`` [n]; -inf past ``count``."""
    ids = tl.load(work.candidates + row * CAPACITY + i, mask=i < count, other=0)
    return ids, tl.load(work.candidate_values + row * CAPACITY + i, mask=i < count, other=-float("inf"))


@triton.jit
def _narrow(work, row, count, peak, k):
    """Leave out candidates that are not among the first k, but for a few; how many are left."""
    i = tl.arange(0, CAPACITY)
    ids, values = _candidates(work, row, i, count)
    left = values >= _reached_by(values, tl.full([CAPACITY], -float("inf"), tl.float32), peak, k)
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
    rank = tl.zeros([SIZE], tl.int32)
    before = tl.zeros([SIZE], tl.int64)
    # A few at a time: code that is run but once costs more to fetch than to execute.
    for start in range(0, count, step):
        other_ids, others = _candidates(work, row, start + tl.arange(0, step), count)
        others, other_ids = others[:, None], other_ids[:, None]
        ahead = (others > values[None, :]) | ((others == values[None, :]) & (other_ids < ids[None, :]))
        rank += tl.sum(ahead.to(tl.int32), 0)
        before += tl.sum(tl.where(ahead, _units(tl.exp2((others - peak) * scale)), 0), 0)
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
def _kept_bound(block_maxima, peak, scale, total, top_k, top_p, min_p, drawable, block_count, BLOCKS: tl.constexpr):
    """A number that everything reaches which truncation keeps."""
    bound = tl.full([], LOWEST, tl.float32)
    if top_k == drawable:
        # What lies below can't hold all that top-p leaves out, even if everything did.
        rest = ((1.0 - top_p) * (total / UNIT) / drawable).to(tl.float32)
        nucleus = peak + (tl.log2(rest) - 0.01) / scale - tl.abs(peak) * 1e-6
        bound = tl.maximum(bound, tl.maximum(nucleus, _min_p_bound(peak, scale, min_p)))
    elif top_k <= block_count:
        bound = _reached_by(block_maxima, tl.full([BLOCKS], -float("inf"), tl.float32), peak, top_k)
    return bound


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
                more = tl.full([BLOCKS], -float("inf"), tl.float32)
                if FINISH:
                    block = tl.arange(0, BLOCKS)
                    seconds = work.seconds + row * block_count + block
                    more = tl.load(seconds, mask=block < block_count, other=-float("inf"))
                bound = _reached_by(block_maxima, more, peak, top_k)
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


@triton.jit
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
    larger = tl.zeros([SIZE], tl.int32)
    for start in range(0, count, step):
        other_ids, others = _candidates(work, row, start + tl.arange(0, step), count)
        larger += tl.sum((others[:, None] > values[None, :]).to(tl.int32), 0)
    kept = kept & (rank < wanted)
    _show(out, row, width, rank, ids, _logprob(values, peak, scale, log_total), larger, kept)
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


@triton.jit
def finish(
    inputs, work, out, tokens, width, block_count,
    BLOCKS: tl.constexpr, WIDTH: tl.constexpr, EDITS: tl.constexpr, MASKED: tl.constexpr, LOGPROBS: tl.constexpr,
    CHAINED: tl.constexpr,
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
        place = row * width + tl.arange(0, WIDTH)
        exists = tl.arange(0, WIDTH) < width
        tl.store(out.token_logprobs + row, float("nan"))
        tl.store(out.ranks + row, tl.zeros([], tl.int64))
        tl.store(out.top_ids + place, tl.full([WIDTH], -1, tl.int64), mask=exists)
        tl.store(out.top_logprobs + place, tl.full([WIDTH], -float("inf"), tl.float32), mask=exists)
        tl.store(out.top_ranks + place, tl.zeros([WIDTH], tl.int64), mask=exists)
        tl.debug_barrier()  # before others write the same places
        token = tl.load(tokens + row)
        if ((needs & ASKS_LOGPROBS) != 0) & (token >= 0):
            _describe(inputs, work, out, row, slot, needs, changes, token, width, block_count, BLOCKS, EDITS, MASKED)


@triton.jit
def append(slots, positions, tokens, history, max_length, settings, bits, counts, words, vocab_size):
    """Write each row's token to its sequence's history and counts, unless it has none (-1)."""
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if token >= 0:
        slot = tl.load(slots + row)
        tl.store(history + slot * max_length + tl.load(positions + row), token)
        if (_setting(settings, slot, EDIT_KINDS) & PENALISED) != 0:
            edit_row = _setting(settings, slot, EDIT_ROW)
            plane = bits + edit_row * (PLANES * words) + (token >> 5)
            bit = (tl.full([], 1, tl.int64) << (token & 31)).to(tl.int32)
            tl.atomic_add(counts + edit_row * vocab_size + token, 1, sem="relaxed")
            tl.atomic_or(plane + SEEN * words, bit, sem="relaxed")
            tl.atomic_or(plane + TOUCHED * words, bit, sem="relaxed")


@triton.jit
def softmax_row(out, logits, stride, temperatures, vocab, VARIED: tl.constexpr, SIZE: tl.constexpr):
    """Softmax of one row held in registers."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.arange(0, SIZE)
    values = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    scale = (1.0 / tl.load(temperatures + (row if VARIED else 0)).to(tl.float64) * LOG2E).to(tl.float32)
    weights = tl.exp2((values - tl.max(values, 0)) * scale)
    tl.store(out + row * vocab + ids, weights / tl.sum(weights, 0), mask=ids < vocab)


@triton.jit
def softmax_stats(
    maxima, sums, logits, stride, temperatures, vocab, block_count, VARIED: tl.constexpr, TILE: tl.constexpr
):
    """Per block of a row its maximum and its sum of exponentials relative to it."""
    row = tl.program_id(1).to(tl.int64)
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    scale = (1.0 / tl.load(temperatures + (row if VARIED else 0)).to(tl.float64) * LOG2E).to(tl.float32)
    peaks = tl.max(values, 1)
    level = tl.where(peaks == -float("inf"), 0.0, peaks)
    weights = tl.exp2((values - level[:, None]) * scale)
    tl.store(maxima + row * block_count + blocks, peaks, mask=blocks < block_count)
    tl.store(sums + row * block_count + blocks, tl.sum(weights, 1), mask=blocks < block_count)


@triton.jit
def softmax_write(
    out, maxima, sums, logits, stride, temperatures, vocab, block_count,
    VARIED: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Softmax of a tile of a row, from the statistics of all its blocks."""
    row = tl.program_id(1).to(tl.int64)
    scale = (1.0 / tl.load(temperatures + (row if VARIED else 0)).to(tl.float64) * LOG2E).to(tl.float32)
    every = tl.arange(0, BLOCKS)
    block_maxima = tl.load(maxima + row * block_count + every, mask=every < block_count, other=-float("inf"))
    block_sums = tl.load(sums + row * block_count + every, mask=every < block_count, other=0.0)
    peak = tl.max(block_maxima, 0)
    total = tl.sum(block_sums * tl.exp2((block_maxima - peak) * scale), 0)
    blocks = tl.program_id(0) * TILE + tl.arange(0, TILE)
    ids = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(logits + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    tl.store(out + row * vocab + ids, tl.exp2((values - peak) * scale) / total, mask=ids < vocab)
