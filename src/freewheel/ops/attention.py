"""Attention over a paged key-value cache.

The cache of a layer is one tensor [2 (keys, values), kv_heads, num_pages, page_size, head_dim]: what a head has in a
page is contiguous, and so is what it has in consecutive pages.

Grouped queries (Ainslie et al., arXiv 2305.13245) never copy keys for each of their heads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from freewheel.ops.rows import RowBatch

FEW = 8  # rows of a sequence that gather its pages as a decode row does: with more the fused kernel is faster


@dataclass(frozen=True)
class _Decode:
    """Sequences of the same few rows, mostly one, and the same width, which is their number of slots rounded up.

    Attributes:
        rows: int64 [n * rows each], where they are in the batch; None when it has no other rows.
        index: int64 [2 * n * kv_heads * pages], the blocks to gather; a block is what a head has in a page.
        blocks: where they go, [2 * n * kv_heads * pages, page_size * head_dim]; each layer overwrites the last one's.
        key, value: views of the slots in use there, [n * kv_heads, slots, head_dim].
        mask: [n * kv_heads, rows each, slots], -inf where the row does not see the slot, else 0.
    """

    rows: Tensor | None
    index: Tensor
    blocks: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _Chunk:
    """A sequence with several rows.

    Attributes:
        rows: where they are in the batch.
        index: int64 [2 * kv_heads * pages], the blocks to gather.
        slots: the gathered slots in use.
        mask: [rows, slots], -inf where the row does not see the slot, else 0; None if it is plainly causal.
    """

    rows: slice
    index: Tensor
    slots: slice
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """What the layers with one window size have in common in a step: where rows go and which slots they see."""

    kv_slots: Tensor
    decodes: tuple[_Decode, ...]
    chunks: tuple[_Chunk, ...]


def plan_attention(batch: RowBatch, cache: Tensor, window: int | None) -> AttentionPlan:
    """Prepares :func:`paged_attention` for every layer with this window; ``cache`` is that of any of them.

    A row sees the last ``window`` positions up to and including its own, or all of them when ``window`` is None.
    """
    ends = list(itertools.accumulate(batch.row_counts))
    trees = batch.ancestors or [None] * len(ends)
    # A row's products and softmax are summed in an order that may depend on the padded width, so the width depends on
    # the row's own length alone: neighbours change nothing, and a long one costs the short ones nothing.
    alike: dict[tuple[int, int], list[int]] = {}
    chunks = []
    for s, (count, length) in enumerate(zip(batch.row_counts, batch.kv_lengths)):
        if count > FEW:
            rows = slice(ends[s] - count, ends[s])
            chunks.append(_plan_chunk(batch.page_table[s], rows, length, cache, window, trees[s]))
        else:
            alike.setdefault((_width(length, count, window, cache.shape[3]), count), []).append(s)
    decodes = []
    for (width, count), sequences in alike.items():
        whole = len(sequences) == len(batch.row_counts)
        places = [row for s in sequences for row in range(ends[s] - count, ends[s])]
        rows = None if whole else torch.tensor(places, device=cache.device)
        members = [(batch.page_table[s], batch.kv_lengths[s], trees[s]) for s in sequences]
        decodes.append(_plan_decode(members, count, rows, cache, window, width))
    return AttentionPlan(batch.kv_slots, tuple(decodes), tuple(chunks))


def _plan_decode(
    members: Sequence[tuple[Sequence[int], int, Sequence[int] | None]],
    count: int,
    rows: Tensor | None,
    cache: Tensor,
    window: int | None,
    width: int,
) -> _Decode:
    """``members``: page table, length and tree of each sequence, all of ``count`` rows."""
    kv_heads, _, page_size, head_dim = cache.shape[1:]
    mask = cache.new_full((len(members), kv_heads, count, width), -torch.inf)
    pages = []
    for s, (table, length, tree) in enumerate(members):
        first_page, last_page = _first_page(length, count, window, page_size), (length - 1) // page_size
        start = first_page * page_size
        if count == 1:
            mask[s, ..., max(length - window - start, 0) if window else 0 : length - start].zero_()
        else:
            mask[s, ..., : length - start].masked_fill_(_seen(count, start, length, window, tree, cache.device), 0)
        # Columns past a sequence's end repeat its own last page: what is masked must at least be finite.
        padding = -(-width // page_size) - (last_page + 1 - first_page)
        pages.append([*table[first_page : last_page + 1], *[table[last_page]] * padding])
    index = _block_index(pages, cache)
    blocks = cache.new_empty(len(index), page_size * head_dim)
    key, value = blocks.view(2, len(members) * kv_heads, -1, head_dim)[:, :, :width].unbind()
    return _Decode(rows, index, blocks, key, value, mask.view(-1, count, width))


def _first_page(length: int, rows: int, window: int | None, page_size: int) -> int:
    """The page with the first position that the first row sees, where the sequence has so many rows."""
    return max(length - rows + 1 - window, 0) // page_size if window else 0


def _width(length: int, rows: int, window: int | None, page_size: int) -> int:
    """Slots to gather for few rows: few different widths, at most half of it padding, none of it from neighbours.

    80, 144, 208, 272, 400, 528, 784, ...: a batch of mixed lengths falls into few groups. Odd multiples of 16 keep the
    heads' memory from starting at the same place in the processor's cache.
    """
    slots = length - _first_page(length, rows, window, page_size) * page_size
    step = 1 << max(6, (slots - 1).bit_length() - 2)
    width = -(-slots // step) * step + 16
    return min(width, window + page_size + rows - 2) if window else width


def _plan_chunk(
    page_table: Sequence[int],
    rows: slice,
    length: int,
    cache: Tensor,
    window: int | None,
    ancestors: Sequence[int] | None,
) -> _Chunk:
    page_size = cache.shape[3]
    count = rows.stop - rows.start
    first_page, last_page = _first_page(length, count, window, page_size), (length - 1) // page_size
    start = max(length - count - window + 1, 0) if window else 0  # the first position that the first row sees
    index = _block_index([page_table[first_page : last_page + 1]], cache)
    mask = None
    if ancestors or count < length - start or (window and length > window):
        seen = _seen(count, start, length, window, ancestors, cache.device)
        mask = cache.new_full(seen.shape, -torch.inf).masked_fill_(seen, 0)
    return _Chunk(rows, index, slice(start - first_page * page_size, length - first_page * page_size), mask)


def _seen(
    count: int, start: int, length: int, window: int | None, ancestors: Sequence[int] | None, device: torch.device
) -> Tensor:
    """Which cached positions from ``start`` on each of a sequence's last rows sees: bool [count, length - start]."""
    position = torch.arange(start, length, device=device)
    if ancestors:  # rows of one depth stand side by side
        position[-count:] = torch.tensor([length - count - 1 + row.bit_count() for row in ancestors])
    distance = position[-count:, None] - position
    seen = distance >= 0
    if ancestors:
        seen[:, -count:] = torch.tensor([[bool(row >> j & 1) for j in range(count)] for row in ancestors])
    if window:
        seen &= distance < window
    return seen


def _block_index(pages: Sequence[Sequence[int]], cache: Tensor) -> Tensor:
    """The blocks of each sequence's pages, of the same number, in the order (key or value, sequence, head, page)."""
    kv_heads, num_pages = cache.shape[1:3]
    heads = torch.arange(0, 2 * kv_heads * num_pages, num_pages, device=cache.device).view(2, 1, kv_heads, 1)
    return (heads + torch.tensor(pages, device=cache.device)[:, None]).flatten()


def write_kv(key_value: Tensor, cache: Tensor, kv_slots: Tensor) -> None:
    """Stores the rows' keys and values, [rows, 2 * kv_heads, head_dim], at ``kv_slots``, int64 [rows]."""
    cache.view(key_value.shape[1], -1, key_value.shape[2]).index_copy_(1, kv_slots, key_value.transpose(0, 1))


def paged_attention(query: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attends from each row to what its sequence has in the cache.

    ``query`` is [rows, heads, head_dim]; returns [rows, heads * head_dim].
    """
    rows, heads, head_dim = query.shape
    if plan.decodes and plan.decodes[0].rows is None:
        return _attend_decode(query, cache, plan.decodes[0], scale).reshape(rows, heads * head_dim)
    output = query.new_empty(query.shape)
    for decode in plan.decodes:
        output[decode.rows] = _attend_decode(query[decode.rows], cache, decode, scale)
    for chunk in plan.chunks:
        output[chunk.rows] = _attend_chunk(query[chunk.rows], cache, chunk, scale)
    return output.view(rows, heads * head_dim)


def _attend_decode(query: Tensor, cache: Tensor, decode: _Decode, scale: float) -> Tensor:
    torch.index_select(cache.view(-1, decode.blocks.shape[1]), 0, decode.index, out=decode.blocks)
    # The queries that share a key head are its query rows, so keys are read once for all of them. The fused kernel is
    # made for many rows: it is slower here, and its last bits depend on the thread that a row falls to.
    head_dim, each, (sharing, count, width) = query.shape[-1], query.shape[1], decode.mask.shape
    if count == 1:
        rows = query.reshape(sharing, -1, head_dim)
        scores = torch.baddbmm(decode.mask, rows, decode.key.mT, alpha=scale).softmax(-1)
        return torch.bmm(scores, decode.value).view(query.shape)
    # [sequence, row, kv head, query head of it, ...]: a row comes with the query heads that share a key head.
    kv_heads = len(decode.mask) * count // len(query)
    rows = query.view(-1, count, kv_heads, each // kv_heads, head_dim).transpose(1, 2).reshape(sharing, -1, head_dim)
    scores = torch.bmm(rows, decode.key.mT).view(sharing, count, -1, width)
    scores = scores.mul_(scale).add_(decode.mask[:, :, None]).softmax(-1).view(sharing, -1, width)
    attended = torch.bmm(scores, decode.value).view(-1, kv_heads, count, each // kv_heads, head_dim)
    return attended.transpose(1, 2).reshape(query.shape)


def _attend_chunk(query: Tensor, cache: Tensor, chunk: _Chunk, scale: float) -> Tensor:
    kv_heads, _, page_size, head_dim = cache.shape[1:]
    blocks = cache.view(-1, page_size * head_dim).index_select(0, chunk.index)
    key, value = blocks.view(2, kv_heads, 1, -1, head_dim)[..., chunk.slots, :].unbind()
    # Key heads take the place of the batch, so that the query heads that share one read the same memory.
    query = query.transpose(0, 1).unflatten(0, (kv_heads, -1))
    key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale
    )
    return attended.flatten(0, 1).transpose(0, 1)
