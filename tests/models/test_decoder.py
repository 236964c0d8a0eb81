"""The decoder against transformers: every family and rope scaling, tiny random weights, float32 on both sides."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from freewheel.models import ModelError
from freewheel.models.decoder import Decoder, kv_bytes_per_token, kv_cache_shape
from freewheel.models.spec import ModelSpec
from freewheel.ops.quantize import GroupQuantized
from freewheel.ops.rows import RowBatch

PAGE = 4
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough that greedy choices are far apart
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": None}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-yarn-attention-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 0.7}}),
    "llama-yarn-mscale": ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}}),
    "llama-yarn-betas": ("llama", {"rope_parameters": YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 3, "query_pre_attn_scalar": 20},
    ),
    "gemma3-softcap-linear": (
        "gemma3_text",
        {
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 5.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


class Checkpoint:
    norm_offset_applied = False

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> Tensor | GroupQuantized:
        return self.tensors[name]


def make_pair(name: str, device: str = "cpu") -> tuple[Any, Decoder]:
    family, changes = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SIZES | changes)
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter_name, parameter in reference.named_parameters():
        if parameter_name.endswith(("norm.weight", "bias")):  # initialised to constants, which would hide mistakes
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    spec = ModelSpec.from_config(config.to_dict())
    return reference, Decoder(spec, Checkpoint(reference.state_dict()), dtype=torch.float32, device=device)


class Sequences:
    """Sequences in a cache of shuffled pages, and the batches that extend them."""

    def __init__(self, decoder: Decoder, num_pages: int = 64):
        shape = kv_cache_shape(decoder.spec, num_pages, PAGE)
        self.decoder = decoder
        self.kv = [torch.zeros(shape, dtype=decoder.dtype) for _ in range(decoder.spec.num_layers)]
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def extend(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Appends tokens to each named sequence in one batch; the logits of all their rows."""
        slots, positions = [], []
        for sequence, new in tokens.items():
            pages, start = self.pages.setdefault(sequence, []), self.lengths.get(sequence, 0)
            self.lengths[sequence] = start + len(new)
            while len(pages) * PAGE < start + len(new):
                pages.append(self.free.pop())
            positions += range(start, start + len(new))
            slots += [pages[p // PAGE] * PAGE + p % PAGE for p in range(start, start + len(new))]
        batch = RowBatch(
            token_ids=torch.tensor([token for new in tokens.values() for token in new]),
            positions=torch.tensor(positions),
            kv_slots=torch.tensor(slots),
            page_table=[self.pages[sequence] for sequence in tokens],
            logit_rows=torch.arange(len(positions)),
            row_counts=tuple(len(new) for new in tokens.values()),
            kv_lengths=tuple(self.lengths[sequence] for sequence in tokens),
        )
        logits = self.decoder.forward(batch, self.kv)
        return dict(zip(tokens, logits.split(list(batch.row_counts))))


@torch.inference_mode()
def expected(reference: Any, tokens: Sequence[int]) -> Tensor:
    return reference(torch.tensor([tokens])).logits[0]


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_same(actual: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())
    assert torch.equal(actual.argmax(-1), right.argmax(-1))


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest) -> tuple[Any, Decoder]:
    return make_pair(request.param)


def test_whole_prefill(pair: tuple[Any, Decoder]) -> None:
    reference, decoder = pair
    tokens = prompt(90)
    assert_same(Sequences(decoder).extend({0: tokens})[0], expected(reference, tokens))


@pytest.mark.parametrize("sizes", [(5, 6, 1, 18), (1, 1, 1, 27), (16, 14)])
def test_prefill_in_chunks(pair: tuple[Any, Decoder], sizes: tuple[int, ...]) -> None:
    reference, decoder = pair
    tokens = prompt(30)
    sequences, done = Sequences(decoder), 0
    right = expected(reference, tokens)
    for size in sizes:
        assert_same(sequences.extend({0: tokens[done : done + size]})[0], right[done : done + size])
        done += size


def test_decode_steps_of_a_batch_with_mixed_lengths(pair: tuple[Any, Decoder]) -> None:
    reference, decoder = pair
    texts = {s: prompt(length, seed=s) for s, length in enumerate((1, 9, 4, 23, 12))}
    sequences = Sequences(decoder)
    next_tokens = {s: int(logits[-1].argmax()) for s, logits in sequences.extend(texts).items()}
    for _ in range(12):
        texts = {s: [*text, next_tokens[s]] for s, text in texts.items()}
        logits = sequences.extend({s: [token] for s, token in next_tokens.items()})
        for s, text in texts.items():
            assert_same(logits[s], expected(reference, text)[-1:])
        next_tokens = {s: int(row[-1].argmax()) for s, row in logits.items()}


def test_chunks_and_decode_steps_in_one_batch(pair: tuple[Any, Decoder]) -> None:
    reference, decoder = pair
    texts = {s: prompt(40, seed=s) for s in range(5)}
    sequences = Sequences(decoder)
    done = dict.fromkeys(texts, 0)
    for counts in [(3, 1, 8, 1, 2), (1, 1, 10, 12, 1), (7, 1, 1, 1, 9), (1, 5, 1, 1, 1)]:
        new = {s: texts[s][done[s] : done[s] + count] for s, count in enumerate(counts)}
        for s, logits in sequences.extend(new).items():
            start, done[s] = done[s], done[s] + counts[s]
            assert_same(logits, expected(reference, texts[s][: done[s]])[start:])


def test_refuses_weights_of_another_shape() -> None:
    reference, decoder = make_pair("llama")
    tensors = reference.state_dict() | {"model.norm.weight": torch.ones(47)}
    with pytest.raises(ModelError, match=r"'model.norm.weight' has shape \[47\], but the config says \[48\]"):
        Decoder(decoder.spec, Checkpoint(tensors), dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.3.mlp.up_proj.weight",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_refuses_weights_that_it_would_not_apply(name: str) -> None:
    reference, decoder = make_pair("llama")
    with pytest.raises(ModelError, match=f"'{name}' has no place in a llama model"):
        Decoder(decoder.spec, Checkpoint(reference.state_dict() | {name: torch.ones(1)}), dtype=torch.float32)


def test_leaves_out_what_is_not_applied() -> None:
    reference, decoder = make_pair("llama-tied")
    more = {name: torch.ones(1) for name in ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")}
    Decoder(decoder.spec, Checkpoint(reference.state_dict() | more), dtype=torch.float32)


def test_quantised_weights_are_expanded_on_any_device_but_a_cpu() -> None:
    class Quantised(Checkpoint):
        def __getitem__(self, name: str) -> Tensor | GroupQuantized:
            tensor = self.tensors[name]
            if tensor.ndim == 1:
                return tensor
            scale = torch.ones(len(tensor), 1)
            return GroupQuantized(tensor.to(torch.uint8), scale, 0 * scale, bits=8, group=tensor.shape[1])

    reference, decoder = make_pair("llama-tied")
    decoder = Decoder(decoder.spec, Quantised(reference.state_dict()), dtype=torch.bfloat16, device="meta")
    assert isinstance(decoder.embedding.table, Tensor)
    products = [decoder.head]
    for layer in decoder.layers:
        products += [layer.qkv, layer.output, layer.gate_up, layer.down]
    for weight in (decoder.embedding.table, *(product.dense()[0] for product in products)):
        assert weight.device.type == "meta"
        assert weight.dtype is torch.bfloat16


def test_gemma_refuses_float16() -> None:
    reference, decoder = make_pair("gemma3")
    with pytest.raises(ModelError, match="overflows in float16"):
        Decoder(decoder.spec, Checkpoint(reference.state_dict()), dtype=torch.float16)


def test_cache_bytes() -> None:
    _, decoder = make_pair("qwen3")
    shape = kv_cache_shape(decoder.spec, num_pages=5, page_size=PAGE)
    layers = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(decoder.spec.num_layers)]
    assert kv_bytes_per_token(decoder.spec, torch.bfloat16) * 5 * PAGE == sum(layer.nbytes for layer in layers)
