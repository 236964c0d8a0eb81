"""Log probabilities: raw and processed values, ranks, alternatives in the total order without duplicates."""

import math

import numpy as np
import pytest
import torch
from drawing import sample_each
from reference import total_order

from freewheel.sampling import SamplingParams, logprobs, prompt_logprobs


def log_softmax(logits: torch.Tensor) -> np.ndarray:
    return logits.double().log_softmax(-1).numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_alternatives_ranks_and_values(count: int, ties: bool, temperature: float) -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(1))
    if ties:
        logits = logits.round()
    samples = sample_each(logits, [SamplingParams(logprobs=count, temperature=temperature)] * 20)
    assert samples.logprobs is not None
    assert samples.logprobs.rows.tolist() == list(range(20))
    assert samples.logprobs.top_ids.shape == samples.logprobs.top_logprobs.shape == (20, count)
    for row, expected in enumerate(log_softmax(logits)):
        token = int(samples.tokens[row])
        assert samples.logprobs.token_logprobs[row] == pytest.approx(expected[token], abs=1e-5)
        assert samples.logprobs.ranks[row] == 1 + (logits[row] > logits[row, token]).sum()
        top = total_order(logits[row].double().numpy())[:count]
        assert samples.logprobs.top_ids[row].tolist() == top
        np.testing.assert_allclose(samples.logprobs.top_logprobs[row], expected[top], atol=1e-5)
        assert samples.logprobs.top_ranks[row].tolist() == [
            1 + int((logits[row] > logits[row, id]).sum()) for id in top
        ]


def test_ranks_tell_apart_what_rounds_to_one_log_probability() -> None:
    logits = torch.full((1, 300), 20.0)
    logits[0, :3] = torch.tensor([2e-7, 1e-7, 0.0])
    scored = prompt_logprobs(logits, torch.tensor([0]), 300)
    close = [scored.top_ids[0].tolist().index(id) for id in range(3)]
    assert len({float(scored.top_logprobs[0, index]) for index in close}) == 1
    assert [int(scored.top_ranks[0, index]) for index in close] == [298, 299, 300]


def test_rows_report_what_each_asked_for() -> None:
    asked = [None, 2, 0, None, 4]
    samples = sample_each(torch.arange(10.0), [SamplingParams(logprobs=count) for count in asked])
    assert samples.logprobs is not None
    assert samples.logprobs.rows.tolist() == [1, 2, 4]
    assert samples.logprobs.top_ids.tolist() == [[9, 8, -1, -1], [-1] * 4, [9, 8, 7, 6]]
    assert (samples.logprobs.top_logprobs > -math.inf).tolist() == [[True, True, False, False], [False] * 4, [True] * 4]
    assert sample_each(torch.arange(10.0), [SamplingParams()]).logprobs is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_log_probabilities_are_the_models_own_whatever_changes_the_logits(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(2)).to(dtype)
    before = logits.clone()
    changes = SamplingParams(
        logprobs=5, temperature=0.01, logit_bias={7: 100.0}, repetition_penalty=2.0, top_k=2, allowed_token_ids=[7, 8]
    )
    samples = sample_each(logits, [changes], prompt=[7, 9])
    assert torch.equal(logits, before)
    assert samples.tokens.tolist() == [7]
    assert samples.logprobs is not None
    expected = log_softmax(logits)[0]
    assert float(samples.logprobs.token_logprobs) == pytest.approx(expected[7], abs=1e-5)
    assert samples.logprobs.top_ids[0].tolist() == total_order(logits[0].double().numpy())[:5]
    np.testing.assert_allclose(samples.logprobs.top_logprobs[0], np.sort(expected)[::-1][:5], atol=1e-5)


def test_processed_log_probabilities_show_what_was_left() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0])
    params = SamplingParams(logprobs=4, logprobs_mode="processed", temperature=0.5, top_k=2)
    samples = sample_each(logits, [params])
    assert samples.logprobs is not None
    assert samples.logprobs.top_ids.tolist() == [[3, 2, 0, 1]]
    expected = [-math.log1p(math.exp(-2)), -2 - math.log1p(math.exp(-2)), -math.inf, -math.inf]
    np.testing.assert_allclose(samples.logprobs.top_logprobs[0], expected, atol=1e-6)


def test_probabilities_never_exceed_one_at_low_temperature() -> None:
    logits = torch.full((3, 262_144), 0.25)
    logits[range(3), [0, 100_000, 262_143]] = torch.tensor([3.0, 0.375, 0.251])
    params = [SamplingParams(temperature=0.001, logprobs=1024, logprobs_mode="processed")] * 3
    samples = sample_each(logits, params)
    assert samples.logprobs is not None
    mass = samples.logprobs.top_logprobs.double().exp()
    assert mass.max() <= 1
    assert mass[:2].sum(1).tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    share = math.e / (math.e + 262_143)
    assert float(mass[2, 0]) == pytest.approx(share, rel=1e-3)


def test_prompt_log_probabilities_do_not_depend_on_how_the_prompt_is_cut() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(33, 2000, generator=generator).bfloat16()
    tokens = torch.randint(2000, (33,), generator=generator)
    whole = prompt_logprobs(logits, tokens, 3)
    expected = log_softmax(logits)
    np.testing.assert_allclose(whole.token_logprobs, expected[range(33), tokens], atol=1e-5)
    for cuts in ([16, 17], [1, 32], [15, 1, 17], [33]):
        parts = [prompt_logprobs(*part, 3) for part in zip(logits.split(cuts), tokens.split(cuts))]
        for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs", "top_ranks"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_prompt_rows_that_cannot_be_scored_do_not_disturb_the_others() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(4))
    expected = prompt_logprobs(logits, torch.arange(6), 2)
    logits[1, 7], logits[2, 7], logits[3] = math.nan, math.inf, -math.inf
    found = prompt_logprobs(logits, torch.tensor([0, 1, 2, 3, 300, 5]), 2)
    assert found.token_logprobs[1:4].isnan().all()
    assert (found.top_ids[1:4] == -1).all()
    assert found.token_logprobs[4] == -math.inf
    assert found.top_ids[4].tolist() == expected.top_ids[4].tolist()
    for row in (0, 5):
        assert found.token_logprobs[row] == expected.token_logprobs[row]
        assert found.ranks[row] == expected.ranks[row]


def test_logits_that_require_gradients_are_sampled_without_them() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(logprobs=2, top_k=3, repetition_penalty=1.2)]
    samples = sample_each(logits.clone().requires_grad_(), params)
    assert samples.tokens.tolist() == sample_each(logits, params).tokens.tolist()
    assert samples.logprobs is not None
    assert not samples.logprobs.top_logprobs.requires_grad


@pytest.mark.parametrize("count", [0, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_scored_the_same_way_where_the_device_is_not_looked_at(
    dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = (3 * torch.randn(24, 40, generator=torch.Generator().manual_seed(2))).to(dtype)
    logits[1] = logits[1].round()  # ties
    logits[2] = torch.where(logits[2] > 0, 0.0, -0.0)
    logits[3, ::2] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 7] = 1.0
    logits[5, 9] = torch.nan
    logits[6, 9] = torch.inf
    logits[7] = -torch.inf
    tokens = torch.arange(24) % 40
    tokens[8] = 40  # past the vocabulary
    expected = prompt_logprobs(logits, tokens, count)
    parts = [logprobs._score(*part, count) for part in zip(logits.split(7), tokens.split(7))]
    for found, name in zip(
        map(torch.cat, zip(*parts)), ("token_logprobs", "ranks", "top_ids", "top_logprobs", "top_ranks")
    ):
        torch.testing.assert_close(found, getattr(expected, name), atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.gpu
def test_prompts_are_scored_without_waiting_for_the_device() -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(3)).bfloat16()
    tokens = torch.arange(9)
    expected, on_device = prompt_logprobs(logits, tokens, 4), (logits.cuda(), tokens.cuda())
    prompt_logprobs(*on_device, 4)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = prompt_logprobs(*on_device, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found.top_ids.cpu(), expected.top_ids)
    assert torch.equal(found.ranks.cpu(), expected.ranks)
    torch.testing.assert_close(found.token_logprobs.cpu(), expected.token_logprobs, atol=1e-5, rtol=1e-5)
