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
        scale: float32 [out, in / group].
        offset: float32 [out, in / group].
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

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        out, columns = self.shape
        grouped = self.values.view(out, columns // self.group, self.group).to(torch.float32)
        return torch.addcmul(self.offset[..., None], grouped, self.scale[..., None]).view(out, columns)
