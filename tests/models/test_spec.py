"""Configurations: what each family means, both generations of rope keys, and clear refusals."""

import math
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freewheel.models import ModelError
from freewheel.models.spec import ModelSpec
from freewheel.ops.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def family(name: str, **changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**LLAMA, "architectures": None, "model_type": name, **changes})


def llama(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config(LLAMA | changes)


def test_optional_keys_of_llama_have_its_defaults() -> None:
    spec = llama(num_key_value_heads=None, head_dim=None)
    assert (spec.num_kv_heads, spec.head_dim) == (4, 16)
    assert spec.attention_scale == 16**-0.5
    assert spec.ropes == (Rope(10_000.0),) * 4
    assert spec.windows == (None,) * 4
    assert not any([spec.tied_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm])


def test_head_dim_need_not_be_a_share_of_the_hidden_size() -> None:
    assert llama(head_dim=32).head_dim == 32


@pytest.mark.parametrize(
    ("name", "changes", "qkv", "output"),
    [
        ("llama", {"attention_bias": True}, True, True),
        ("qwen2", {}, True, False),
        ("qwen3", {}, False, False),
        ("qwen3", {"attention_bias": True}, True, True),
        ("mistral", {}, False, False),
        ("mistral", {"attention_bias": True}, False, False),
    ],
)
def test_biases(name: str, changes: dict[str, Any], qkv: bool, output: bool) -> None:
    spec = family(name, **changes)
    assert (spec.qkv_bias, spec.output_bias) == (qkv, output)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("llama", {"sliding_window": 8}, [None] * 4),
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 8}, [8] * 4),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}, [None, None, None, 8]),
        ("qwen2", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 4),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None]),
        ("gemma3_text", {"sliding_window": 8}, [8] * 4),
        (
            "gemma3_text",
            {"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 3]},
            [None, 8, 8, 8],
        ),
    ],
)
def test_windows(name: str, changes: dict[str, Any], windows: list[int | None]) -> None:
    assert list(family(name, **changes).windows) == windows


def test_gemma3_facts() -> None:
    spec = family("gemma3_text", head_dim=24, query_pre_attn_scalar=30, sliding_window_pattern=2)
    assert all([spec.norm_offset, spec.sandwich_norms, spec.qk_norm, spec.tied_embeddings])
    assert not spec.float16
    assert spec.activation == "gelu_tanh"
    assert spec.embedding_scale == 8.0
    assert spec.attention_scale == 30**-0.5
    assert spec.ropes == (Rope(10_000.0), Rope(1_000_000.0)) * 2


def test_gemma3_scales_the_global_rope_only() -> None:
    scaled = Rope(1e6, LinearScaling(8.0))
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert family("gemma3_text", **old, sliding_window_pattern=2).ropes == (Rope(1e4), scaled) * 2
    new = {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        }
    }
    assert family("gemma3_text", **new, sliding_window_pattern=2).ropes == (Rope(1e4), scaled) * 2


def test_the_text_part_of_a_multimodal_gemma3() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    spec = ModelSpec.from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    )
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("name", "parameters", "scaling"),
    [
        ("default", {}, None),
        ("linear", {"factor": 2}, LinearScaling(2.0)),
        ("llama3", LLAMA3, Llama3Scaling(8.0, 1.0, 4.0, 512)),
        ("yarn", YARN, YarnScaling(4.0, 512, 1.1386294361119891)),
        ("yarn", YARN | {"attention_factor": 0.5, "beta_fast": 16}, YarnScaling(4.0, 512, 0.5, beta_fast=16.0)),
        ("yarn", {"factor": 4.0}, YarnScaling(4.0, 2048, 1.1386294361119891)),
    ],
)
def test_rope_keys_of_both_generations(name: str, parameters: dict[str, Any], scaling: object) -> None:
    new = llama(rope_parameters={"rope_type": name, "rope_theta": 5e5, **parameters})
    old = llama(rope_theta=5e5, rope_scaling={"type": name, **parameters})
    assert new.ropes == old.ropes == (Rope(5e5, scaling),) * 4  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM.*not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*not supported"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba'.*not supported"),
        ({"architectures": None, "model_type": None}, "architecture.*not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4.0 must be below"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*'awq'.*not supported"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": "many"}, "vocab_size must be an integer from 1 to 2147483648, not 'many'"),
        ({"vocab_size": True}, "vocab_size must be an integer .*, not True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer from 1 to 4096, not 1000000000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, not nan"),
        ({"rms_norm_eps": True}, "rms_norm_eps must be a number above 0, not True"),
        ({"rope_theta": 0}, "rope_theta must be a number above 1, not 0"),
        ({"rope_theta": 10**400}, "rope_theta must be a number above 1"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor must be a number above 0, not -2.0"),
        ({"rope_parameters": [1]}, r"rope_parameters must be a mapping, not \[1\]"),
        ({"quantization_config": "awq"}, "quantization_config must be a mapping, not 'awq'"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
        ({"model_type": ["llama"], "architectures": None}, r"model_type \['llama'\]\) is not supported"),
        ({"layer_types": 4}, "layer_types must name 4"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types must name 4"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types must name 4"),
    ],
)
def test_refusals_name_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        llama(**changes)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 2048),
        ({"type": "linear", "factor": 2.5}, 5120),
        ({"type": "yarn", "factor": 4.0}, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"type": "llama3", **LLAMA3}, 2048),
    ],
)
def test_scaling_extends_the_context(scaling: dict[str, Any] | None, positions: int) -> None:
    assert llama(rope_scaling=scaling).max_positions == positions


def test_gemma3_states_its_extended_context() -> None:
    assert family("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0}).max_positions == 2048


def test_gemma3_refuses_numbers_that_are_none() -> None:
    for key in ("query_pre_attn_scalar", "final_logit_softcapping"):
        for value in (0, -1.0, "256", True):
            with pytest.raises(ModelError, match=f"{key} must be a number above 0"):
                family("gemma3_text", **{key: value})
    with pytest.raises(ModelError, match="text_config must be a mapping, not 'x'"):
        ModelSpec.from_config({"model_type": "gemma3", "text_config": "x"})


ROPE_KEYS = [
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale",
    "mscale_all_dim", "beta_fast", "beta_slow", "truncate", "original_max_position_embeddings", "full_attention",
    "sliding_attention", "partial_rotary_factor",
]  # fmt: skip
KEYS = [
    *LLAMA, *ROPE_KEYS, "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias", "hidden_act",
    "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping", "tie_word_embeddings", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "rope_parameters",
    "rope_scaling", "rope_local_base_freq", "quantization_config", "use_bidirectional_attention", "text_config",
]  # fmt: skip
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**9, 10**400, 1e308, 5e-324])
    | st.floats()
    | st.sampled_from(["", "llama", "linear", "yarn", "llama3", "silu", "full_attention"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=6),
    max_leaves=6,
)


@settings(max_examples=500)
@given(
    name=st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"]),
    changes=st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3),
)
def test_any_value_of_any_key_is_a_spec_or_a_model_error(name: str, changes: dict[str, Any]) -> None:
    text = {"text_config": LLAMA | changes} if name == "gemma3" else {}
    with suppress(ModelError):
        spec = family(name, **text | changes)
        assert all(torch.isfinite(rope.frequencies(16)).all() for rope in spec.ropes)
        numbers = (spec.norm_eps, spec.attention_scale, spec.embedding_scale, spec.logit_softcap or 1.0)
        assert all(0 < number < math.inf for number in numbers)


def test_gemma3_refuses_what_it_does_not_compute() -> None:
    with pytest.raises(ModelError, match="use_bidirectional_attention True is not supported"):
        family("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ModelError, match=r"attn_logit_softcapping 50.0 is not supported"):
        family("gemma3_text", attn_logit_softcapping=50.0)
