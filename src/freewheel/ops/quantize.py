"""Group-quantised weights in one neutral form, whatever file format they came from."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupQuantized:
    """A matrix whose rows are cut into groups that share a scale and an offset.

    ``w[o, i] = scale[o, i // group] * values[o, i] + offset[o, i // group]``, computed in float32.

    Attributes:
        values: uint8 [out, in] (``signed`` formats are shifted by the reader so that values are never negative),
            each below ``2 ** bits``.
        scale: float32 or float16 [out, in / group].
        offset: float32 or float16 [out, in / group].
        bits: 2 to 8.
        group: columns that share a scale; divides ``in``.
    """

    values: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(out, in)``."""
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes + self.scale.nbytes + self.offset.nbytes

    def __getitem__(self, rows: slice | Tensor) -> "GroupQuantized":
        """The given rows: a view for a slice, a copy for int64 [n]."""
        return GroupQuantized(self.values[rows], self.scale[rows], self.offset[rows], self.bits, self.group)

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        out, columns = self.shape
        grouped = self.values.view(out, columns // self.group, self.group).to(torch.float32)
        scale, offset = self.scale.to(torch.float32), self.offset.to(torch.float32)
        return torch.addcmul(offset[..., None], grouped, scale[..., None]).view(out, columns)

    def compact(self) -> "GroupQuantized":
        """The same matrix, with scales and offsets in float16 where that loses nothing."""
        return GroupQuantized(
            self.values, _lossless_half(self.scale), _lossless_half(self.offset), self.bits, self.group
        )


def _lossless_half(numbers: Tensor) -> Tensor:
    half = numbers.to(torch.float16)
    return half if torch.equal(half.to(numbers.dtype), numbers) else numbers
