"""GGUF files: metadata, mapped tensors, and both in the names that Hugging Face checkpoints use.

The layout follows the specification of the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a
header, typed key-value pairs, tensor descriptions, and the aligned tensor data. Versions 2 and 3, little-endian, in one
file.

Nothing in a file is trusted: every count and offset is checked against the file's size before it is used, so that a
truncated or foreign file is a :class:`ModelError` and never a large allocation.
"""

import math
import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from freewheel.models.errors import ModelError
from freewheel.ops.quantize import GroupQuantized

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_SMALLEST_PAIR = 8 + 4 + 1  # an empty key, a value type, a one-byte value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type, an offset
_MAX_DIMENSIONS = 4


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


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: ``shape`` in torch's order (rows first), ``offset`` in bytes from the start of the file."""

    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file mapped into memory.

    Attributes:
        path: the file.
        metadata: values by key. Strings are ``str``, arrays of strings ``list[str]``, arrays of numbers NumPy arrays.
        tensors: descriptions by GGUF name (``blk.0.attn_q.weight``).
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _bytes: Tensor

    def tensor(self, name: str) -> Tensor | GroupQuantized:
        """Reads one tensor by its GGUF name.

        Unquantised tensors are views of the mapped file in their own dtype (not to be written to); quantised ones, which
        must be matrices, are unpacked into new memory.
        """
        info = self.tensors[name]
        data = self._bytes[info.offset : info.offset + info.nbytes]
        if info.type.unpack is None:
            assert info.type.dtype is not None
            return data.view(info.type.dtype).view(info.shape)
        if len(info.shape) != 2:
            raise ModelError(
                f"{self.path}: quantised tensor {name!r} has shape {info.shape}; only matrices are supported"
            )
        values, scale, offset = info.type.unpack(data.view(-1, info.type.nbytes))
        rows = info.shape[0]
        return GroupQuantized(
            values.reshape(info.shape),
            scale.reshape(rows, -1),
            offset.reshape(rows, -1),
            bits=info.type.bits,
            group=values.shape[1] // scale.shape[1],
        )


def read_gguf(path: str | Path) -> GGUFFile:
    """Reads the metadata and tensor descriptions of a GGUF file and maps its tensors.

    Raises:
        ModelError: the file is missing, truncated, not GGUF, or uses a version, byte order or tensor type that is not
            supported, or is one part of several.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            # Copy-on-write, because torch wants writable memory; nothing here writes to it.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if size else b""
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    reader = _Reader(path, data)
    if data[:4] != b"GGUF":
        reader.fail("is not a GGUF file")
    reader.position = 4
    version = reader.scalar("<u4")
    if version & 0xFFFF == 0:
        reader.fail("is a big-endian GGUF file; only little-endian files are supported")
    if version not in (2, 3):
        reader.fail(f"has GGUF version {version}; versions 2 and 3 are supported")
    tensor_count = reader.scalar("<u8")
    pair_count = reader.scalar("<u8")

    reader.need(pair_count * _SMALLEST_PAIR, f"{pair_count} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = reader.string()
        if key in metadata:
            reader.fail(f"has the metadata key {key!r} twice")
        metadata[key] = reader.value()
    if metadata.get("split.count", 1) != 1:
        reader.fail(f"is one part of {metadata['split.count']}; join the parts into one file (gguf-split --merge)")

    reader.need(tensor_count * _SMALLEST_TENSOR, f"{tensor_count} tensors")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in tensors:
            reader.fail(f"has the tensor {name!r} twice")
        tensors[name] = reader.tensor_info(name)

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        reader.fail(f"has the alignment {alignment!r}; a multiple of 8 is expected")
    start = -(-reader.position // alignment) * alignment
    for name, info in tensors.items():
        if info.offset % alignment:
            reader.fail(f"has tensor {name!r} at an offset that is not a multiple of the alignment {alignment}")
        end = start + info.offset + info.nbytes
        if end > len(data):
            reader.fail(f"is truncated: tensor {name!r} ends at byte {end}, the file at {len(data)}")
    tensors = {
        name: TensorInfo(info.type, info.shape, start + info.offset, info.nbytes) for name, info in tensors.items()
    }
    return GGUFFile(path, metadata, tensors, torch.frombuffer(data, dtype=torch.uint8))


class _Reader:
    """A position in a file's bytes; every step checks that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def fail(self, reason: str) -> NoReturn:
        raise ModelError(f"{self.path}: {reason}")

    def need(self, count: int, what: str) -> None:
        if count > len(self.data) - self.position:
            self.fail(f"is truncated or damaged: it has no room for {what} at byte {self.position}")

    def scalar(self, kind: str) -> Any:
        dtype = np.dtype(kind)
        self.need(dtype.itemsize, "a number")
        value = np.frombuffer(self.data, dtype, 1, self.position)[0].item()
        self.position += dtype.itemsize
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # A vocabulary has hundreds of thousands of these: the loop is flat on purpose.
        data, size, position = self.data, len(self.data), self.position
        unpack_length = struct.Struct("<Q").unpack_from
        strings = []
        try:
            for _ in range(count):
                (length,) = unpack_length(data, position)
                position += 8
                end = position + length
                if end > size:
                    self.fail(
                        f"is truncated or damaged: it has no room for a text of {length} bytes at byte {position}"
                    )
                strings.append(data[position:end].decode())
                position = end
        except struct.error:
            self.fail(f"is truncated or damaged: a text was expected at byte {position}")
        except UnicodeDecodeError:
            self.fail(f"is damaged: the text at byte {position} is not UTF-8")
        self.position = position
        return strings

    def value(self) -> Any:
        kind = self.scalar("<u4")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            self.fail(f"is damaged: unknown value type {kind} at byte {self.position - 4}")
        kind, count = self.scalar("<u4"), self.scalar("<u8")
        if kind == _STRING:
            self.need(count * 8, f"an array of {count} texts")
            return self.strings(count)
        if kind not in _SCALARS:
            self.fail(f"has an array with elements of type {kind} at byte {self.position}, which is not supported")
        dtype = np.dtype(_SCALARS[kind])
        self.need(count * dtype.itemsize, f"an array of {count} numbers")
        array = np.frombuffer(self.data, dtype, count, self.position)
        self.position += array.nbytes
        return array

    def tensor_info(self, name: str) -> TensorInfo:
        dimensions = self.scalar("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(f"is damaged: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("<u8") for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("<u4"), self.scalar("<u8")
        if kind not in _TENSOR_TYPES:
            supported = ", ".join(tensor_type.name for tensor_type in _TENSOR_TYPES.values())
            label = _OTHER_TENSOR_TYPES.get(kind, f"number {kind}")
            self.fail(f"has tensor {name!r} of type {label}; supported are {supported}")
        tensor_type = _TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % tensor_type.block:
            self.fail(f"is damaged: tensor {name!r} of type {tensor_type.name} has shape {shape}")
        return TensorInfo(tensor_type, shape, offset, math.prod(shape) // tensor_type.block * tensor_type.nbytes)


# The block layouts are those of ggml's ggml-common.h. All multiplications below are exact in float32 (an 11-bit float16
# scale by a sub-scale of at most 7 bits by a value of at most 8), so the values are those of ggml to the bit.


def _float16(blocks: Tensor, start: int) -> Tensor:
    """float32 [blocks, 1] from the two bytes at ``start``."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).to(torch.float32)


def _nibbles(packed: Tensor, run: int) -> Tensor:
    """[blocks, n] bytes to [blocks, 2n] values: of each ``run`` bytes first all low nibbles, then all high ones."""
    runs = packed.unflatten(1, (-1, 1, run))
    return torch.cat([runs & 0xF, runs >> 4], dim=2).flatten(1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """[blocks, 4] bytes to [blocks, 32] values 0 or 16."""
    bits = torch.arange(8, dtype=torch.uint8)
    return (((packed[:, :, None] >> bits) & 1) << 4).flatten(1)


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
    return blocks[:, 2:] ^ 0x80, scale, -128 * scale  # the exclusive or adds 128 to a signed byte


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


_TENSOR_TYPES = {
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
_OTHER_TENSOR_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
