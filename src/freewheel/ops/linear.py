"""Matrix products with packed weights, and embedding tables.

Dense weights are multiplied in their own dtype. Quantised weights have two products:

- int4 holds 4-bit groups as they are (scales and offsets rounded to bfloat16) and multiplies bfloat16 rows. It reads
  the fewest bytes and adds the smallest error, but takes every row's full time from about eight rows up.
- int8 takes any weight: one scale per output, in a rotated basis, against rows that are rotated and rounded to int8
  with one scale each. The rotation (a Hadamard matrix on blocks of columns, as in QuaRot, arXiv 2404.00456) spreads
  outliers over their block: without it the divergence that int8 adds to SmolLM2 is eight times as large.

Either one serves every number of rows, so that a row's result does not depend on the rows beside it: int4 sums each
output in the order of the columns, int8 sums integers. Of int8 only the rotation, and of dense products everything, is
left to MKL and oneDNN, whose order of summing may change with the number of rows in the last bit.
"""

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from freewheel.ops.quantize import GroupQuantized

# Orthonormal blocks whose entries are powers of two. A block of 32 would not be, and MKL's product with a 32 x 32
# matrix depends on the number of rows in the last bit.
_ROTATION_BLOCKS = (64, 16)

# Rows of a weight in float32 at a time while it is packed: a head of 262,144 rows is never dense as a whole.
_PACKING_ROWS = 1024


class Linear:
    """A weight [out, in] packed for products with rows [rows, in]; make one with ``Linear.pack``."""

    def __init__(self, product: "_Dense | _Int4 | _Int8", out_features: int, in_features: int):
        self.product = product
        self.out_features = out_features
        self.in_features = in_features

    @classmethod
    def pack(
        cls,
        parts: Sequence[Tensor | GroupQuantized],
        dtype: torch.dtype,
        bias: Tensor | None = None,
        *,
        int4: bool = True,
    ) -> "Linear":
        """One product for all ``parts``, whose results come side by side.

        When every part is quantised, the product is quantised too, where the processor can do that; else it is dense.

        Args:
            parts: each [out_i, in]; quantised ones may differ in bits and group.
            dtype: of a dense weight, its inputs and results. int4 results are bfloat16, int8 ones float32; both take
                inputs of either type.
            bias: [sum of out_i].
            int4: whether parts of 4 bits are multiplied as they are; else quantised parts meet in int8.
        """
        quantized = [part for part in parts if isinstance(part, GroupQuantized)]
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        if len(quantized) == len(parts) and quantized[0].values.device.type == "cpu":
            if int4 and _Int4.takes(quantized):
                return cls(_Int4(quantized, bias), out_features, in_features)
            if _int8_levels():
                return cls(_Int8.pack(quantized, bias), out_features, in_features)
        dense = [part.dequantize() if isinstance(part, GroupQuantized) else part for part in parts]
        weight = dense[0].to(dtype) if len(dense) == 1 else torch.cat([part.to(dtype) for part in dense])
        return cls(_Dense(weight, None if bias is None else bias.to(dtype)), out_features, in_features)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return self.product(x)

    def dense(self) -> tuple[Tensor, Tensor | None]:
        """Weight [out, in] and bias as torch's own product has them; of a product that is not quantised."""
        assert isinstance(self.product, _Dense)
        weight = self.product.weight
        return weight.to_dense() if self.product.packed else weight, self.product.bias

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.product.nbytes


class Embedding:
    """A table [entries, hidden] that stays quantised if it was; make one with ``Embedding.pack``."""

    def __init__(self, table: Tensor | GroupQuantized, dtype: torch.dtype):
        self.table = table
        self.dtype = dtype

    @classmethod
    def pack(cls, weight: Tensor | GroupQuantized, dtype: torch.dtype) -> "Embedding":
        """``weight`` is [entries, hidden]; lookups come in ``dtype``. Quantised rows lose nothing more."""
        return cls(weight.compact() if isinstance(weight, GroupQuantized) else weight.to(dtype), dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [rows] -> [rows, hidden]."""
        rows = self.table[ids]
        return rows.dequantize().to(self.dtype) if isinstance(rows, GroupQuantized) else rows

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.table.nbytes


class _Dense:
    """A product in the weight's dtype: oneDNN's packed one on CPU where it exists, else torch's own.

    oneDNN sums a lone row's long products in another order than those of several rows, so a lone row is doubled. On
    processors with AVX-512 its result was then seen to be the same, bit for bit, in a batch of any size.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.bias = bias
        self.packed = _onednn_packs(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None) if self.packed else weight
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        rows = x.expand(2, -1).contiguous() if len(x) == 1 else x.contiguous()
        return torch.ops.mkldnn._linear_pointwise.default(rows, self.weight, self.bias, "none", [], "")[: len(x)]


class _Int4:
    """A product of bfloat16 rows and 4-bit groups, summed in float32, by torch's weight-only kernel.

    ``w[o, i] = scale[o, g] * (values[o, i] - 8) + centre[o, g]`` with ``centre = offset + 8 * scale``.
    """

    def __init__(self, parts: Sequence[GroupQuantized], bias: Tensor | None):
        values = torch.cat([part.values for part in parts])
        scale = torch.cat([part.scale.to(torch.float32) for part in parts])
        offset = torch.cat([part.offset.to(torch.float32) for part in parts])
        self.group = parts[0].group
        self.bias = None if bias is None else bias.to(torch.bfloat16)
        self.weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.to(torch.int32), 1)
        # [in / group, out, 2 (scale, centre)]
        self.scales = torch.stack([scale, offset + 8 * scale], dim=-1).transpose(0, 1).to(torch.bfloat16).contiguous()
        self.nbytes = self.weight.nbytes + self.scales.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @staticmethod
    def takes(parts: Sequence[GroupQuantized]) -> bool:
        """Whether the processor has the vector instructions and the kernel the sizes."""
        return (
            torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
            and all(part.bits == 4 and part.group == parts[0].group for part in parts)
            and parts[0].group in (32, 64, 128, 256)
            and sum(part.shape[0] for part in parts) % 16 == 0
        )

    def __call__(self, x: Tensor) -> Tensor:
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
        y = multiply(x.bfloat16(), self.weight, self.group, self.scales)
        return y if self.bias is None else y.add_(self.bias)


class _Int8:
    """A product of int8 rows and int8 weights, summed in int32, by FBGEMM.

    ``y[r, o] = row_scale[r] * weight_scale[o] * sum_i q_row[r, i] * q_weight[o, i] + bias[o]``
    """

    def __init__(
        self,
        weight: torch.ScriptObject,
        levels: int,
        rotation: Tensor | None,
        bias: Tensor | None,
        nbytes: int,
    ):
        self.weight = weight
        self.levels = levels
        self.rotation = rotation
        self.bias = bias
        self.nbytes = nbytes

    @classmethod
    def pack(cls, parts: Sequence[GroupQuantized], bias: Tensor | None) -> "_Int8":
        out_features, in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        rotation = _rotation(in_features)
        values = torch.empty(out_features, in_features, dtype=torch.int8)
        scale = torch.empty(out_features, 1)
        start = 0
        for part in parts:
            for begin in range(0, part.shape[0], _PACKING_ROWS):
                dense = _rotate(part[begin : begin + _PACKING_ROWS].dequantize(), rotation)
                rows = slice(start, start := start + len(dense))
                # A row of zeros must not divide by its largest value.
                scale[rows] = (_largest(dense) / 127).clamp_min_(torch.finfo(torch.float32).tiny)
                values[rows] = dense.div_(scale[rows]).round_()
        return cls(
            _fbgemm_pack(values, scale.view(-1)),
            _int8_levels(),
            rotation,
            None if bias is None else bias.to(torch.float32),
            # FBGEMM keeps, beside the values, a float32 scale, an int32 zero point and an int32 sum for each output.
            values.nbytes + 12 * out_features + (0 if bias is None else 4 * out_features),
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = _rotate(x.float(), self.rotation)
        # A row of zeros divides by zero, but whatever integers come of that are multiplied by zero in the end.
        scale = _largest(x)
        y = _fbgemm_multiply(x.div_(scale), self.weight, self.levels).mul_(scale)
        return y if self.bias is None else y.add_(self.bias)


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude of each row: [rows, n] -> [rows, 1]."""
    return x.abs().amax(dim=-1, keepdim=True)


def _rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Multiply each block of columns by ``rotation``, into new memory."""
    if rotation is None:
        return x.clone()
    blocks = x.reshape(-1, len(rotation))
    # A lone block would be a matrix-vector product, which MKL sums in another order on some processors.
    rotated = torch.mm(blocks.expand(2, -1) if len(blocks) == 1 else blocks, rotation)
    return rotated[: len(blocks)].view(x.shape)


@cache
def _hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5


def _rotation(in_features: int) -> Tensor | None:
    return next((_hadamard(block) for block in _ROTATION_BLOCKS if in_features % block == 0), None)


def _onednn_packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bfloat16 or weight.dtype == torch.float32


def _fbgemm_pack(values: Tensor, scale: Tensor) -> torch.ScriptObject:
    """``values``: int8 [out, in]; ``scale``: float32 [out]."""
    engine = torch.backends.quantized.engine
    with warnings.catch_warnings():
        # Quantised tensors are to leave torch one day; FBGEMM's packing takes nothing else.
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(values, scale, zeros, 0)  # pyright: ignore[reportPrivateImportUsage]
    try:
        torch.backends.quantized.engine = "fbgemm"
        return torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = engine


def _fbgemm_multiply(x: Tensor, weight: torch.ScriptObject, levels: int) -> Tensor:
    """Round ``x`` (float32 [rows, in], within -1 and 1) to ``levels`` steps each way and multiply."""
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(x, 1 / levels, levels + 1, weight)


@cache
def _int8_levels() -> int:
    """Steps each way that rows are rounded to: 127, 63 where pairs of products are summed in 16 bits, 0 without FBGEMM.

    Processors without VNNI saturate such sums, which a weight and a row of largest values shows.
    """
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return 0
    size = 64
    weight = _fbgemm_pack(torch.full((size, size), 127, dtype=torch.int8), torch.ones(size))
    exact = torch.full((1, size), 127.0 * size)
    return 127 if torch.allclose(_fbgemm_multiply(torch.ones(1, size), weight, 127), exact) else 63
