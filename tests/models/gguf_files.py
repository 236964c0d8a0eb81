"""Small GGUF files, written by the gguf package: an implementation that is not the one under test."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FLOAT16_AT = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the blocks of each quantised type hold float16 numbers."""

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": False}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"tie_word_embeddings": True, "sliding_window": 24,
                                                     "query_pre_attn_scalar": 16}),
}  # fmt: skip


def random_blocks(kind: str, rows: int, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [rows, blocks * bytes]: random bits, with finite float16 scales."""
    rng = np.random.default_rng(seed)
    _, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (rows, blocks, nbytes), dtype=np.uint8)
    for start in FLOAT16_AT[kind]:
        scale = rng.normal(size=(rows, blocks, 1)).astype(np.float16)
        data[..., start : start + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, NDArray[Any] | tuple[str, NDArray[np.uint8]]],
    *,
    big_endian: bool = False,
) -> Path:
    """Writes a file; a quantised tensor is a pair of its type's name and its bytes, uint8 [rows, bytes of a row]."""
    writer = gguf.GGUFWriter(
        path, architecture, endianess=gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE
    )
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            kind, data = tensor
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_model(architecture: str) -> PreTrainedModel:
    """A random model of a family, in float32, with norm weights and biases that are not the initial ones."""
    model_class, config_class, options = FAMILIES[architecture]
    torch.manual_seed(0)
    model = model_class(config_class(**COMMON | options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model.eval()


def convert(path: Path, architecture: str, model: PreTrainedModel, more: Mapping[str, Any] | None = None) -> Path:
    """Writes a model the way llama.cpp's converter does, with ``more`` metadata."""
    config: Any = model.config
    metadata = {
        f"{architecture}.block_count": config.num_hidden_layers,
        f"{architecture}.context_length": config.max_position_embeddings,
        f"{architecture}.embedding_length": config.hidden_size,
        f"{architecture}.feed_forward_length": config.intermediate_size,
        f"{architecture}.attention.head_count": config.num_attention_heads,
        f"{architecture}.attention.head_count_kv": config.num_key_value_heads,
        f"{architecture}.attention.key_length": (COMMON | FAMILIES[architecture][2])["head_dim"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{architecture}.rope.freq_base": COMMON["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"token{i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    }
    if architecture == "gemma3":
        metadata["gemma3.attention.sliding_window"] = config.sliding_window
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    tensors = {}
    for name, tensor in checkpoint(model).items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        stored_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored_name is not None
        tensors[stored_name] = tensor.numpy()
    return write_gguf(path, architecture, metadata | dict(more or {}), tensors)


def checkpoint(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's tensors as a checkpoint holds them: without the head when it is tied."""
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state
