"""Storage types of GGUF tensors and how their blocks unpack.

The block layouts are those of ggml (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). Scale times value
is exact in float32, with at most 24 bits (Q6_K: 11 of a float16 significand, 7 of a sub-scale, 6 of a value).
Adding the offset rounds at most once, hence the weights are those of ggml to the bit.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorType:
    """How a tensor's elements are stored: ``block`` elements in ``nbytes`` bytes.

    ``unpack`` turns uint8 [blocks, nbytes] into values (uint8 [blocks, block], each below ``2 ** bits``), scales and
    offsets (float32 [blocks, block / group]). Types that are not quantised have a ``dtype`` instead.
    """

    name: str
    block: int
    nbytes: int
    dtype: torch.dtype | None = None
    bits: int = 0
    unpack: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]] | None = None


_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
# Eight bytes for each byte, from its bits: 0 or 16.
_FIFTH_BITS = ((torch.arange(256)[:, None] >> torch.arange(8) & 1) << 4).to(torch.uint8).view(torch.int64).flatten()


def _float16(blocks: Tensor, start: int) -> Tensor:
    """float32 [blocks, 1] from the two bytes at ``start``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """[blocks, n] bytes to [blocks, 2n] values: of each ``run`` bytes first all low nibbles, then all high ones."""
    # A copy, because a file's bytes are not aligned for words.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int64)
    halves = torch.stack([words & _LOW_NIBBLES, (words >> 4) & _LOW_NIBBLES])
    # As elements of 16 bytes, because moving single bytes is six times slower.
    halves = halves.view(torch.complex128).unflatten(2, (-1, run // 16))
    return halves.permute(1, 2, 0, 3).contiguous().view(packed.shape[0], -1).view(torch.uint8)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes to [blocks, 32] values 0 or 16."""
    return _FIFTH_BITS.index_select(0, packed.flatten().to(torch.int32)).view(torch.uint8).view(-1, 32)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _float16(blocks, 0)
    return _nibbles(blocks[:, 2:], 16), scale, -8 * scale


def _q4_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks[:, 4:], 16), _float16(blocks, 0), _float16(blocks, 2)


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _float16(blocks, 0)
    return _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]), _float16(blocks, 0), _float16(blocks, 2)


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = _float16(blocks, 0)
    return blocks[:, 2:] ^ 0x80, scale, -128 * scale  # flipping its sign bit adds 128 to a signed byte


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and offsets of Q4_K and Q5_K: [blocks, 8] each, from eight 6-bit pairs packed in twelve bytes."""
    first, second, third = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([first & 63, (third & 0xF) | (first >> 6 << 4)], dim=1)
    minima = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    return _float16(blocks, 0) * scales, -_float16(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (((blocks[:, None, 16:48] >> bits) & 1) << 4).flatten(1)
    return _nibbles(blocks[:, 48:], 32) | fifth, *_k_scales(blocks)


def _q6_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts) & 3
    scale = _float16(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    return _nibbles(blocks[:, :128], 64) | (high << 4).flatten(1), scale, -32 * scale


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4, dtype=torch.float32),
    1: TensorType("F16", 1, 2, dtype=torch.float16),
    30: TensorType("BF16", 1, 2, dtype=torch.bfloat16),
    2: TensorType("Q4_0", 32, 18, bits=4, unpack=_q4_0),
    3: TensorType("Q4_1", 32, 20, bits=4, unpack=_q4_1),
    6: TensorType("Q5_0", 32, 22, bits=5, unpack=_q5_0),
    7: TensorType("Q5_1", 32, 24, bits=5, unpack=_q5_1),
    8: TensorType("Q8_0", 32, 34, bits=8, unpack=_q8_0),
    12: TensorType("Q4_K", 256, 144, bits=4, unpack=_q4_k),
    13: TensorType("Q5_K", 256, 176, bits=5, unpack=_q5_k),
    14: TensorType("Q6_K", 256, 210, bits=6, unpack=_q6_k),
}
OTHER_TENSOR_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
