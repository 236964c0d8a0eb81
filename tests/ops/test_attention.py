"""Paged attention against a row-by-row definition in float64, and what must not change a row's result."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from freewheel.ops.attention import paged_attention, plan_attention, write_kv
from freewheel.ops.rows import RowBatch

PAGE = 4
SCALE = 0.3


class Paged:
    """Random keys and values for sequences of given lengths, in shuffled pages of a cache of NaN."""

    def __init__(self, lengths: Sequence[int], counts: Sequence[int], kv_heads: int = 2, group: int = 3, dim: int = 16):
        self.group = group
        generator = torch.Generator().manual_seed(0)
        self.lengths, self.counts = tuple(lengths), tuple(counts)
        pages_each = [-(-length // PAGE) for length in lengths]
        num_pages = sum(pages_each) + 3
        order = torch.randperm(num_pages, generator=generator)
        self.cache = torch.full((2, kv_heads, num_pages, PAGE, dim), torch.nan)
        table = torch.nn.utils.rnn.pad_sequence(list(order[: sum(pages_each)].split(pages_each)), batch_first=True)
        self.contents = [torch.randn(length, 2 * kv_heads, dim, generator=generator) for length in lengths]
        for pages, content in zip(table, self.contents):
            self.cache[:, :, pages[: -(-len(content) // PAGE)]] = 0
            position = torch.arange(len(content))
            write_kv(content, self.cache, pages[position // PAGE] * PAGE + position % PAGE)
        self.query = torch.randn(sum(counts), kv_heads * group, dim, generator=generator)
        unused = torch.zeros(0, dtype=torch.int64)
        self.batch = RowBatch(unused, unused, unused, table.tolist(), unused, self.counts, self.lengths)

    def attend(self, window: int | None) -> Tensor:
        return paged_attention(self.query, self.cache, plan_attention(self.batch, self.cache, window), SCALE)

    def right(self, window: int | None) -> Tensor:
        rows = []
        for content, count, query in zip(self.contents, self.counts, self.query.split(self.counts)):
            key, value = content.double().repeat_interleave(self.group, dim=1).chunk(2, dim=1)
            for position, row in enumerate(query.double(), start=len(content) - count):
                seen = slice(max(position + 1 - window, 0) if window else 0, position + 1)
                weights = (torch.einsum("hd,phd->hp", row, key[seen]) * SCALE).softmax(-1)
                rows.append(torch.einsum("hp,phd->hd", weights, value[seen]).flatten())
        return torch.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 1000])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1], [1]),
        ([37], [1]),
        ([9, 1, 40, 16, 3], [1] * 5),  # decode
        ([21], [21]),  # a whole prompt
        ([21], [6]),  # a chunk after a cached prefix
        ([21, 8, 5], [6, 8, 2]),
        ([21, 8, 33, 5, 12], [6, 1, 1, 5, 1]),  # mixed
        ([21, 40, 20, 5, 33, 12], [3, 1, 3, 3, 9, 2]),  # some of the same few rows
    ],
)
def test_equals_the_definition(lengths: list[int], counts: list[int], window: int | None) -> None:
    paged = Paged(lengths, counts)
    torch.testing.assert_close(paged.attend(window).double(), paged.right(window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("heads", [(3, 3, 64), (1, 4, 256), (2, 7, 64), (2, 4, 128)])
def test_a_row_does_not_depend_on_its_neighbours(
    heads: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    lengths = [5, 700, 64, 256, 130, 300, 513, 31, 193]
    paged = Paged(lengths, [1] * len(lengths), *heads)
    paged.cache, paged.query = paged.cache.to(dtype), paged.query.to(dtype)
    together = paged.attend(window)
    table = paged.batch.page_table
    empty = torch.zeros(0, dtype=torch.int64)
    for row, length in enumerate(lengths):
        alone = RowBatch(empty, empty, empty, table[row : row + 1], empty, (1,), (length,))
        plan = plan_attention(alone, paged.cache, window)
        result = paged_attention(paged.query[row : row + 1], paged.cache, plan, SCALE)[0]
        # The same sums over the same width; MKL may still order them by the number of threads and sequences.
        rounding = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(result, together[row], rtol=0, atol=rounding * float(together[row].abs().max()))


def test_only_the_rows_slots_are_written() -> None:
    cache = torch.zeros(2, 5, 3, PAGE, 8)
    key_value = torch.randn(2, 10, 8)
    write_kv(key_value, cache, torch.tensor([9, 2]))
    assert torch.equal(cache[:, :, 2, 1].flatten(0, 1), key_value[0])
    assert torch.equal(cache[:, :, 0, 2].flatten(0, 1), key_value[1])
    assert cache.count_nonzero() == key_value.numel()


@pytest.mark.parametrize("window", [None, 1, 3, 9, 1000])
@pytest.mark.parametrize("few", [1, 8])
def test_rows_of_a_tree_see_their_ancestors(window: int | None, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a prompt, a step of one row, and a chain, which is seen as a chunk is."""
    monkeypatch.setattr("freewheel.ops.attention.FEW", few)
    parents = [None, 0, 0, 1, 2, 2, 4, 1]
    masks = [1]
    for row, parent in enumerate(parents[1:], 1):
        assert parent is not None
        masks.append(masks[parent] | 1 << row)
    paged = Paged([20, 12, 9, 30], [8, 12, 1, 3])
    chain = [1, 3, 7]
    paged.batch = replace(paged.batch, ancestors=[masks, None, None, chain])
    attended, right = paged.attend(window), paged.right(window)
    torch.testing.assert_close(attended[8:].double(), right[8:], atol=1e-5, rtol=1e-5)
    content, depths = paged.contents[0].double(), [mask.bit_count() - 1 for mask in masks]
    key, value = content.repeat_interleave(paged.group, dim=1).chunk(2, dim=1)
    for row, query in enumerate(paged.query[:8].double()):
        places = [*range(12), *(12 + j for j in range(8) if masks[row] >> j & 1)]
        positions = [place if place < 12 else 12 + depths[place - 12] for place in places]
        seen = [p for p, at in zip(places, positions) if not window or at > 12 + depths[row] - window]
        weights = (torch.einsum("hd,phd->hp", query, key[seen]) * SCALE).softmax(-1)
        expected = torch.einsum("hp,phd->hd", weights, value[seen]).flatten()
        torch.testing.assert_close(attended[row].double(), expected, atol=1e-5, rtol=1e-5)
