"""Models of a known shape with random weights: as fast as the real ones, and nothing has to be fetched."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from freewheel.models.errors import ModelError
from freewheel.models.files import read_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from freewheel.models.load import LoadedModel
    from freewheel.models.spec import ModelSpec
    from freewheel.models.tokenizer import Tokenizer

Config = dict[str, Any]
DummyDType = Literal["float32", "bfloat16", "float16"]

QWEN3: Config = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, Config] = {
    "qwen3-0.6b": {**QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}
STD = 0.02  # of a matrix's entries, as models are initialised


def shape_config(name: str) -> Config:
    """The configuration of a shape by name, or the one in a ``config.json``.

    Raises:
        ValueError: there is neither.
    """
    if name in SHAPES:
        return SHAPES[name]
    if not Path(name).is_file():
        raise ValueError(f"shape: {name!r} is neither a config.json file nor one of {', '.join(SHAPES)}")
    return read_json(Path(name))


class DummyWeights:
    """Random weights for a specification, each made on the device when it is asked for, the same every time.

    Matrices are normal with standard deviation ``STD``, norm weights 1, biases 0.
    """

    norm_offset_applied = True

    def __init__(self, spec: "ModelSpec", dtype: "torch.dtype", device: "torch.device") -> None:
        self._shapes = weight_shapes(spec)
        self._dtype = dtype
        self._device = device

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __getitem__(self, name: str) -> "Tensor":
        import torch

        if name not in self._shapes:
            raise ModelError(f"there is no weight {name!r} in this shape")
        shape = self._shapes[name]
        weight = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return weight.fill_(0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        return weight.normal_(0.0, STD, generator=generator)


def weight_shapes(spec: "ModelSpec") -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a model, by checkpoint name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, key_value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    projections = {
        "self_attn.q_proj": (query, hidden, spec.qkv_bias),
        "self_attn.k_proj": (key_value, hidden, spec.qkv_bias),
        "self_attn.v_proj": (key_value, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, query, spec.output_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), hidden)
    if spec.sandwich_norms:
        norms |= dict.fromkeys(("pre_feedforward_layernorm", "post_feedforward_layernorm"), hidden)
    if spec.qk_norm:
        norms |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), spec.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in projections.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
    return shapes


class NoText:
    """The encoder of a model that knows no text."""

    def encode(self, text: str, ignored: str = "") -> list[int]:
        del ignored
        raise ValueError(f"prompt: a model of random weights has token ids and no text, not {text!r:.50}")


def dummy_model(shape: str, dtype: str, device: "torch.device | str") -> "LoadedModel":
    """A model of a shape, with random weights. Its tokenizer spells out ids, reads no text and knows no end.

    Raises:
        ModelError: the shape's configuration is not supported.
        ValueError: there is no such shape or dtype.
    """
    import torch

    from freewheel.models.decoder import Decoder
    from freewheel.models.load import LoadedModel
    from freewheel.models.spec import ModelSpec

    if dtype not in get_args(DummyDType):
        raise ValueError(f"dtype of random weights must be one of {', '.join(get_args(DummyDType))}, not {dtype!r}")
    spec, device, kind = ModelSpec.from_config(shape_config(shape)), torch.device(device), getattr(torch, dtype)
    decoder = Decoder(spec, DummyWeights(spec, kind, device), dtype=kind, device=device)
    return LoadedModel(Path(shape), spec, decoder, id_tokenizer(spec.vocab_size))


def id_tokenizer(vocab_size: int) -> "Tokenizer":
    """One that spells out ids, reads no text and knows no end."""
    from freewheel.models.tokenizer import Tokenizer

    return Tokenizer(
        NoText(),
        token_text=lambda id: f"<{id}>",
        text_bytes=str.encode,
        vocab_size=vocab_size,
        special_ids=(),
        added_ids=(),
        bos_token_id=None,
        eos_token_ids=(),
    )
