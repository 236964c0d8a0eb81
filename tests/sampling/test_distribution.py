"""The distribution of the draw, exactly and in the draws themselves, against the float64 reference."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from drawing import Draw, p_value, sample_many
from reference import edited_logits, probabilities, total_order

from freewheel.sampling import Sampler, SampleRows, SamplingParams, SamplingState, Status
from freewheel.sampling.draw import BLOCK

VOCAB = 97


def random_request(generator: np.random.Generator) -> dict[str, Any]:
    """Parameters and history of a request, each demand present about every third time."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if generator.random() < 0.35 else otherwise

    def ids(count: Any) -> list[int]:
        return generator.integers(0, VOCAB, count).tolist()

    prompt, output = ids(generator.integers(1, 12)), ids(generator.integers(0, 12))
    bad_words = sometimes([[*ids(1)], [*output[-1:], *ids(1)], [*prompt[-1:], *output, *ids(1)], [*ids(3)]], [])
    params = SamplingParams(
        temperature=float(generator.choice([0.0, 0.3, 0.8, 1.0, 2.0], p=[0.1, 0.2, 0.3, 0.2, 0.2])),
        top_k=sometimes(int(generator.integers(1, VOCAB + 5)), 0),
        top_p=sometimes(float(generator.uniform(0.05, 0.999)), 1.0),
        min_p=sometimes(float(generator.uniform(0.001, 0.5)), 0.0),
        repetition_penalty=sometimes(float(generator.uniform(0.5, 2.0)), 1.0),
        frequency_penalty=sometimes(float(generator.uniform(-2, 2)), 0.0),
        presence_penalty=sometimes(float(generator.uniform(-2, 2)), 0.0),
        logit_bias=sometimes({token: float(generator.normal()) * 4 for token in ids(5)}, None),
        allowed_token_ids=sometimes(ids(30), None),
        bad_words=["word"] * len(bad_words),
        min_tokens=sometimes(int(generator.integers(0, 14)), 0),
        stop_token_ids=sometimes(ids(2), ()),
        logprobs=VOCAB,
        logprobs_mode="processed",
    )
    return {"params": params, "prompt": prompt, "output": output, "bad_word_ids": bad_words, "end_ids": ids(2)}


def join(state: SamplingState, slot: int, request: dict[str, Any]) -> None:
    state.join(
        slot,
        request["params"],
        request["prompt"],
        seed=slot,
        output_ids=request["output"],
        bad_word_ids=request["bad_word_ids"],
        end_ids=request["end_ids"],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_combination_of_parameters_has_the_exact_distribution(dtype: torch.dtype) -> None:
    generator = np.random.default_rng(1)
    count = 300
    requests = [random_request(generator) for _ in range(count)]
    logits = torch.from_numpy(generator.normal(size=(count, VOCAB)) * 2).to(dtype)
    if dtype != torch.float64:
        logits[::3] = (logits[::3] * 2).round() / 2  # many ties
    kept = logits.clone()
    state = SamplingState(count, VOCAB, 32)
    for slot, request in enumerate(requests):
        join(state, slot, request)
    slots = torch.arange(count)
    lengths = torch.tensor([len(request["prompt"]) + len(request["output"]) for request in requests])
    samples = Sampler(state).sample(logits, SampleRows(slots, lengths))

    assert (samples.status == Status.OK).all()
    assert torch.equal(logits, kept)
    assert samples.logprobs is not None
    for row, request in enumerate(requests):
        params = request["params"]
        history = {name: request[name] for name in ("end_ids", "bad_word_ids")}
        values = edited_logits(logits[row].float().numpy(), params, request["prompt"], request["output"], **history)
        expected = probabilities(values, params)
        token = int(samples.tokens[row])
        assert expected[token] > 0
        if params.temperature == 0:
            # A greedy row reports the log probabilities at temperature 1.
            expected = np.exp(values - values.max()) / np.exp(values - values.max()).sum()
        found = np.zeros(VOCAB)
        found[samples.logprobs.top_ids[row]] = samples.logprobs.top_logprobs[row].double().exp().numpy()
        assert ((found > 0) == (expected > 0)).all(), f"survivors of {request}"
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-9)
        with np.errstate(divide="ignore"):
            scores = np.where(expected > 0, values, -math.inf)
        assert samples.logprobs.top_ids[row].tolist() == total_order(scores)


GRID = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.2},
    {"top_p": 0.9},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "min_p": 0.05},
    {"top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.7, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    {"logit_bias": {3: 2.0, 5: -100.0}},
    {"allowed_token_ids": [0, 3, 40, 96], "top_k": 3},
]


@pytest.mark.parametrize("draw", ["two_level", "gumbel", "multinomial"])
@pytest.mark.parametrize("fields", GRID, ids=str)
def test_draws_follow_the_distribution(draw: Draw, fields: dict[str, Any]) -> None:
    generator = np.random.default_rng(2)
    logits = torch.from_numpy(generator.normal(size=VOCAB) * 2).bfloat16()
    logits[10:20] = logits[0]
    params = SamplingParams(**fields)
    torch.manual_seed(3)
    tokens = sample_many(logits, params, 700 if draw == "gumbel" else 2000, draw=draw)
    values = edited_logits(logits.float().numpy(), params, [0])
    assert p_value(tokens, probabilities(values, params)) > 1e-3


@pytest.mark.parametrize("draw", ["two_level", "gumbel", "multinomial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [BLOCK - 1, BLOCK, BLOCK + 1, 12 * BLOCK + 5])
def test_draws_from_several_blocks_follow_the_distribution(vocab: int, dtype: torch.dtype, draw: Draw) -> None:
    generator = np.random.default_rng(vocab)
    logits = torch.from_numpy(generator.normal(size=vocab) * 3).to(dtype)
    params = SamplingParams(temperature=1.3)
    torch.manual_seed(4)
    tokens = sample_many(logits, params, 1_500 if draw == "gumbel" else 5_000, draw=draw)
    assert p_value(tokens, probabilities(logits.double().numpy(), params)) > 1e-3


@pytest.mark.parametrize("draw", ["two_level", "gumbel", "multinomial"])
def test_blocks_are_drawn_by_their_mass_whatever_their_shape(draw: Draw) -> None:
    logits = torch.full((4 * BLOCK + 1,), -math.inf)
    logits[:BLOCK] = 0.0
    logits[BLOCK + 100] = math.log(BLOCK)
    logits[2 * BLOCK : 3 * BLOCK] = torch.linspace(-20, math.log(25), BLOCK)
    logits[4 * BLOCK] = math.log(125)
    expected = probabilities(logits.double().numpy(), SamplingParams())
    torch.manual_seed(5)
    tokens = sample_many(logits, SamplingParams(), 1500, draw=draw)
    masses = np.add.reduceat(expected, range(0, len(expected), BLOCK))
    assert p_value(tokens // BLOCK, masses) > 1e-3
    assert p_value(tokens, expected) > 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_first_draws_of_many_seeds_follow_the_distribution(temperature: float) -> None:
    # A draft is verified by drawing at its nodes: over seeds, each position alone must follow the target.
    slots = torch.arange(3000)
    state = SamplingState(len(slots), 8, 4)
    for slot in slots.tolist():
        state.join(slot, SamplingParams(temperature=temperature, top_k=6, top_p=0.97), [0], seed=slot)
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 3.0])
    tokens = Sampler(state).sample(logits.expand(len(slots), -1), SampleRows(slots, torch.ones_like(slots))).tokens
    params = SamplingParams(temperature=temperature, top_k=6, top_p=0.97)
    assert p_value(tokens, probabilities(logits.numpy(), params)) > 1e-3
