"""What bias, held-back ends, bad words and penalties change: before the draw, and once its token is known.

touch       [rows]         in drafts: the ids of drafted tokens, which penalties may change
edit        [parts, rows]  the values of the few ids that they change; ``_load`` puts them in place
untouch     [rows]         in drafts: as it was before
append      [rows]         the token: to the history, and to the counts and bits that penalties go by

A row of a draft has tokens before it that are not in the history: its path in the tree. Of penalties each row of a
sequence changes other ids, and which ones are touched is known of the sequence alone: so those that are drafted at any
row are touched at all of them.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from freewheel.sampling.kernels import (
    COLUMNS,
    EDIT_KINDS,
    EDIT_LIST,
    EDIT_ROW,
    EDITED_UNTIL,
    ENDS,
    FREQUENCY,
    KIND_BITS,
    LISTED,
    LISTED_COUNT,
    MIN_TOKENS,
    MOST_ENDS,
    PENALISED,
    PLANES,
    PRESENCE,
    PROMPT_LENGTH,
    RANKS,
    REPETITION,
    SEEN,
    TOUCHED,
    _bit,
    _popcount,
    _real,
    _setting,
)


@triton.jit
def _drafted(inputs, row, DEPTH: tl.constexpr):
    """The token drafted at a row, and where its word is in the planes of its slot if it has penalties; else -1s."""
    slot = tl.load(inputs.slots + row)
    kinds = _setting(inputs.settings, slot, EDIT_KINDS)
    edited = tl.load(inputs.positions + row) < _setting(inputs.settings, slot, EDITED_UNTIL)
    token = tl.load(inputs.paths + row * DEPTH + DEPTH - 1)
    token = tl.where(edited & ((kinds & PENALISED) != 0), token, -1)
    return token, _setting(inputs.settings, slot, EDIT_ROW) * (PLANES * inputs.words) + (token >> 5)


@triton.jit
def touch(inputs, DEPTH: tl.constexpr):
    """Mark what is drafted at each row."""
    token, word = _drafted(inputs, tl.program_id(0).to(tl.int64), DEPTH)
    if token >= 0:
        bit = (tl.full([], 1, tl.int64) << (token & 31)).to(tl.int32)
        tl.atomic_or(inputs.bits + word + TOUCHED * inputs.words, bit, sem="relaxed")


@triton.jit
def untouch(inputs, DEPTH: tl.constexpr):
    """Leave marked what is seen or listed."""
    token, word = _drafted(inputs, tl.program_id(0).to(tl.int64), DEPTH)
    if token >= 0:
        plane = inputs.bits + word
        lasting = tl.load(plane + SEEN * inputs.words) | tl.load(plane + LISTED * inputs.words)
        tl.store(plane + TOUCHED * inputs.words, lasting)


@triton.jit
def edit(
    inputs, rows, IDS: tl.constexpr, DEPTH: tl.constexpr, PATH: tl.constexpr, EACH: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """For each id that its slot lists or has seen: the value after bias, held-back ends, bad words and penalties.

    Paths of drafts are DEPTH long, PATH is a power of two from there; rows of a sequence are neighbours, EACH at most.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    if CHAINED:
        gdc_launch_dependents()
    if position >= _setting(inputs.settings, slot, EDITED_UNTIL):
        return
    edit_row = _setting(inputs.settings, slot, EDIT_ROW)
    plane = inputs.bits + edit_row * (PLANES * inputs.words)
    kinds = _setting(inputs.settings, slot, EDIT_KINDS)
    penalised = (kinds & PENALISED) != 0
    start = _setting(inputs.settings, slot, EDIT_LIST)
    listed = _setting(inputs.settings, slot, LISTED_COUNT)
    known, drafted = position, 0  # tokens in the history, and those that may be drafted at any row of the sequence
    if DEPTH > 0:
        column = tl.arange(0, PATH)
        path = tl.load(inputs.paths + row * DEPTH + column, mask=column < DEPTH, other=-1)
        known -= tl.sum((path >= 0).to(tl.int64), 0)
        drafted = tl.where(penalised, 2 * EACH, 0)
    seen_tokens = tl.where(penalised, known, 0)
    holds_back = position - _setting(inputs.settings, slot, PROMPT_LENGTH) < _setting(inputs.settings, slot, MIN_TOKENS)
    repetition = _real(inputs.settings, slot, REPETITION).to(tl.float32)
    frequency = _real(inputs.settings, slot, FREQUENCY).to(tl.float32)
    presence = _real(inputs.settings, slot, PRESENCE).to(tl.float32)
    # An id may turn up several times, in the history and in the list: each time it gets the same value.
    for part in range(tl.program_id(0) * IDS, listed + seen_tokens + drafted, tl.num_programs(0) * IDS):
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
        if DEPTH > 0:
            other = row - EACH + i - listed - seen_tokens
            there = (i >= listed + seen_tokens) & (i < listed + seen_tokens + drafted) & (other >= 0) & (other < rows)
            there = there & (tl.load(inputs.slots + other, mask=there, other=-1) == slot)
            ids = tl.where(there, tl.load(inputs.paths + other * DEPTH + DEPTH - 1, mask=there, other=-1), ids)
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
                    if DEPTH > 0:
                        if position - distance >= known:
                            token = tl.load(inputs.paths + row * DEPTH + DEPTH - distance)
                    compared = matches & (distance <= length)
                    wanted = tl.load(inputs.lists + start + before + length - distance, mask=compared, other=0)
                    matches = matches & ((compared == 0) | (wanted == token))
                banned = banned | matches
            values = tl.where(banned, -float("inf"), values + bias)
        if penalised:
            seen = inside & _bit(
                tl.load(plane + SEEN * inputs.words + (ids >> 5), mask=inside, other=0), ids.to(tl.int32)
            )
            counts = inputs.counts + (kinds >> KIND_BITS) * inputs.vocab_size
            times = tl.load(counts + ids, mask=seen, other=0)
            if DEPTH > 0:
                times += tl.sum((ids[:, None] == path[None, :]).to(tl.int32), 1)
                seen = seen | (inside & (times > 0))
            times = times.to(tl.float32)
            lowered = tl.where(values > 0, values / repetition, values * repetition)
            lowered = lowered - times * frequency - tl.where(times > 0, presence, 0.0)
            values = tl.where(seen, lowered, values)
        tl.store(inputs.edited_values + row * inputs.vocab_size + ids, values, mask=inside)


@triton.jit
def append(slots, positions, tokens, sequences):
    """Add each row's token to its sequence."""
    row = tl.program_id(0)
    add_token(sequences, tl.load(slots + row), tl.load(positions + row), tl.load(tokens + row))


@triton.jit
def add_token(sequences, slot, position, token):
    """Write a token to the history and counts of the sequence in a slot.

    Neither where there is none (-1), nor where it lies past the longest sequence: that one ends there in any case.
    """
    if (token >= 0) & (position < sequences.max_length):
        tl.store(sequences.history + slot * sequences.max_length + position, token)
        kinds = _setting(sequences.settings, slot, EDIT_KINDS)
        if (kinds & PENALISED) != 0:
            edit_row = _setting(sequences.settings, slot, EDIT_ROW)
            plane = sequences.bits + edit_row * (PLANES * sequences.words) + (token >> 5)
            bit = (tl.full([], 1, tl.int64) << (token & 31)).to(tl.int32)
            counts = sequences.counts + (kinds >> KIND_BITS) * sequences.vocab_size
            tl.atomic_add(counts + token, 1, sem="relaxed")
            tl.atomic_or(plane + SEEN * sequences.words, bit, sem="relaxed")
            tl.atomic_or(plane + TOUCHED * sequences.words, bit, sem="relaxed")


@triton.jit
def ends_of(settings, slot):
    """What ends the sequence in a slot, int64 [MOST_ENDS], for :func:`is_end`; anything if the slot is none (-1)."""
    return tl.load(settings + tl.maximum(slot, 0) * COLUMNS + ENDS + tl.arange(0, MOST_ENDS))


@triton.jit
def is_end(ends, token):
    """Whether a sequence ends with this token. So it does where there is none (-1)."""
    return (token < 0) | (tl.max((ends == token + 1).to(tl.int32), 0) > 0)
