"""The sampler on the device: the whole tail from logits to tokens in a few launches, with no host in between.

    touch       [rows]         in drafts: the ids of drafted tokens, which penalties may change
    edit        [parts, rows]  the values of the few ids that a row's bias, penalties and bad words change
    draw        [parts, rows]  rows that ask for more than a plain token
    draw_plain  [tiles, rows]  the other rows
    check       [parts, rows]  the mass before each draw of a nucleus: the first draw inside it
    finish      [rows]         what is left: one of the few candidates above a bound; log probabilities
    untouch     [rows]         in drafts: as it was before

They are in edit_kernels.py, draw_kernels.py, truncation_kernels.py (``check``) and finish_kernels.py. Here is what they
share, and no launch: constants, a row's parameters and random words, weights and keys, how its logits and the
statistics of its blocks are read.

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
from triton.language.extra.cuda import gdc_wait

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
ENDS = tl.constexpr(tables.ENDS)
MOST_ENDS = tl.constexpr(tables.MOST_ENDS)
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
KIND_BITS = tl.constexpr(tables.KIND_BITS)

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
                edited = tl.load(inputs.edited_values + row * inputs.vocab_size + ids, mask=touched, other=0.0)
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
            edited = tl.load(inputs.edited_values + row * inputs.vocab_size + ids, mask=touched, other=0.0)
            values = tl.where(touched, edited, values)
    return values


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
