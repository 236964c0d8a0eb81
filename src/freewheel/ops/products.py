"""Launches the kernels of product_kernels.py: what a decoder computes for a few rows. Needs Triton.

All tensors are dense and on one device; results are written into tensors that are given, so that a graph can be
captured. ``chained`` launches start before the kernel ahead of them ends and wait for it themselves: that one has to be
a kernel that waits, or one that is not chained. Norm weights are float32 [n] and plain, as a checkpoint means them
(Gemma's with 1 added): ``freewheel.ops.norm.RMSNorm`` keeps them times sqrt(n).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler.compiler import max_shared_mem

from freewheel.ops import product_kernels as kernels
from freewheel.ops.activation import Activation
from freewheel.ops.attention_gpu import PROCESSORS, LayerAttention, Partials
from freewheel.ops.launch import power

MOST_ROWS = 4  # of ``product``: more are quicker in tensor cores
MOST_WIDE_ROWS = 128  # of a program of ``wide_product``
SHARED_MEMORY = 227 << 10  # bytes that a program has on an H200; on some devices no more than 99 KiB


class Tile(NamedTuple):
    """How a product is divided: see ``product_kernels.product``. ``outputs`` counts pairs where there are gates."""

    outputs: int
    columns: int
    ahead: int
    warps: int


def tile_for(
    rows: int,
    outputs: int,
    inputs: int,
    gated: bool = False,
    combined: bool = False,
    itemsize: int = 2,
    words: bool = False,
) -> Tile:
    """How to divide a product with ``outputs`` results of ``inputs`` columns; see scripts/tune_products.py.

    ``words``: it may be read in words, see ``product_kernels._word_products``.
    """
    columns = max(power(inputs), 16)
    if combined:
        return Tile(8, min(columns, 2048), 1, 4 if rows == 1 and itemsize == 2 else 8)
    if words and 2048 <= outputs <= 8192 and inputs <= 2048:
        return Tile(8, min(columns, 1024), 0, 4)
    if outputs * (2 if gated else 1) >= 4096:
        return Tile(4 if gated and rows == 1 else 8, min(columns, 512), 1 if gated and rows == 1 else 2, 4)
    # So few outputs make about one program an SM: it reads ahead all it needs, or what registers hold.
    columns = min(columns, 512 if rows == 1 else 1024)
    ahead = min(-(-inputs // columns), (24 if rows == 1 else 16) // itemsize)
    few = rows == 2 or (rows == 1 and outputs < 960)
    return Tile(4 if few else 8, columns, ahead, 4 if rows == 1 else 8)


class WideTile(NamedTuple):
    """How a wide product is divided: see ``product_kernels.wide_product``."""

    lines: int
    share: int
    columns: int
    ahead: int
    warps: int
    stages: int


def wide_tile_for(
    rows: int, outputs: int, inputs: int, itemsize: int = 2, shared: bool = False, memory: int = SHARED_MEMORY
) -> WideTile:
    """How to divide a product of many rows; with ``shared`` columns may be divided as well.

    A program has so much shared ``memory``: the bits do not depend on it.
    """
    columns = min(max(power(inputs), 16), 256 // itemsize)
    chunks, blocks = -(-inputs // columns), -(-rows // MOST_WIDE_ROWS)
    most = memory // (256 * (64 + min(max(power(rows), 16), MOST_WIDE_ROWS)))
    if not shared:
        return WideTile(64, chunks * columns, columns, 0, 4, min(4, most))
    shares = max(PROCESSORS // (-(-outputs // 64) * blocks), 1)  # a program for each processor
    each = -(-chunks // shares)
    return WideTile(64, each * columns, columns, min(each, 3) if rows <= 32 else 1, 4, min(3, most))


def product(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    cap: float | None = None,
    add: bool = False,
    chained: bool = False,
    early: bool = False,
    tile: Tile | None = None,
) -> None:
    """``y = x @ weight.T``, or ``y += ...`` with ``add``, for 1 to MOST_ROWS rows.

    Sums and factors are float32. A row's bits depend on how many rows there are, not on what the others hold.

    Args:
        y: [rows, n] of any floating type; with ``add`` the residual stream, float32.
        x: [rows, m] of any floating type.
        weight: [n, m], float32, bfloat16 or float16; with ``activation`` [2n, m], the gates' rows before the ups'.
        norm: float32 [m]: rows are normalised first, with ``eps``.
        bias: float32, as long as the weight.
        activation: of the gates, which are multiplied with the ups.
        cap: c in ``c * tanh(y / c)``.
        early: let the next launch start even before the one ahead of this has ended. Until it waits, it may then read
            only what neither of the two writes, nor what ends after they have started.
        tile: how to divide the work, ``tile_for`` unless given.

    Raises:
        ValueError: sizes do not fit, a tensor is not dense, or the tile is not for such a product.
    """
    _check(x, len(y), weight.shape[1])
    _launch_product(y, x, weight, None, norm, eps, bias, activation, cap, add, chained, early, tile)


def wide_product(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    chained: bool = False,
    tile: WideTile | None = None,
) -> None:
    """``y = x @ weight.T`` for some hundred rows, on tensor cores.

    Factors have the weight's type, sums are float32. A row's bits depend on how many rows there are, not on what the
    others hold.

    Args:
        y: [rows, n] of any floating type; or float32 [shares, rows, n], as ``shares`` says: their sum is the product.
        x: [rows, m] of the weight's type.
        weight: [n, m], float32, bfloat16 or float16; with ``activation`` [2n, m], the gates' rows before the ups'.
        bias: float32, as long as the weight.
        activation: of the gates, which are multiplied with the ups; not with shares.
        tile: how to divide the work, ``wide_tile_for`` unless given.

    Raises:
        ValueError: sizes or types do not fit, or a tensor is not dense.
    """
    (rows, inputs), (width, _), outputs = x.shape, weight.shape, y.shape[-1]
    if x.dtype != weight.dtype:
        raise ValueError(f"a wide product is of one type, not {x.dtype} and {weight.dtype}")
    shared = y.dim() == 3
    memory = max_shared_mem(y.device.index) if y.is_cuda else SHARED_MEMORY
    tile = tile or wide_tile_for(rows, outputs, inputs, weight.element_size(), shared, memory)
    count = -(-inputs // tile.share)
    _check(x, rows, inputs)
    _check(y, *([count] if shared else []), rows, outputs)
    _check(weight, outputs if activation is None else 2 * outputs, inputs)
    if bias is not None:
        _check(bias, width)
    if count > 1 and (not shared or activation is not None):
        raise ValueError(f"{count} shares need room of their own, and cannot be gated")
    _launch(
        kernels.wide_product, (-(-width // tile.lines), count, -(-rows // MOST_WIDE_ROWS)), tile.warps, chained,
        y, x, weight, bias, rows, outputs,
        min(max(power(rows), 16), MOST_WIDE_ROWS), inputs, tile.lines, tile.share, tile.columns, tile.ahead,
        activation, tile.stages,
    )  # fmt: skip


def shares(weight: Tensor, rows: int) -> int:
    """How many shares a wide product of so many rows with room for them is divided into."""
    outputs, inputs = weight.shape
    return -(-inputs // wide_tile_for(rows, outputs, inputs, weight.element_size(), shared=True).share)


def combine_product(
    y: Tensor,
    layer: LayerAttention,
    partials: Partials,
    positions: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    add: bool = False,
    chained: bool = False,
    tile: Tile | None = None,
) -> None:
    """``product`` of rows of attention whose splits, of ``layer.tile`` places, are added up on the way.

    ``attention_gpu.combine`` does that for more rows, and for a head_dim that is not a power of two.

    Raises:
        ValueError: as ``product``; or splits or head_dim is not a power of two.
    """
    splits, head_dim = partials.attended.shape[-2:]
    if splits != power(splits) or head_dim != power(head_dim):
        raise ValueError(f"{splits} splits of head_dim {head_dim}: both must be powers of two")
    _check(partials.attended, len(y), layer.heads, splits, layer.head_dim)
    for statistics in (partials.peaks, partials.sums):
        _check(statistics, len(y), layer.heads, splits)
    _check(positions, len(y))
    _check(weight, y.shape[1], layer.heads * head_dim)
    merge = _Merge(partials.peaks, partials.sums, positions, splits, head_dim, layer.tile, layer.window or 0)
    _launch_product(y, partials.attended, weight, merge, None, 0.0, bias, None, None, add, chained, False, tile)


def embed(
    stream: Tensor,
    rotations: Tensor,
    table: Tensor,
    history: Tensor,
    slots: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    factors: Tensor,
    scale: float = 1.0,
    *,
    places: Tensor | None = None,
    chained: bool = False,
) -> None:
    """Begin a step: the residual stream, and for each rope the rows' rotations.

    ``stream[row] = scale * table[history[slots[row], places[row]]]``, and for each pair of a head's dimensions
    ``rotations[rope, row, pair] = factors[rope] * (cos, sin)(positions[row] * frequencies[rope, pair])``.

    Args:
        stream: float32 [rows, hidden].
        rotations: float32 [ropes, rows, pairs, 2].
        table: [entries, hidden] of any floating type.
        history: int64 [slots, max_length], tokens; all within the table.
        slots, positions: int64 [rows]. A row whose slot is negative is idle: its stream is 0.
        frequencies: float32 [ropes, pairs], radians per position.
        factors: float32 [ropes].
        places: int64 [rows], where the rows' tokens stand; None: at their positions.

    Raises:
        ValueError: sizes do not fit, or a tensor is not dense.
    """
    (rows, hidden), (ropes, pairs) = stream.shape, frequencies.shape
    places = positions if places is None else places
    for numbers in (slots, positions, places):
        _check(numbers, rows)
    _check(stream, rows, hidden)
    _check(rotations, ropes, rows, pairs, 2)
    _check(table, len(table), hidden)
    _check(history, *history.shape)
    _check(frequencies, ropes, pairs)
    _check(factors, ropes)
    _launch(
        kernels.embed, (rows,), 4, chained,
        stream, table, history, slots, positions, places, frequencies, factors, rotations, history.shape[1], hidden,
        float(scale), ropes, pairs, power(pairs), power(hidden),
    )  # fmt: skip


def norm(out: Tensor, x: Tensor, weight: Tensor, eps: float, *, chained: bool = False) -> None:
    """out [rows, n] of any floating type = ``x / sqrt(mean(x²) + eps) * weight`` for x [rows, n].

    Raises:
        ValueError: sizes do not fit, or a tensor is not dense.
    """
    _launch_norm(out, x, None, None, weight, eps, chained)


def add_norm(
    stream: Tensor,
    delta: Tensor,
    *,
    eps: float,
    delta_norm: Tensor | None = None,
    norm: Tensor | None = None,
    out: Tensor | None = None,
    chained: bool = False,
) -> None:
    """``stream += delta``, normalised with ``delta_norm`` if given; then ``out`` = the stream normalised with ``norm``.

    Args:
        stream: float32 [rows, n].
        delta: [rows, n] of any floating type; or [shares, rows, n], to be added up.
        delta_norm, norm: float32 [n].
        out: [rows, n] of any floating type, if and only if there is a ``norm``.

    Raises:
        ValueError: sizes do not fit, a tensor is not dense, or only one of ``norm`` and ``out`` is given.
    """
    if (norm is None) != (out is None):
        raise ValueError("norm and out go together")
    _launch_norm(out, stream, delta, delta_norm, norm, eps, chained)


def gated(out: Tensor, gate_up: Tensor, activation: Activation, *, chained: bool = False) -> None:
    """out [rows, n] = ``act(gate) * up`` for rows [rows, 2n] that hold gate and up side by side; any floating types.

    Raises:
        ValueError: sizes do not fit, or a tensor is not dense.
    """
    rows, size = out.shape
    _check(out, rows, size)
    _check(gate_up, rows, 2 * size)
    columns = min(power(size), 1024)
    _launch(kernels.gated, (-(-size // columns), rows), 4, chained, out, gate_up, size, activation, columns)


class _Merge(NamedTuple):
    """What adds up the splits of attention, if that is what a product is of."""

    peaks: Tensor
    sums: Tensor
    positions: Tensor
    splits: int
    head_dim: int
    places: int
    window: int


def _launch_product(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    merge: _Merge | None,
    norm: Tensor | None,
    eps: float,
    bias: Tensor | None,
    activation: Activation | None,
    cap: float | None,
    add: bool,
    chained: bool,
    early: bool,
    tile: Tile | None,
) -> None:
    (rows, outputs), inputs = y.shape, weight.shape[1]
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"a product takes 1 to {MOST_ROWS} rows, not {rows}")
    if add and y.dtype != torch.float32:
        raise ValueError(f"a product is added to a float32 stream, not {y.dtype}")
    width = outputs if activation is None else 2 * outputs
    _check(y, rows, outputs)
    _check(weight, width, inputs)
    if norm is not None:
        _check(norm, inputs)
    if bias is not None:
        _check(bias, width)
    gated, combined = activation is not None, merge is not None
    words = rows == 1 and x.dtype == torch.float32 and weight.dtype == torch.bfloat16 and inputs % 8 == 0
    words = words and not (gated or combined or add)
    tile = tile or tile_for(rows, outputs, inputs, gated, combined, weight.element_size(), words)
    if tile.ahead == 0 and not words:
        raise ValueError("only one float32 row can be multiplied with a weight in words, a bfloat16 one, and no more")
    columns = tile.columns if merge is None else max(tile.columns, merge.head_dim)
    peaks, sums, positions, splits, head_dim, places, window = merge or [None] * 7
    _launch(
        kernels.product, (-(-outputs // tile.outputs),), tile.warps, chained,
        y, x, weight, norm, bias, peaks, sums, positions, outputs, eps, cap,
        rows, inputs, tile.outputs, columns, tile.ahead, activation, add, splits, head_dim, places, window, early,
    )  # fmt: skip


def _launch_norm(
    out: Tensor | None,
    stream: Tensor,
    delta: Tensor | None,
    delta_norm: Tensor | None,
    weight: Tensor | None,
    eps: float,
    chained: bool,
) -> None:
    rows, size = stream.shape
    for places in (out, stream):
        if places is not None:
            _check(places, rows, size)
    if delta is not None:
        _check(delta, *delta.shape[:-2], rows, size)
    for vector in (delta_norm, weight):
        if vector is not None:
            _check(vector, size)
    columns = power(size)
    warps = min(max(columns // 128, 1), 8)
    count = len(delta) if delta is not None and delta.dim() == 3 else 1
    _launch(
        kernels.add_norm, (rows,), warps, chained, stream, out, delta, delta_norm, weight, size, eps, count, columns
    )


def _launch(kernel: Any, grid: tuple[int, ...], warps: int, chained: bool, *args: Any) -> None:
    """The kernel, whose last argument is CHAINED."""
    if args[0].device.type == "cuda":
        kernel[grid](*args, chained, num_warps=warps, launch_pdl=chained)
    else:  # interpreted
        kernel[grid](*args, False)


def _check(tensor: Tensor, *shape: int) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"expected a dense tensor {list(shape)}, not {list(tensor.shape)} of strides {tensor.stride()}"
        )
