"""The decoder's step by Triton kernels: what it computes on a CUDA device, from the weights of a :class:`Decoder`.

Two ways through the layers, which share everything but the products:

    few rows    norm and product in one launch, weights read while the launch before still runs; five launches a layer
    many rows   products by tensor cores, and one launch for each thing between them; torch's products for prompts, and
                for many rows of large models

The residual stream is float32. Rows name their slot and position; tokens, pages and cached keys are looked up on the
device, so that a captured graph serves whatever comes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from freewheel.models.decoder import Decoder, Layer
from freewheel.models.errors import ModelError
from freewheel.models.spec import ModelSpec
from freewheel.ops import attention_gpu as attention
from freewheel.ops import products
from freewheel.ops.activation import Activation
from freewheel.ops.launch import dependent_launch, power
from freewheel.ops.linear import Linear
from freewheel.ops.norm import RMSNorm

# Rows of decode steps up to which our products take no longer than torch's, as measured on an H200; for models of a
# smaller hidden size than NARROW any number. At NARROW itself twice as many.
NARROW = 1024
MOST_WIDE_ROWS, MOST_WIDE_QKV_ROWS = 128, 64


@dataclass(frozen=True)
class Rows:
    """Rows of a step, on the device.

    Attributes:
        slots: int64 [rows], whose sequence; -1 for an idle row of a captured graph.
        positions: int64 [rows], where in its sequence.
        tiles: int32 [tiles, 4], of prefill chunks (see ``attention_gpu.plan_tiles``); None where each row is the only
            one of its sequence.
        places, ancestors: int64 [rows], of draft trees, each of which has a tile (see ``attention_gpu.attend_chunks``).
            A row's token stands in the history at its place.
        tile_rows: of the largest tile; None: that of prefill.
    """

    slots: Tensor
    positions: Tensor
    tiles: Tensor | None = None
    places: Tensor | None = None
    ancestors: Tensor | None = None
    tile_rows: int | None = None


@dataclass(frozen=True)
class _Product:
    """A dense weight [out, in], and its bias float32 [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, linear: Linear) -> "_Product":
        weight, bias = linear.dense()
        return cls(weight, None if bias is None else bias.float())

    def __call__(self, x: Tensor) -> Tensor:
        """Torch's product, for many rows."""
        return functional.linear(x, self.weight, None if self.bias is None else self.bias.to(x.dtype))


@dataclass(frozen=True)
class _Layer:
    """A layer's weights, and which of the ropes it has.

    Norms are plain, float32; those after attention and network are there for Gemma alone.
    """

    attention: attention.LayerAttention
    rope: int
    activation: Activation
    qkv: _Product
    output: _Product
    gate_up: _Product
    down: _Product
    attention_norm: Tensor
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    post_mlp_norm: Tensor | None


class FusedDecoder:
    """A decoder's step over a paged cache, in whatever dtype its weights have.

    Args:
        decoder: whose weights, not quantised.
        history: int64 [slots, max_length], the tokens of each sequence.
        page_table: int32 [slots, max_pages].
        kv: the cache of each layer, see :func:`freewheel.models.decoder.kv_cache_shape`.

    Raises:
        ModelError: quantised weights.
    """

    def __init__(self, decoder: Decoder, history: Tensor, page_table: Tensor, kv: Sequence[Tensor]) -> None:
        if not isinstance(decoder.embedding.table, Tensor):
            raise ModelError("quantised weights have to be expanded for this device: choose another dtype than auto")
        self.spec = decoder.spec
        self.dtype = decoder.dtype
        self.device = decoder.device
        self.vocab_size = decoder.spec.vocab_size
        self._history = history
        self._page_table = page_table
        self._kv = kv
        self._table = decoder.embedding.table
        ropes = list(decoder.frequencies)
        self._frequencies = torch.stack([decoder.frequencies[rope] for rope in ropes])
        self._factors = torch.tensor([rope.attention_factor for rope in ropes], device=decoder.device)
        self._layers = [_unpack(decoder.spec, layer, ropes.index(layer.rope)) for layer in decoder.layers]
        self._norm = _plain(decoder.norm)
        self._head = _Product.of(decoder.head)
        self._chained = dependent_launch(history.device)

    def __call__(self, rows: Rows, logit_rows: Tensor | None = None) -> Tensor:
        """One step. The rows' keys and values are written into the cache.

        Args:
            rows: at least one.
            logit_rows: int64 [m], the rows whose logits are wanted; None for all.

        Returns:
            logits [m, vocab_size] in the weights' dtype.
        """
        count = len(rows.slots)
        stream = self._table.new_empty(count, self.spec.hidden_size, dtype=torch.float32)
        rotations = stream.new_empty(len(self._factors), count, self._frequencies.shape[1], 2)
        products.embed(
            stream, rotations, self._table, self._history, rows.slots, rows.positions, self._frequencies,
            self._factors, self.spec.embedding_scale, places=rows.places,
        )  # fmt: skip
        if rows.tiles is None and count <= products.MOST_ROWS:
            return self._few(stream, rotations, rows)
        return self._many(stream, rotations, rows, logit_rows)

    def _few(self, stream: Tensor, rotations: Tensor, rows: Rows) -> Tensor:
        spec, chained = self.spec, self._chained
        count = len(stream)
        partials = self._partials(count, count)
        qkv = stream.new_empty(count, self._layers[0].attention.columns)
        activated = stream.new_empty(count, spec.intermediate_size)
        attended = stream.new_empty(count, spec.num_heads * spec.head_dim)
        merges = partials is not None and spec.head_dim & (spec.head_dim - 1) == 0
        for index, (layer, cache) in enumerate(zip(self._layers, self._kv, strict=True)):
            products.product(
                qkv, stream, layer.qkv.weight, norm=layer.attention_norm, eps=spec.norm_eps, bias=layer.qkv.bias,
                chained=chained, early=count == 1 and index > 0,  # attention reads early what the embedding writes
            )  # fmt: skip
            self._attend_alone(layer, qkv, rotations, cache, rows, partials or attended)
            if partials and merges and layer.post_attention_norm is None:
                weight, bias = layer.output.weight, layer.output.bias
                products.combine_product(
                    stream, layer.attention, partials, rows.positions, weight, bias=bias, add=True, chained=chained
                )
            else:
                if partials:
                    attention.combine(layer.attention, partials, rows.positions, attended, chained=chained)
                self._add(stream, attended, layer.output, layer.post_attention_norm)
            products.product(
                activated, stream, layer.gate_up.weight, norm=layer.mlp_norm, eps=spec.norm_eps,
                bias=layer.gate_up.bias, activation=layer.activation, chained=chained,
            )  # fmt: skip
            self._add(stream, activated, layer.down, layer.post_mlp_norm)
        logits = torch.empty(count, self.vocab_size, dtype=self.dtype, device=stream.device)
        products.product(
            logits, stream, self._head.weight, norm=self._norm, eps=spec.norm_eps, bias=self._head.bias,
            cap=spec.logit_softcap, chained=chained,
        )  # fmt: skip
        return logits

    def _add(self, stream: Tensor, x: Tensor, product: _Product, norm: Tensor | None) -> None:
        """Add a product of few rows to the stream, normalised first where the model has a norm there."""
        if norm is None:
            products.product(stream, x, product.weight, bias=product.bias, add=True, chained=self._chained)
            return
        result = torch.empty_like(stream)
        products.product(result, x, product.weight, bias=product.bias, chained=self._chained)
        products.add_norm(stream, result, eps=self.spec.norm_eps, delta_norm=norm, chained=self._chained)

    def _many(self, stream: Tensor, rotations: Tensor, rows: Rows, logit_rows: Tensor | None) -> Tensor:
        spec, chained = self.spec, self._chained
        count = len(stream)
        if rows.tiles is None:
            partials = self._partials(count, count)
        else:
            partials = None if rows.ancestors is None else self._partials(count, len(rows.tiles))
        normed = stream.new_empty(stream.shape, dtype=self.dtype)
        activated = normed.new_empty(count, spec.intermediate_size)
        attended = normed.new_empty(count, spec.num_heads * spec.head_dim)
        if rows.tiles is not None:  # for rows of no tile
            if partials:
                partials.peaks.fill_(-torch.inf)
            else:
                attended.zero_()
        narrow = spec.hidden_size < NARROW
        wide = narrow or count <= MOST_WIDE_ROWS * (2 if spec.hidden_size == NARROW else 1)
        wide &= rows.tiles is None or rows.ancestors is not None  # prompts have many more rows
        products.norm(normed, stream, self._layers[0].attention_norm, spec.norm_eps, chained=chained)
        for index, (layer, cache) in enumerate(zip(self._layers, self._kv, strict=True)):
            qkv = self._times(layer.qkv, normed, wide and (narrow or count <= MOST_WIDE_QKV_ROWS))
            attend = self._attend_alone if rows.tiles is None else self._attend_tiles
            attend(layer, qkv, rotations, cache, rows, partials or attended)
            if partials:
                attention.combine(
                    layer.attention, partials, rows.positions, attended, places=rows.places, chained=chained
                )
            products.add_norm(
                stream, self._times(layer.output, attended, wide), eps=spec.norm_eps,
                delta_norm=layer.post_attention_norm, norm=layer.mlp_norm, out=normed, chained=chained,
            )  # fmt: skip
            if wide:
                products.wide_product(
                    activated, normed, layer.gate_up.weight, bias=layer.gate_up.bias, activation=layer.activation,
                    chained=chained,
                )  # fmt: skip
            else:
                products.gated(activated, layer.gate_up(normed), layer.activation, chained=chained)
            last = index + 1 == len(self._layers)
            products.add_norm(
                stream, self._times(layer.down, activated, wide), eps=spec.norm_eps,
                delta_norm=layer.post_mlp_norm, norm=self._norm if last else self._layers[index + 1].attention_norm,
                out=normed, chained=chained,
            )  # fmt: skip
        logits = self._head(normed if logit_rows is None else normed[logit_rows])
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    def _times(self, product: _Product, x: Tensor, wide: bool) -> Tensor:
        """The product of many rows; if ``wide`` by our kernel, in shares that what follows adds up."""
        if not wide:
            return product(x)
        y = x.new_empty(products.shares(product.weight, len(x)), len(x), len(product.weight), dtype=torch.float32)
        products.wide_product(y, x, product.weight, bias=product.bias, chained=self._chained)
        return y

    def _attend_alone(
        self,
        layer: _Layer,
        qkv: Tensor,
        rotations: Tensor,
        cache: Tensor,
        rows: Rows,
        out: Tensor | attention.Partials,
    ) -> None:
        attention.attend_decode(
            layer.attention, qkv, rotations[layer.rope], cache, self._page_table, rows.slots, rows.positions, out,
            chained=self._chained,
        )  # fmt: skip

    def _attend_tiles(
        self,
        layer: _Layer,
        qkv: Tensor,
        rotations: Tensor,
        cache: Tensor,
        rows: Rows,
        out: Tensor | attention.Partials,
    ) -> None:
        assert rows.tiles is not None
        table, chained = self._page_table, self._chained
        places = rows.positions if rows.places is None else rows.places
        shape = len(rows.slots), self.spec.num_heads, self.spec.head_dim
        queries = torch.empty(shape, dtype=self.dtype, device=qkv.device)
        attention.rotate_and_store(
            layer.attention, qkv, rotations[layer.rope], cache, table, rows.slots, places, queries, chained=chained
        )
        attention.attend_chunks(
            layer.attention, queries, cache, table, rows.tiles, rows.positions, out,
            tile_rows=rows.tile_rows or self.tile_rows, places=places, ancestors=rows.ancestors, chained=chained,
        )  # fmt: skip

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of prefill."""
        return attention.rows_per_tile(self._layers[0].attention)

    def tree_rows(self, rows: int) -> int:
        """Rows of a tile of trees that have so many on average: in the smallest that tensor cores take without loss."""
        layer = self._layers[0].attention
        return attention.rows_per_tile(layer, min(max(power(rows * layer.group), 16), 64))

    def _partials(self, count: int, tiles: int) -> attention.Partials | None:
        """Room for what splits of the context leave for so many rows; None where so many tiles of them need none."""
        splits = attention.default_splits(tiles, self.spec.num_kv_heads)
        if splits == 1:
            return None
        # Float16 could not hold sums over a long context.
        dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32
        return attention.make_partials(count, self._layers[0].attention, splits, self._table.device, dtype)


def _plain(norm: RMSNorm) -> Tensor:
    """The weight as the model means it; the norm keeps it times sqrt(n)."""
    return norm.weight / math.sqrt(norm.weight.shape[-1])


def _unpack(spec: ModelSpec, layer: Layer, rope: int) -> _Layer:
    head_norm = layer.qk_norm
    post_attention, post_mlp = layer.post_attention_norm, layer.post_mlp_norm
    return _Layer(
        attention.LayerAttention(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=layer.window,
            norm_weight=None if head_norm is None else _plain(head_norm).contiguous(),
            eps=spec.norm_eps,
        ),
        rope=rope,
        activation=layer.activation,
        qkv=_Product.of(layer.qkv),
        output=_Product.of(layer.output),
        gate_up=_Product.of(layer.gate_up),
        down=_Product.of(layer.down),
        attention_norm=_plain(layer.attention_norm),
        post_attention_norm=None if post_attention is None else _plain(post_attention),
        mlp_norm=_plain(layer.mlp_norm),
        post_mlp_norm=None if post_mlp is None else _plain(post_mlp),
    )
