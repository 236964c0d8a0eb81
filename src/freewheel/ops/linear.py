"""Matrix products with packed weights."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from freewheel.ops.quantize import GroupQuantized


def _dense(part: Tensor | GroupQuantized, dtype: torch.dtype) -> Tensor:
    return (part.dequantize() if isinstance(part, GroupQuantized) else part).to(dtype)


class Linear:
    """A weight [out, in] packed for products with rows [rows, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight = weight
        self.bias = bias
        self.out_features, self.in_features = weight.shape

    @classmethod
    def pack(cls, parts: Sequence[Tensor | GroupQuantized], dtype: torch.dtype, bias: Tensor | None = None) -> "Linear":
        """Concatenate ``parts`` (each [out_i, in]) along ``out``; ``bias`` is [out]. ``dtype`` is that of inputs and results."""
        weight = torch.cat([_dense(part, dtype) for part in parts])
        return cls(weight, None if bias is None else bias.to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""
        return functional.linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class Embedding:
    """Rows of a table [entries, hidden]."""

    def __init__(self, weight: Tensor | GroupQuantized, dtype: torch.dtype):
        self.weight = weight
        self.dtype = dtype

    @classmethod
    def pack(cls, weight: Tensor | GroupQuantized, dtype: torch.dtype) -> "Embedding":
        """``weight`` is [entries, hidden]; lookups come in ``dtype``."""
        return cls(weight if isinstance(weight, GroupQuantized) else weight.to(dtype), dtype)

    def __call__(self, ids: Tensor) -> Tensor:
        """int64 [rows] -> [rows, hidden]."""
        weight = self.weight
        if isinstance(weight, Tensor):
            return weight[ids]
        rows = GroupQuantized(weight.values[ids], weight.scale[ids], weight.offset[ids], weight.bits, weight.group)
        return rows.dequantize().to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        weight = self.weight
        if isinstance(weight, Tensor):
            return weight.nbytes
        return weight.values.nbytes + weight.scale.nbytes + weight.offset.nbytes
