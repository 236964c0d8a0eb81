"""One decoder for Llama, Mistral, Qwen 2 and 3, SmolLM and Gemma 3, by its :class:`ModelSpec`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from freewheel.models.errors import ModelError
from freewheel.models.spec import ModelSpec
from freewheel.models.weights import Weights
from freewheel.ops.activation import Activation, gated
from freewheel.ops.attention import AttentionPlan, paged_attention, plan_attention, write_kv
from freewheel.ops.linear import Embedding, Linear
from freewheel.ops.norm import RMSNorm
from freewheel.ops.quantize import GroupQuantized
from freewheel.ops.rope import Rope, paired, rotate_, rotation
from freewheel.ops.rows import RowBatch

Quantize = Literal["none", "auto", "int8"]

_ROTATED = frozenset({"q_proj", "k_proj", "q_norm", "k_norm"})


def kv_cache_shape(spec: ModelSpec, num_pages: int, page_size: int) -> tuple[int, ...]:
    """The shape of one layer's cache: (2 (keys, values), kv_heads, num_pages, page_size, head_dim).

    What a page holds before it is written must be finite: it may be read, with weight 0.
    """
    return 2, spec.num_kv_heads, num_pages, page_size, spec.head_dim


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of cache that a token takes in all layers."""
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class Decoder:
    """The model: rows of tokens in, logits out.

    Args:
        spec: the shape.
        weights: tensors by checkpoint name.
        dtype: of activations, cache and logits.
        quantize: what becomes of quantised weights: "none" expands them to ``dtype``, "auto" takes the product closest
            to each, "int8" the one that is fastest with many rows (see :mod:`freewheel.ops.linear`).

    Raises:
        ModelError: a weight is missing or has another shape than the specification says, or the specification has no
            use for one that belongs to a layer or is a bias.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantize: Quantize = "none",
    ):
        if dtype == torch.float16 and not spec.float16:
            raise ModelError(f"{spec.family} overflows in float16; use bfloat16 or float32")
        reader = _Reader(spec, weights, dtype, torch.device(device), quantize)
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        embedding = reader.stored("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.embedding = Embedding.pack(embedding, dtype)
        self.layers = [Layer(spec, reader, index) for index in range(spec.num_layers)]
        self.norm = reader.norm("model.norm.weight", spec.hidden_size)
        if not spec.tied_embeddings:
            embedding = reader.stored("lm_head.weight", spec.vocab_size, spec.hidden_size)
        self.head = reader.pack([embedding])
        reader.refuse_unused()
        self.frequencies = {rope: rope.frequencies(spec.head_dim).to(device) for rope in set(spec.ropes)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of matrices that a step reads: everything but the embedding table, of which it reads a few rows."""
        layers = (layer.weight_bytes for layer in self.layers)
        return sum(layers) + self.head.nbytes

    def forward(self, batch: RowBatch, kv: Sequence[Tensor]) -> Tensor:
        """One step.

        Args:
            batch: the rows.
            kv: the cache of each layer (see :func:`kv_cache_shape`); the rows' keys and values are written into it.

        Returns:
            The logits of ``batch.logit_rows``, [m, vocab_size].
        """
        spec = self.spec
        rotations = {
            rope: rotation(batch.positions, frequencies, rope.attention_factor)
            for rope, frequencies in self.frequencies.items()
        }
        plans = {window: plan_attention(batch, kv[0], window) for window in set(spec.windows)}
        hidden = self.embedding(batch.token_ids)
        if spec.embedding_scale != 1.0:
            hidden = hidden * spec.embedding_scale
        for layer, cache in zip(self.layers, kv, strict=True):
            hidden = layer(hidden, cache, rotations[layer.rope], plans[layer.window])
        logits = self.head(self.norm(hidden.index_select(0, batch.logit_rows)))
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits


class Layer:
    """Attention and feed-forward network, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, reader: "_Reader", index: int):
        name = f"model.layers.{index}."
        hidden_size, head_dim = spec.hidden_size, spec.head_dim
        query, key_value = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, head_dim
        self.scale = spec.attention_scale
        self.activation: Activation = spec.activation
        self.rope: Rope = spec.ropes[index]
        self.window = spec.windows[index]

        attention = name + "self_attn."
        qkv = {attention + "q_proj": query, attention + "k_proj": key_value, attention + "v_proj": key_value}
        self.qkv = reader.linear(qkv, hidden_size, bias=spec.qkv_bias)
        self.output = reader.linear({attention + "o_proj": hidden_size}, query, bias=spec.output_bias)
        gate_up = dict.fromkeys([name + "mlp.gate_proj", name + "mlp.up_proj"], spec.intermediate_size)
        self.gate_up = reader.linear(gate_up, hidden_size, bias=spec.mlp_bias)
        self.down = reader.linear({name + "mlp.down_proj": hidden_size}, spec.intermediate_size, bias=spec.mlp_bias)

        self.qk_norm = reader.head_norms(attention, spec) if spec.qk_norm else None
        self.attention_norm = reader.norm(name + "input_layernorm.weight", hidden_size)
        if spec.sandwich_norms:
            self.post_attention_norm = reader.norm(name + "post_attention_layernorm.weight", hidden_size)
            self.mlp_norm = reader.norm(name + "pre_feedforward_layernorm.weight", hidden_size)
            self.post_mlp_norm = reader.norm(name + "post_feedforward_layernorm.weight", hidden_size)
        else:
            self.mlp_norm = reader.norm(name + "post_attention_layernorm.weight", hidden_size)
            self.post_attention_norm = self.post_mlp_norm = None

    @property
    def weight_bytes(self) -> int:
        return sum(linear.nbytes for linear in (self.qkv, self.output, self.gate_up, self.down))

    def __call__(self, hidden: Tensor, cache: Tensor, rotation: Tensor, plan: AttentionPlan) -> Tensor:
        attended = self.attend(self.attention_norm(hidden), cache, rotation, plan)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        hidden.add_(attended)
        mixed = self.down(gated(self.gate_up(self.mlp_norm(hidden)), self.activation))
        if self.post_mlp_norm is not None:
            mixed = self.post_mlp_norm(mixed)
        return hidden.add_(mixed)

    def attend(self, hidden: Tensor, cache: Tensor, rotation: Tensor, plan: AttentionPlan) -> Tensor:
        qkv = self.qkv(hidden).float().view(len(hidden), -1, self.head_dim)
        query_key = qkv[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            query_key.copy_(self.qk_norm(query_key))
        rotate_(query_key, rotation)
        qkv = qkv.type_as(hidden)
        write_kv(qkv[:, self.num_heads :], cache, plan.kv_slots)
        return self.output(paged_attention(qkv[:, : self.num_heads], cache, plan, self.scale))


@dataclass(frozen=True)
class _Reader:
    """Takes weights by name, checked against the specification's sizes, into packed form."""

    spec: ModelSpec
    weights: Weights
    dtype: torch.dtype
    device: torch.device
    quantize: Quantize
    taken: set[str] = field(default_factory=set)

    def stored(self, name: str, *shape: int) -> Tensor | GroupQuantized:
        """The named weight, as the file has it but for dimensions that are to be rotated, and expanded on a GPU."""
        weight = self.weights[name]
        self.taken.add(name)
        if tuple(weight.shape) != shape:
            raise ModelError(f"weight {name!r} has shape {list(weight.shape)}, but the config says {list(shape)}")
        if name.split(".")[-2] in _ROTATED:
            weight = weight[paired(shape[0], self.spec.head_dim)]
        if isinstance(weight, GroupQuantized) and self.device.type != "cpu":
            weight = weight.dequantize().to(self.dtype)  # Products of quantised weights are made for CPUs.
        return weight.to(self.device) if isinstance(weight, Tensor) else weight

    def refuse_unused(self) -> None:
        """Raises :class:`ModelError` for a weight that the model applies and this decoder does not."""
        for name in self.weights:
            applied = name.startswith("model.layers.") or name.endswith("bias")
            # Old checkpoints store the frequencies of the rotary embedding.
            if applied and name not in self.taken and not name.endswith("rotary_emb.inv_freq"):
                raise ModelError(f"weight {name!r} has no place in a {self.spec.family} model of this configuration")

    def linear(self, out_features: dict[str, int], in_features: int, *, bias: bool) -> Linear:
        """One product for the named projections."""
        parts = [self.stored(f"{name}.weight", size, in_features) for name, size in out_features.items()]
        biases = [self._vector(f"{name}.bias", size) for name, size in out_features.items()] if bias else None
        return self.pack(parts, torch.cat(biases) if biases else None)

    def pack(self, parts: Sequence[Tensor | GroupQuantized], bias: Tensor | None = None) -> Linear:
        """One product, quantised as far as it may be."""
        if self.quantize == "none":
            parts = [part.dequantize() if isinstance(part, GroupQuantized) else part for part in parts]
        return Linear.pack(parts, self.dtype, bias, int4=self.quantize == "auto")

    def norm(self, name: str, size: int) -> RMSNorm:
        """The norm with the named weight."""
        return RMSNorm(self._norm_weight(name, size), self.spec.norm_eps)

    def head_norms(self, attention: str, spec: ModelSpec) -> RMSNorm:
        """One norm for all query heads and key heads, its weight [heads + kv_heads, head_dim]."""
        query = self._norm_weight(attention + "q_norm.weight", spec.head_dim).expand(spec.num_heads, -1)
        key = self._norm_weight(attention + "k_norm.weight", spec.head_dim).expand(spec.num_kv_heads, -1)
        return RMSNorm(torch.cat([query, key]), spec.norm_eps)

    def _norm_weight(self, name: str, size: int) -> Tensor:
        weight = self._vector(name, size)
        return weight + 1 if self.spec.norm_offset and not self.weights.norm_offset_applied else weight

    def _vector(self, name: str, size: int) -> Tensor:
        """float32 [size]."""
        vector = self.stored(name, size)
        assert isinstance(vector, Tensor)
        return vector.to(torch.float32)
