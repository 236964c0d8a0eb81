"""A step whose rows are drafted on the device: the host knows neither how long sequences are nor what was drafted.

judge    [sequences]          where nobody drafts: how good a draft would have been
lay_out  [sequences]          the rows of the step
settle   [sequences]          the accepted path goes to its sequence and to the host
compact  [sequences, planes]  keys and values of accepted rows, to where they belong

A sequence of length n has its last known token at n - 1, which is its first row. The tokens of its tree stand behind
it in the history, and their keys and values behind its own in the cache, node by node, until they are overwritten:

    place     n - 2      n - 1    n        n + 1    n + 2 ...
    token     known      last     node 0   node 1   node 2
    position  n - 2      n - 1    n - 1 + the depth of each node
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from freewheel.sampling.edit_kernels import add_token, ends_of, is_end
from freewheel.speculative.draft_kernels import child_of


class DraftInputs(NamedTuple):
    """What a step is told of its sequences: int64 [sequences] each.

    Attributes:
        slots: of each; -1 of idle ones: those whose sequence has ended since, and the last ones.
        lengths: that they have from now on; -1 where the device knows.
        most_nodes: that may be drafted.
        places: where in the ring the results go.
    """

    slots: Any
    lengths: Any
    most_nodes: Any
    places: Any


class DraftRows(NamedTuple):
    """The rows of a step: tensors.

    Attributes:
        slots: int64 [rows], whose sequence; -1 of idle rows, which come last.
        positions, places, ancestors: int64 [rows], see ``fused_decoder.Rows``.
        following: int64 [rows], the positions of what is sampled.
        sample_slots: int64 [rows], the same slots, but for idle rows one that nobody has.
        tiles: int32 [tiles, 4], see ``attention_gpu.plan_tiles``; those that are not needed, which come last, have no
            rows.
        starts: int32 [sequences], the first row of each.
        paths: int64 [rows, DEPTH], see ``SampleRows``; of idle rows anything.
    """

    slots: Any
    positions: Any
    places: Any
    ancestors: Any
    following: Any
    sample_slots: Any
    tiles: Any
    starts: Any
    paths: Any


class Guesses(NamedTuple):
    """What was thought to follow the tokens of sequences: tensors.

    Attributes:
        tokens: int64 [slots, most].
        counts: int32 [slots], of tokens; 0 if nothing was found.
        lengths: int64 [slots], of the sequence then; 0 if there is no guess.
    """

    tokens: Any
    counts: Any
    lengths: Any


@triton.jit
def judge(
    inputs, lengths, history, max_length, found, guesses, ring, PLACES: tl.constexpr, GUESSED: tl.constexpr
):  # fmt: skip
    """Say how much of each sequence's guess was right; the chain in ``found`` is the next one, if any was asked for.

    Comes before ``settle``, which leaves these words of the ``ring`` alone where nobody drafts: how deep the guess was,
    as far as can be told, and how much of it was right. Both are 0 if there is nothing to tell. GUESSED, a power of
    two, is how long guesses are.
    """
    own, count = tl.program_id(0), tl.num_programs(0)
    slot = tl.load(inputs.slots + own)
    if slot >= 0:
        length, at = tl.load(lengths + slot), tl.load(guesses.lengths + slot)
        guessed = tl.load(guesses.counts + slot)
        i = tl.arange(0, GUESSED)
        token = tl.load(guesses.tokens + slot * GUESSED + i)
        came = tl.load(history + slot * max_length + at + i, mask=(i < guessed) & (at + i < length), other=-1)
        right = tl.min(tl.where((i < guessed) & (token == came), GUESSED, i), 0)
        wrong = (right < guessed) & (at + right < length)
        # Where nothing was found the first token is wrong.
        depth = tl.where(wrong, guessed, tl.where(guessed > 0, right, 1))
        told = (at > 0) & (length > at)
        place = tl.load(inputs.places + own)
        result = ring + (place * count + own) * (3 + 3 * 2)
        tl.store(result, tl.where(told, depth, 0).to(tl.int64))
        tl.store(result + 1, tl.where(told, right, 0).to(tl.int64))
        asked = tl.load(inputs.most_nodes + own) > 0
        if told | asked:
            tl.store(guesses.lengths + slot, tl.where(asked, length, 0))
            tl.store(guesses.counts + slot, tl.load(found.counts + own))
            tl.store(guesses.tokens + slot * GUESSED + i, tl.load(found.tokens + own * GUESSED + i))


@triton.jit
def lay_out(
    inputs, lengths, trees, rows, history, max_length, spare_slot, total, total_tiles,
    SEQUENCES: tl.constexpr, NODES: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Give each sequence its rows, the root and the nodes of its tree: no more than the ``total`` of rows.

    They are in tiles of TILE_ROWS, of which each sequence has one at least, in all no more than ``total_tiles``.
    ``lengths`` is int64 [slots]. SEQUENCES, PADDED, ROWS, TILES and COLUMNS are powers of two from the sequences,
    NODES + 1, total, total_tiles and DEPTH, the longest path.
    """
    own, sequences = tl.program_id(0), tl.num_programs(0)
    number = tl.arange(0, SEQUENCES)
    active = tl.load(inputs.slots + number, mask=number < sequences, other=-1) >= 0
    count = tl.load(trees.counts + number, mask=active, other=0)
    start = tl.sum(tl.where((number < own) & active, 1 + count, 0), 0)
    nodes = tl.sum(tl.where(number == own, count, 0), 0)
    slot = tl.load(inputs.slots + own)
    tl.store(rows.starts + own, start)
    more_tiles = count // TILE_ROWS  # than one
    own_tile = own + tl.sum(tl.where(number < own, more_tiles, 0), 0)
    for tile_number in tl.static_range(1 + NODES // TILE_ROWS):
        first = tile_number * TILE_ROWS
        tile, inside = rows.tiles + (own_tile + tile_number) * 4, tl.minimum(nodes + 1 - first, TILE_ROWS)
        needed = inside > 0
        tl.store(tile, start + first, mask=needed)
        tl.store(tile + 1, tl.where(slot >= 0, inside, 0), mask=needed)
        tl.store(tile + 2, slot.to(tl.int32), mask=needed)
        tl.store(tile + 3, start, mask=needed)
    if slot >= 0:
        last = tl.load(lengths + slot) - 1
        row = tl.arange(0, PADDED)
        here, drafted = row <= nodes, (row > 0) & (row <= nodes)
        node = own * NODES + row - 1
        depth = tl.load(trees.depths + node, mask=drafted, other=0)
        tokens = tl.load(trees.tokens + node, mask=drafted, other=0)
        tl.store(history + slot * max_length + last + row, tokens, mask=drafted)
        at = start + row
        tl.store(rows.slots + at, slot + row * 0, mask=here)
        tl.store(rows.sample_slots + at, slot + row * 0, mask=here)
        tl.store(rows.positions + at, last + depth, mask=here)
        tl.store(rows.following + at, last + depth + 1, mask=here)
        tl.store(rows.places + at, last + row, mask=here)
        ancestors = tl.load(trees.ancestors + node, mask=drafted, other=1)
        tl.store(rows.ancestors + at, ancestors, mask=here)
        column = tl.arange(0, COLUMNS)
        paths = rows.paths + at * DEPTH
        room = here[:, None] & (column < DEPTH)[None, :]
        tl.store(paths[:, None] + column[None, :], tl.full([PADDED, COLUMNS], -1, tl.int64), mask=room)
        tl.debug_barrier()  # another thread may have written there
        above = tl.arange(0, PADDED)  # a row on the way from the root
        known = own * NODES + above - 1
        theirs = (above > 0) & (above <= nodes)
        token = tl.load(trees.tokens + known, mask=theirs, other=0)
        place = DEPTH - 1 - depth[:, None] + tl.load(trees.depths + known, mask=theirs, other=0)[None, :]
        leads = here[:, None] & theirs[None, :] & (((ancestors[:, None] >> above[None, :]) & 1) == 1)
        tl.store(paths[:, None] + place, token[None, :] + row[:, None] * 0, mask=leads)
    if own == sequences - 1:
        any_tile = tl.arange(0, TILES)
        spare = (any_tile >= sequences + tl.sum(more_tiles, 0)) & (any_tile < total_tiles)
        for word in tl.static_range(4):
            tl.store(rows.tiles + any_tile * 4 + word, tl.zeros([TILES], tl.int32), mask=spare)
        row = tl.arange(0, ROWS)
        used = tl.sum(active.to(tl.int32) + count, 0)
        idle = (row >= used) & (row < total)
        tl.store(rows.slots + row, tl.full([ROWS], -1, tl.int64), mask=idle)
        tl.store(rows.sample_slots + row, spare_slot + row * 0, mask=idle)
        tl.store(rows.positions + row, row * 0, mask=idle)
        tl.store(rows.following + row, row * 0, mask=idle)
        tl.store(rows.places + row, row * 0, mask=idle)
        tl.store(rows.ancestors + row, row * 0 + 1, mask=idle)


@triton.jit
def settle(
    inputs, lengths, trees, rows, sampled, statuses, ring, paths, sequences,
    PLACES: tl.constexpr, NODES: tl.constexpr, PADDED: tl.constexpr, DRAFTS: tl.constexpr,
):  # fmt: skip
    """Walk each tree by the tokens sampled at its rows, and append what the walk meets.

    What lies past the longest sequence is not appended: the host ends it there, later. A sequence that ends with one of
    these tokens takes no more, and is idle from then on. Leaves the path in ``paths``,
    int32 [sequences, 1 + NODES], rows of the tree and then -1; and in the ring, int64 [PLACES, sequences,
    3 + 3 * (1 + NODES)], how many nodes there were and how deep if the step DRAFTS, how many rows the walk met, and of
    each its token, its status, and its row among those of the step.
    """
    own, count = tl.program_id(0), tl.num_programs(0)
    slot = tl.load(inputs.slots + own)
    path = paths + own * (1 + NODES)
    if slot >= 0:
        node = tl.arange(0, PADDED)
        nodes = tl.load(trees.counts + own)
        exists = node < nodes
        parents = tl.load(trees.parents + own * NODES + node, mask=exists, other=PADDED)
        tokens = tl.load(trees.tokens + own * NODES + node, mask=exists, other=-1)
        start = tl.load(rows.starts + own)
        length = tl.load(lengths + slot)
        place = tl.load(inputs.places + own)
        words: tl.constexpr = 3 + 3 * (1 + NODES)
        result = ring + (place * count + own) * words
        at = tl.zeros([], tl.int32)
        met = tl.zeros([], tl.int32)
        ends = ends_of(sequences.settings, slot)
        while at >= 0:
            token = tl.load(sampled + start + at)
            tl.store(path + met, at)
            tl.store(result + 3 + 3 * met, token)
            tl.store(result + 4 + 3 * met, tl.load(statuses + start + at).to(tl.int64))
            tl.store(result + 5 + 3 * met, (start + at).to(tl.int64))
            add_token(sequences, slot, length + met, token)
            met += 1
            at = child_of(at, token, exists, parents, tokens, PADDED)
            if is_end(ends, token):
                at = tl.full([], -1, tl.int32)
                tl.store(inputs.slots + own, tl.full([], -1, tl.int64))
        if DRAFTS:
            depths = tl.load(trees.depths + own * NODES + node, mask=exists, other=0)
            tl.store(result, nodes.to(tl.int64))
            tl.store(result + 1, tl.max(depths, 0).to(tl.int64))
        tl.store(result + 2, met.to(tl.int64))
        tl.store(lengths + slot, tl.minimum(length + met, sequences.max_length))
        tl.store(inputs.places + own, tl.where(place + 1 < PLACES, place + 1, 0))
        tl.store(inputs.lengths + own, tl.full([], -1, tl.int64))
        if met <= NODES:
            tl.store(path + met, -1)
    else:
        tl.store(path, -1)


@triton.jit
def compact(
    rows, paths, storage, page_table, num_pages, max_pages,
    NODES: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Move what a head has of accepted rows to the places behind the root's, where their tokens stand from now on.

    ``storage`` is [planes, pages, PAGE_SIZE, HEAD_DIM]: keys and values of each head of each layer are a plane.
    """
    own, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    path = paths + own * (1 + NODES)
    if tl.load(path) >= 0:  # others were idle
        start = tl.load(rows.starts + own)
        slot, root = tl.load(rows.slots + start), tl.load(rows.places + start)
        d = tl.arange(0, DIM)
        entries = storage + plane * num_pages * (PAGE_SIZE * HEAD_DIM) + d
        pages = page_table + slot * max_pages
        depth = tl.full([], 1, tl.int32)
        row = tl.load(path + 1)
        while row >= 0:
            if row != depth:  # it is larger: nothing is overwritten that has yet to move
                source, target = root + row, root + depth
                source = tl.load(pages + source // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + source % PAGE_SIZE
                target = tl.load(pages + target // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + target % PAGE_SIZE
                moved = tl.load(entries + source * HEAD_DIM, mask=d < HEAD_DIM)
                tl.store(entries + target * HEAD_DIM, moved, mask=d < HEAD_DIM)
            depth += 1
            row = tl.load(path + tl.minimum(depth, NODES))
            row = tl.where(depth <= NODES, row, -1)
