"""The end of a decode step: its tokens go to their sequences and to the host, and its rows move on.

The ring is in pinned host memory, where the device writes itself: a copy of so few bytes would take longer than the
kernels around it. What a kernel has written there, the host sees once the kernel has ended.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from freewheel.sampling.edit_kernels import add_token, ends_of, is_end


@triton.jit
def deliver(outbox, place, PLACES: tl.constexpr, WORDS: tl.constexpr):
    """Bring the next message of ``outbox``, int64 [PLACES, WORDS] in host memory, to where it goes.

    ``place`` is int64 [1], of the next message, and moves on: so there is one program only. Messages are ::

        address   count   0   numbers [count]                      int64 [count] at the address
        address   count   1   entries [count]   numbers [count]    entries of the int32 numbers at the address
    """
    number = tl.load(place)
    message = outbox + number * WORDS
    address, count, scattered = tl.load(message), tl.load(message + 1), tl.load(message + 2)
    i = tl.arange(0, WORDS)
    first = tl.load(message + 3 + i, mask=i < count, other=0)
    if scattered:
        second = tl.load(message + 3 + count + i, mask=i < count, other=0)
        tl.store(address.to(tl.pointer_type(tl.int32)) + first, second.to(tl.int32), mask=i < count)
    else:
        tl.store(address.to(tl.pointer_type(tl.int64)) + i, first, mask=i < count)
    tl.debug_barrier()  # all threads have read it
    tl.store(place, tl.where(number + 1 < PLACES, number + 1, 0))


class StepInputs(NamedTuple):
    """What a decode step is told of its rows: int64 [rows] each.

    Attributes:
        slots: whose sequence; -1 of idle rows.
        positions: where in its sequence.
        following: the positions that follow, where the tokens go.
        sample_slots: the same slots, but for idle rows one that nobody has.
        places: where in the ring the results go.
    """

    slots: Any
    positions: Any
    following: Any
    sample_slots: Any
    places: Any


@triton.jit
def advance(inputs, tokens, statuses, ring, sequences, spare_slot, PLACES: tl.constexpr, CHAINED: tl.constexpr):
    """Take each row's token, which goes where the row does next. One program has a row; idle ones stay as they are.

    A row whose sequence ends with the token is idle from then on: the host, which may have launched it again already,
    finds out later.

    ring is int64 [PLACES, 2, rows]: tokens and statuses. Each row counts its own place, so that no program depends on
    another.
    """
    row = tl.program_id(0)
    slot = tl.load(inputs.slots + row)
    position = tl.load(inputs.positions + row)
    following = tl.load(inputs.following + row)
    place = tl.load(inputs.places + row)
    ends = ends_of(sequences.settings, slot)
    if CHAINED:  # what was read above, this kernel alone writes, or the host between steps
        gdc_wait()
    if slot >= 0:
        token = tl.load(tokens + row)
        status = tl.load(statuses + row).to(tl.int64)
        rows = tl.num_programs(0)
        result = ring + place * 2 * rows + row
        tl.store(result, token)
        tl.store(result + rows, status)
        tl.store(inputs.positions + row, position + 1)
        tl.store(inputs.following + row, following + 1)
        tl.store(inputs.places + row, tl.where(place + 1 < PLACES, place + 1, 0))
        add_token(sequences, slot, following, token)
        if is_end(ends, token):
            tl.store(inputs.slots + row, -1)
            tl.store(inputs.sample_slots + row, spare_slot)
