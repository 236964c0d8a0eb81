"""GGUF files: metadata, mapped tensors, and both in the names that Hugging Face checkpoints use.

The layout follows the specification of the format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): a
header, typed key-value pairs, tensor descriptions, and the aligned tensor data. Versions 2 and 3, little-endian, in one
file.

Nothing in a file is trusted: every count and offset is checked against the file's size before it is used, so that a
truncated or foreign file is a :class:`ModelError` and never a large allocation.
"""

import dataclasses
import math
import mmap
import re
import reprlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from freewheel.models.errors import ModelError
from freewheel.models.gguf_blocks import OTHER_TENSOR_TYPES, TENSOR_TYPES, TensorType
from freewheel.ops.quantize import GroupQuantized

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_SMALLEST_PAIR = 8 + 4 + 1  # an empty key, a value type, a one-byte value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # an empty name, one dimension, a type, an offset
_MAX_DIMENSIONS = 4


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

        Unquantised tensors are views of the mapped file in their own dtype (not to be written to); quantised ones
        (matrices only) are unpacked into new memory.
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
    parts = metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts > 1:
        reader.fail(f"is one part of {reprlib.repr(parts)}; join the parts into one file (gguf-split --merge)")

    reader.need(tensor_count * _SMALLEST_TENSOR, f"{tensor_count} tensors")
    tensors: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        name = reader.string()
        if name in tensors:
            reader.fail(f"has the tensor {name!r} twice")
        tensors[name] = reader.tensor_info(name)

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
        reader.fail(f"has the alignment {reprlib.repr(alignment)}; a multiple of 8 is expected")
    start = -(-reader.position // alignment) * alignment  # the descriptions count from here
    for name, info in tensors.items():
        if info.offset % alignment:
            reader.fail(f"has tensor {name!r} at an offset that is not a multiple of the alignment {alignment}")
        tensors[name] = info = dataclasses.replace(info, offset=start + info.offset)
        if info.offset + info.nbytes > len(data):
            reader.fail(f"is truncated: tensor {name!r} ends at {info.offset + info.nbytes}, the file at {len(data)}")
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
        array = np.frombuffer(self.data, dtype, count, self.position).copy()  # aligned, and free of the mapping
        self.position += array.nbytes
        return array

    def tensor_info(self, name: str) -> TensorInfo:
        dimensions = self.scalar("<u4")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(f"is damaged: tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self.scalar("<u8") for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("<u4"), self.scalar("<u8")
        if kind not in TENSOR_TYPES:
            supported = ", ".join(tensor_type.name for tensor_type in TENSOR_TYPES.values())
            label = OTHER_TENSOR_TYPES.get(kind, f"number {kind}")
            self.fail(f"has tensor {name!r} of type {label}; supported are {supported}")
        tensor_type = TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % tensor_type.block:
            self.fail(f"is damaged: tensor {name!r} of type {tensor_type.name} has shape {shape}")
        return TensorInfo(tensor_type, shape, offset, math.prod(shape) // tensor_type.block * tensor_type.nbytes)


_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),  # Mistral and SmolLM too: their files say llama
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's configuration in the keys of a Hugging Face ``config.json``.

    What GGUF leaves to its readers is filled in: the vocabulary size, whether embeddings are tied, Llama 3's rope
    scaling (a file has only its effect, as ``rope_freqs.weight``), and for Gemma 3 the local rope base, the layer
    pattern and the attention scale (https://arxiv.org/abs/2503.19786).

    Raises:
        ModelError: the architecture is not supported, or a fact is missing or has the wrong type.
    """
    architecture = _architecture(file)
    model_type, class_name = _ARCHITECTURES[architecture]
    facts = _Facts(file, architecture)
    if facts.integer("expert_count", 0, minimum=0):
        raise ModelError(f"{file.path}: mixtures of experts are not supported")
    hidden_size, heads, layers = (
        facts.integer(key) for key in ("embedding_length", "attention.head_count", "block_count")
    )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or embedding.shape[1:] != (hidden_size,):
        raise ModelError(f"{file.path}: has no tensor 'token_embd.weight' with rows of {hidden_size}")
    if f"blk.{layers - 1}.attn_q.weight" not in file.tensors:
        raise ModelError(f"{file.path}: lacks tensors of some of its {layers} layers")
    head_dim = facts.integer("attention.key_length", hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.integer(key, head_dim) != head_dim:
            facts.fail(key, f"differs from the head size {head_dim}, which is not supported")
    rope_theta = facts.number("rope.freq_base", 10_000.0)
    config = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": facts.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_scaling": _rope_scaling(file, facts, rope_theta, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture == "gemma3":
        pattern = facts.integer("attention.sliding_window_pattern", 6)
        config |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": facts.integer("attention.sliding_window"),
            "layer_types": [
                "full_attention" if layer % pattern == pattern - 1 else "sliding_attention" for layer in range(layers)
            ],
            "rope_local_base_freq": facts.number("rope.freq_base_swa", 10_000.0),
            # The 27B model, told by its 62 layers, is the one that does not scale by its head size.
            "query_pre_attn_scalar": hidden_size // heads if layers == 62 else head_dim,
        }
    else:
        config |= {
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        }
        if window := facts.integer("attention.sliding_window", 0, minimum=0):
            if architecture != "llama":  # which layers have it is not said; Mistral's, which are "llama" here, all do
                facts.fail("attention.sliding_window", f"is {window}, which is not supported for {architecture}")
            config |= {"sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    return config


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _ARCHITECTURES:
        label, supported = reprlib.repr(architecture), ", ".join(_ARCHITECTURES)
        raise ModelError(f"{file.path}: the architecture {label} is not supported; supported are {supported}")
    return architecture


class _Facts:
    """Typed access to the metadata of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            self.fail(key, f"is {reprlib.repr(value)}; an integer from {minimum} up is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            self.fail(key, f"is {reprlib.repr(value)}; a positive number is expected")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self.fail(key, f"is {reprlib.repr(value)}; a text is expected")
        return value

    def fail(self, key: str, reason: str) -> NoReturn:
        raise ModelError(f"{self.file.path}: {self.architecture}.{key} {reason}")

    def _get(self, key: str, default: Any) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            self.fail(key, "is missing")
        return value


def _rope_scaling(file: GGUFFile, facts: _Facts, theta: float, head_dim: int) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope_scaling(file, theta, head_dim)
    # As in llama.cpp: a factor without a type is linear, "scale_linear" is its name in old files, and none is 1.
    kind = facts.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        facts.fail("rope.scaling.type", f"is {reprlib.repr(kind)}; none, linear and yarn are supported")
    factor = facts.number("rope.scaling.factor", facts.number("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if facts.number(f"rope.scaling.{key}", 1.0) != 1:
                facts.fail(f"rope.scaling.{key}", "differs from 1, which is not supported")
        scaling |= {
            "original_max_position_embeddings": facts.integer("rope.scaling.original_context_length"),
            "beta_fast": facts.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": facts.number("rope.scaling.yarn_beta_slow", 1.0),
        }
    return scaling


def _llama3_rope_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers the parameters whose effect, a divisor for each frequency, the file stores."""
    divisors = file.tensor("rope_freqs.weight")
    divisors = divisors.dequantize() if isinstance(divisors, GroupQuantized) else divisors.to(torch.float32)
    factor, low, high, original = round(divisors.max().item(), 3), 1.0, 4.0, 8192
    turns = original / (2 * math.pi * theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim))
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    expected = (1 / ((1 - smooth) / factor + smooth)).to(torch.float32)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        raise ModelError(f"{file.path}: rope_freqs.weight holds other frequencies than Llama 3's; not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFWeights:
    """A file's tensors under the names of Hugging Face checkpoints, each read when it is asked for.

    Llama's query and key rows, which GGUF keeps in the order of interleaved rotary embedding, come back in the order of
    the checkpoint. Gemma's norm weights stay as GGUF stores them, with 1 already added.

    Raises:
        ModelError: the architecture is not supported, or a tensor has no place in it.
    """

    norm_offset_applied = True

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        architecture = _architecture(file)
        layer_names = _GEMMA_LAYER_NAMES if architecture == "gemma3" else _LAYER_NAMES
        self._stored_names: dict[str, str] = {}
        for stored_name in file.tensors:
            name = _TOP_NAMES.get(stored_name)
            if match := _LAYER_TENSOR.fullmatch(stored_name):
                layer, part, kind = match.groups()
                name = f"model.layers.{layer}.{layer_names[part]}.{kind}" if part in layer_names else None
            if name is not None:
                self._stored_names[name] = stored_name
            elif stored_name != "rope_freqs.weight":  # the configuration has its content
                raise ModelError(f"{file.path}: the tensor {stored_name!r} has no place in a {architecture} model")
        self._rotary_heads: dict[str, int] = {}
        if architecture == "llama":
            facts = _Facts(file, architecture)
            heads = facts.integer("attention.head_count")
            self._rotary_heads = {"q_proj": heads, "k_proj": facts.integer("attention.head_count_kv", heads)}

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def __getitem__(self, name: str) -> Tensor | GroupQuantized:
        """The tensor; :class:`ModelError` if the file has none of that name."""
        if name not in self._stored_names:
            raise ModelError(f"{self._file.path}: has no tensor for {name!r}")
        tensor = self._file.tensor(self._stored_names[name])
        heads = self._rotary_heads.get(name.split(".")[-2])
        return tensor if heads is None else self._unpermuted(name, tensor, heads)

    def _unpermuted(self, name: str, tensor: Tensor | GroupQuantized, heads: int) -> Tensor | GroupQuantized:
        """From pairs (0, half), (1, half + 1), ... of a head's rows back to 0, 1, ..., half, half + 1, ..."""
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise ModelError(f"{self._file.path}: the {rows} rows of {name!r} do not split into {heads} even heads")
        order = torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
        if isinstance(tensor, Tensor):
            return tensor[order]
        return dataclasses.replace(
            tensor, values=tensor.values[order], scale=tensor.scale[order], offset=tensor.offset[order]
        )
