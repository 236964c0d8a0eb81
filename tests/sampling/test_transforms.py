"""Masks, bias and penalties: what each forbids, and that it forbids nothing else."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drawing import Draw, new_state, sample_at, sample_many

from freewheel.sampling import Sampler, SampleRows, SamplingParams, SamplingState, Status
from freewheel.sampling.transforms import transform

VOCAB = 8
FLAT = torch.zeros(VOCAB)


def transformed(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (0,),
    output: Sequence[int] = (),
    **join: Any,
) -> list[float]:
    state = SamplingState(1, len(logits), 256)
    state.join(0, params, prompt, seed=0, output_ids=output, **join)
    values = torch.tensor([list(logits)])
    transform(state, values, torch.tensor([0]), torch.tensor([len(prompt) + len(output)]))
    return values[0].tolist()


def forbidden(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], **join: Any) -> set[int]:
    values = transformed([0.0] * VOCAB, params, prompt, output, **join)
    return {token for token, value in enumerate(values) if value == -math.inf}


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("times", [1, 10])
@pytest.mark.parametrize("seen_in", ["prompt", "output"])
def test_repetition_penalty_lowers_seen_tokens_once_whatever_their_sign(
    penalty: float, times: int, seen_in: str
) -> None:
    logits = [2.0, 0.0, -2.0, -math.inf, 2.0, 0.0, -2.0]
    seen = [0, 1, 2, 3] * times
    prompt, output = (seen, []) if seen_in == "prompt" else ([0], seen)
    values = transformed(logits, SamplingParams(repetition_penalty=penalty), prompt, output)
    assert values == pytest.approx([2.0 / penalty, 0.0, -2.0 * penalty, -math.inf, 2.0, 0.0, -2.0])


def test_frequency_and_presence_penalties_see_the_output_only() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    values = transformed([1.0] * 5, params, prompt=[0, 0, 1], output=[1, 2, 2, 2])
    assert values == [1.0, 0.25, -0.75, 1.0, 1.0]


def test_draws_see_penalties_once_for_each_distinct_token(fused: bool) -> None:
    """Prompt, output and what the logits 2, 0, -2, -inf, 2, 0, -2 become."""
    repeated, counted = {"repetition_penalty": 1.5}, {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    seen = [0, 1, 2, 3]
    cases: list[tuple[dict[str, Any], list[int], list[int], list[float]]] = [
        (repeated, seen, [], [2 / 1.5, 0, -3, -math.inf, 2, 0, -2]),
        (repeated, seen * 10, [], [2 / 1.5, 0, -3, -math.inf, 2, 0, -2]),
        (repeated, [0], seen * 10, [2 / 1.5, 0, -3, -math.inf, 2, 0, -2]),
        ({"repetition_penalty": 0.5}, seen, seen, [4, 0, -1, -math.inf, 2, 0, -2]),
        (counted, [0, 0, 1], [1, 2, 2, 2], [2, -0.75, -3.75, -math.inf, 2, 0, -2]),
        ({**repeated, **counted}, [0, 0, 2], [0, 3], [2 / 1.5 - 0.75, 0, -3, -math.inf, 2, 0, -2]),
        ({"frequency_penalty": -2.0}, [0], [4, 4, 3], [2, 0, -2, -math.inf, 6, 0, -2]),
    ]
    state = new_state(len(cases), 7, 64, fused=fused)
    for slot, (fields, prompt, output, _) in enumerate(cases):
        params = SamplingParams(logprobs=7, logprobs_mode="processed", **fields)
        state.join(slot, params, prompt, seed=slot, output_ids=output)
    keys = [(slot, len(prompt) + len(output)) for slot, (_, prompt, output, _) in enumerate(cases)]
    logprobs = sample_at(state, torch.tensor([2.0, 0.0, -2.0, -math.inf, 2.0, 0.0, -2.0]), keys).logprobs
    assert logprobs is not None
    found = torch.empty(len(cases), 7).scatter(1, logprobs.top_ids.cpu(), logprobs.top_logprobs.cpu())
    expected = torch.tensor([values for *_, values in cases]).log_softmax(1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_negative_frequency_penalty_favours_the_output() -> None:
    assert transformed([1.0] * 3, SamplingParams(frequency_penalty=-2.0), [0], [1, 1]) == [1.0, 5.0, 1.0]


def test_bias_comes_before_penalties_and_never_lifts_a_mask() -> None:
    params = SamplingParams(logit_bias={1: 4.0, 2: 100.0}, repetition_penalty=2.0, allowed_token_ids=[0, 1])
    assert transformed([1.0] * 4, params, [1, 2]) == [1.0, 2.5, -math.inf, -math.inf]


@pytest.mark.parametrize("prompt_length", [1, 100])
@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_ids_are_held_back_for_exactly_min_tokens(prompt_length: int, min_tokens: int, ignore_eos: bool) -> None:
    params = SamplingParams(
        min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=[4], logit_bias={5: 1e4}, temperature=0.0
    )
    state = SamplingState(1, VOCAB, 128)
    state.join(0, params, [3] * prompt_length, seed=0, end_ids=[5, 6, -1, VOCAB, 2**31])
    sampler, slots, tokens = Sampler(state), torch.tensor([0]), []
    for _ in range(min_tokens + 1):
        positions = torch.tensor([prompt_length + len(tokens)])
        assert state.settings[0].edited(int(positions)) or len(tokens) >= min_tokens
        samples = sampler.sample(FLAT[None], SampleRows(slots, positions))
        state.append(slots, positions, samples.tokens)
        tokens.append(int(samples.tokens))
    assert tokens == [0] * min_tokens + [5]
    for made in range(min_tokens + 1):
        params = SamplingParams(min_tokens=min_tokens, ignore_eos=ignore_eos, stop_token_ids=[4])
        held = forbidden(params, [3] * prompt_length, [1] * made, end_ids=[5, 6, -1, VOCAB])
        assert held == ({4, 5, 6} if made < min_tokens else set())


def test_rows_are_held_back_as_long_as_each_asked(fused: bool) -> None:
    """Whatever the prompt's length, and whether something else changes their logits too."""
    logits = torch.tensor([0.0, 0.0, 0.0, 0.0, 8.0, 9.0, 8.5, 1.0])  # best are a stop id and two end ids, then the last
    asked = [(1, 1, 0.0), (1, 3, 0.5), (40, 0, 0.5), (40, 1, 0.5), (40, 3, 0.0)]
    state = new_state(len(asked), VOCAB, 64, fused=fused)
    for slot, (length, least, bias) in enumerate(asked):
        params = SamplingParams(
            temperature=0.0, min_tokens=least, stop_token_ids=[4], logit_bias={0: bias} if bias else None
        )
        state.join(slot, params, [3] * length, seed=slot, end_ids=[5, 6, -1, VOCAB, 2**31])
    drawn: list[list[int]] = [[] for _ in asked]
    while going := [slot for slot, tokens in enumerate(drawn) if 5 not in tokens]:
        keys = [(slot, asked[slot][0] + len(drawn[slot])) for slot in going]
        tokens = sample_at(state, logits, keys).tokens
        slots, positions = torch.tensor(keys, device=state.device).unbind(1)
        state.append(slots, positions, tokens)
        for slot, token in zip(going, tokens.tolist()):
            drawn[slot].append(token)
    assert drawn == [[7] * least + [5] for _, least, _ in asked]


@pytest.mark.parametrize(("end_ids", "edited"), [([5], [True, True, False, False]), ([], [False] * 4)])
def test_min_tokens_that_is_satisfied_or_holds_nothing_back_costs_nothing(end_ids: list[int], edited: list) -> None:
    state = SamplingState(1, VOCAB, 16)
    state.join(0, SamplingParams(min_tokens=2), [1, 2, 3], seed=0, end_ids=end_ids)
    assert [state.settings[0].edited(position) for position in (3, 4, 5, 6)] == edited


@pytest.mark.parametrize(
    ("history", "banned"),
    [
        ([1], {7}),
        ([1, 2], {7, 3}),
        ([2, 1], {7}),
        ([1, 2, 3], {7, 4}),
        ([0, 2, 3], {7}),
        ([1, 2, 2], {7}),
        ([5], {7, 5}),
    ],
)
def test_bad_words_forbid_their_last_token_after_the_others(history: list[int], banned: set[int]) -> None:
    words = [[7], [1, 2, 3], [1, 2, 3, 4], [5, 5], []]
    params = SamplingParams(bad_words=["x"])
    for split in range(1, len(history) + 1):
        # The words may lie in the prompt, in the output, or across the two.
        assert forbidden(params, history[:split], history[split:], bad_word_ids=words) == banned


def test_bad_words_do_not_reach_before_the_first_token_or_past_the_row() -> None:
    params = SamplingParams(bad_words=["x"], allowed_token_ids=[1, 2, 3])
    state = SamplingState(2, VOCAB, 16)
    state.join(0, params, [1], seed=0, output_ids=[2, 1, 2], bad_word_ids=[[1, 2, 3], [1, 1, 2]])
    positions = torch.tensor([1, 2, 3, 4])
    values = torch.zeros(4, VOCAB)
    transform(state, values, torch.zeros_like(positions), positions)
    assert [row[3] == -math.inf for row in values] == [False, True, False, True]
    assert (values[:, 2] == 0).all()


def test_bad_words_cost_what_their_tokens_are() -> None:
    """Not their number times the longest of them."""
    state = SamplingState(1, VOCAB, 4096)
    words = [[1] * 4000, *([2, 3] for _ in range(1000))]
    state.join(0, SamplingParams(bad_words=["x"]), [1, 2], seed=0, bad_word_ids=words)
    assert len(state.bad_words.entries) == len(state.bad_word_distances.entries) == 6000
    values = torch.zeros(1, VOCAB)
    transform(state, values, torch.tensor([0]), torch.tensor([2]))
    assert values.isinf().nonzero().tolist() == [[0, 3]]


def test_bad_words_of_several_rows_stay_apart() -> None:
    state = SamplingState(3, VOCAB, 16)
    for slot, words in enumerate([[[1, 2], [3]], [], [[4], [1, 1, 5], [2, 6]]]):
        state.join(slot, SamplingParams(bad_words=["x"]), [1, 1, 2], seed=0, bad_word_ids=words)
    values = torch.zeros(4, VOCAB)
    transform(state, values, torch.tensor([2, 0, 1, 2]), torch.tensor([2, 2, 2, 3]))
    assert values.isinf().nonzero().tolist() == [[0, 4], [0, 5], [1, 2], [1, 3], [3, 4], [3, 6]]


def test_an_allow_list_whose_last_id_is_forbidden_is_refused_or_reported(fused: bool) -> None:
    state = new_state(5, VOCAB, 16, fused=fused)
    with pytest.raises(ValueError, match=r"allowed_token_ids .* bad_words"):
        state.join(0, SamplingParams(allowed_token_ids=[3], bad_words=["x"]), [1], seed=0, bad_word_ids=[[3]])
    variants: list[Any] = [{"temperature": 0.0}, {}, {"top_k": 2}, {"min_tokens": 2, "allowed_token_ids": [3, 7]}]
    for slot, fields in enumerate(variants):
        params = SamplingParams(bad_words=["x"], logprobs=2, **{"allowed_token_ids": [3], **fields})
        state.join(slot, params, [1], seed=0, bad_word_ids=[[1, 3]], end_ids=[7])
    state.join(4, SamplingParams(logprobs=1), [1], seed=5)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    samples = sample_at(state, logits, [(slot, 1) for slot in range(5)])
    alone = sample_at(state, logits[4:], [(4, 1)])
    assert samples.status.tolist() == [Status.EMPTY] * 4 + [Status.OK]
    assert samples.tokens.tolist() == [-1] * 4 + alone.tokens.tolist()
    assert samples.logprobs is not None
    assert samples.logprobs.rows[samples.logprobs.ranks > 0].tolist() == [4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_ids_are_drawn(temperature: float) -> None:
    tokens = sample_many(FLAT, SamplingParams(allowed_token_ids=[2, 7], temperature=temperature), 200)
    assert set(tokens.tolist()) == ({2, 7} if temperature else {2})


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 1, 2**31 - 1])
def test_ids_out_of_range_are_refused_and_leave_no_trace(field: str, bad: int) -> None:
    state = SamplingState(2, VOCAB, 16)
    state.join(0, SamplingParams(), [1], seed=1)
    fields: dict[str, Any] = {field: {bad: 1.0} if field == "logit_bias" else [bad]}
    with pytest.raises(ValueError, match=field):
        state.join(1, SamplingParams(min_tokens=1, **fields), [1], seed=2)
    assert not any(settings.edited(1) for settings in state.settings)


def test_padding_past_the_tokenizers_vocabulary_is_never_drawn_or_listed() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1064, generator=generator)
    logits[:, 1000:] += 20
    variants = [{}, {"top_k": 30}, {"top_p": 0.99}, {"temperature": 0.0}, {"repetition_penalty": 1.5}]
    state = SamplingState(len(variants), 1064, 1100, valid_vocab_size=1000)
    for slot, fields in enumerate(variants):
        fields = {"temperature": 2.0, "logprobs": 1000, **fields}
        state.join(slot, SamplingParams(**fields), [1, 1063], seed=slot)
    slots = torch.arange(len(variants)).repeat(100)
    positions = torch.arange(2, 102).repeat_interleave(len(variants))
    samples = Sampler(state).sample(logits.expand(len(slots), -1), SampleRows(slots, positions))
    assert samples.logprobs is not None
    assert 0 <= samples.tokens.min() <= samples.tokens.max() < 1000
    assert samples.logprobs.top_ids.max() < 1000
    with pytest.raises(ValueError, match="logit_bias"):
        state.join(0, SamplingParams(logit_bias={1000: 1.0}), [1], seed=0)


@pytest.mark.parametrize("draw", ["two_level", "gumbel"])
def test_likely_padding_is_never_drawn_or_listed_beside_any_demand(draw: Draw, fused: bool) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    logits[:, :256], logits[:, 280:] = -60.0, 50.0  # what is left to draw shares a block with the padding
    variants: list[Any] = [
        {"temperature": 0.0, "logprobs": 4},
        {"top_p": 0.9, "logprobs": 4, "logprobs_mode": "processed"},
        {"top_k": 2, "logprobs": 4, "logprobs_mode": "processed"},
        {"repetition_penalty": 0.1, "frequency_penalty": -2.0},
        {"temperature": 5.0},
        {},
    ]
    state = new_state(len(variants), 300, 16, fused=fused, valid_vocab_size=280)
    for slot, fields in enumerate(variants):
        state.join(slot, SamplingParams(**fields), [1, 299], seed=slot, output_ids=[299])
    masks = torch.zeros(1, 10, dtype=torch.int32)
    masks[0, 9] = -1  # a grammar that permits nothing but padding
    keys, mask_rows = [(slot, 3) for slot in range(6)], torch.tensor([-1] * 5 + [0])
    samples = sample_at(state, logits, keys, draw=draw, masks=masks, mask_rows=mask_rows)
    assert samples.status.tolist() == [Status.OK] * 5 + [Status.EMPTY]
    assert samples.logprobs is not None
    assert samples.tokens.max() < 280
    assert samples.logprobs.top_ids.max() < 280


def test_greedy_rows_with_masked_ids_beside_a_random_one(fused: bool) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[range(4), [4, 5, 6, 7]], logits[range(4), [3, 2, 1, 0]] = 9.0, 8.0
    state = new_state(5, VOCAB, 8, fused=fused)
    greedy: list[Any] = [{"logit_bias": {4: -1e30}}, {"allowed_token_ids": [1, 2, 3]}, {"bad_words": ["x"]}, {}]
    for slot, fields in enumerate(greedy):
        params = SamplingParams(temperature=0.0, logprobs=3, logprobs_mode="processed", **fields)
        state.join(slot, params, [1], seed=slot, bad_word_ids=[[6]] if "bad_words" in fields else ())
    state.join(4, SamplingParams(), [1], seed=4)
    masks, mask_rows = torch.tensor([[0b01111111]], dtype=torch.int32), torch.tensor([-1, -1, -1, 0, -1])
    samples = sample_at(state, logits, [(slot, 1) for slot in range(5)], masks=masks, mask_rows=mask_rows)
    assert samples.status.tolist() == [Status.OK] * 5
    assert samples.tokens.tolist() == [3, 2, 1, 0, *sample_at(state, logits[4:], [(4, 1)]).tokens.tolist()]
    assert samples.logprobs is not None
    assert not samples.logprobs.top_logprobs[:4].isnan().any()
