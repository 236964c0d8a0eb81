"""Temperature and softmax, in one pass over the logits or in two; see probabilities.py.

softmax_row    [rows]         a row held in registers
softmax_stats  [tiles, rows]  the statistics of a row's blocks
softmax_write  [tiles, rows]  and what follows from them
"""

import triton
import triton.language as tl

from freewheel.sampling.kernels import BLOCK, LOG2E


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
