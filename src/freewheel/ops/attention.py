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


@dataclass(frozen=True)
class _Decode:
    """Sequences with a single row and the same width, which is their number of slots rounded up.

    Attributes:
        rows: int64 [n], where they are in the batch; None when it has no other rows.
        index: int64 [2 * n * kv_heads * pages], the blocks to gather; a block is what a head has in a page.
        blocks: where they go, [2 * n * kv_heads * pages, page_size * head_dim]; each layer overwrites the last one's.
        key, value: views of the slots in use there, [n * kv_heads, slots, head_dim].
        mask: [n * kv_heads, 1, slots], -inf where the row does not see the slot, else 0.
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
    chunks = tuple(
        _plan_chunk(batch.page_table[s], slice(ends[s] - count, ends[s]), batch.kv_lengths[s], cache, window, trees[s])
        for s, count in enumerate(batch.row_counts)
        if count > 1
    )
    # A row's products and softmax are summed in an order that may depend on the padded width, so the width depends on
    # the row's own length alone: neighbours change nothing, and a long one costs the short ones nothing.
    widths: dict[int, list[int]] = {}
    for s, count in enumerate(batch.row_counts):
        if count == 1:
            widths.setdefault(_width(batch.kv_lengths[s], window, cache.shape[3]), []).append(s)
    decodes = []
    for width, sequences in widths.items():
        whole = len(sequences) == len(batch.row_counts)
        rows = None if whole else torch.tensor([ends[s] - 1 for s in sequences], device=cache.device)
        lengths = [batch.kv_lengths[s] for s in sequences]
        decodes.append(_plan_decode([batch.page_table[s] for s in sequences], rows, lengths, cache, window, width))
    return AttentionPlan(batch.kv_slots, tuple(decodes), chunks)


def _plan_decode(
    page_table: Sequence[Sequence[int]],
    rows: Tensor | None,
    lengths: Sequence[int],
    cache: Tensor,
    window: int | None,
    width: int,
) -> _Decode:
    kv_heads, _, page_size, head_dim = cache.shape[1:]
    count = len(lengths)
    mask = cache.new_full((count, kv_heads, 1, width), -torch.inf)
    pages = []
    for s, (table, length) in enumerate(zip(page_table, lengths)):
        first_page, last_page = _first_page(length, window, page_size), (length - 1) // page_size
        start = first_page * page_size
        mask[s, ..., max(length - window - start, 0) if window else 0 : length - start].zero_()
        # Columns past a sequence's end repeat its own last page: what is masked must at least be finite.
        padding = -(-width // page_size) - (last_page + 1 - first_page)
        pages.append([*table[first_page : last_page + 1], *[table[last_page]] * padding])
    index = _block_index(pages, cache)
    blocks = cache.new_empty(len(index), page_size * head_dim)
    key, value = blocks.view(2, count * kv_heads, -1, head_dim)[:, :, :width].unbind()
    return _Decode(rows, index, blocks, key, value, mask.view(-1, 1, width))


def _first_page(length: int, window: int | None, page_size: int) -> int:
    """The page with the first position that the last row sees."""
    return max(length - window, 0) // page_size if window else 0


def _width(length: int, window: int | None, page_size: int) -> int:
    """Slots to gather for a decode row: few different widths, at most half of it padding, none of it from neighbours.

    80, 144, 208, 272, 400, 528, 784, ...: a batch of mixed lengths falls into few groups. Odd multiples of 16 keep the
    heads' memory from starting at the same place in the processor's cache.
    """
    slots = length - _first_page(length, window, page_size) * page_size
    step = 1 << max(6, (slots - 1).bit_length() - 2)
    width = -(-slots // step) * step + 16
    return min(width, window + page_size - 1) if window else width


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
    start = max(length - count - window + 1, 0) if window else 0  # the first position that the first row sees
    first_page, last_page = start // page_size, (length - 1) // page_size
    index = _block_index([page_table[first_page : last_page + 1]], cache)
    mask = None
    if ancestors or count < length - start or (window and length > window):
        position = torch.arange(start, length, device=cache.device)
        if ancestors:  # rows of one depth stand side by side
            position[-count:] = torch.tensor([length - count - 1 + row.bit_count() for row in ancestors])
        distance = position[-count:, None] - position
        hidden = distance < 0
        if ancestors:
            hidden[:, -count:] = torch.tensor([[not row >> j & 1 for j in range(count)] for row in ancestors])
        if window:
            hidden |= distance >= window
        mask = cache.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return _Chunk(rows, index, slice(start - first_page * page_size, length - first_page * page_size), mask)


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
        return _attend_decode(query, cache, plan.decodes[0], scale).view(rows, heads * head_dim)
    output = query.new_empty(query.shape)
    for decode in plan.decodes:
        output[decode.rows] = _attend_decode(query[decode.rows], cache, decode, scale).view(-1, heads, head_dim)
    for chunk in plan.chunks:
        output[chunk.rows] = _attend_chunk(query[chunk.rows], cache, chunk, scale)
    return output.view(rows, heads * head_dim)


def _attend_decode(query: Tensor, cache: Tensor, decode: _Decode, scale: float) -> Tensor:
    torch.index_select(cache.view(-1, decode.blocks.shape[1]), 0, decode.index, out=decode.blocks)
    # The queries that share a key head are its query rows, so keys are read once for all of them. The fused kernel is
    # made for many rows: it is slower here, and its last bits depend on the thread that a row falls to.
    query = query.reshape(len(decode.mask), -1, query.shape[-1])
    scores = torch.baddbmm(decode.mask, query, decode.key.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1), decode.value)


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
