"""Drafts of many sequences at once, from tokens on the device: what ``NgramIndex``, ``draft`` and ``walk`` do for one.

clear   [rows, levels]  a slot gets another sequence
extend  [rows, levels]  n-grams that end with new tokens go into the index
draft   [rows]          matches, merged into a tree
walk    [rows]          the path that samples take through the tree

A program has a sequence, and none waits for another.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tables(NamedTuple):
    """The index of sequences in slots: tensors, and sizes. See ``NgramIndex``, which has the same of one sequence.

    Attributes:
        tokens: int64 [slots, max_length].
        lengths: int64 [slots], of the tokens that are known.
        heads: int32 [slots, levels, buckets].
        previous: int32 [slots, levels, max_length].
        indexed: int32 [slots, levels], how many tokens the index has seen.
        orders: int32 [levels].
        powers: int32 [longest order], of the multiplier.
        max_length, buckets: sizes.
    """

    tokens: Any
    lengths: Any
    heads: Any
    previous: Any
    indexed: Any
    orders: Any
    powers: Any
    max_length: int
    buckets: int


class Trees(NamedTuple):
    """Trees of a batch: tensors. See ``DraftTree``; entries from a row's count on mean nothing.

    Attributes:
        tokens: int64 [rows, nodes].
        parents, depths: int32 [rows, nodes].
        ancestors: int64 [rows, nodes], the mask of each node's row; the root's is 1.
        counts: int32 [rows], of nodes.
    """

    tokens: Any
    parents: Any
    depths: Any
    ancestors: Any
    counts: Any


class Paths(NamedTuple):
    """Accepted paths of a batch: tensors. See ``Walk``; entries from a row's count on mean nothing.

    Attributes:
        rows: int32 [rows, nodes + 1], rows of the tree, the root first.
        tokens: int64 [rows, nodes + 1], what was sampled at each.
        counts: int32 [rows], 1 or more.
    """

    rows: Any
    tokens: Any
    counts: Any


@triton.jit
def clear(tables, slots, TILE: tl.constexpr):
    """Forget what was indexed of each row's slot, a level in each program. Slot -1 is none."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        place = slot * tl.num_programs(1) + tl.program_id(1)
        for start in range(0, tables.buckets, TILE):
            at = start + tl.arange(0, TILE)
            tl.store(tables.heads + place * tables.buckets + at, -1, mask=at < tables.buckets)
        tl.store(tables.indexed + place, 0)


@triton.jit
def extend(tables, slots, told, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Index the tokens of each row's slot, TILE positions of a level at a time. Slot -1 is none.

    ``told`` is None, or how many these are; or -1: as many as ``lengths`` has.
    """
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    if slot >= 0:
        place = slot * tl.num_programs(1) + tl.program_id(1)
        order = tl.load(tables.orders + tl.program_id(1))
        end = tl.load(tables.lengths + slot)
        if told is not None:
            known = tl.load(told + tl.program_id(0))
            end = tl.where(known >= 0, known, end)
            tl.store(tables.lengths + slot, end)  # the same from the program of each level
        end = end.to(tl.int32)
        tokens = tables.tokens + slot * tables.max_length
        heads = tables.heads + place * tables.buckets
        previous = tables.previous + place * tables.max_length
        for start in range(tl.load(tables.indexed + place), end, TILE):
            at = start + tl.arange(0, TILE)
            exists = (at < end) & (at >= order - 1)
            total = tl.zeros([TILE], tl.int32)
            for distance in range(order):
                token = tl.load(tokens + at - distance, mask=exists, other=0).to(tl.int32)
                total += token * tl.load(tables.powers + distance)
            bucket = (total.to(tl.uint32, bitcast=True) >> SHIFT).to(tl.int32)
            same = (bucket[:, None] == bucket[None, :]) & exists[None, :]
            before = tl.max(tl.where(same & (at[None, :] < at[:, None]), at[None, :], -1), 1)
            last = tl.max(tl.where(same, at[None, :], -1), 1)
            head = tl.load(heads + bucket, mask=exists, other=-1)
            tl.store(previous + at, tl.where(before >= 0, before, head), mask=exists)
            tl.debug_barrier()  # all heads have been read
            tl.store(heads + bucket, at, mask=exists & (last == at))
            tl.debug_barrier()
        tl.store(tables.indexed + place, end)


@triton.jit
def _candidates(tables, slot, last, LEVELS: tl.constexpr, PADDED: tl.constexpr, CHAIN: tl.constexpr):
    """Where the n-grams that end with the token at ``last`` may have ended before, int32 [PADDED, CHAIN]; -1 for none.

    The chains of all levels are followed together: a step along one takes as long as a step along each.
    """
    level = tl.arange(0, PADDED)
    order = tl.load(tables.orders + level, mask=level < LEVELS, other=0)
    previous = tables.previous + (slot * LEVELS + level) * tables.max_length
    position = tl.load(previous + last, mask=(level < LEVELS) & (order <= last + 1), other=-1)
    column = tl.arange(0, CHAIN)
    found = tl.full([PADDED, CHAIN], -1, tl.int32)
    for i in range(CHAIN):
        found = tl.where(column[None, :] == i, position[:, None], found)
        position = tl.load(previous + position, mask=position >= 0, other=-1)
    return found


@triton.jit
def _guesses(
    tables, tokens, candidates, last, chain, limit, cap,
    LEVELS: tl.constexpr, PADDED: tl.constexpr, CHAIN: tl.constexpr, CAP: tl.constexpr, GUESSES: tl.constexpr,
):  # fmt: skip
    """Where the best ``limit`` matches end, int32 [GUESSES]: the longest first, then the latest; -1 for none."""
    distance = tl.arange(0, CAP)
    tail = tl.load(tokens + last - distance, mask=distance <= last, other=-2)
    at = candidates[:, :, None] - distance[None, None, :]
    earlier = tl.load(tokens + at, mask=at >= 0, other=-1)
    differs = tl.where(earlier == tail[None, None, :], cap, distance[None, None, :])
    length = tl.minimum(tl.min(differs, 2), cap)
    level = tl.arange(0, PADDED)
    order = tl.load(tables.orders + level, mask=level < LEVELS, other=0)
    longer = tl.load(tables.orders + level - 1, mask=(level > 0) & (level < LEVELS), other=0)
    longer = tl.where(level == 0, cap + 1, longer)  # those are found there
    match = (candidates >= 0) & (length >= order[:, None]) & (length < longer[:, None])
    match = match & (tl.arange(0, CHAIN) < chain)[None, :]
    keys = tl.where(match, length.to(tl.int64) * (1 << 32) + candidates, -1)  # all different
    keys = tl.reshape(keys, [PADDED * CHAIN])
    rank = tl.sum((keys[None, :] > keys[:, None]).to(tl.int32), 1)
    guess = tl.arange(0, GUESSES)
    chosen = (rank[None, :] == guess[:, None]) & (guess < limit)[:, None]
    return tl.max(tl.where(chosen, tl.where(keys >= 0, keys & 0x7FFFFFFF, -1)[None, :], -1), 1).to(tl.int32)


@triton.jit
def _owner(common, taken, step, GUESSES: tl.constexpr):
    """Which guess brought each step of each guess's path, int32 [GUESSES, steps]: the first that agrees so far."""
    guess = tl.arange(0, GUESSES)
    shares = (common[:, None, :] > step[None, :, None]) & taken[None, None, :]
    return tl.min(tl.where(shares, guess[None, None, :], GUESSES), 2)


@triton.jit
def _of(owner, values, GUESSES: tl.constexpr):
    """The owners' values [GUESSES]."""
    guess = tl.arange(0, GUESSES)
    return tl.sum(tl.where(guess[None, None, :] == owner[:, :, None], values[None, None, :], 0), 2)


@triton.jit
def draft(
    tables, slots, most_nodes, most_depths, trees, width, chain, limit, cap,
    LEVELS: tl.constexpr, PADDED: tl.constexpr, CHAIN: tl.constexpr, CAP: tl.constexpr, GUESSES: tl.constexpr,
    STEPS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Draft what follows the tokens of each row's slot, all of which are indexed. Slot -1 is none.

    ``most_nodes`` and ``most_depths`` are [rows]; a row with 0 nodes is left at once, and no row gets more than there
    is room for behind its tokens. ``chain``, ``limit`` and ``cap`` are at most CHAIN, GUESSES and CAP.
    """
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    last = tl.load(tables.lengths + tl.maximum(slot, 0)).to(tl.int32) - 1
    nodes = tl.minimum(tl.load(most_nodes + row).to(tl.int32), tl.minimum(tables.max_length - 1 - last, NODES))
    count = tl.zeros([], tl.int32)
    if (slot >= 0) & (nodes > 0):
        depth = tl.minimum(tl.load(most_depths + row).to(tl.int32), STEPS)
        tokens = tables.tokens + slot * tables.max_length
        candidates = _candidates(tables, slot, last, LEVELS, PADDED, CHAIN)
        ends = _guesses(
            tables, tokens, candidates, last, chain, limit, cap, LEVELS, PADDED, CHAIN, CAP, GUESSES
        )  # fmt: skip
        exists = ends >= 0
        step, guess = tl.arange(0, STEPS), tl.arange(0, GUESSES)
        # Beyond the end of what is known it goes on with the same tokens again.
        at = ends[:, None] + 1 + step[None, :] % tl.where(exists, last - ends, 1)[:, None]
        ids = tl.load(tokens + at, mask=exists[:, None], other=-1)
        agrees = (ids[:, None, :] == ids[None, :, :]) | (step >= depth)[None, None, :]
        common = tl.min(tl.where(agrees, depth, step[None, None, :]), 2)
        earlier = (guess[None, :] < guess[:, None]) & exists[None, :]
        repeats = tl.max((earlier & (common == depth)).to(tl.int32), 1)
        taken = exists & (repeats == 0)
        taken = taken & (tl.cumsum(taken.to(tl.int32), 0) <= width)
        owner = _owner(common, taken, step, GUESSES)
        inside = (step < depth)[None, :]
        own = taken[:, None] & (owner == guess[:, None]) & inside
        brought = tl.sum(own.to(tl.int32), 1)
        # From a step to the node a guess has there: those before it, less the steps that it shares, depth - brought.
        bases = tl.cumsum(brought, 0) - depth
        node = step[None, :] + _of(owner, bases, GUESSES)
        parent = step[None, :] - 1 + _of(_owner(common, taken, step - 1, GUESSES), bases, GUESSES)
        parent = tl.where(step[None, :] > 0, parent, -1)
        one = tl.full([], 1, tl.int64)
        bits = tl.where(inside, one << tl.where(taken[:, None] & inside, node + 1, 0).to(tl.int64), 0)
        masks = tl.cumsum(bits, 1) + 1
        written = own & (node < nodes)
        place = row * NODES + node
        tl.store(trees.tokens + place, ids, mask=written)
        tl.store(trees.parents + place, parent, mask=written)
        tl.store(trees.depths + place, tl.broadcast_to(step[None, :] + 1, [GUESSES, STEPS]), mask=written)
        tl.store(trees.ancestors + place, masks, mask=written)
        count = tl.minimum(tl.sum(brought, 0), nodes)
    tl.store(trees.counts + row, count)


@triton.jit
def child_of(at, token, exists, parents, tokens, PADDED: tl.constexpr):
    """The row to which a walk goes from the row ``at`` that sampled ``token``, int32; -1 for none.

    ``exists``, ``parents`` and ``tokens`` [PADDED] are those of the tree's nodes.
    """
    hits = exists & (parents == at - 1) & (tokens == token)
    child = tl.min(tl.where(hits, tl.arange(0, PADDED), PADDED), 0)
    return tl.where(child < PADDED, child + 1, -1)


@triton.jit
def walk(trees, starts, sampled, paths, NODES: tl.constexpr, PADDED: tl.constexpr):
    """Go from each row's root to the child that equals the sample, as long as there is one.

    ``sampled`` has the token of the root at ``starts`` [rows], then those of the nodes.
    """
    row = tl.program_id(0)
    node = tl.arange(0, PADDED)
    exists = node < tl.load(trees.counts + row)
    parents = tl.load(trees.parents + row * NODES + node, mask=exists, other=PADDED)
    tokens = tl.load(trees.tokens + row * NODES + node, mask=exists, other=-1)
    samples = sampled + tl.load(starts + row)
    rows, emitted = paths.rows + row * (NODES + 1), paths.tokens + row * (NODES + 1)
    at = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    while at >= 0:
        token = tl.load(samples + at)
        tl.store(rows + count, at)
        tl.store(emitted + count, token)
        count += 1
        at = child_of(at, token, exists, parents, tokens, PADDED)
    tl.store(paths.counts + row, count)
