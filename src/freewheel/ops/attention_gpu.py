"""Launches the kernels of attention_kernels.py, which say how memory is laid out: attention of devices with Triton.

Nothing looks at the device, and what is launched depends on shapes alone, so a captured graph serves any contents. ::

    rows alone in their sequence    attend_decode, or attend_decode with partials -> combine
    prefill chunks                  rotate_and_store -> attend_chunks
    draft trees                     rotate_and_store -> attend_chunks with partials -> combine

Tensors are contiguous and on one device. A negative slot marks a row, or a tile of rows, that has nothing to do: it
writes no key or value, and its attended row is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from freewheel.ops import attention_kernels as kernels_
from freewheel.ops.launch import power

kernels: Any = kernels_

PROCESSORS = 132  # of the GPU that choices are made for, an H200


@dataclass(frozen=True)
class LayerAttention:
    """What a layer's attention is, besides its projections.

    Attributes:
        heads, kv_heads, head_dim: of queries, of keys and of values, and their size, which is even.
        scale: what query-key products are multiplied by.
        window: how many positions a row sees, up to and including its own; None: all.
        soft_cap: c in ``c * tanh(score / c)``, if any.
        norm_weight: float32 [heads + kv_heads, head_dim], by which normalised queries and keys are multiplied: the
            plain weight, not the one multiplied by sqrt(head_dim) that RMSNorm keeps. None: they are not normalised.
        eps: added to the mean square.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None
    norm_weight: Tensor | None = None
    eps: float = 0.0

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def tile(self) -> int:
        """Places of the context that are read at a time: those whose keys and values registers hold twice."""
        return min(8192 // max(power(self.head_dim), 16), 64)

    @property
    def columns(self) -> int:
        """Of the fused projection: queries, keys, values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Partials(NamedTuple):
    """What each split of the context leaves: tensors as the kernels' file describes them."""

    peaks: Tensor
    sums: Tensor
    attended: Tensor

    @property
    def splits(self) -> int:
        """Of the context, a power of two."""
        return self.peaks.shape[2]


def make_partials(
    rows: int,
    layer: LayerAttention,
    splits: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
) -> Partials:
    """Room for ``rows``, with what is ``attended`` in this dtype; the layers of a step take turns in it.

    ``splits`` is a power of two.
    """
    shape = rows, layer.heads, splits
    peaks, sums = torch.empty(2, *shape, device=device).unbind()
    return Partials(peaks, sums, torch.empty(*shape, layer.head_dim, dtype=dtype, device=device))


def default_splits(rows: int, kv_heads: int) -> int:
    """Splits of the context with which so many rows keep the processors busy, and long contexts short.

    Few rows have half as many: every program of the product that follows reads all of them.
    """
    programs = PROCESSORS if rows <= 4 else 2 * PROCESSORS
    return min(1 << max(round(programs / (rows * kv_heads)).bit_length() - 1, 0), 64)


class DecodeTile(NamedTuple):
    """How ``attend_decode`` divides its work; see there."""

    places: int
    warps: int
    stages: int
    early: bool


def decode_tile(layer: LayerAttention, splits: int, rows: int) -> DecodeTile:
    """What was quickest on an H200, by how many programs there are for each processor.

    With splits it reads ``layer.tile`` places at a time, which is what adds them up goes by.
    """
    if splits > 2:
        return DecodeTile(layer.tile, 4, 3, early=True)
    if splits > 1 or layer.kv_heads * rows < 4 * PROCESSORS:
        return DecodeTile(layer.tile, 4, 3, early=False)
    return DecodeTile(max(layer.tile // 2, 16), 1, 4, early=False)  # many small ones, which wait for no other warp


def rows_per_tile(layer: LayerAttention, queries: int = 64) -> int:
    """Rows of a tile of ``attend_chunks`` that has so many queries for each key head."""
    return max(queries // layer.group, 1)


def plan_tiles(row_counts: Sequence[int], slots: Sequence[int], tile_rows: int) -> Tensor:
    """Tiles of the rows of sequences, for all layers of a step; on the host, int32 [tiles, 4].

    A tile is (first row, rows, slot, first row of the sequence).
    """
    tiles, origin = [], 0
    for count, slot in zip(row_counts, slots, strict=True):
        tiles += [(origin + start, min(tile_rows, count - start), slot, origin) for start in range(0, count, tile_rows)]
        origin += count
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 4)


def attend_decode(
    layer: LayerAttention,
    qkv: Tensor,
    rotations: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    out: Tensor | Partials,
    *,
    chained: bool = False,
    tile: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
    early: bool | None = None,
) -> None:
    """Rotates, stores and attends, for rows of which each is the only one of its sequence in the step.

    Args:
        layer: see there.
        qkv: [rows, columns], any floating type, straight from the projection; or [shares, rows, columns], whose sum it
            is.
        rotations: float32 [rows, head_dim / 2, 2], cosine and sine for each pair of dimensions.
        cache: the layer's, [2, kv_heads, num_pages, page_size, head_dim]. The rows' keys and values are written.
        page_table: int32 [slots, max_pages].
        slots: int64 [rows].
        positions: int64 [rows], where in its sequence the row goes; the cache holds what is before it.
        out: [rows, heads * head_dim], in any dtype; or, if few rows are to keep the device busy, partials, where splits
            of the context leave what they found, for :func:`combine`.
        chained: start while the launch ahead still runs (CUDA devices only). That may then have written ``qkv``, or the
            ``queries`` and new keys and values of the other functions; all else was written at least two launches ago.
        tile: places of the context that are read at a time, a power of two from 16. With partials ``layer.tile``, or
            what is given to :func:`combine` as well.
        warps: of a program.
        stages: tiles on their way at a time, besides the look-up of their pages.
        early: read the first tile before the launch ahead has ended; it takes registers. By default this and the three
            above are what :func:`decode_tile` says.
    """
    shares, rows, _ = qkv.shape if qkv.dim() == 3 else (1, *qkv.shape)
    _check(layer, qkv, cache, rotations)
    partials = None if isinstance(out, Tensor) else out
    splits = 1 if partials is None else partials.splits
    default = decode_tile(layer, splits, rows)
    tile, warps = tile or default.places, warps or default.warps
    stages, early = stages or default.stages, default.early if early is None else early
    kernels.attend_decode[(splits, layer.kv_heads, rows)](
        out if partials is None else None, partials, qkv, layer.norm_weight, rotations, cache, page_table, slots,
        positions, layer.eps, layer.scale, cache.shape[2], page_table.shape[1],
        **_sizes(layer, cache), WINDOW=layer.window or 0, CAP=layer.soft_cap or 0.0, SHARES=shares,
        GROUP=power(layer.group), SPLITS=splits, TILE=tile, CHAINED=chained,
        num_warps=warps, STAGES=stages, EARLY=early, **_options(chained),
    )  # fmt: skip


def combine(
    layer: LayerAttention,
    partials: Partials,
    positions: Tensor,
    out: Tensor,
    *,
    places: Tensor | None = None,
    chained: bool = False,
    tile: int | None = None,
) -> Tensor:
    """The attended rows, [rows, heads * head_dim], in the dtype of ``out``, into which they go.

    Args:
        layer, positions, places, tile: what the partials were made with.
    """
    kernels.combine[(layer.heads, len(out))](
        out, partials, positions, positions if places is None else places, HEAD_DIM=layer.head_dim,
        DIM=power(layer.head_dim), SPLITS=partials.splits, TILE=tile or layer.tile, WINDOW=layer.window or 0,
        CHAINED=chained, num_warps=4, **_options(chained),
    )  # fmt: skip
    return out


def rotate_and_store(
    layer: LayerAttention,
    qkv: Tensor,
    rotations: Tensor,
    cache: Tensor,
    page_table: Tensor,
    slots: Tensor,
    places: Tensor,
    queries: Tensor,
    *,
    chained: bool = False,
    part: int = 8,
) -> Tensor:
    """Puts the rows' keys and values into their pages, and what attends to them into ``queries``.

    Args:
        layer, qkv, rotations, cache, page_table, slots, chained: as for :func:`attend_decode`.
        queries: [rows, heads, head_dim], in any dtype.
        places: int64 [rows], where in its sequence's pages a row is stored: at its position; but rows of a draft tree
            that are equally deep have one position, and a place each.
        part: heads of a program, a power of two.

    Returns:
        ``queries``.
    """
    _check(layer, qkv, cache, rotations)
    parts = -(-(layer.heads + 2 * layer.kv_heads) // part)
    shares, rows, _ = qkv.shape if qkv.dim() == 3 else (1, *qkv.shape)
    kernels.rotate_and_store[(parts, rows)](
        queries, qkv, layer.norm_weight, rotations, cache, page_table, slots, places,
        layer.eps, cache.shape[2], page_table.shape[1],
        **_sizes(layer, cache), PART=part, SHARES=shares, CHAINED=chained, num_warps=4, **_options(chained),
    )  # fmt: skip
    return queries


def attend_chunks(
    layer: LayerAttention,
    queries: Tensor,
    cache: Tensor,
    page_table: Tensor,
    tiles: Tensor,
    positions: Tensor,
    out: Tensor | Partials,
    *,
    tile_rows: int,
    places: Tensor | None = None,
    ancestors: Tensor | None = None,
    chained: bool = False,
    tile: int | None = None,
    warps: int = 4,
    stages: int | None = None,
) -> None:
    """Attends from rows whose keys and values are stored to all that is stored up to and including themselves.

    Args:
        layer, cache, page_table, chained: as for :func:`attend_decode`.
        queries: [rows, heads, head_dim], from :func:`rotate_and_store`.
        tiles: int32 [tiles, 4], from :func:`plan_tiles`. A tile without rows does nothing.
        positions, places: int64 [rows]; places rise within a sequence's rows, one by one.
        out: [rows, heads * head_dim], in any dtype; or partials, if few rows are to keep the device busy. Rows of no
            tile are left as they are.
        tile_rows: rows of the largest tile.
        ancestors: int64 [rows]; bit j says whether the row sees row j of its sequence in this step, besides what was
            stored before the first of them. -1 for a row of a chunk, which sees all up to itself, be they more than 64.
        tile: places of the context that are read at a time, a power of two from 16; None: ``layer.tile``.
        warps: of a program.
        stages: tiles on their way at a time; None: what fits into the shared memory of any device.
    """
    partials = None if isinstance(out, Tensor) else out
    splits = 1 if partials is None else partials.splits
    kernels.attend_chunks[(splits, layer.kv_heads, len(tiles))](
        out if partials is None else None, partials, queries, cache, page_table, tiles, positions,
        positions if places is None else places, ancestors, layer.scale, cache.shape[2], page_table.shape[1],
        **_sizes(layer, cache), WINDOW=layer.window or 0, CAP=layer.soft_cap or 0.0,
        M=max(power(tile_rows * layer.group), 16), SPLITS=splits, TILE=tile or layer.tile,
        STAGES=stages or (3 if cache.itemsize == 2 else 1), CHAINED=chained, num_warps=warps, **_options(chained),
    )  # fmt: skip


def _check(layer: LayerAttention, qkv: Tensor, cache: Tensor, rotations: Tensor) -> None:
    if qkv.shape[-1] != layer.columns or not (qkv.is_contiguous() and cache.is_contiguous()):
        raise ValueError(f"qkv must be contiguous [..., {layer.columns}], not {list(qkv.shape)}, like the cache")
    pairs = qkv.shape[-2], layer.head_dim // 2, 2
    if rotations.shape != pairs or rotations.dtype != torch.float32 or not rotations.is_contiguous():
        raise ValueError(f"rotations must be contiguous float32 {list(pairs)}, not {list(rotations.shape)}")
    if layer.norm_weight is not None and layer.norm_weight.dtype != torch.float32:
        raise ValueError(f"norm_weight must be float32, not {layer.norm_weight.dtype}")


def _sizes(layer: LayerAttention, cache: Tensor) -> dict[str, int]:
    return {
        "HEADS": layer.heads,
        "KV_HEADS": layer.kv_heads,
        "HEAD_DIM": layer.head_dim,
        "PAGE_SIZE": cache.shape[3],
        "DIM": max(power(layer.head_dim), 16),  # what tensor cores take at least
    }


def _options(chained: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if chained else {}
