"""Attention over a paged key-value cache.

The cache of a layer is one tensor [2 (keys, values), kv_heads, num_pages, page_size, head_dim]: what a head has in a
page is contiguous, and so is what it has in consecutive pages.

Grouped queries (Ainslie et al., arXiv 2305.13245) never copy keys: in a decode step the queries that share a key head
are the query rows of that head; in a prefill chunk they are heads that read the same memory.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from freewheel.ops.rows import RowBatch


@dataclass(frozen=True)
class _Decode:
    """All sequences with a single row.

    Attributes:
        rows: int64 [n], their rows; None when the batch has no others.
        index: int64 [2 * n * kv_heads * pages], the cache's (key or value, head, page) blocks to gather.
        shape: of what is gathered: (2, n, kv_heads, slots, head_dim).
        slots: the gathered slots that some sequence needs, from the first on.
        mask: [n, 1, 1, slots], 0 or -inf; None when every sequence sees all slots.
    """

    rows: Tensor | None
    index: Tensor
    shape: tuple[int, ...]
    slots: slice
    mask: Tensor | None
    buffer: Tensor


@dataclass(frozen=True)
class _Chunk:
    """A sequence with several rows: what is gathered and which of it each row sees (None: plain causal)."""

    rows: slice
    index: Tensor
    shape: tuple[int, ...]
    slots: slice
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """What the layers with one window size have in common in a step: where rows go and which slots they see."""

    kv_slots: Tensor
    decode: _Decode | None
    chunks: tuple[_Chunk, ...]


def plan_attention(batch: RowBatch, cache: Tensor, window: int | None) -> AttentionPlan:
    """Prepares :func:`paged_attention` for every layer with this window; ``cache`` is that of any of them.

    A row sees the last ``window`` positions up to and including its own, or all of them when ``window`` is None.
    """
    first_rows = [0]
    for count in batch.row_counts:
        first_rows.append(first_rows[-1] + count)
    single = [s for s, count in enumerate(batch.row_counts) if count == 1]
    chunks = tuple(
        _plan_chunk(batch.page_table[s], slice(first_rows[s], first_rows[s + 1]), batch.kv_lengths[s], cache, window)
        for s, count in enumerate(batch.row_counts)
        if count > 1
    )
    if not single:
        return AttentionPlan(batch.kv_slots, None, chunks)
    lengths = [batch.kv_lengths[s] for s in single]
    if chunks:
        rows = torch.tensor([first_rows[s] for s in single], device=cache.device)
        page_table = batch.page_table[torch.tensor(single, device=cache.device)]
    else:
        rows, page_table = None, batch.page_table
    return AttentionPlan(batch.kv_slots, _plan_decode(page_table, rows, lengths, cache, window), chunks)


def _block_index(pages: Tensor, cache: Tensor) -> Tensor:
    """Pages [n, pages] to the index of their blocks in the cache, [2 * n * kv_heads * pages]."""
    kv_heads, num_pages = cache.shape[1:3]
    heads = torch.arange(2 * kv_heads, device=cache.device).view(2, 1, kv_heads, 1)
    return (heads * num_pages + pages[:, None, :]).flatten()


def _plan_decode(
    page_table: Tensor, rows: Tensor | None, lengths: list[int], cache: Tensor, window: int | None
) -> _Decode:
    _, kv_heads, _, page_size, head_dim = cache.shape
    first_pages = [max(length - window, 0) // page_size if window else 0 for length in lengths]
    slots = max(length - page * page_size for length, page in zip(lengths, first_pages))
    width = -(-slots // page_size)
    length = torch.tensor(lengths, device=cache.device)[:, None]
    first_page = torch.tensor(first_pages, device=cache.device)[:, None]
    columns = torch.arange(width, device=cache.device)
    # Columns past a sequence's end repeat its own last page: what is masked must at least be finite.
    pages = page_table.gather(1, torch.minimum(first_page + columns, (length - 1) // page_size))
    mask = None
    if len(lengths) > 1 or (window and lengths[0] > window):
        position = first_page * page_size + torch.arange(slots, device=cache.device)
        hidden = position >= length
        if window:
            hidden |= position < length - window
        mask = torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device)
        mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None, :]
    shape = (2, len(lengths), kv_heads, width * page_size, head_dim)
    index = _block_index(pages, cache)
    return _Decode(rows, index, shape, slice(0, slots), mask, cache.new_empty(len(index), page_size * head_dim))


def _plan_chunk(page_table: Tensor, rows: slice, length: int, cache: Tensor, window: int | None) -> _Chunk:
    _, kv_heads, _, page_size, head_dim = cache.shape
    count = rows.stop - rows.start
    start = max(length - count - window + 1, 0) if window else 0  # the first position that the first row sees
    first_page, last_page = start // page_size, (length - 1) // page_size
    pages = page_table[first_page : last_page + 1]
    shape = (2, kv_heads, 1, len(pages) * page_size, head_dim)
    slots = slice(start - first_page * page_size, length - first_page * page_size)
    mask = None
    if count < length - start or (window and length > window):
        distance = torch.arange(length - count, length, device=cache.device)[:, None] - torch.arange(
            start, length, device=cache.device
        )
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        mask = torch.zeros(hidden.shape, dtype=cache.dtype, device=cache.device).masked_fill_(hidden, -torch.inf)
    return _Chunk(rows, _block_index(pages[None], cache), shape, slots, mask)


def write_kv(key_value: Tensor, cache: Tensor, kv_slots: Tensor) -> None:
    """Stores the rows' keys and values, [rows, 2 * kv_heads, head_dim], at ``kv_slots``, int64 [rows]."""
    cache.view(key_value.shape[1], -1, key_value.shape[2]).index_copy_(1, kv_slots, key_value.transpose(0, 1))


def paged_attention(query: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Attends from each row to what its sequence has in the cache.

    ``query`` is [rows, heads, head_dim]; returns [rows, heads * head_dim].
    """
    rows, heads, head_dim = query.shape
    kv_heads, page_size = cache.shape[1], cache.shape[3]
    blocks = cache.view(-1, page_size * head_dim)
    decode = plan.decode
    if decode is not None and decode.rows is None:
        return _attend_decode(query, blocks, decode, scale).reshape(rows, heads * head_dim)
    output = torch.empty_like(query)
    if decode is not None:
        assert decode.rows is not None
        output[decode.rows] = _attend_decode(query[decode.rows], blocks, decode, scale).reshape(-1, heads, head_dim)
    for chunk in plan.chunks:
        key, value = blocks.index_select(0, chunk.index).view(chunk.shape)[..., chunk.slots, :]
        shared = (kv_heads, heads // kv_heads, *key.shape[2:])
        attended = functional.scaled_dot_product_attention(
            query[chunk.rows].transpose(0, 1).unflatten(0, shared[:2]),
            key.expand(shared),
            value.expand(shared),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scale,
        )
        output[chunk.rows] = attended.flatten(0, 1).transpose(0, 1)
    return output.view(rows, heads * head_dim)


def _attend_decode(query: Tensor, blocks: Tensor, decode: _Decode, scale: float) -> Tensor:
    """[n, heads, head_dim] -> [n, kv_heads, heads / kv_heads, head_dim]."""
    torch.index_select(blocks, 0, decode.index, out=decode.buffer)
    key, value = decode.buffer.view(decode.shape)[..., decode.slots, :]
    query = query.unflatten(1, (key.shape[1], -1))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=decode.mask, scale=scale)
