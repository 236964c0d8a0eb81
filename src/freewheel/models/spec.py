"""What a model is made of, read from a configuration in the keys of Hugging Face's ``config.json``."""

import math
import reprlib
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

# Far beyond any model, and small enough that nothing computed from a configuration overflows.
_LARGEST_SIZE = 1 << 31
_MOST_LAYERS = 1 << 12
_LARGEST_NUMBER = 1e15


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a decoder-only transformer of the Llama kind.

    Attributes:
        family: the configuration's ``model_type``.
        norm_eps: added to the mean square in every normalisation.
        norm_offset: whether checkpoints store norm weights less 1 (Gemma).
        sandwich_norms: whether attention and feed-forward outputs are normalised too (Gemma).
        qk_norm: whether query and key heads are normalised before their rotation.
        max_positions: tokens of context. As in vLLM, "linear" and "yarn" rope scaling multiply the context that the
            model had before; a "llama3" configuration, and Gemma 3's, already gives what comes of it.
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
            config = _mapping(config, "text_config")
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
        attention_bias = _flag(config, "attention_bias") and family != "mistral"  # as in transformers
        return cls(
            family=family,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_positions=_max_positions(config, gemma),
            activation=_activation(config),
            norm_eps=_number(config, "rms_norm_eps", 1e-6),
            norm_offset=gemma,
            sandwich_norms=gemma,
            qk_norm=gemma or family == "qwen3",
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=_flag(config, "mlp_bias") and family == "llama",
            attention_scale=(_number(config, "query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
            embedding_scale=hidden_size**0.5 if gemma else 1.0,
            logit_softcap=_optional_number(config, "final_logit_softcapping"),
            tied_embeddings=_flag(config, "tie_word_embeddings"),
            float16=not gemma,
            ropes=tuple(_rope(config, kind) for kind in kinds),
            windows=tuple(_window(config) if kind == "sliding_attention" else None for kind in kinds),
        )


def _family(config: Mapping[str, Any]) -> str:
    family, architectures = config.get("model_type"), config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise ModelError(f"config: architectures must be a list of names, not {reprlib.repr(architectures)}")
    expected = _CLASSES.get(family) if isinstance(family, str) else None
    architecture = architectures[0] if architectures else expected
    if expected is None or architecture != expected:
        raise ModelError(
            f"config: architecture {architecture!r:.99} (model_type {reprlib.repr(family)}) is not supported; "
            f"supported are {', '.join(_CLASSES.values())}"
        )
    assert isinstance(family, str)
    return family


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if quantization := _mapping(config, "quantization_config", {}):
        method = reprlib.repr(quantization.get("quant_method"))
        raise ModelError(f"config: quantization_config (quant_method {method}) is not supported; use a GGUF file")
    for key, neutral in {
        "partial_rotary_factor": 1,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }.items():
        if config.get(key) not in (None, neutral):
            raise ModelError(f"config: {key} {reprlib.repr(config[key])} is not supported")


def _value(config: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of a key, which may be null or missing if there is a default."""
    value = config.get(key)
    if value is None and default is None:
        raise ModelError(f"config: {key!r} is missing")
    return default if value is None else value


def _mapping(config: Mapping[str, Any], key: str, default: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
    value = _value(config, key, default)
    if not isinstance(value, Mapping):
        raise ModelError(f"config: {key} must be a mapping, not {reprlib.repr(value)}")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = _value(config, key, default)
    if not isinstance(value, bool):
        raise ModelError(f"config: {key} must be true or false, not {reprlib.repr(value)}")
    return value


def _size(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST_SIZE
) -> int:
    value = _value(config, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ModelError(f"config: {key} must be an integer from {least} to {most}, not {reprlib.repr(value)}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None, *, above: float = 0) -> float:
    value = _value(config, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= _LARGEST_NUMBER:
        raise ModelError(f"config: {key} must be a number above {above}, not {reprlib.repr(value)}")
    return float(value)


def _optional_number(config: Mapping[str, Any], key: str) -> float | None:
    return None if config.get(key) is None else _number(config, key)


def _activation(config: Mapping[str, Any]) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ModelError(f"config: activation {reprlib.repr(name)} is not supported; supported are {supported}")
    return _ACTIVATIONS[name]


def _layer_kinds(config: Mapping[str, Any], family: str) -> list[str]:
    """'full_attention' or 'sliding_attention' for each layer."""
    layers = _size(config, "num_hidden_layers", most=_MOST_LAYERS)
    kinds = config.get("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in known for kind in kinds):
            raise ModelError(f"config: layer_types must name {layers} full_attention or sliding_attention layers")
        return kinds
    if family == "mistral":
        sliding = [config.get("sliding_window", 4096) is not None] * layers
    elif family in ("qwen2", "qwen3"):
        slides = _flag(config, "use_sliding_window") and config.get("sliding_window", 4096) is not None
        first = _size(config, "max_window_layers", 28, least=0) if slides else layers
        sliding = [layer >= first for layer in range(layers)]
    elif family.startswith("gemma3"):
        pattern = _size(config, "sliding_window_pattern", 6)
        sliding = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        sliding = [False] * layers
    return ["sliding_attention" if slides else "full_attention" for slides in sliding]


def _window(config: Mapping[str, Any]) -> int:
    return _size(config, "sliding_window", 4096)


def _rope_parameters(config: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """What ``rope_parameters`` (per kind of layer or not) or the older keys say of a kind."""
    parameters = _mapping(config, "rope_parameters", {})
    if kind in parameters:
        return _mapping(parameters, kind)
    if "rope_local_base_freq" in config and kind == "sliding_attention":
        return {"rope_theta": config["rope_local_base_freq"]}
    return {**parameters, **_mapping(config, "rope_scaling", {})}


def _rope_type(parameters: Mapping[str, Any]) -> Any:
    return parameters.get("rope_type") or parameters.get("type") or "default"


def _max_positions(config: Mapping[str, Any], gemma: bool) -> int:
    positions = _size(config, "max_position_embeddings")
    parameters = _rope_parameters(config, "full_attention")
    name = _rope_type(parameters)
    if gemma or name not in ("linear", "yarn"):
        return positions
    if name == "yarn":
        positions = _original_positions(parameters, config)
    return int(positions * max(1.0, _number(parameters, "factor")))


def _rope(config: Mapping[str, Any], kind: str) -> Rope:
    parameters = _rope_parameters(config, kind)
    theta = _number(parameters, "rope_theta", _number(config, "rope_theta", 10_000.0, above=1), above=1)
    name = _rope_type(parameters)
    if parameters.get("partial_rotary_factor") not in (None, 1):
        factor = reprlib.repr(parameters["partial_rotary_factor"])
        raise ModelError(f"config: partial_rotary_factor {factor} is not supported")
    if name == "default":
        return Rope(theta)
    if name == "linear":
        return Rope(theta, LinearScaling(_number(parameters, "factor")))
    if name == "llama3":
        return Rope(theta, _llama3(parameters, config))
    if name == "yarn":
        return Rope(theta, _yarn(parameters, config))
    raise ModelError(
        f"config: rope type {reprlib.repr(name)} is not supported; supported are default, linear, llama3, yarn"
    )


def _original_positions(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    key = "original_max_position_embeddings"
    return _size(parameters, key, _size(config, key, _size(config, "max_position_embeddings")))


def _llama3(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> Llama3Scaling:
    factor, low, high = (_number(parameters, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise ModelError(f"config: the rope scaling's low_freq_factor {low} must be below its high_freq_factor {high}")
    return Llama3Scaling(factor, low, high, _original_positions(parameters, config))


def _yarn(parameters: Mapping[str, Any], config: Mapping[str, Any]) -> YarnScaling:
    factor = _number(parameters, "factor")
    growth = 0.1 * math.log(max(factor, 1.0))  # section 3.4 of the paper; the mscale pair is DeepSeek's
    attention_factor = growth + 1
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        mscale, mscale_all_dim = _number(parameters, "mscale"), _number(parameters, "mscale_all_dim")
        attention_factor = (mscale * growth + 1) / (mscale_all_dim * growth + 1)
    return YarnScaling(
        factor=factor,
        original_max_positions=_original_positions(parameters, config),
        attention_factor=_number(parameters, "attention_factor", attention_factor),
        beta_fast=_number(parameters, "beta_fast", 32),
        beta_slow=_number(parameters, "beta_slow", 1),
        truncate=_flag(parameters, "truncate", True),
    )
