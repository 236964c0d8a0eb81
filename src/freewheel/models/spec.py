"""What a model is made of, read from a configuration in the keys of Hugging Face's ``config.json``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freewheel.models.errors import ModelError
from freewheel.ops.activation import Activation
from freewheel.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Published Gemma 3 configurations leave out what equals the default of its class.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer of the Llama kind.

    Attributes:
        family: the configuration's ``model_type``.
        norm_eps: added to the mean square in every normalisation.
        norm_offset: whether checkpoints store norm weights less 1 (Gemma).
        sandwich_norms: whether attention and feed-forward outputs are normalised too (Gemma).
        qk_norm: whether query and key heads are normalised before their rotation.
        qkv_bias, output_bias, mlp_bias: which projections have biases.
        attention_scale: what query-key products are multiplied by.
        embedding_scale: what embeddings are multiplied by.
        logit_softcap: c in ``c * tanh(logits / c)``, if any.
        tied_embeddings: whether the embedding is also the output head.
        float16: whether activations stay within the range of float16.
        ropes: the rotary embedding of each layer.
        windows: the sliding window of each layer in tokens, the row's own included; None: it sees everything.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    activation: Activation
    norm_eps: float
    norm_offset: bool
    sandwich_norms: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    attention_scale: float
    embedding_scale: float
    logit_softcap: float | None
    tied_embeddings: bool
    float16: bool
    ropes: tuple[Rope, ...]
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ModelSpec":
        """Reads a configuration of Llama, Mistral, Qwen 2 and 2.5, Qwen 3 or Gemma 3 (the text part).

        Raises:
            ModelError: the architecture or something in it is not supported, or a key is missing or impossible.
        """
        family = _family(config)
        if family == "gemma3":
            config = _required(config, "text_config")
        gemma = family.startswith("gemma3")
        if gemma:
            config = _GEMMA3_DEFAULTS | {key: value for key, value in config.items() if value is not None}
        _refuse_unsupported(config)
        hidden_size = _size(config, "hidden_size")
        num_heads = _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", num_heads)
        head_dim = _size(config, "head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise ModelError(
                f"config: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        if head_dim % 2:
            raise ModelError(f"config: head_dim {head_dim} is odd, which rotary embedding cannot be")
        kinds = _layer_kinds(config, family)
        attention_bias = bool(config.get("attention_bias"))
        return cls(
            family=family,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=_size(config, "max_position_embeddings"),
            activation=_activation(config),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            norm_offset=gemma,
            sandwich_norms=gemma,
            qk_norm=gemma or family == "qwen3",
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias and family not in ("mistral", "qwen2"),
            mlp_bias=bool(config.get("mlp_bias")) and family == "llama",
            attention_scale=(config.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            logit_softcap=config.get("final_logit_softcapping"),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            float16=not gemma,
            ropes=tuple(_rope(config, kind) for kind in kinds),
            windows=tuple(_window(config) if kind == "sliding_attention" else None for kind in kinds),
        )


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type", "")
    architecture = (config.get("architectures") or [_CLASSES.get(family)])[0]
    if family not in _CLASSES or architecture != _CLASSES[family]:
        raise ModelError(
            f"config: architecture {architecture!r} (model_type {family!r}) is not supported; "
            f"supported are {', '.join(_CLASSES.values())}"
        )
    return family


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ModelError(f"config: quantization_config (quant_method {method!r}) is not supported; use a GGUF file")
    for key, neutral in {
        "partial_rotary_factor": 1,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }.items():
        if config.get(key) not in (None, neutral):
            raise ModelError(f"config: {key} {config[key]!r} is not supported")


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ModelError(f"config: {key!r} is missing")
    return config[key]


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = _required(config, key) if default is None else config.get(key) or default
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config: {key} must be a positive integer, not {value!r}")
    return value


def _activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ModelError(f"config: activation {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layer_kinds(config: Mapping[str, Any], family: str) -> list[str]:
    """'full_attention' or 'sliding_attention' for each layer."""
    layers = _size(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is not None:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != layers:
            raise ModelError(f"config: layer_types must name {layers} full_attention or sliding_attention layers")
        return list(kinds)
    if family == "mistral":
        sliding = [config.get("sliding_window", 4096) is not None] * layers
    elif family in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else layers
        sliding = [layer >= first for layer in range(layers)]
    elif family.startswith("gemma3"):
        pattern = _size(config, "sliding_window_pattern", 6)
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        sliding = [False] * layers
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _window(config: Mapping[str, Any]) -> int:
    return _size(config, "sliding_window", 4096)


def _rope(config: Mapping[str, Any], kind: str) -> Rope:
    """The rotary embedding of a kind of layer, from ``rope_parameters`` (per kind or not) or the older keys."""
    parameters = dict(config.get("rope_parameters") or {})
    if isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    elif "rope_local_base_freq" in config and kind == "sliding_attention":
        parameters = {"rope_theta": config["rope_local_base_freq"]}
    else:
        parameters |= config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if parameters.get("partial_rotary_factor", 1) != 1:
        raise ModelError(f"config: partial_rotary_factor {parameters['partial_rotary_factor']!r} is not supported")
    if name == "default":
        return Rope(theta)
    if name == "linear":
        return Rope(theta, LinearScaling(_number(parameters, "factor")))
    if name == "llama3":
        return Rope(theta, _llama3(parameters, config))
    if name == "yarn":
        return Rope(theta, _yarn(parameters, config))
    raise ModelError(f"config: rope type {name!r} is not supported; supported are default, linear, llama3, yarn")


def _number(parameters: Mapping[str, Any], key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"config: the rope scaling's {key} must be a positive number, not {value!r}")
    return float(value)


def _original_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    return _size({**config, **parameters}, "original_max_position_embeddings", config.get("max_position_embeddings"))


def _llama3(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Llama3Scaling:
    factor, low, high = (_number(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelError(f"config: the rope scaling's low_freq_factor {low} must be below its high_freq_factor {high}")
    return Llama3Scaling(factor, low, high, _original_positions(parameters, config))


def _yarn(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> YarnScaling:
    factor = _number(parameters, "factor")
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        growth = 0.1 * math.log(max(factor, 1.0))  # section 3.4 of the paper; the mscale pair is DeepSeek's
        mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention_factor = growth + 1
        if mscale and mscale_all_dim:
            attention_factor = (mscale * growth + 1) / (mscale_all_dim * growth + 1)
    return YarnScaling(
        factor=factor,
        original_max_positions=_original_positions(parameters, config),
        attention_factor=float(attention_factor),
        beta_fast=float(parameters.get("beta_fast") or 32),
        beta_slow=float(parameters.get("beta_slow") or 1),
        truncate=bool(parameters.get("truncate", True)),
    )
